"""What the docs say about pages and the engine agrees with the newest results."""

import json

from benchmarks import readme, report
from benchmarks.suites.paged import suite as paged
from tests.tools.docs_helpers import docs_text


def test_formats_differ_as_the_docs_say():
    """The words of docs/paged.md and docs/benchmarks/paged.md about k8v4 and mixed bits."""
    _, result = report.newest(readme.RESULTS, ("paged_formats",))
    us = {row["name"]: row["us"] for row in result["rows"]}
    for place in ("b16-s32768", "b64-s4096", "b1-s32768", "b1-s4096", "b1-s1024"):
        of = {
            kv_dtype: us[f"paged-decode/llama3-8b/{place}/{kv_dtype}/triton"]
            for kv_dtype in ("k8v4", "fp8_e4m3", "turbo4")
        }
        assert of["k8v4"] < (0.98 if place[:3] in ("b16", "b64") else 1.03) * min(
            of["fp8_e4m3"], of["turbo4"]
        )
    largest = "paged-decode/llama3-8b/b16-s32768"
    for kv_dtype in ("fp8_e4m3", "turbo4"):
        assert us[f"{largest}/{kv_dtype}/mosaic_gpu"] < us[f"{largest}/k8v4/triton"]
    share = us[f"{largest}/turbo_k4v2/triton"] / us[f"{largest}/turbo4/triton"]
    assert 0.85 < share < 0.95  # "A tenth of the time."
    made = paged.FORMATS.tables["paged formats"]("paged_formats_2026-01-01.json", result)
    append = us["paged-append/llama3-8b/b64-s4096/k8v4"]
    assert f"| 16 x 32k | k8v4 | triton | {us[f'{largest}/k8v4/triton']:.0f} |" in made
    assert f"| 1 of 64 x 4k | k8v4 | default | {append:.2f} |" in made


def test_prose_agrees_with_the_results():
    """The figures that docs/benchmarks/paged.md names outside of its tables."""
    results = [report.newest(readme.RESULTS, (of,))[1] for of in ("paged", "paged_chunk")]
    rows = {row["name"]: row for result in results for row in result["rows"]}
    decode = "paged-decode/llama3-8b/{}/{}/mosaic_gpu"
    best = rows[decode.format("b16-s32768", "turbo4")]
    fp8 = rows[decode.format("b16-s32768", "fp8_e4m3")]
    over = best["speedup_over"]

    def slower(kv_dtype):
        pages = f"paged-page-size/llama3-8b/b16-s32768/{kv_dtype}/page-{{}}/mosaic_gpu"
        share = rows[pages.format(16)]["us"] / rows[pages.format(64)]["us"] - 1
        return f"{100 * share:.0f} %"

    append = [
        rows[f"paged-append/llama3-8b/{x}/turbo4"]["us"] for x in ("b64-s4096", "b4-s32768-t4096")
    ]
    kinds = ("auto", "fp8_e4m3", "turbo4")
    one, short = (
        [rows[decode.format(place, kind)]["speedup_over"]["cudnn"] for kind in kinds]
        for place in ("b1-s4096", "b1-s1024")
    )
    theirs = [
        rows[f"paged-decode/llama3-8b/{place}/cudnn-paged"]["us"]
        for place in ("b16-s32768", "b64-s4096", "b1-s8192")
    ]
    figures = [
        f"turbo4 takes {best['us']:.0f} us",
        f"{over['bf16-pages']:.2f} times the speed of our bfloat16 pages",
        f"{over['cudnn']:.2f} times that of cuDNN",
        f"{over['fp8-pages']:.2f} times that of fp8 pages",
        f"at {best['percent_of_ceiling']:.0f} % of a copy's bandwidth",
        f"fp8 takes {fp8['us']:.0f}, at {fp8['percent_of_ceiling']:.0f} %",
        f"Pages of 16 tokens cost turbo4 {slower('turbo4')}, and fp8 {slower('fp8_e4m3')}",
        "4k tokens is {:.2f}, {:.2f} and {:.2f} times as fast as through cuDNN".format(*one),
        "one of 1k {:.2f}, {:.2f} and {:.2f} times".format(*short),
        "{:.0f} us at 16 x 32k, {:.0f} at 64 x 4k and {:.1f} at 1 x 8k".format(*theirs),
        f"64 sequences to turbo4 pages takes {append[0]:.1f} us",
        f"16,384 tokens of prompts {append[1]:.0f} us",
    ]
    for said, place in (
        ("8k of 8k", "b1-s8192-t8192"),
        ("8k of 32k", "b1-s32768-t8192"),
        ("1k of 32k", "b1-s32768-t1024"),
        ("256 of 32k", "b1-s32768-t256"),
        ("64 of 32k", "b1-s32768-t64"),
        ("256 of 8k, 4 sequences", "b4-s8192-t256"),
    ):
        chunk = f"paged-chunk/llama3-8b/{place}"
        cells = [f"{rows[f'{chunk}/cudnn-full']['us']:,.0f}"]
        for kind in kinds:
            row = rows[f"{chunk}/{kind}/mosaic_gpu"]
            cells.append(f"{row['tflops_per_second']:.0f} ({row['speedup_over']['cudnn']:.2f}x)")
        figures.append(f"| {said} | {' | '.join(cells)} |")
    text = docs_text("benchmarks/paged.md")
    assert [figure for figure in figures if figure not in text] == []


def test_prose_agrees_with_the_formats():
    """The figures of pages whose sides differ in docs/benchmarks/paged.md."""
    _, result = report.newest(readme.RESULTS, ("paged_formats",))
    rows = {row["name"]: row for row in result["rows"]}

    def of(place, implementation):
        return [
            rows[f"paged-decode/llama3-8b/{place}/{kind}/{implementation}"]
            for kind in ("k8v4", "turbo_k3v2")
        ]

    def ratios(place, implementation="mosaic_gpu"):
        return [row["speedup_over"]["cudnn"] for row in of(place, implementation)]

    (eight, mixed), speeds = of("b16-s32768", "mosaic_gpu"), ratios("b16-s32768")
    text = docs_text("benchmarks/paged.md")
    for figure in (
        f"takes {eight['us']:.0f} us for `k8v4` at 16 x 32k, {speeds[0]:.2f} times the speed",
        f"and {mixed['us']:.0f} for `turbo_k3v2`, {speeds[1]:.2f} times; Triton's takes "
        + "{:.0f} and {:.0f}".format(*(row["us"] for row in of("b16-s32768", "triton"))),
        "of 4k tokens Hopper's kernel is {:.2f} and {:.2f} times".format(*ratios("b1-s4096")),
        "of one of 1k {:.2f} and {:.2f} times".format(*ratios("b1-s1024")),
    ):
        assert figure in text
    # "Triton's is slower than cuDNN at both."
    assert max(ratios("b1-s4096", "triton") + ratios("b1-s1024", "triton")) < 1
    # Of k8v4 in docs/paged.md: between the others' speeds, but for one sequence of up to 4k.
    for place in ("b16-s32768", "b64-s4096", "b1-s32768", "b1-s8192", "b1-s4096", "b1-s1024"):
        fp8, turbo4 = (
            rows[f"paged-decode/llama3-8b/{place}/{kind}/mosaic_gpu"]["us"]
            for kind in ("fp8_e4m3", "turbo4")
        )
        us = of(place, "mosaic_gpu")[0]["us"]
        is_between = turbo4 < us < fp8
        assert is_between == (place not in ("b1-s4096", "b1-s1024"))
        assert is_between or us > max(fp8, turbo4)


def test_prose_agrees_with_the_engine():
    """The figures of the engine in docs/benchmarks/paged.md, of the newest run."""
    text = docs_text("benchmarks/paged.md")
    _, result = report.newest(readme.RESULTS, ("engine",))
    rows = {row["name"].removeprefix("engine/llama-3-8b/"): row for row in result["rows"]}
    speed = {name: f"{row['generated_per_second']:,.0f}" for name, row in rows.items()}
    figures = [
        f"{rows['long/turbo4']['token_capacity']:,} tokens where bfloat16 holds "
        f"{rows['long/auto']['token_capacity']:,}",
        f"{rows['long/turbo4']['capacity_over_auto']:.2f} times as many",
        f"at {speed['long/turbo4']} new tokens per second",
        f"pages at {speed['long/fp8_e4m3']}, from bfloat16 at {speed['long/auto']}",
        f"{speed['short/turbo4']}, {speed['short/fp8_e4m3']} and {speed['short/auto']}",
    ]
    assert [figure for figure in figures if figure not in text] == []


def test_prose_agrees_with_serving():
    """The figures in docs/benchmarks/serving.md, of the newest run and of its steps' parts."""
    text = docs_text("benchmarks/serving.md")
    _, result = report.newest(readme.RESULTS, ("serving",))
    rows = {row["name"].split("/", 2)[2]: row for row in result["rows"]}
    parts = json.loads((readme.RESULTS / "engine_steps_2026-11-26.json").read_text("utf-8"))
    ms = {row["name"]: row["ms"] for row in parts["rows"]}
    batch, decode = rows["batch/engine"], rows["batch/engine"]["steps_of_decoding"]
    products, attention = ms["decode/256/products"], ms["decode/256/attention"]
    floor = batch["steps_of_prompts"] * ms["products/8448"] + decode * (products + attention)
    one = rows["one/engine"]["seconds"] / rows["one/by-hand"]["seconds"]
    figures = [
        f"{batch['generated_per_second']:,.0f} new tokens per second",
        f"{batch['share_of_bare']:.2f} times the speed of the kernels",
        f"({batch['steps_of_prompts']} steps of prompts, {decode} of one",
        f"{ms['products/8448']:.0f} ms for a step of 8,448 tokens",
        f"{products:.1f} ms of products and {attention:.1f} of attention",
        f"{floor / 1e3:.1f} of the {batch['seconds']:.1f} seconds",
        f"INT4 weights take {rows['int4/engine']['seconds']:.1f} seconds",
        f"{rows['many/engine']['generated_per_second']:,.0f} new tokens",
        f"give {rows['loops-one/ngram']['times_without']:.2f} times",
        f"and {rows['loops/ngram']['times_without']:.1f} times of 32",
        f"cost a few percent ({rows['no-loops/ngram']['times_without']:.2f})",
        f"takes {100 * (one - 1):.0f} % longer than a loop of `decode_step`",
    ]
    assert [figure for figure in figures if figure not in text] == []
    assert max(row.get("idle_ms") or 0 for row in rows.values()) < 0.015
