"""What smoothing does to INT4 keys and weights of the embedded model, with and without outliers.

Quantization is written out in numpy: INT4 per token and head for keys, INT4 with e4m3 scales per
128 inputs for weights.
"""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from benchmarks.cache_quality import held_out_windows
from turbojax import models
from turbojax import smoothing as sm
from turbojax.models import causal_attention
from turbojax.rotary import Rope, rotate

TOKENS = 512
LAYERS = (0, 7)


@dataclasses.dataclass(frozen=True)
class Sample:
    """A layer, what its attention reads, and what its feed-forward layer roughly reads."""

    layer: sm.LayerWeights
    inputs: np.ndarray

    def query_key(self, layer: sm.LayerWeights, after: bool = True) -> tuple[jax.Array, jax.Array]:
        """[T, N, H] and [T, K, H], after RoPE and CRS or before."""
        x = jnp.asarray(self.inputs * np.asarray(layer.attention_norm / self.layer.attention_norm))
        query, key = (p(x).reshape(1, TOKENS, -1, layer.head_dim) for p in (layer.q, layer.k))
        if after:
            angles = Rope(layer.head_dim).angles(jnp.arange(TOKENS)[None])
            query, key = rotate(query, angles), rotate(key, angles)
            if layer.key_channel_scale is not None:
                query, key = sm.scale_rotated(query, key, layer.key_channel_scale)
        return query[0], key[0]

    def statistics(self, layer: sm.LayerWeights) -> sm.KeyStatistics:
        """Of the first half of the text."""
        before, after = self.query_key(layer, False)[1], self.query_key(layer)[1]
        empty = sm.KeyStatistics.init(layer.num_kv_heads, layer.head_dim)
        return empty.update(before[: TOKENS // 2], after[: TOKENS // 2])


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    decoder = models.unstack(models.load(dtype=jnp.float32))
    tokens = jnp.asarray(held_out_windows(TOKENS, 1)["argparse.py"][:, :TOKENS])
    found = []
    for i in LAYERS:
        params = decoder.layers[i]
        # The layers before, and this layer's norm in place of the last: what q, k and v read.
        scale = params["attention_norm"]["scale"].astype(jnp.float32)
        part = dataclasses.replace(decoder, layers=decoder.layers[:i], norm=scale)
        inputs, _ = part.hidden(tokens, jnp.arange(TOKENS)[None], causal_attention, (None,) * i)
        found.append(Sample(_layer(params, decoder.config), np.asarray(inputs[0])))
    return found


def _layer(params, config) -> sm.LayerWeights:
    def projections(part: str, *names: str) -> dict[str, sm.Projection]:
        kernels = {name: params[part][f"{name}_proj"]["kernel"] for name in names}
        return {name: sm.Projection(w.astype(jnp.float32).T) for name, w in kernels.items()}

    return sm.LayerWeights(
        attention_norm=params["attention_norm"]["scale"].astype(jnp.float32),
        mlp_norm=params["mlp_norm"]["scale"].astype(jnp.float32),
        **projections("attention", "q", "k", "v", "o"),
        **projections("mlp", "gate", "up", "down"),
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )


def score_error(sample: Sample, layer: sm.LayerWeights) -> float:
    """RMS error of the scores of the text's second half against INT4 keys, before the softmax."""
    query, key = (np.asarray(x, np.float64) for x in sample.query_key(layer))
    scale = np.abs(key).max(-1, keepdims=True) / 7
    rounded = scale * np.clip(np.rint(key / scale), -8, 7)
    error = np.repeat(rounded - key, query.shape[1] // key.shape[1], axis=1)[TOKENS // 2 :]
    scores = np.einsum("tnh,snh->nts", query[TOKENS // 2 :], error)
    return float(np.sqrt((scores**2).mean()) / np.sqrt(key.shape[-1]))


def weight_error(layer: sm.LayerWeights, sample: Sample) -> float:
    """Relative RMS error of the attention's value-and-output product with INT4 weights."""
    x = sample.inputs.astype(np.float64)
    x = x * np.asarray(layer.attention_norm / sample.layer.attention_norm, np.float64)
    groups = layer.num_heads // layer.num_kv_heads

    def product(round_weight) -> np.ndarray:
        y = x
        for projection in (layer.v, layer.o):
            scale = 1 if projection.output_scale is None else float(projection.output_scale)
            y = y @ round_weight(np.asarray(projection.weight, np.float64)).T * scale
            if projection is layer.v:
                heads = y.reshape(TOKENS, layer.num_kv_heads, 1, layer.head_dim)
                y = np.repeat(heads, groups, axis=2).reshape(TOKENS, -1)
        return y

    exact, rounded = product(lambda w: w), product(int4)
    return float(np.sqrt(((rounded - exact) ** 2).mean() / (exact**2).mean()))


def int4(w: np.ndarray) -> np.ndarray:
    """INT4 weights as they are multiplied with: e4m3(sigma q), per 128 inputs."""
    groups = w.reshape(w.shape[0], -1, 128)
    sigma = (np.abs(groups).max(-1, keepdims=True) / 7).astype(ml_dtypes.float8_e4m3fn)
    sigma = np.maximum(sigma.astype(np.float64), 2.0**-9)
    codes = np.clip(np.rint(groups / sigma), -8, 7)
    table = np.clip(sigma * codes, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return table.astype(np.float64).reshape(w.shape)


KEYS_ONLY = {"cas": False, "pts": False}


@pytest.mark.fuzz
def test_smoothing_lowers_the_error_of_int4_keys(samples):
    sample = samples[-1]
    planted = sm.plant_outliers(sample.layer, seed=1)
    natural, uneven = (score_error(sample, x) for x in (sample.layer, planted))
    assert uneven > 3 * natural  # what the outliers cost
    for options in ({"crs": False}, {"rpn": False}, {}):
        smoothing = sm.Smoothing(**KEYS_ONLY, **options)
        for layer in (sample.layer, planted):
            smooth = sm.smooth_layer(layer, sample.statistics(layer), smoothing)
            # All of what outliers cost, and the embedded model's own unevenness, too.
            assert score_error(sample, smooth) < 1.1 * natural
    assert score_error(sample, smooth) < 0.95 * natural  # RPN and CRS together


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(LAYERS)))
def test_smoothing_takes_back_what_outliers_cost_int4_weights(samples, index):
    sample = samples[index]
    planted = sm.plant_outliers(sample.layer, seed=index)
    natural, uneven = (weight_error(x, sample) for x in (sample.layer, planted))
    assert natural < 0.25
    smoothing = sm.Smoothing(rpn=False, crs=False, cas_inputs="all")
    smooth = weight_error(sm.smooth_layer(planted, None, smoothing), sample)
    assert uneven - smooth > 0.8 * (uneven - natural)
    assert uneven > 2 * natural


@pytest.mark.slow
def test_statistics_of_half_a_text_nearly_bound_the_other_half(samples):
    """Theorem 3.1 is about calibration; other keys exceed its bound by little."""
    for sample in samples:
        statistics = sample.statistics(sample.layer)
        smoothing = sm.Smoothing(**KEYS_ONLY, crs=False)
        smooth = sm.smooth_layer(sample.layer, statistics, smoothing)
        _, key = sample.query_key(smooth)
        length = np.asarray(jnp.hypot(*jnp.split(key, 2, axis=-1)))
        assert length[: TOKENS // 2].max() <= (1 + 1e-4) / 8
        assert length.max() < 3 / 8
