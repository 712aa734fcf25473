"""The ablation of FireQ's smoothing: what it plants, what it measures, what is committed."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import fireq_ablation as ablation
from turbojax import models, smoothing
from turbojax.models.layer_by_layer import calibrate
from turbojax.models.quantize import layer_weights

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "fireq_ablation_2026-11-21.json"
PLANTED = [name for name in ablation.OUTLIERS if name != "as_is"]


@pytest.fixture(scope="module")
def decoder() -> models.Decoder:
    return models.unstack(models.load_transformer(dtype=jnp.float32))


@pytest.fixture(scope="module")
def shallow(decoder) -> models.Decoder:
    """Two layers: quick, and of real weights."""
    config = dataclasses.replace(decoder.config, num_layers=2)
    return dataclasses.replace(decoder, layers=decoder.layers[:2], config=config)


@pytest.fixture(scope="module")
def text() -> ablation.Text:
    return ablation.Text.of_library(window=256, calibrated=2, evaluated=2)


def _ignore(count: int) -> None:
    pass


@pytest.mark.fuzz
@pytest.mark.parametrize("name", PLANTED)
def test_planting_changes_nothing_but_makes_keys_and_weights_uneven(shallow, text, name):
    planted = ablation.plant(shallow, ablation.OUTLIERS[name])
    costs = [ablation.bits(m, text, "exact", _ignore) for m in (shallow, planted)]
    # Powers of two: only sums may come out in another order.
    assert costs[0] == pytest.approx(costs[1], rel=1e-5)

    def unevenness(model: models.Decoder) -> dict[str, float]:
        """How far the largest channel is above the median one, on average of the layers."""
        found: dict[str, list[float]] = {}
        for params, seen in zip(model.layers, calibrate(model, text.calibration), strict=True):
            weights = layer_weights(params, model.config)
            columns = {n: getattr(weights, n).weight for n in ("q", "o", "gate", "down")}
            sizes = {n: jnp.mean(jnp.abs(w), axis=0) for n, w in columns.items()}
            for n, size in {**sizes, "keys": seen.pair_norm.reshape(-1)}.items():
                found.setdefault(n, []).append(float(jnp.max(size) / jnp.median(size)))
        return {n: float(np.mean(ratios)) for n, ratios in found.items()}

    before, after = unevenness(shallow), unevenness(planted)
    outliers = ablation.OUTLIERS[name]
    for part, ratio in after.items():
        factors = outliers.key_factors if part == "keys" else outliers.channel_factors
        # The largest channel was not necessarily the one that grew, and so was the median.
        assert ratio > before[part]
        assert ratio > 0.7 * min(factors)


def test_windows_are_real_text_and_held_out_text_is_apart(text):
    assert text.calibration.shape == (2, 256)
    assert text.held_out.shape == (2, 257)
    library = b"".join(ablation.quantizing.evaluation_text())
    for window in text.held_out:
        # Without the bytes that begin a file.
        longest = max(bytes(window.tolist()).split(b"\0"), key=len)
        assert longest in library
    for window in text.calibration:
        assert max(bytes(window.tolist()).split(b"\0"), key=len) not in library


@pytest.mark.optimized
@pytest.mark.fuzz
def test_smoothing_gives_back_what_outliers_cost(decoder):
    text = ablation.Text.of_library(window=512, calibrated=2, evaluated=3)
    options = smoothing.Smoothing(cas_inputs="all")
    ends = ("none", "all")
    exact = ablation.bits(decoder, text, "exact", _ignore)
    as_is = ablation.measure(decoder, text, options, _ignore, ends)
    other = ablation.plant(decoder, ablation.OUTLIERS["planted"])
    planted = ablation.measure(other, text, options, _ignore, ends)
    shares = ablation.recovered(exact, as_is, planted)
    # They must cost something, or giving it back means nothing.
    assert planted["none"] > as_is["none"] + 0.5
    assert shares["against_unsmoothed"] > 0.8
    assert exact < as_is["all"] < exact + 0.2


def test_shares_of_what_is_recovered():
    as_is, planted = {"none": 1.5, "all": 1.25}, {"none": 3.5, "all": 1.75}
    shares = ablation.recovered(1.0, as_is, planted)
    assert shares["against_unsmoothed"] == pytest.approx(1.75 / 2.0)
    assert shares["against_smoothed"] == pytest.approx(1.75 / 2.25)
    assert shares["against_exact"] == pytest.approx(1.75 / 2.5)


def test_the_committed_result_holds_what_it_claims():
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    rows = result["bits_per_byte"]
    assert list(rows) == list(ablation.OUTLIERS)
    for name, row in rows.items():
        assert list(row) == list(ablation.COLUMNS)
        planted = ablation.OUTLIERS[name]
        described = planted and json.loads(json.dumps(dataclasses.asdict(planted)))
        assert result["outliers"][name] == described
    exact = result["exact_bits_per_byte"]
    for name in PLANTED:
        shares = ablation.recovered(exact, rows["as_is"], rows[name])
        assert result["recovered"][name] == pytest.approx(shares)
        assert shares["against_unsmoothed"] >= 0.8
        floats = result["float_weights_bits_per_byte"]
        assert floats[name]["exact"] == pytest.approx(exact, rel=1e-5)
    # As in the paper, CAS leaves alone what the norms write, and nothing is planted there.
    behind = result["variants"]["planted behind no norm, cas_inputs=constant"]
    as_is = result["variants"]["as_is, cas_inputs=constant"]
    assert ablation.recovered(exact, as_is, behind)["against_unsmoothed"] >= 0.8
    assert result["evaluated_bytes"] >= 16384


def test_the_plot_is_drawn(tmp_path):
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    ablation.save_plot(result, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
