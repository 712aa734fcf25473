"""The suite of latent attention: what it counts, that it runs and compares, and its table."""

import json

import numpy as np
import pytest

from benchmarks import readme
from benchmarks.measuring import calls
from benchmarks.suites import latent
from tests.tools.docs_helpers import docs_text


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
    """Latent attention in docs/benchmarks/paged.md: errors, and steps of four layers."""
    path = readme.RESULTS / "models_tuning_2026-11-25.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    rows = [row for row in rows if row["call"] == 2]
    text = docs_text("benchmarks/paged.md")
    errors = []
    for method in ("bfloat16", "fp8_e4m3", "turbo4"):
        found = [r["error"] for r in rows if r.get("method") == method and "error" in r]
        errors.append(f"{np.mean(found):.3f}")
    assert "Errors beside bfloat16 are {}, {} and {} of".format(*errors) in text
    for cache, size in (("exact", 13.29), ("latent_turbo4", 0.42)):
        [step] = [r for r in rows if r.get("cache") == cache and "cache_bytes" in r]
        assert f"{step['us'] / 1e3:.2f} ms and {size} GB" in text
        assert round(step["cache_bytes"] / 1e9, 2) == size


def test_prose_agrees_with_the_versions():
    """Latent attention in docs/benchmarks/paged.md: what it took before."""
    path = readme.RESULTS / "latent_versions_2026-11-30.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    us = {(r["name"], r["version"]): r["us"] for r in rows if r["option"] is None}
    large, small = "64 x 8192, 128 heads, bfloat16", "1 x 8192, 16 heads, "
    said = "{:.0f} us before, at 1 x 8k with 16 heads {:.1f} and then {:.1f}, XLA {:.1f}".format(
        us[large, "v3, v4"],
        *(us[f"{small}bfloat16", version] for version in ("v3, v4", "v5")),
        us[f"{small}xla", "v3, v4"],
    )
    assert said in docs_text("benchmarks/paged.md")
