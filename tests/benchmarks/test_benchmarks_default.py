"""The suite `default`, a call without options beside cuDNN; the table of training."""

import turbojax as tj
from benchmarks.suite import describe
from benchmarks.suites.attention import prefill, suite
from benchmarks.suites.attention import tables as attention_tables
from benchmarks.tables import Result


def result() -> Result:
    rows = []
    for group in suite.DEFAULT.groups():
        if group.shape.tokens in (1024, 4096):
            for case, us in zip(group.cases, (20.0, 16.0), strict=True):
                row = describe(group, case) | {"status": "ok", "us": us}
                rows.append(row | {"relative_l1": 0.05})
    return {"device": "GPU", "jax": "0", "date": "2000-01-01", "rows": suite.over_cudnn(rows)}


def test_every_head_dim_and_size_has_its_row():
    shapes = [group.shape for group in suite.DEFAULT.groups()]
    assert {shape.heads.dim for shape in shapes} == {64, 96, 128, 256}
    assert {shape.heads.query > shape.heads.kv for shape in shapes} == {True, False}
    tokens = {shape.tokens for shape in shapes}
    assert {1, 131072} <= tokens
    assert len(shapes) == len(set(shapes)) == len(tokens) * len(suite.GRID_MODELS)


def test_the_default_is_called_without_options():
    [_, case] = prefill.cases(suite.Shape("tiny", 1, 128, is_causal=True), "default")
    assert case.implementation is None
    assert case.build.keywords["config"] == tj.TurboConfig()


def test_table_and_plot_show_ratios():
    table = attention_tables.default_table(result())
    assert "| `llama3-8b/b4-s1024-causal` | 16 | 1.25x | 0.0500 |" in table
    [axes] = attention_tables.default_plot(result()).axes
    lines = [line for line in axes.get_lines() if len(line.get_xdata()) == 2 and line.get_marker()]
    shown = [line for line in lines if list(line.get_xdata()) == [1024, 4096]]
    assert len(shown) == len(suite.GRID_MODELS)
    assert all(list(line.get_ydata()) == [1.25, 1.25] for line in shown)


def test_training_is_shown_by_shape_and_windows_are_shapes_of_their_own():
    shape = {"model": "m", "batch": 2, "tokens": 8192, "is_causal": True}
    rows = []
    for window, us in ((None, 100.0), (1024, 30.0)):
        facts = shape | {"operation": "training", "status": "ok"}
        facts |= {} if window is None else {"window": window}
        for method, faster in (("cudnn", 1.0), ("turbo-fp8-exact-gradient-8bit", 1.25)):
            rows.append(facts | {"method": method, "us": us / faster, "speedup_over_cudnn": faster})
    rows.append(rows[1] | {"method": "turbo-int8-exact-gradient-float", "speedup_over_cudnn": 0.5})
    table = attention_tables.training_table({"rows": rows})
    assert '| `fp8`, `gradient="8bit"` | `int8`, `gradient="float"` |' in table
    assert "| m 2 x 8k causal | 100 | 1.25x | 0.50x |" in table
    assert "| m 2 x 8k causal window 1024 | 30 | 1.25x | - |" in table
