"""The suites of the verdict and of latency: what they count, that they run, their tables."""

import jax
import pytest

from benchmarks import readme, report
from benchmarks.shapes import Shape
from benchmarks.suites import generate, latency
from benchmarks.suites.verdict import cases, suite, tables
from benchmarks.suites.verdict.suite import Texts
from benchmarks.suites.verdict.tables import CACHES, DECODE, FULL, METHODS, PROMPT, TEXT
from tests.tools.docs_helpers import docs_text
from turbojax.caches import CACHE_NAMES

TINY = Shape("tiny", 2, 192)


def test_rows_are_named_once_and_begin_with_the_most_important():
    rows = suite.SUITE.rows()
    names = [group.name(case) for group, case in rows]
    assert names[0] == "verdict-decode/llama3-8b/b16-s32768/exact"
    for name in (
        "verdict-decode/llama3-8b/b1-s131072/kivi4",
        "verdict-decode/llama3-8b/b64-s4096/turbo4-triton",
        "verdict-prompt/llama3-8b/b1-s32768-causal/paged_k8v4",
        "verdict-text/embedded-t4095/fp8_e4m3",
    ):
        assert name in names
    assert set(CACHES) <= set(CACHE_NAMES)
    # What others are compared with comes first, and is there for every shape.
    for group, _ in rows:
        if not isinstance(group, Texts):
            assert [case.method for case in group.cases][:1] == ["exact"]
    assert not [name for name in names if name.startswith(PROMPT) and FULL in name]


@pytest.mark.parametrize(
    ("name", "bits"), [("exact", 16), ("fp8_e4m3", 8), ("turbo4", 4.125), ("kv4", 4.125)]
)
def test_bits_of_a_number(name, bits):
    """By hand: codes, and 16 bits beside them for the 128 channels of a token."""
    shape = Shape("llama3-8b", 16, 32768)
    cache = jax.eval_shape(lambda: cases.new_cache(shape, name))
    # Lengths, flags and tables of pages come on top: less than a thousandth.
    assert bits <= cases.bits_per_number(shape, cache.nbytes) < 1.001 * bits


def test_pages_lie_all_over_the_pool():
    cache = cases.new_cache(TINY, "turbo4")
    table = cache.block_tables
    assert sorted(table.ravel().tolist()) == list(range(cache.pages.num_pages))
    assert table.ravel().tolist() != list(range(cache.pages.num_pages))


# Tables -------------------------------------------------------------------------------------------


def _row(operation, method, us, *, batch=2, tokens=1024, bits=4.0, **more):
    return {
        "name": f"{operation}/{batch}/{tokens}/{method}",
        "operation": operation,
        "label": f"tiny/b{batch}-s{tokens}",
        "method": method,
        "family": suite.cases.family(method),
        "status": "ok",
        "us": us,
        "clock": "cupti",
        "batch": batch,
        "tokens": tokens,
        "kernels": [{"name": "a", "us": us - 1}],
        "bytes": 1e6,
        "gigabytes_per_second": 100.0,
        "tflops_per_second": 7.0,
        "percent_of_ceiling": 50.0,
        "bound": "copy",
        "bits_per_number": bits,
        "relative_l1": 0.01,
        **more,
    }


def _text(method, cost):
    return {
        "name": f"{TEXT}/embedded-t95/{method}",
        "operation": TEXT,
        "method": method,
        "model": "embedded",
        "context": 4095,
        "status": "ok",
        "seconds": 2.0,
        "text": {
            "bits_per_byte": 0.8 + cost,
            "cost": cost,
            "cost_interval": [cost - 0.001, cost + 0.001],
            "same_greedy_choice": 0.98,
            "divergence": 0.004,
            "cost_by_file": {"a": cost, "b": 2 * cost},
        },
        "layers": {
            "prefill": {"relative_l1": [0.01, 0.03]},
            "decode": {"cosine": [0.999, 0.99], "relative_l1": [0.03, 0.05]},
        },
    }


@pytest.fixture(scope="module")
def result():
    rows = [
        _row(DECODE, "exact", 40.0, bits=16.0),
        _row(DECODE, "cudnn-full", 30.0, bits=16.0),
        _row(DECODE, "fp8_e4m3", 20.0, bits=8.0),
        _row(DECODE, "turbo4", 10.0, bits=4.125),
        _row(DECODE, "kivi4", 60.0, bits=4.1),
        _row(DECODE, "exact", 5.0, batch=1, bits=16.0),
        _row(DECODE, "fp8_e4m3", 8.0, batch=1, bits=8.0),
        _row(DECODE, "turbo4", 10.0, batch=1, bits=4.125),
        {**_row(DECODE, "kivi4", 1.0, batch=1), "status": "failed", "reason": "a | b"},
        _row(PROMPT, "exact", 100.0),
        _row(PROMPT, "turbo4", 90.0),
        _text("exact", 0.0),
        _text("kivi4", 0.002),
        _text("turbo4", 0.01),
    ]
    rows = suite.SUITE.with_ratios(rows)
    assert [row["operation"] for row in rows[-3:]] == [TEXT] * 3
    machine = {"device": "a device", "jax": "0", "date": "2000-01-01"}
    return {**machine, "ceilings": {"copy": 4000.0, "bf16": None}, "rows": rows}


def test_the_summary_compares_with_fp8_and_says_what_follows(result):
    text = tables.summary("verdict_2000-01-01.json", result)
    cost = "0.8100 | +0.0100 (+0.0090 to +0.0110) | 98.0% | 0.00400"
    assert f"| turbo4 pages | 4.125 | 10 (2.00x) | 10 (0.80x) | 1.0 % | {cost} |" in text
    assert "| fp8 pages, e4m3 | 8 | 20 | 8 | 1.0 % | - | - | - | - |" in text
    # cuDNN's faster call has no cache that a model takes.
    assert f"| {METHODS[FULL]} | 16 | 30 (0.67x) | - |" in text
    said = "turbo4 pages against fp8 pages: 2.00 at 2 x 1k, 0.80 at 1 x 1k times as fast"
    assert said in text
    assert "not faster everywhere" in text


def test_where_we_are_worse_is_listed_in_full(result):
    lines = tables.worse(result)
    assert ["turbo4 pages", "decoding, 1 x 1k", "dense bf16", "0.50x the speed"] in lines
    assert ["turbo4 pages", "decoding, 1 x 1k", "fp8 pages", "0.80x the speed"] in lines
    by = "+0.0080 bits per byte, 2 of 2 files"
    kivi = "KIVI, 4 bits, plain JAX, 4.1 bits"
    assert ["turbo4 pages, 4.125 bits", "held-out text", kivi, by] in lines
    # Not worse: against a larger cache, in a prompt, at the longer shape.
    assert len(lines) == 3
    quick = [
        {**row, "us": 9.0} if row["name"] == f"{DECODE}/2/1024/kivi4" else row
        for row in result["rows"]
    ]
    row = ["turbo4 pages", "decoding, 2 x 1k", METHODS["kivi4"], "0.90x the speed"]
    assert row in tables.worse({**result, "rows": quick})
    assert tables.worse({**result, "rows": result["rows"][:4]}) == []
    assert "No row" in tables.worse_section("x", {**result, "rows": result["rows"][:4]})


def test_rows_that_failed_are_shown(result):
    text = tables.rows_table(result, DECODE)
    assert "| 1 x 1k | KIVI, 4 bits, plain JAX | failed: a \\| b |" in text
    numbers = "10 | 9 | 3.00x | - | 2.00x | 1.0 | 100 GB/s | 50 % (bytes) | 0.0100"
    assert f"| 2 x 1k | turbo4 pages | {numbers} |" in text
    assert "| 7 TFLOP/s |" in tables.rows_table(result, PROMPT)
    numbers = "0.99450 | 0.99000 | 4.00 % | 5.00 % | 2.00 %"
    assert f"| turbo4 pages | {numbers} |" in tables.layers_table(result)


def test_a_line_for_a_terminal(result):
    lines = [tables.one_line(row) for row in result["rows"]]
    assert ": 10.0 us, by cupti" in lines[3]
    assert lines[3].endswith("L1 0.0100, 3.00x bf16, 2.00x fp8-pages")
    assert "2.00 s, " in lines[-1]
    assert lines[-1].endswith("+0.0100 (+0.0090 to +0.0110)")
    assert "failed" in lines[8]


def test_logits_that_are_nan_are_told(result):
    row = _text("turbo4", 0.0)
    nothing = dict.fromkeys(("bits_per_byte", "cost", "cost_interval", "divergence"))
    row = {**row, "text": {**row["text"], **nothing, "cost_by_file": {"a": None, "b": None}}}
    row["layers"]["decode"]["cosine"] = [None, 0.9]
    nan = {**result, "rows": [*result["rows"][:-1], row]}
    assert "NaN bits per byte" in tables.one_line(row)
    assert "| NaN | NaN | 98.0% | NaN |" in tables.summary("verdict.json", nan)
    assert ["turbo4 pages", "held-out text", METHODS["kivi4"], "NaN"] in tables.worse(nan)
    assert "| turbo4 pages | NaN | NaN |" in tables.layers_table(nan)
    assert len(tables.side_by_side(nan).axes[2].containers) == 2
    assert tables.interval(0.01, None) == "+0.0100"


def test_of_two_kernels_for_fp8_the_faster_one_is_the_baseline():
    rows = [
        _row(DECODE, "fp8_e4m3", 20.0),
        _row(DECODE, "fp8_e4m3-triton", 16.0),
        _row(DECODE, "turbo4", 8.0),
    ]
    assert suite.SUITE.with_ratios(rows)[2]["speedup_over"] == {"fp8-pages": 2.0}


@pytest.mark.slow
def test_plots_show_speed_and_cost(result):
    speed, error, cost = tables.side_by_side(result).axes
    points, errors = (
        {tuple(line.get_xydata()[0]) for line in axes.lines if len(line.get_xydata()) == 1}
        for axes in (speed, error)
    )
    assert {(4.125, 3.0), (4.1, 0.5)} <= points
    assert errors == {(16.0, 1.0), (8.0, 1.0), (4.125, 1.0), (4.1, 1.0)}
    assert len(cost.containers) == 3
    latencies = latency.speed_plot(_latencies())
    assert {bar.get_height() for bar in latencies.axes[0].patches} >= {2.0, 0.5, 1.25}


# Latency ------------------------------------------------------------------------------------------


def _latencies():
    base = {"status": "ok", "model": "tiny", "batch": 2, "tokens": 1024, "kernels": []}
    decode = {**base, "operation": "decode", "is_causal": False}
    prompt = {**base, "operation": "prefill", "is_causal": True}
    rows = [
        {**decode, "method": "cudnn", "us": 12.0},
        {**decode, "method": "cudnn-full", "us": 10.0},
        {**decode, "method": "turbo-4bit", "us": 5.0},
        {**decode, "method": "kivi-4bit", "us": 20.0},
        {**prompt, "method": "cudnn", "us": 10.0},
        {**prompt, "method": "turbo-fp8-exact-64", "us": 8.0},
        {**prompt, "method": "turbo-fp8-exact-128", "us": 9.0},
        {**prompt, "method": "e4m3-cudnn", "us": 7.0},
    ]
    machine = {"device": "a device", "jax": "0", "date": "2000-01-01"}
    return {**machine, "rows": latency.SUITE.with_ratios(rows)}


def test_latency_stands_beside_the_paper():
    text = latency.section("latency_2000-01-01.json", _latencies())
    assert "| 2 x 1k | 10 | 2.00x | 0.50x |" in text
    assert "| 2 x 1k | 10 | 1.25x |" in text
    assert "prompts up to 1.8x in the paper, 1.25x to 1.25x here" in text
    assert "decoding up to 1.7x in the paper, 2.00x to 2.00x here" in text
    assert "KIVI slower than FP16 in the paper, 0.50x to 0.50x here" in text
    rows = latency.SUITE.rows()
    names = [group.name(case) for group, case in rows]
    assert names[0] == "decode/phi3-medium/b1-s1024/cudnn"
    assert "decode/phi3-medium/b4-s32768/kivi-4bit" in names
    assert "prefill/phi3-medium/b64-s1024-causal/turbo-fp8-exact-64/mosaic_gpu" in names
    assert not [name for name in names if "triton" in name or "pallas" in name]


def test_throughput_stands_beside_the_paper():
    rows = [
        {"cache": "exact", "batch": 1, "tokens_per_second": 10.0, "status": "ok"},
        {"cache": "exact", "batch": 2, "tokens_per_second": None, "status": "out of memory"},
        {"cache": "4bit", "batch": 2, "tokens_per_second": 18.0, "status": "ok"},
        {"cache": "kivi4", "batch": 1, "tokens_per_second": None, "status": "error"},
    ]
    result = {"device": "a device", "jax": "0", "date": "2000-01-01", "rows": rows}
    text = generate.SUITE.tables["batches"]("generate_2000-01-01.json", result)
    assert "| batch | exact | 4bit | kivi4 |" in text
    assert "| 2 | - | 18 | - |" in text
    assert "2.37x in the paper, 1.80x with `4bit` here" in text
    text = generate.throughput_table(result)
    assert "| exact | 1 | 10 | 1.00x | - | 2: out of memory |" in text
    assert "| kivi4 | - | - | - | - | 1: error |" in text


def test_prose_agrees_with_the_results():
    """The figures of docs/benchmarks/turboquant.md, which are of pages' own suite."""
    name, result = report.newest(readme.RESULTS, ("paged",))
    rows = {row["name"]: row for row in result["rows"]}

    def us(kernel, *places):
        at = [f"paged-decode/llama3-8b/{place}/{{}}/{kernel}" for place in places]
        found = [rows[x.format(y)]["us"] for x in at for y in ("turbo4", "fp8_e4m3")]
        return [tables.tables.number(x) for x in found]

    places = ("b16-s32768", "b64-s4096", "b1-s32768")
    text = docs_text("benchmarks/turboquant.md")
    said = (
        "takes {} us for turbo4 and {} for fp8 at 16 x 32k, {} and {} at 64 x 4k, and {} and {}",
        "it is {} and {}, {} and {}, {} and {} (",
    )
    for words, kernel in zip(said, ("triton", "mosaic_gpu"), strict=True):
        assert words.format(*us(kernel, *places)) in text
    assert f"(`benchmarks/results/{name}`)" in text
    chunks: dict[tuple[str, int], dict[str, float]] = {}
    for row in report.newest(readme.RESULTS, ("paged_chunk",))[1]["rows"]:
        if row["operation"] == "paged-chunk" and row["implementation"] == "mosaic_gpu":
            chunks.setdefault((row["label"], row["queries"]), {})[row["method"]] = row["us"]
    assert "fp8 is faster for every chunk of 64 queries or more" in text
    many = [us_of for (_, queries), us_of in chunks.items() if queries >= 64]
    assert len(many) > 5
    assert all(us_of["fp8_e4m3"] < us_of["turbo4"] for us_of in many)


def test_prose_agrees_with_the_verdict():
    """The figures of the same page that are of its own run."""
    _, result = report.newest(readme.RESULTS, ("verdict",))
    rows = {row["name"]: row for row in result["rows"]}

    def us(shape, name):
        return rows[f"verdict-decode/llama3-8b/{shape}/{name}"]["us"]

    def ratio(shape, one="fp8_e4m3", other="turbo4"):
        return us(shape, one) / us(shape, other)

    def cost(name):
        return rows[f"verdict-text/embedded-t4095/{name}"]["text"]["cost"]

    shapes = ("b16-s32768", "b64-s4096", "b1-s131072")
    triton = [ratio(shape, "fp8_e4m3-triton", "turbo4-triton") for shape in shapes]
    four = [ratio(shape, "turbo4", "4bit") for shape in shapes]
    fast = [ratio(shape) for shape in shapes]
    short = [ratio("b1-s1024", "cudnn-full", x) for x in ("turbo4", "paged", "fp8_e4m3")]
    figures = [
        f"read {fast[0]:.2f} times as fast as fp8 pages at 16 x 32k, {fast[1]:.2f} at 64 x 4k and "
        f"{fast[2]:.2f} at 1 x 128k",
        f"{cost('turbo4'):.4f} bits per byte, and fp8 {cost('fp8_e4m3'):.4f}",
        f"is {min(four):.2f} to {max(four):.2f} times as fast as turbo4 in these shapes and costs "
        f"{cost('4bit'):.4f}",
        f"costs {cost('kivi4'):.4f}, and has no kernel here",
        f"Triton's turbo4 is {triton[0]:.2f} times as fast as Triton's fp8 at 16 x 32k and "
        f"{triton[1]:.2f} times at 64 x 4k and 1 x 128k, and slower at 1 x 8k",
        f"decodes at {short[0]:.2f} times the speed of cuDNN from bfloat16",
    ]
    text = docs_text("benchmarks/turboquant.md")
    assert [figure for figure in figures if figure not in text] == []
    assert f"{triton[1]:.2f}" == f"{triton[2]:.2f}"
    assert ratio("b1-s8192", "fp8_e4m3-triton", "turbo4-triton") < 1
    assert max(short) - min(short) < 0.02


# A run --------------------------------------------------------------------------------------------
