"""FireQ's suites: what they count, that they run and compare, and their tables and plot."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import readme, report, tables, timing
from benchmarks.measuring import calls
from benchmarks.measuring.work import Needs
from benchmarks.suite import describe
from benchmarks.suites.fireq import cases as fireq_cases
from benchmarks.suites.fireq import model as fireq_model
from benchmarks.suites.fireq import suite as fireq
from tests.benchmarks.quick_runs import WITHOUT_HOPPER, quick_run
from tests.tools.docs_helpers import docs_text
from turbojax import models


def test_rows_are_named_once_and_come_with_what_they_are_compared_with():
    names = [group.name(case) for group, case in fireq.FIREQ.rows()]
    assert names[0] == "matmul/k4096-n14336/m16/bf16"
    assert "matmul/k4096-n11008/m1/int4-activations/mosaic_gpu" in names
    assert "matmul/k14336-n4096/m4096/int4/triton" in names
    assert "quantize/norm-16384x4096/e4m3/triton" in names
    scales = fireq.FIREQ.rows("bf16-scales")
    assert sorted({group.facts["tokens"] for group, _ in scales}) == [16, 1024]
    decode = [group.name(case) for group, case in fireq.KV4.rows()]
    assert decode[0] == "kv4-decode/llama3-8b/b16-s32768/cudnn"
    assert "kv4-decode/llama3-8b/b1-s4096/k8v4/triton" in decode
    for suite in (fireq.FIREQ, fireq.KV4, fireq.FIREQ_MODEL):
        for group in suite.groups():
            families = {case.family for case in group.cases}
            assert families > set(fireq.BASELINES[group.operation])
    models_ = fireq.FIREQ_MODEL.rows()
    assert [group.facts["prefill_batch_size"] for group, _ in models_[::2]] == [16, 8, 4]


def test_floors():
    needs = Needs(nbytes=3e9, operations=4e12, unit="fp8")
    # 3 GB take 1 ms at 3,000 GB/s, 4 TFLOP 4 ms at 1,000 TFLOP/s.
    ceilings = {"copy": 3000.0, "fp8": 1000.0, "bf16": None}
    assert needs.floor(ceilings) == (pytest.approx(4000), "fp8")
    facts = needs.facts(8000, ceilings)
    assert facts["percent_of_ceiling"] == pytest.approx(50)
    assert facts["gigabytes_per_second"] == pytest.approx(375)
    assert facts["tflops_per_second"] == pytest.approx(500)
    few = dataclasses.replace(needs, operations=1e9)
    assert few.floor(ceilings) == (pytest.approx(1000), "copy")
    unknown = dataclasses.replace(needs, unit="bf16")
    assert unknown.floor(ceilings) is None
    assert unknown.facts(8000, ceilings)["percent_of_ceiling"] is None
    # Without operations their rate need not be known.
    assert dataclasses.replace(unknown, operations=0).floor(ceilings)[1] == "copy"


def _build(group, method):
    [case] = [c for c in group.cases if c.method == method and c.implementation in (None, "xla")]
    return case.build(calls.Arrays())


def test_bytes_and_operations_of_a_product():
    group = fireq_cases.matmul(192, 72, 5, implementations=("xla",))
    bf16, fp8, int4, whole = (
        _build(group, name).needs for name in ("bf16", "fp8", "int4", "int4-activations")
    )
    out = 5 * 72 * 2
    assert bf16.nbytes == 5 * 192 * 2 + 72 * 192 * 2 + out
    assert fp8.nbytes == 5 * 192 + 72 * 192 + out
    # 72 outputs are stored as 128, 192 inputs as 256 in two groups; a float32 for each output.
    weight = 128 * (256 // 2 + 2 + 4)
    assert int4.nbytes == 5 * 192 + 5 * 2 + weight + out
    assert whole.nbytes == 5 * 192 * 2 + weight + out
    assert {x.operations for x in (bf16, fp8, int4, whole)} == {2 * 5 * 72 * 192}
    assert [x.unit for x in (bf16, fp8, int4)] == ["bf16", "fp8", "fp8"]


@pytest.mark.slow
def test_bytes_and_operations_of_a_layer_and_of_a_model():
    layer = _build(fireq_cases.feed_forward("tiny", 64, 96, 3, implementations=("xla",)), "bf16")
    assert layer.needs.nbytes == 2 * (3 * 64 * 96 + 2 * 3 * 64)
    assert layer.needs.operations == 2 * 3 * (3 * 64 * 96)
    prefill = _build(fireq_model.prefill("tiny", 2, 24), "bf16")
    config = models.SHAPES["tiny"]
    layers = prefill.arguments[0].layers
    linear = sum(x.size for x in jax.tree.leaves(layers) if x.ndim > 1)
    pairs = 2 * config.num_layers * config.num_heads * 24 * 24 / 2
    # Both products of attention have two operations for every channel of every visible pair.
    attention = pairs * 4 * config.head_dim
    assert prefill.needs.operations == 2 * 2 * 24 * linear + attention


def test_products_fit_the_tiles_of_the_kernel_of_int8():
    """Of two warpgroups, side by side along the weight's rows; it refuses others."""
    from jax.experimental.pallas.ops.gpu import hopper_mixed_type_matmul_mgpu as kernel

    groups = [g for g in fireq.FIREQ.groups() if g.operation == fireq.MATMUL]
    for facts in (group.facts for group in groups):
        tokens = max(16, facts["tokens"])
        config = kernel.TuningConfig(**fireq_cases.mixed_settings(kernel, tokens))
        assert config.wg_dimension == kernel.MatmulDimension.M
        assert facts["outputs"] % (2 * config.tile_m) == 0
        assert facts["inputs"] % config.tile_k == tokens % config.tile_n == 0
        assert config.tile_n % config.epi_tile_n == 0


@pytest.mark.skipif(timing.on_gpu(), reason="about a machine without a GPU")
def test_the_kernel_of_int8_is_refused_in_words():
    with pytest.raises(NotImplementedError, match="compute capability"):
        fireq_cases.mixed_product((128, 128, 16), calls.Arrays())


def test_methods_have_the_same_weights():
    x, bf16, fp8 = (
        np.asarray(a, np.float64)
        for a in (
            fireq_cases.values(fireq_cases.int4(40, 192)),
            fireq_cases.dense(40, 192),
            fireq_cases.dense_fp8(40, 192),
        )
    )
    assert np.abs(fp8 * 192**-0.5 - bf16).mean() < 0.04 * np.abs(bf16).mean()
    # Steps of 4 bits: a seventh of the largest of 128 numbers.
    assert np.abs(x - bf16).mean() < 0.15 * np.abs(bf16).mean()
    gate, up = np.split(np.asarray(fireq_cases.dense_gate_and_up(40, 192), np.float64), 2)
    np.testing.assert_array_equal(gate, bf16)
    assert np.abs(gate - up).mean() > np.abs(gate).mean()
    gated = np.asarray(fireq_cases.values(fireq_cases.gate_and_up(40, 192)), np.float64)
    np.testing.assert_array_equal(gated[:40], x)
    assert np.abs(gated[40:] - up).mean() < 0.15 * np.abs(up).mean()


@pytest.fixture(scope="module")
def decode_result(tmp_path_factory):
    return quick_run(tmp_path_factory.mktemp("run"), "kv4", WITHOUT_HOPPER)


@pytest.mark.slow
def test_a_quick_run_of_decoding(decode_result):
    rows = {row["name"]: row for row in decode_result["rows"]}
    assert set(decode_result["ceilings"]) == {"copy"}
    for kind in ("kv4", "k8v4"):
        decode = rows[f"kv4-decode/tiny/b2-s192/{kind}/xla"]
        assert decode["relative_l1"] < 1e-3 < decode["against_exact"]["relative_l1"]
        assert set(decode["speedup_over"]) == ({"cudnn", "turbo"} if timing.on_gpu() else {"turbo"})
    assert "relative_l1" not in rows["kv4-decode/tiny/b2-s192/turbo-4bit/xla"]
    if not timing.on_gpu():
        assert rows["kv4-decode/tiny/b2-s192/cudnn"]["status"] == "not run"


@pytest.mark.fuzz
def test_the_prefill_is_that_of_start():
    call = _build(fireq_model.prefill("tiny", 4, 24), "int4-kv4")
    call = dataclasses.replace(call, count=2)
    steps = fireq_model._Steps(call.lower().compile(), call)
    logits = jnp.concatenate([steps(), steps()])
    model, prompts = call.arguments
    session = models.start(model, prompts, max_length=24, cache="kv4", prefill_batch_size=2)
    np.testing.assert_array_equal(logits, session.logits)
    jax.tree.map(np.testing.assert_array_equal, steps.caches, session.caches)


@pytest.mark.parametrize("spoil", ["nan", "other"])
def test_a_wrong_output_is_a_failed_row(monkeypatch, spoil):
    """NaN in a row that is not compared is found too."""
    rows = fireq.FIREQ.rows("matmul.*/(bf16|int4/xla)$", quick=True)
    build = fireq_cases._dense_product

    def broken(*arguments, **options):
        call = build(*arguments, **options)

        def wrong(x, w):
            out = call.function(x, w)
            return out.at[3, 2].set(jnp.nan) if spoil == "nan" else out[:, ::-1]

        return dataclasses.replace(call, function=wrong)

    [[group, bf16], ours] = rows
    monkeypatch.setattr(fireq_cases, "_dense_product", broken)
    again = fireq_cases.matmul(192, 72, 5, implementations=())
    assert 3 not in calls.compared_rows(5)
    found = []
    calls.run([(again, again.cases[0]), ours], {}, found.append, repetitions=2)
    assert [row["status"] for row in found] == ["failed", "ok"]
    assert ("not finite" if spoil == "nan" else "wrong") in found[0]["reason"]
    assert found[0]["name"] == group.name(bf16)
    assert fireq.FIREQ.with_ratios(found)[1]["speedup_over"] == {}


@pytest.mark.slow
def test_failures_are_rows(monkeypatch):
    rows = fireq.FIREQ_MODEL.rows("", quick=True)

    def full(*_):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory\nby some bytes")

    monkeypatch.setattr(fireq_model.Prefill, "caches", full)
    found = []
    calls.run(rows, {}, found.append, repetitions=2)
    assert [row["status"] for row in found] == ["failed", "failed"]
    assert "RESOURCE_EXHAUSTED" in found[0]["reason"]
    late = []
    calls.run(rows, {}, late.append, deadline=-1.0)
    assert {row["reason"] for row in late} == {tables.OUT_OF_TIME}


def test_tables_say_what_did_not_run():
    group, case = fireq.FIREQ.rows("int4/triton", quick=True)[0]
    base = describe(group, case)
    refused = {**base, "status": "not run", "reason": "a | b"}
    late = {**base, "status": "not run", "reason": tables.OUT_OF_TIME}
    table = fireq.operation_table({"rows": [refused, late]}, base["operation"])
    assert "| triton | not run: a \\| b |" in table
    assert table.endswith(f"1 of 2 rows were not run: {tables.OUT_OF_TIME}.")
    assert len({line.count(" | ") for line in table.splitlines()[:3]}) == 1
    assert tables.one_line(refused) == f"{base['name']}: not run: a | b"
    group, case = fireq.FIREQ_MODEL.rows("", quick=True)[0]
    failed = {**describe(group, case), "status": "failed", "reason": "no memory"}
    assert "| failed: no memory |" in fireq.model_table({"rows": [failed]})


def test_prose_agrees_with_the_results():
    """The figures that docs/benchmarks/int4.md names outside of its tables."""
    _, models_run = report.newest(readme.RESULTS, ("fireq_model",))
    by_place = {(row["tokens"], row["method"]): row for row in models_run["rows"]}
    ours, dense = by_place[4096, "int4-kv4"], by_place[4096, "bf16"]
    text = docs_text("benchmarks/int4.md")
    assert f"{ours['speedup_over']['bf16']:.2f} times as fast as in bfloat16 with cuDNN's" in text
    assert f"{ours['tokens_per_second']:,.0f} tokens per second for 16 prompts of 4k tokens" in text
    share = ours["weight_bytes"] / dense["weight_bytes"]
    assert 0.3 < share < 0.4
    assert "with a third of the weights' memory" in text
    _, kernels = report.newest(readme.RESULTS, ("fireq",))
    rows = {row["name"]: row for row in kernels["rows"] if row["status"] == "ok"}
    for name, row in rows.items():
        if name.startswith("matmul/k4096-n14336/") and name.endswith("/int4/mosaic_gpu"):
            assert (row["speedup_over"]["fp8"] < 1) == (row["tokens"] >= 128)
    assert "faster from 128 tokens on" in text
    _, decoding = report.newest(readme.RESULTS, ("kv4",))
    at = {row["name"].partition("/b16-s32768/")[2]: row for row in decoding["rows"]}
    (kv4, k8v4), (slow, slower) = (
        [at[f"{kind}/{implementation}"] for kind in ("kv4", "k8v4")]
        for implementation in ("mosaic_gpu", "triton")
    )
    assert (
        f"Decoding from a `kv4` cache at 16 sequences of 32k tokens takes {kv4['us']:.0f} us on an "
        f"H200, {kv4['speedup_over']['cudnn']:.2f} times the speed of cuDNN with dense bfloat16, "
        f"and from a `k8v4` cache {k8v4['us']:.0f}, {k8v4['speedup_over']['cudnn']:.2f} times; "
        f"Triton's kernels take {slow['us']:.0f} and {slower['us']:.0f}"
    ) in text


def test_prose_agrees_with_the_compiled_programs():
    """Kernels of a layer and temporary memory, in docs/benchmarks/int4.md."""
    result = json.loads((readme.RESULTS / "programs_2026-11-25.json").read_text(encoding="utf-8"))

    def found(rows):
        counts = {(r["kind"], r["batch"]): r.get("kernels_of_a_layer") for r in rows}
        bytes_ = {r["kind"]: r["temporary_bytes"] / 1e9 for r in rows if r["program"] == "prefill"}
        return counts, bytes_

    (now, memory), (before, more) = found(result["rows"]), found(result["rows_before"])
    text = docs_text("benchmarks/int4.md")
    for batch, name in ((1, "kernels of a layer, decoding 1 sequence"), (16, "16 sequences")):
        assert f"{name} | {now['int4-kv4', batch]} | {now['bf16', batch]} |" in text
    was = before["int4-kv4", 1], before["int4-kv4", 16]
    assert "a layer took {} kernels for one sequence and {} for 16".format(*was) in text
    assert f"| {memory['int4-kv4']:.2f} GB | {memory['bf16']:.2f} GB |" in text
    assert f"temporary memory was {more['int4-kv4']:.2f} GB" in text


def test_products_of_many_tokens_are_those_of_their_records():
    """The tables of "Many tokens" in docs/benchmarks/int4.md: before, after; XLA's e4m3."""

    def shown(times):
        return f"{times:.0f}" if times >= 100 else f"{times:.1f}"

    def us(file):
        rows = json.loads((readme.RESULTS / file).read_text(encoding="utf-8"))["rows"]
        found: dict[str, dict[str, str]] = {}
        for row in sorted(rows, key=lambda row: row.get("run", 0)):
            found.setdefault(row["name"], {})[row["variant"]] = shown(row["us"])
        return found

    text = docs_text("benchmarks/int4.md")
    cut, tiles = us("many_even_2026-11-30.json"), us("int4_tiles_2026-11-30.json")
    cells = []
    for name, before, after, e4m3 in (
        ("14336x4096 m256", "old", "late", "xla e4m3"),
        ("14336x4096 m1024", "old", "even, all", "xla e4m3"),
        ("11008x4096 m256", "old", "late", "xla e4m3"),
        ("11008x4096 m512", "old", "even, all", "xla e4m3"),
        ("11008x4096 m1024", "old", "late", "xla e4m3"),
        ("4096x14336 m256", "default", "even, all", "xla e4m3"),
        ("4096x14336 m512", "old", "even, all", "xla e4m3"),
    ):
        row, mark = cut[name], "*" if after.startswith("even") else ""
        cells.append(f"| {row[before]}, {mark}{row[after]}{mark}; {row[e4m3]} |")
    for name, before, after in (
        ("14336x4096 m128", "int4.py", "many, two levels"),
        ("14336x4096 m192", "tile of 256", "tile of 192"),
        ("28672x4096 gated m128", "int4.py", "many, two levels"),
    ):
        row = tiles[name]
        cells.append(f"| {row[before]}, {row[after]}; {row['xla e4m3']} |")
    for name in ("11008x4096 m128", "4096x14336 m128", "6144x4096 m128"):
        row = tiles[name]
        cells.append(f"| {row['int4.py']}, *{row['many, two levels, even']}*; {row['xla e4m3']} |")
    row = tiles["14336x4096 m1024 precise"]
    cells.append(f"take {row['many, two levels']} and not {row['int4.py']}.")
    assert [cell for cell in cells if cell not in text] == []


def test_prose_agrees_with_the_ablation():
    """The figures of `cas_inputs` in docs/fireq.md."""
    path = readme.RESULTS / "fireq_ablation_2026-11-21.json"
    result = json.loads(path.read_text(encoding="utf-8"))
    text = " ".join((readme.ROOT / "docs" / "fireq.md").read_text(encoding="utf-8").split())
    rows, variants = result["bits_per_byte"], result["variants"]
    planted, as_is = rows["planted"], rows["as_is"]
    constant = variants["planted, cas_inputs=constant"]["all"]
    assert (
        f"at {planted['none']:.3f} bits per byte without smoothing, {planted['all']:.3f} with all "
        f'of it, and {constant:.3f} with `"constant"`'
    ) in text
    cost = planted["none"] - as_is["none"]
    shares = [(planted["none"] - x) / cost for x in (planted["all"], constant)]
    assert "{:.1f} % and {:.0f} % of what the".format(*(100 * s for s in shares)) in text
    unsmoothed = variants["as_is, cas_inputs=constant"]
    assert unsmoothed["none"] == as_is["none"]
    assert (
        f'{as_is["none"]:.3f} without smoothing, {as_is["all"]:.3f} with `"all"`, '
        f'{unsmoothed["all"]:.3f} with `"constant"`'
    ) in text
