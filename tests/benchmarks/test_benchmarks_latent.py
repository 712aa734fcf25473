"""The suite of latent attention: what it counts, that it runs and compares, and its table."""

import functools
import json

import pytest

from benchmarks import readme
from benchmarks.measuring import calls
from benchmarks.suites import latent
from tests.tools.docs_helpers import docs_text

LENGTHS = (
    (64, 8192, "64 x 8k"),
    (16, 32768, "16 x 32k"),
    (1, 131072, "1 x 128k"),
    (1, 8192, "1 x 8k"),
)


def test_rows_come_with_what_they_are_compared_with():
    names = [group.name(case) for group, case in latent.SUITE.rows()]
    assert names[0] == "latent/deepseek-v2-lite/b64-s8192/bf16"
    assert "latent/deepseek-v3/b1-s131072/turbo4/mosaic_gpu" in names
    assert len(names) == 6 * 4


@pytest.mark.slow
def test_what_is_counted():
    s = latent.TINY
    for case, token in zip(
        latent.decoding(s, implementations=("xla",)).cases, (160, 160, 100, 68), strict=True
    ):
        needs = case.build(calls.Arrays()).needs
        rest = 2 * s.batch * s.heads * (2 * s.latent + s.rope)
        assert needs.nbytes == s.batch * s.length * token + rest
        assert needs.operations == 2 * s.batch * s.heads * s.length * (s.latent * 2 + s.rope)


def test_prose_agrees_with_the_tuning():
    """Latent attention in docs/benchmarks/paged.md."""
    path = readme.RESULTS / "models_tuning_2026-11-25.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    rows = [row for row in rows if row["call"] == 2]
    text = docs_text("benchmarks/paged.md")

    def us(subject, **fields):
        found = [r["us"] for r in rows if r["subject"] == subject and fields.items() <= r.items()]
        return found[0] if found else None

    kernels = functools.partial(us, "latent kernel, time")
    for batch, tokens, name in LENGTHS:
        for heads in (16, 128):
            at = {"batch": batch, "tokens": tokens, "heads": heads}
            times = [kernels(method="xla bf16, dense", **at)]
            for form in ("bfloat16", "fp8_e4m3", "turbo4"):
                changes = {"ahead": 0} if batch == 64 and form == "bfloat16" else {}
                times.append(kernels(method="kernel", format=form, changes=changes, **at))
            shown = ["-" if t is None else f"{t:.0f}" if t > 100 else f"{t:.1f}" for t in times]
            assert f"| {name} | {heads} | {' | '.join(shown)} |" in text
    for heads, said in ((16, "{1}, {2} and {3} us with 16 heads"), (128, "{1}, {2} and {3} with")):
        op = functools.partial(
            us, "latent_attention, time and error against bf16", heads=heads, length=8192
        )
        methods = ("bf16 XLA absorbed", "bfloat16", "fp8_e4m3", "turbo4")
        times = [f"{op(method=method):.0f}" for method in methods]
        assert said.format(*times) in text
        assert f"(XLA {times[0]})" in text
    for cache, size in (("exact", 13.29), ("latent_turbo4", 0.42)):
        [step] = [r for r in rows if r.get("cache") == cache and "cache_bytes" in r]
        assert f"{step['us'] / 1e3:.2f} ms and {size} GB" in text
        assert round(step["cache_bytes"] / 1e9, 2) == size


def test_the_later_table_is_that_of_its_record():
    """Of each shape the first version's time and the best of the later ones, whatever its parts."""
    path = readme.RESULTS / "latent_versions_2026-11-30.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    lines = docs_text("benchmarks/paged.md").partition("latent_versions_2026-11-30.json")[2]
    shown = [[x.strip() for x in line.split("|")[1:-1]] for line in lines.splitlines()[4:11]]

    def us(length, heads, form, version):
        batch, tokens = length.split(" x ")
        name = f"{batch} x {int(tokens[:-1]) * 1024}, {heads} heads, {form}"
        found = [r for r in rows if (r["name"], r["version"]) == (name, version)]
        if version == "v3, v4":
            found = [r for r in found if r["option"] is None]
        else:
            found = [r for r in found if r["option"] in (None, "{'parts': 32}")]
        return "-" if not found else f"{min(r['us'] for r in found):.1f}"

    for length, heads, xla, *formats in shown:
        assert xla == us(length, heads, "xla", "v3, v4")
        for form, cell in zip(("bfloat16", "fp8_e4m3", "turbo4"), formats, strict=True):
            before, after = (us(length, heads, form, v) for v in ("v3, v4", "v5"))
            assert cell == (before if before == after == "-" else f"{before}, {after}")
