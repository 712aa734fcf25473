"""What caches cost on held-out text: the benchmark runs, and docs/paged.md says what it found."""

import json

import numpy as np
import pytest

from benchmarks import cache_quality

RESULT = {
    "device": "a GPU",
    "date": "2026-01-02",
    "jax": "0.11.2",
    "modules": 12,
    "windows": 69,
    "prefilled": 2048,
    "caches": {
        "exact": {"bits_per_byte": 0.7, "cost": 0.0, "cost_standard_error": 0.0},
        "turbo4": {"bits_per_byte": 0.71, "cost": 0.0108, "cost_standard_error": 0.00141},
    },
}


def test_the_sentence():
    text = cache_quality.pages_sentence("cache_quality_2026-01-02.json", RESULT)
    assert '+0.0108 ± 0.0014 with `"turbo4"`, not measured with `"fp8_e4m3"`' in text
    assert "69 windows of 12 modules" in text
    assert "`cache_quality_2026-01-02.json`" in text
    old = {**RESULT, "caches": {"exact": {"bits_per_byte": 0.7}}}
    del old["modules"]
    text = cache_quality.pages_sentence("old.json", old)
    assert text.endswith("beyond a bfloat16 cache: not measured.")


def test_mean_and_error():
    values = np.array([1.0, 2.0, 4.0])
    mean, error = cache_quality.mean_and_error(values)
    deviation = np.sqrt(np.sum((values - 7 / 3) ** 2) / 2)
    assert (mean, error) == pytest.approx((7 / 3, deviation / np.sqrt(3)))


@pytest.mark.optimized
@pytest.mark.fuzz
def test_a_quick_run_measures_every_cache(tmp_path):
    """Of every kind one, and the coarsest: each compiles the whole model twice."""
    file = tmp_path / "results" / "quality.json"
    names = ("exact", "2bit", "turbo4")
    assert set(names) < set(cache_quality.DEFAULT_CACHES)
    cache_quality.main(["--quick", "--caches", ",".join(names), "--out", str(file)])
    result = json.loads(file.read_text(encoding="utf-8"))
    assert set(result["caches"]) == set(names)
    assert result["modules"] == result["windows"] == 12
    exact = np.array(result["caches"]["exact"]["bits_per_byte_by_window"])
    for name, row in result["caches"].items():
        windows = np.array(row["bits_per_byte_by_window"])
        assert len(windows) == 12
        assert row["bits_per_byte"] == pytest.approx(windows.mean(), abs=1e-5)
        assert row["cost"] == pytest.approx((windows - exact).mean(), abs=1e-5)
        if name != "exact":
            # Every cache rounds, and none of these lose more than the coarsest.
            assert 0 < row["cost_standard_error"] < 0.2
            assert abs(row["cost"]) < 0.3
    costs = {name: row["cost"] for name, row in result["caches"].items()}
    assert costs["turbo4"] < costs["2bit"]
    assert cache_quality.pages_sentence("quality.json", result).count(" ± ") == 1
