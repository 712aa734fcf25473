"""The benchmarks: what they count and write, and that they run; not how fast anything is."""

import copy
import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from benchmarks import __main__ as command
from benchmarks import readme, report, tables, timing
from benchmarks.measuring import samples
from benchmarks.measuring import work as accounting
from benchmarks.shapes import MODELS, Shape
from benchmarks.suites.attention import cases as attention_cases
from benchmarks.suites.attention import decode, prefill
from benchmarks.suites.attention import suite as attention
from benchmarks.suites.attention import tables as attention_tables
from benchmarks.suites.attention.tables import alone
from benchmarks.summary import best_batches
from tests.tools.docs_helpers import copied_docs, docs_text
from turbojax.caches.comparison import kivi

# Two sequences of 192 tokens, four query heads on two KV heads of 64 channels.
TINY = Shape("tiny", 2, 192)


def test_operations_of_prefill():
    # 32 heads, 8192 x 8192 scores of 128 channels, two products of two operations each.
    shape = Shape("llama3-8b", 2, 8192)
    assert accounting.attention_operations(shape) == 2 * 32 * 8192 * 8192 * 128 * 4
    causal = Shape("llama3-8b", 2, 8192, is_causal=True)
    assert accounting.attention_operations(causal) == 2 * 32 * 8192 * 8192 * 128 * 2
    work = accounting.prefill_work(shape, "int8_fp8")
    assert work.shares == {"int8": 0.5, "fp8": 0.5}
    # 2.199 TFLOP in 4000 us; the ceilings allow half of it at 1000 and half at 2000 TFLOP/s.
    assert work.rate(4000) == pytest.approx(549.756, rel=1e-5)
    percent = work.percent_of_ceiling(4000, {"int8": 1000, "fp8": 2000})
    assert percent == pytest.approx(100 * 549.756 * (0.5 / 1000 + 0.5 / 2000), rel=1e-5)
    assert work.percent_of_ceiling(4000, {"int8": 1000, "fp8": None}) is None


def test_bytes_of_decode():
    # bfloat16: 16 sequences, 32,741 tokens, 8 heads of 128 channels, K and V, 2 bytes.
    shape = Shape("llama3-8b", 16, 32768)
    assert accounting.bfloat16_bytes(shape, 32741) == 16 * 32741 * 8 * 128 * 2 * 2
    # Ours: 510 blocks of 64 tokens at 4 bits, 2 bytes a channel and 4 for the scale of each; 101
    # tokens of 128 bytes in the buffer, and its scale.
    per_head = 510 * (64 * 64 + 2 * 128 + 4) + 101 * 128 + 4
    assert accounting.turbo_bytes(shape, 32741, tj.TurboConfig()) == 16 * 8 * 2 * per_head
    mixed = attention_cases.turbo_configs(8)["2/4bit"]
    low = 510 * (64 * 32 + 2 * 128 + 4) + 101 * 128 + 4
    assert accounting.turbo_bytes(shape, 32741, mixed) == 16 * 2 * (4 * per_head + 4 * low)
    # The query and the output besides: 16 x 32 x 128 numbers of 2 bytes, twice.
    work = accounting.decode_work(shape, 1000)
    assert work.amount == 1000 + 2 * 16 * 32 * 128 * 2
    assert work.rate(1) == work.amount / 1e3
    assert work.percent_of_ceiling(10, {"copy": 1.0}) == pytest.approx(work.amount / 100)


@pytest.mark.parametrize("name", ["4bit", "2/4bit", "3bit", "2bit"])
def test_bytes_are_those_of_a_full_cache(name):
    """Counted from the shapes and from the arrays: the same, but for what keeps the books."""
    config = dataclasses.replace(attention_cases.turbo_configs(2)[name], buffer_size=64)
    cache = jax.eval_shape(lambda: tj.init_cache(2, 192, 2, 64, config=config))
    unused_buffers = 2 * 2 * 2 * config.buffer_size * 64
    # int32 slots per head, two int32 lengths and a flag per sequence.
    books = 2 * 2 * 2 * 4 + 2 * (4 + 4 + 1)
    assert accounting.turbo_bytes(TINY, 192, config) == cache.nbytes - unused_buffers - books


def test_bytes_of_kivi_are_those_of_its_cache():
    shape = Shape("tiny", 2, 256)
    cache = jax.eval_shape(lambda: kivi.init_cache(2, 256, 2, 64))
    # The residual of keys is empty, and that of values is full.
    residual = 2 * 128 * 2 * 64 * 2
    assert accounting.kivi_bytes(shape, 256, kivi.Kivi()) == cache.nbytes - residual - 2 * 9
    # 100 tokens fill no residual: all of them are bfloat16.
    assert accounting.kivi_bytes(shape, 100, kivi.Kivi()) == 2 * 2 * 100 * 2 * 64 * 2


def test_rows_are_named_once_and_begin_with_the_most_important():
    rows = attention.ATTENTION.rows()
    names = [group.name(case) for group, case in rows]
    assert names[0] == "decode/llama3-8b/b16-s32768/cudnn"
    assert "decode/phi3-medium/b4-s32768/turbo-4bit/triton" in names
    assert "decode/llama3-8b/b1-s131072/turbo-4bit/triton" in names
    assert "prefill/llama3-8b/b2-s8192-causal/turbo-fp8-exact-128/jax_triton" in names
    rows = attention.HOPPER.rows()
    assert len({group.name(case) for group, case in rows}) == len(rows) <= 154
    assert {case.implementation for _, case in rows} == {None, "mosaic_gpu"}
    some = attention.ATTENTION.rows("prefill/.*/cudnn")
    assert {group.name(case).rsplit("/", 1)[1] for group, case in some} == {"cudnn"}


def test_shapes_are_possible():
    for name, heads in MODELS.items():
        assert heads.query % heads.kv == 0, name
        assert heads.dim % 8 == 0, name


def test_errors_are_those_of_numpy():
    rng = np.random.default_rng(0)
    got, want = rng.normal(size=(2, 3, 4, 5)).astype(np.float32)[:, None]
    errors = samples.errors(jnp.asarray(got), jnp.asarray(want))
    a, b = (x.astype(np.float64).ravel() for x in (got, want))
    assert errors["cosine"] == pytest.approx(a @ b / np.sqrt(a @ a * (b @ b)), rel=1e-5)
    assert errors["relative_l1"] == pytest.approx(np.abs(a - b).sum() / np.abs(b).sum(), rel=1e-5)
    assert errors["rmse"] == pytest.approx(np.sqrt(np.mean((a - b) ** 2)), rel=1e-5)
    with pytest.raises(ArithmeticError, match="not finite"):
        samples.errors(jnp.asarray(got).at[0, 0, 0].set(jnp.nan), jnp.asarray(want))


@pytest.mark.fuzz
def test_inputs_of_decode_use_the_buffer_and_have_outliers():
    inputs = decode.Inputs(TINY)
    cache = inputs.turbo(tj.TurboConfig())
    assert cache.lengths.tolist() == [165, 165]
    assert cache.buffer_lengths.tolist() == [101, 101]
    other = inputs.turbo(tj.TurboConfig(mode="float", softmax="exact"))
    assert other.config.mode == "float"
    assert other.key.codes is cache.key.codes
    spread = np.std(np.asarray(inputs.key, np.float32), axis=(0, 1))
    assert np.all(np.sum(spread > 3, axis=-1) == 3)
    assert inputs.query.dtype == jnp.bfloat16
    assert len(np.unique(np.asarray(inputs.value, np.float32))) > 1000


def test_rotation_is_what_the_profiler_calls_as_it_is():
    compiled = jax.jit(lambda x: x + 1).lower(jnp.int32(0)).compile()
    rotation = timing.Rotation(compiled, [(jnp.int32(1),), (jnp.int32(5),)])
    assert isinstance(rotation, jax.stages.Wrapped)
    assert [int(rotation()) for _ in range(3)] == [2, 6, 2]


@pytest.mark.fuzz
def test_device_time_is_the_sum_of_the_kernels(monkeypatch):
    """With a profiler that reports two kernels, one of them launched twice."""
    from jax.experimental.mosaic.gpu import profiler

    def fake_measure(f, *, aggregate, iterations):
        assert not aggregate
        assert isinstance(f, jax.stages.Wrapped)
        kernels = [("a", 0.001), ("b", 0.003), ("a", 0.0015)]
        return lambda: (f(), [[(n, t * (1 + i)) for n, t in kernels] for i in range(iterations)])

    monkeypatch.setattr(timing, "on_gpu", lambda: True)
    monkeypatch.setattr(profiler, "measure", fake_measure)
    x = jnp.zeros(2**20)
    compiled = jax.jit(lambda x: x + 1).lower(x).compile()
    taken = timing.measure(compiled, (x,), repetitions=3)
    # 5.5, 11 and 16.5 us.
    assert (taken.clock, taken.microseconds) == ("cupti", pytest.approx(11))
    assert taken.kernels == (("b", pytest.approx(6)), ("a", pytest.approx(5)))
    # 50 copies of 4 MiB: more than any L2 cache holds.
    assert len({sets[0].unsafe_buffer_pointer() for sets in timing.rotated((x,))}) == 50

    # What cannot be told apart is timed by the wall clock, and says so.
    def confused(*_, **__):
        raise RuntimeError("Kernel names are not consistent across iterations")

    monkeypatch.setattr(profiler, "measure", confused)
    assert timing.measure(compiled, (x,), repetitions=3).clock == "wall"


@pytest.fixture(scope="module")
def result_file(tmp_path_factory):
    """A quick run on this device, in two calls."""
    path = tmp_path_factory.mktemp("run") / "attention_2000-01-01.json"
    common_arguments = ["run", "--quick", "--repetitions", "2", "--out", str(path)]
    command.main([*common_arguments, "--filter", "(decode|compress)/.*(4bit|/cudnn|/xla)"])
    first = json.loads(path.read_text())
    resumed = ["--resume", "--filter", "decode/.*/xla|prefill/.*s128/(cudnn|xla|.*sas-64)"]
    command.main([*common_arguments, *resumed])
    second = json.loads(path.read_text())
    assert second["rows"][: len(first["rows"])] == first["rows"]
    assert len(second["rows"]) > len(first["rows"])
    return path


@pytest.mark.fuzz
def test_a_quick_run_holds_every_row_asked_for(result_file):
    result = json.loads(result_file.read_text())
    assert result["device"] == jax.devices()[0].device_kind
    assert result["ceilings"]["copy"] > 0
    rows = {row["name"]: row for row in result["rows"]}
    assert len(rows) == len(result["rows"])
    ours = rows["decode/tiny/b2-s192/turbo-4bit/xla"]
    assert ours["status"] == "ok"
    assert ours["us"] > 0
    assert ours["percent_of_ceiling"] > 0
    assert ours["work"] == accounting.turbo_bytes(TINY, 165, tj.TurboConfig()) + 2 * 2 * 4 * 64 * 2
    # Rough, for a figure in another unit or of another row would be far off: 4 bits keep
    # the direction, exact attention in bfloat16 nearly everything.
    assert ours["cosine"] > 0.95
    assert rows["decode/tiny/b2-s192/xla"]["relative_l1"] < 0.01
    assert rows["prefill/tiny/b1-s128/xla"]["relative_l1"] < 0.01
    assert rows["prefill/tiny/b1-s128/turbo-int8-sas-64/xla"]["cosine"] > 0.99
    assert rows["compress/tiny/b2-s192/turbo-4bit/xla"]["cosine"] > 0.98
    if jax.default_backend() == "cpu":
        assert ours["clock"] == "wall"
        refused = rows["decode/tiny/b2-s192/cudnn"]
        assert (refused["status"], refused["reason"]) == ("not run", "cuDNN needs a GPU, not cpu")
        assert rows["prefill/tiny/b1-s128/turbo-int8-sas-64/triton"]["status"] == "not run"


@pytest.mark.fuzz
def test_a_result_of_other_versions_is_not_resumed(result_file, tmp_path):
    path = tmp_path / "old.json"
    path.write_text(json.dumps({**json.loads(result_file.read_text()), "jax": "0.0.1"}))
    with pytest.raises(SystemExit, match=r"jax 0.0.1 \(here"):
        command.main(["run", "--quick", "--resume", "--out", str(path)])


def test_nothing_to_run_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(timing, "ceilings", lambda **_: ({}, {}))  # which take seconds
    arguments = ["--quick", "--filter", "no such row", "--out", str(tmp_path / "new.json")]
    with pytest.raises(SystemExit, match="no row is left"):
        command.main(["run", *arguments])


def _with_gpu_rows(result):
    """The result, with figures of the kind that only a GPU gives."""
    result = copy.deepcopy(result)
    for row in result["rows"]:
        speed = {"cudnn": 10.0, "cudnn-full": 11.0}.get(row["method"])
        if (row["method"], row["implementation"]) == ("turbo-int8-sas-64", "triton"):
            speed = 5.0
        if speed is not None:
            like = next(r for r in result["rows"] if r["status"] == "ok" and _same(r, row))
            row |= {**like, **{k: row[k] for k in ("name", "method", "implementation")}}
            row |= {"us": speed, "kernels": [{"name": "turbojax_kernel", "us": speed - 1}]}
            if "tflops_per_second" in row:
                row["tflops_per_second"] = row["work"] / speed / 1e6
    result["rows"] = attention.ATTENTION.with_ratios(result["rows"])
    return result


def _same(a, b):
    return a["operation"] == b["operation"] and a["is_causal"] == b["is_causal"]


def test_ratios_are_to_the_fastest_cudnn_of_the_shape():
    base = {"status": "ok", "operation": "decode", "model": "tiny", "batch": 1, "is_causal": False}
    rows = [
        {**base, "tokens": 64, "method": "cudnn", "us": 10.0},
        {**base, "tokens": 64, "method": "cudnn-full", "us": 8.0},
        {**base, "tokens": 64, "method": "turbo-4bit", "us": 4.0},
        {**base, "tokens": 128, "method": "turbo-4bit", "us": 4.0},
        {**base, "tokens": 64, "method": "xla", "status": "failed"},
    ]
    rows = attention.ATTENTION.with_ratios(rows)
    assert [row.get("speedup_over_cudnn") for row in rows] == [0.8, 1.0, 2.0, None, None]


GENERATED = {
    "device": "a device",
    "jax": "0",
    "date": "2000-01-01",
    "rows": [
        {"cache": "exact", "batch": 1, "tokens_per_second": 10.0, "status": "ok"},
        {"cache": "exact", "batch": 2, "tokens_per_second": None, "status": "out of memory"},
        {"cache": "4bit", "batch": 1, "tokens_per_second": 9.0, "status": "ok"},
        {"cache": "4bit", "batch": 2, "tokens_per_second": 18.0, "status": "ok"},
        {
            "cache": "4bit",
            "batch": 4,
            "tokens_per_second": None,
            "status": "skipped",
            "note": "no time",
        },
    ],
}


@pytest.mark.fuzz
def test_report_round_trip(result_file, tmp_path):
    result = _with_gpu_rows(json.loads(result_file.read_text()))
    (tmp_path / result_file.name).write_text(json.dumps(result))
    (tmp_path / "generate_2000-01-01.json").write_text(json.dumps(GENERATED))
    docs = copied_docs(tmp_path)
    names = ("attention", "index", "models", "paper_speed")
    wrong = {f"benchmarks/{name}.md" for name in names}
    pictures = {"decode_speed.png", "prefill_speed.png", "throughput.png"}
    assert set(report.stale(tmp_path, docs)) == wrong | pictures
    report.write(tmp_path, docs)
    assert report.stale(tmp_path, docs) == []
    assert {path.name for path in (docs / "benchmarks").glob("*.png")} == pictures

    text = "".join((docs / name).read_text(encoding="utf-8") for name in sorted(wrong))
    decoded = tables.finished(result, "decode")
    ours = tables.fastest(decoded, lambda row: row["method"] == "turbo-4bit")
    assert f"| tiny 2 x 192 | 10 | {ours['us']:,.0f} ({10 / ours['us']:.2f}x) |" in text
    work = 4 * 4 * 128 * 128 * 64
    assert f"| tiny 1 x 128 | cuDNN bf16 | {work / 10 / 1e6:.3g} | 1.00x |" in text
    ours = f"{work / 5 / 1e6:.3g} | 2.00x | {work / 4 / 1e6:.3g} | 2.50x"
    assert f"| tiny 1 x 128 | int8, triton, sas, 64 | {ours} |" in text
    assert "| `tiny/b2-s192/turbo-2/4bit/triton` | not run: " in text or timing.on_gpu()
    assert "| 4bit | 2 | 18 | 1.80x | - | 4: no time |" in text
    assert "| exact | 1 | 10 | 1.00x | - | 2: out of memory |" in text
    for picture in pictures:
        assert f"]({picture})" in text

    # Another result makes all that shows it stale.
    result["rows"][0]["us"] = 1.0
    (tmp_path / "attention_2000-01-02.json").write_text(json.dumps(result))
    assert "throughput.png" not in report.stale(tmp_path, docs)
    assert {"benchmarks/attention.md", "decode_speed.png"} <= set(report.stale(tmp_path, docs))


@pytest.mark.fuzz
def test_summaries_appear_with_their_results(result_file, tmp_path, monkeypatch):
    result = _with_gpu_rows(json.loads(result_file.read_text()))
    (tmp_path / "hopper_2000-01-01.json").write_text(json.dumps(result))
    monkeypatch.setattr(attention_tables, "SUMMARY_MODEL", "tiny")
    found = report.page_tables(tmp_path)
    shown = {"hopper", "several", "training", "decode summary", "prefill summary"}
    assert set(found) == shown
    assert "| tiny 2 x 192 | 10 |" in found["decode summary"]()
    assert "(`benchmarks/results/hopper_2000-01-01.json`)" in found["prefill summary"]()
    assert report.page_tables(tmp_path / "none") == {}


def test_docs_show_the_newest_results():
    assert report.stale(readme.RESULTS, report.DOCS) == [], "run python -m benchmarks report"


def test_every_marker_belongs_to_a_table():
    marked = [
        name
        for text in report.pages(report.DOCS).values()
        for name in re.findall(r"<!-- (?!end of )(.*) table -->", text)
    ]
    assert sorted(marked) == sorted(report.page_tables(readme.RESULTS))


def test_a_table_is_on_one_page():
    region = "<!-- a table -->\n<!-- end of a table -->\n"
    filled = report.fill_pages({"x.md": region, "y.md": ""}, {"a": lambda: "| 1 |"})
    assert filled == {"x.md": "<!-- a table -->\n| 1 |\n<!-- end of a table -->\n", "y.md": ""}
    for texts in ({"x.md": ""}, {"x.md": region, "y.md": region}):
        with pytest.raises(ValueError, match="one page must hold '<!-- a table -->'"):
            report.fill_pages(texts, {"a": lambda: "| 1 |"})


def test_compress_shows_the_kernels_without_what_surrounds_them():
    row = {
        "operation": "compress",
        "status": "ok",
        "model": "tiny",
        "batch": 2,
        "tokens": 192,
        "is_causal": False,
        "method": "turbo-4bit",
        "implementation": "triton",
        "us": 10.0,
        "work": 1e6,
        "relative_l1": 0.1,
        "kernels": [
            {"name": "loop_broadcast_fusion", "us": 5.0},
            {"name": "turbojax_compress", "us": 3.0},
            {"name": "turbojax_compress__1", "us": 1.0},
        ],
    }
    by_xla = {**row, "implementation": "xla", "kernels": row["kernels"][:1]}
    table = attention_tables.compress_table({"ceilings": {"copy": 500.0}, "rows": [row, by_xla]})
    assert "| 4bit, triton | 10 | 100 | 20 % | 4 | 250 | 50 % | 0.1000 |" in table
    assert "| 4bit, xla | 10 | 100 | 20 % | - | - | - | 0.1000 |" in table


@pytest.mark.slow
def test_a_cached_prefill_attends_to_the_same():
    """With what runs on a CPU: the output's error, whatever else is returned."""
    shape = Shape("tiny", 1, 64)
    inputs = prefill.Inputs(shape)
    options = {"config": tj.TurboConfig(), "implementation": "xla"}
    calls = [make(inputs, **options) for make in (prefill._turbo, prefill._cached)]
    got, want = (call.error(jax.jit(call.function)(*call.arguments)) for call in calls)
    assert got == pytest.approx(want, rel=1e-4)
    names = [case.method for case in prefill.cases(shape, "hopper")]
    assert "turbo-int8-sas-128-cached" in names


def test_hopper_shows_calls_kernels_and_errors():
    base = {"status": "ok", "operation": "prefill", "model": "tiny", "batch": 1, "tokens": 64}
    base |= {"is_causal": True, "relative_l1": 0.05, "rmse": 0.001, "cosine": 0.999}
    base |= {"work": 8e9, "percent_of_ceiling": 40.0, "tflops_per_second": 0.0}
    cudnn = {**base, "name": "prefill/a/cudnn", "method": "cudnn", "us": 15.0, "kernels": []}
    ours = {**base, "name": "prefill/a/turbo-fp8", "method": "turbo-fp8-exact-128", "us": 10.0}
    ours["kernels"] = [
        {"name": "turbojax_attention_hopper", "us": 8.0},
        {"name": "turbojax_quantize__1", "us": 1.0},
        {"name": "turbojax_maxima", "us": 0.5},
    ]
    table = attention_tables.hopper_table({"rows": [cudnn, ours]})
    numbers = "10 | 1.50x | 8 | 1.88x | 1,000 TFLOP/s | 50 % | 15.0 %"
    assert f"| `prefill/a/turbo-fp8` | {numbers} | 0.99900 | 0.0500, 0.001 |" in table


def test_rows_without_time_are_counted_and_not_listed():
    base = {"operation": "decode", "status": "not run"}
    late = {**base, "reason": tables.OUT_OF_TIME}
    rows = [{**late, "name": f"decode/late{i}"} for i in range(2)]
    rows.append({**base, "name": "decode/x", "reason": "no GPU"})
    table = attention_tables.details_table({"rows": rows}, "decode")
    assert "late" not in table
    assert "| `x` | not run: no GPU |" in table
    assert table.endswith(f"2 of 3 rows were not run: {tables.OUT_OF_TIME}.")


def test_prose_agrees_with_the_results():
    """The figures that the docs name outside of their tables."""
    _, result = report.newest(readme.RESULTS, ("attention",))
    _, generated = report.newest(readme.RESULTS, ("generate", "throughput"))
    rows = {row["name"]: row for row in result["rows"] if row["status"] == "ok"}
    speed = {name: f"{row.get('speedup_over_cudnn', 0):.2f}x" for name, row in rows.items()}
    long, short = "decode/llama3-8b/b16-s32768/", "decode/llama3-8b/b1-s1024/"
    prompt = "prefill/llama3-8b/b2-s8192/"
    four, best = rows[f"{long}turbo-4bit/triton"], rows[f"{prompt}turbo-fp8-exact-128/jax_triton"]
    mixed = [speed[name] for name in rows if "decode" in name and "turbo-2/4bit" in name]
    kivi = [speed[name] for name in rows if "decode" in name and "kivi-4bit" in name]
    compressed = alone(rows["compress/llama3-8b/b16-s32768/turbo-4bit/triton"])
    ends = best_batches(generated)
    over = ends["4bit"]["tokens_per_second"] / ends["exact"]["tokens_per_second"]
    equal = {row["batch"]: row for row in generated["rows"] if row["method"] == "4bit"}
    figures = [
        f"tokens take {four['us']:.0f} us",
        f", {speed[four['name']]}. It is faster",
        f"({speed[f'{short}turbo-4bit/triton']}; ",
        f"{four['percent_of_ceiling']:.0f} % of the ceiling",
        f"at {min(mixed)} to {max(mixed)} of cuDNN",
        f"3 bits reach {speed[f'{long}turbo-3bit/triton']},",
        f"2 bits {speed[f'{long}turbo-2bit/triton']},",
        f"{min(kivi)} to {max(kivi)}. At",
        f"{speed[best['name']]} cuDNN with the quantization",
        f"and {alone(rows[f'{prompt}cudnn']) / alone(best):.2f}x without it",
        f"makes {speed[f'{prompt}turbo-fp8-sas2-128/jax_triton']} of cuDNN",
        f"blocks of 64) {speed[f'{prompt}turbo-int8-sas-64/jax_triton']}.",
        f"{compressed:,.0f} us or",
        f"{ends['exact']['batch']} sequences and {ends['exact']['tokens_per_second']:,.0f} tokens",
        f"makes {ends['4bit']['tokens_per_second']:,.0f} with {ends['4bit']['batch']},",
        f"{over:.2f}x, where",
        f"is {equal[64]['speedup_over']['exact']:.2f}x as fast at 64 sequences and "
        f"{equal[256]['speedup_over']['exact']:.2f}x at 256",
    ]
    figures.append(f"on this one {four['speedup_over_cudnn']:.2f} times")
    text = docs_text("benchmarks/attention.md", "benchmarks/models.md")
    assert [figure for figure in figures if figure not in text] == []


def test_prose_agrees_with_the_results_on_hopper():
    _, result = report.newest(readme.RESULTS, ("hopper",))
    rows = {row["name"]: row for row in result["rows"] if row["status"] == "ok"}
    long, prompt = "decode/llama3-8b/b16-s32768/", "prefill/llama3-8b/b2-s8192/"
    four, mixed = (rows[f"{long}turbo-{bits}bit/mosaic_gpu"] for bits in ("4", "2/4"))
    slow = rows[f"{prompt}turbo-int8-sas-64/mosaic_gpu"]["speedup_over_cudnn"]
    three, two = (rows[f"{long}turbo-{bits}bit/mosaic_gpu"] for bits in ("3", "2"))
    text = docs_text("benchmarks/attention.md")
    figures = [
        f"is {four['speedup_over_cudnn']:.2f} times as fast",
        f"at {four['percent_of_ceiling']:.0f} % of a copy",
        f"at 2 bits it is {mixed['speedup_over_cudnn']:.2f} times",
        f"reaches {slow:.2f}x on this GPU",
        f"{four['us']:.0f} us at 16 x 32k with 4 bits",
        f"{mixed['us']:.0f} us with 2/4 bits, {mixed['percent_of_ceiling']:.0f} %",
        f"with 3 bits {three['us']:.0f} us, {three['percent_of_ceiling']:.0f} %, and with 2 bits "
        f"{two['us']:.0f}, {two['percent_of_ceiling']:.0f} %",
    ]
    assert [figure for figure in figures if figure not in text] == []


def test_prose_agrees_with_the_sweeps_on_hopper():
    _, sweep = report.newest(readme.RESULTS, ("decode_launches",))
    _, versions = report.newest(readme.RESULTS, ("prefill_versions",))
    text = docs_text("benchmarks/attention.md")
    for batch, tokens in ((64, 4), (1, 128), (16, 4), (16, 1), (4, 4), (1, 4), (4, 1), (1, 1)):
        speeds = [
            row["speedup_over_cudnn"]
            for row in sweep["rows"]
            if (row["batch"], row["tokens"], row["cache"]) == (batch, tokens * 1024, "4bit")
            and row["kv_heads"] == 8
        ]
        best = max(speed for speed in speeds if speed is not None)
        figure = f"{best:.2f}x"
        assert f"{batch} x {tokens}k {figure}" in text
        if (batch, tokens) in ((64, 4), (1, 128), (1, 1)):
            assert f"{best:.2f} times" in text
    fourth = {
        (row["mode"], row["is_causal"]): row for row in versions["rows"] if row["name"] == "v4"
    }
    for key in (("fp8", False), ("fp8", True), ("int8_fp8", False)):
        row = fourth[key]
        assert f"{row['tflops_per_second']:.0f}" in text
        assert f"{row['speedup_over_cudnn']:.2f}x" in text
