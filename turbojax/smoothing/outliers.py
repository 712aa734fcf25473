"""Plants outliers in a layer by rescalings that leave it the same: for tests and ablations.

A small model has hardly any of the outliers for which smoothing exists. With these its keys and
weight channels are uneven, while it computes the same numbers: all factors are powers of two, of
which each is multiplied in at one place and divided out at another. Factors of columns are what CAS
can undo exactly, so for CAS these outliers are the best case.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks
from turbojax.smoothing.folding import (
    CasInputs,
    fold_attention_input,
    fold_mlp_input,
    fold_query_key,
    fold_up_down,
    fold_value_output,
)
from turbojax.smoothing.layer import LayerWeights, widened_layer


@dataclasses.dataclass(frozen=True)
class Outliers:
    """What `plant_outliers` plants.

    Attributes:
      key_pairs: pairs of channels per KV head whose keys become larger.
      key_factors: by how much; each pair gets one of these powers of two.
      spread: standard deviation of the binary logarithm of all other input channels of the linear
        layers, before it is rounded to an integer.
      channel_share: share of the input channels that become outliers, at least one of each layer.
      channel_factors: by how much; each of them gets one of these powers of two.
      inputs: "constant" leaves the inputs of q, k, v and of gate, up alone, as
        `Smoothing.cas_inputs` does; "all" plants there, too.

    Raises:
      TypeError: if a value is of the wrong kind.
      ValueError: if a factor is not a power of two, a count or the spread negative, or the share
        not between 0 and 1.
    """

    key_pairs: int = 2
    key_factors: tuple[float, ...] = (8.0, 16.0)
    spread: float = 1.0
    channel_share: float = 0.01
    channel_factors: tuple[float, ...] = (16.0, 32.0)
    inputs: CasInputs = "all"

    def __post_init__(self) -> None:
        _checks.check_integer("key_pairs", self.key_pairs)
        _checks.check_number("spread", self.spread)
        _checks.check_number("channel_share", self.channel_share)
        if self.key_pairs < 0 or self.spread < 0 or not 0 <= self.channel_share <= 1:
            raise ValueError(
                f"key_pairs={self.key_pairs} and spread={self.spread} must not be negative, "
                f"channel_share={self.channel_share} between 0 and 1"
            )
        for factor in (*self.key_factors, *self.channel_factors):
            _checks.check_number("a factor", factor)
            if factor <= 0 or np.frexp(factor)[0] != 0.5:
                raise ValueError(f"a factor of {factor} must be a power of two")
        if not self.key_factors or not self.channel_factors:
            raise ValueError("key_factors and channel_factors must not be empty")
        if self.inputs not in ("constant", "all"):
            raise ValueError(f"inputs={self.inputs!r} must be 'constant' or 'all'")


def plant_outliers(
    layer: LayerWeights, *, seed: int = 0, outliers: Outliers = Outliers()
) -> LayerWeights:
    """Plants outliers in the keys and in the input channels of the linear layers.

    Keys of a pair of channels grow by one factor, and the queries shrink; columns of a weight grow,
    and the rows or the norm's factor before it shrink. Factors differ between heads, channels and
    seeds.

    Args:
      layer: the weights, not smoothed.
      seed: of the random choice; give each layer its own.
      outliers: how many and how large.

    Returns:
      The layer in float32, or float64 where it was, which computes the same to the last bit as long
      as nothing overflows or gets subnormal.

    Raises:
      TypeError: if an array is not floating point.
      ValueError: if shapes do not fit, or a head has fewer pairs than `key_pairs`.
    """
    layer.validate()
    pairs = layer.head_dim // 2
    if outliers.key_pairs > pairs:
        raise ValueError(f"key_pairs={outliers.key_pairs} must be at most the head's {pairs} pairs")
    rng = np.random.default_rng(seed)
    layer = widened_layer(layer)
    layer = fold_query_key(layer, 1 / _key_factors(rng, layer.num_kv_heads, pairs, outliers))
    values = _channel_factors(rng, layer.num_kv_heads * layer.head_dim, outliers)
    layer = fold_value_output(layer, values.reshape(layer.num_kv_heads, layer.head_dim))
    layer = fold_up_down(layer, _channel_factors(rng, layer.up.weight.shape[0], outliers))
    if outliers.inputs == "all":
        width = layer.o.weight.shape[0]
        layer = fold_attention_input(layer, _channel_factors(rng, width, outliers))
        layer = fold_mlp_input(layer, _channel_factors(rng, width, outliers))
    return layer


def _key_factors(rng: np.random.Generator, heads: int, pairs: int, outliers: Outliers) -> jax.Array:
    """``[K, H/2]`` float32."""
    factors = np.ones((heads, pairs), np.float32)
    for head in factors:
        chosen = rng.choice(pairs, outliers.key_pairs, replace=False)
        head[chosen] = rng.choice(outliers.key_factors, outliers.key_pairs)
    return jnp.asarray(factors)


def _channel_factors(rng: np.random.Generator, size: int, outliers: Outliers) -> jax.Array:
    """``[size]`` float32."""
    factors = np.exp2(np.rint(outliers.spread * rng.standard_normal(size)))
    if outliers.channel_share > 0:
        count = max(1, round(outliers.channel_share * size))
        chosen = rng.choice(size, count, replace=False)
        factors[chosen] = rng.choice(outliers.channel_factors, count)
    return jnp.asarray(factors, jnp.float32)
