"""Folds smoothing factors into a layer's weights; in exact arithmetic the layer stays the same.

CAS multiplies a projection's columns and divides what produces its inputs: the rows of the
projection before, or the norm's factor. RPN divides rows of k and multiplies those of q, or the
factors of their heads' norms, where there are. PTS multiplies a whole weight and divides its
output. CRS cannot be folded, because a rotation does not commute with it: it stays as
`LayerWeights.key_channel_scale`.

That is exact whatever else a layer has. Biases are scaled with the rows of their weight; soft caps,
windows and factors of scores see the same scores; the activation of a gate is not scaled, only what
it is multiplied with; norms after attention and feed-forward layer see the same outputs. Where one
norm serves both, its factor is divided by what is common to all five projections that read it.
Inputs that no norm makes are not scaled: there is nothing before them to divide.
"""

import dataclasses
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from turbojax import _checks
from turbojax.smoothing._values import widened
from turbojax.smoothing.attention import channel_rope_scale, of_channels, rope_preserving_norm
from turbojax.smoothing.layer import PROJECTIONS, LayerWeights, Projection, widened_layer
from turbojax.smoothing.linear import channel_absmean_scale, per_tensor_scale
from turbojax.smoothing.statistics import KeyStatistics

_ATTENTION_INPUTS = ("q", "k", "v")

CasInputs = Literal["constant", "all"]
"""How CAS treats inputs that come from a norm."""


@dataclasses.dataclass(frozen=True)
class Smoothing:
    """What `smooth_layer` does; each of the four can be left out. FireQ (Baek et al., 2025).

    Attributes:
      cas: channel-wise absmean scaling (Def. 3.1).
      pts: per-tensor scaling (Def. 3.2).
      rpn: RoPE-preserving normalization of the keys (Theorem 3.1).
      crs: channel-wise RoPE scaling of the keys with outliers.
      alpha: factor of RPN.
      beta: factor of CRS together with RPN; without RPN the outliers are scaled to the size of the
        other channels instead, see `channel_rope_scale`.
      num_pairs: pairs of channels per head that CRS scales.
      cas_inputs: whether CAS also scales the inputs of q, k, v and of gate, up, which come from a
        norm, of layers that have one: "all" scales them, too, which outliers there need; "constant"
        gives all of them one factor, as the paper does for stability, which is as if there were
        none. It can be a little better for a model without such outliers.

    Raises:
      TypeError: if a factor is not a number or `num_pairs` not an integer.
      ValueError: if a factor is not positive, `num_pairs` negative or `cas_inputs` unknown.
    """

    cas: bool = True
    pts: bool = True
    rpn: bool = True
    crs: bool = True
    alpha: float = 8.0
    beta: float = 8.0
    num_pairs: int = 8
    cas_inputs: CasInputs = "all"

    def __post_init__(self) -> None:
        for name in ("alpha", "beta"):
            if getattr(self, name) is None:
                raise TypeError(f"{name}=None must be a number")
            _checks.check_number(name, getattr(self, name))
            _checks.check_positive(name, getattr(self, name))
        _checks.check_integer("num_pairs", self.num_pairs)
        if self.num_pairs < 0:
            raise ValueError(f"num_pairs={self.num_pairs} must not be negative")
        if self.cas_inputs not in get_args(CasInputs):
            raise ValueError(f"cas_inputs={self.cas_inputs!r} must be in {get_args(CasInputs)}")


def smooth_layer(
    layer: LayerWeights, statistics: KeyStatistics | None, smoothing: Smoothing = Smoothing()
) -> LayerWeights:
    """Smooths a layer for INT4 weights and keys; in exact arithmetic it computes the same.

    Args:
      layer: the weights, not smoothed before.
      statistics: of the layer's keys; only RPN and CRS need them.
      smoothing: what to do.

    Returns:
      The layer in float32, or float64 where it was; with `output_scale` in every projection if PTS
      was asked for, and `key_channel_scale` if CRS was.

    Raises:
      TypeError: if an array is not floating point.
      ValueError: if shapes do not fit, statistics are missing or of no tokens, the layer has been
        smoothed, a head has fewer pairs than `num_pairs`, or (outside `jit`) a value is not finite.
    """
    layer.validate()
    if layer.key_channel_scale is not None or any(
        getattr(layer, name).output_scale is not None for name in PROJECTIONS
    ):
        raise ValueError("layer has output or key channel scales: it must not be smoothed before")
    layer = widened_layer(layer)
    if smoothing.cas:
        layer = _scale_channels(layer, smoothing.cas_inputs)
    if smoothing.rpn or smoothing.crs:
        layer = _smooth_keys(layer, statistics, smoothing)
    if smoothing.pts:
        scaled: dict[str, Any] = {
            name: fold_per_tensor(getattr(layer, name)) for name in PROJECTIONS
        }
        layer = dataclasses.replace(layer, **scaled)
    return layer


def fold_value_output(layer: LayerWeights, scale: jax.Array) -> LayerWeights:
    """CAS between v and o: columns of o times `scale`, rows and bias of v divided.

    Args:
      layer: the layer.
      scale: ``[K, H]``, shared by the query heads of a group, whose outputs mix the same values.
    """
    scale = _of_heads(layer, "scale", scale, layer.head_dim)
    columns = jnp.repeat(scale, layer.num_heads // layer.num_kv_heads, axis=0)
    v, o = layer.v.scale_rows(1 / scale.reshape(-1)), layer.o.scale_columns(columns.reshape(-1))
    return dataclasses.replace(layer, v=v, o=o)


def fold_up_down(layer: LayerWeights, scale: jax.Array) -> LayerWeights:
    """CAS from up to down: columns of down times `scale` ``[F]``, rows and bias of up divided."""
    up, down = layer.up.scale_rows(1 / scale), layer.down.scale_columns(scale)
    return dataclasses.replace(layer, up=up, down=down)


def fold_attention_input(layer: LayerWeights, scale: jax.Array) -> LayerWeights:
    """CAS of q, k, v: their columns times `scale` ``[D]``, the norm's factor divided.

    In a parallel layer those of gate and up, which read the same, are scaled as well.

    Raises:
      ValueError: if no norm makes these inputs.
    """
    norm = layer.attention_norm
    if norm is None:
        raise ValueError("attention_norm=None: inputs of q, k and v can be scaled by a norm alone")
    names = _ATTENTION_INPUTS + (_mlp_inputs(layer) if layer.parallel else ())
    return dataclasses.replace(
        layer,
        attention_norm=norm / scale.astype(norm.dtype),
        **{name: getattr(layer, name).scale_columns(scale) for name in names},
    )


def fold_mlp_input(layer: LayerWeights, scale: jax.Array) -> LayerWeights:
    """CAS of gate and up: their columns times `scale` ``[D]``, the norm's factor divided.

    The columns of a router, which reads the same, are scaled as well.

    Raises:
      ValueError: if no norm of their own makes these inputs.
    """
    norm = layer.mlp_norm
    if norm is None:
        raise ValueError("mlp_norm=None: inputs of gate and up can be scaled by their norm alone")
    return dataclasses.replace(
        layer,
        mlp_norm=norm / scale.astype(norm.dtype),
        **{name: getattr(layer, name).scale_columns(scale) for name in _mlp_inputs(layer)},
    )


def _mlp_inputs(layer: LayerWeights) -> tuple[str, ...]:
    """Names of the projections that read the input of the feed-forward layer."""
    return ("gate", "up") if layer.router is None else ("gate", "up", "router")


def fold_query_key(layer: LayerWeights, scale: jax.Array) -> LayerWeights:
    """RPN: rows and bias of k divided by `scale`, those of q multiplied.

    With norms of queries and keys it is the norms' factors, which then differ between heads.

    Args:
      layer: the layer.
      scale: ``[K, H/2]``, for both channels of a pair.
    """
    scale = _of_heads(layer, "scale", scale, layer.head_dim // 2)
    channels = of_channels(scale, layer.rotary_dim, layer.interleaved)
    queries = jnp.repeat(channels, layer.num_heads // layer.num_kv_heads, axis=0)
    if layer.q_norm is not None and layer.k_norm is not None:
        q_norm = layer.q_norm * queries.astype(layer.q_norm.dtype)
        k_norm = layer.k_norm / channels.astype(layer.k_norm.dtype)
        return dataclasses.replace(layer, q_norm=q_norm, k_norm=k_norm)
    q, k = layer.q.scale_rows(queries.reshape(-1)), layer.k.scale_rows(1 / channels.reshape(-1))
    return dataclasses.replace(layer, q=q, k=k)


def fold_per_tensor(projection: Projection) -> Projection:
    """PTS: the weight times `per_tensor_scale`, a power of two, and its output divided; no bias.

    An `output_scale` that is there already is divided, too.
    """
    delta = per_tensor_scale(projection.weight)
    weight = projection.weight * delta.astype(projection.weight.dtype)
    output_scale = 1 / delta
    if projection.output_scale is not None:
        before = widened("output_scale", projection.output_scale)
        output_scale = before * output_scale.astype(before.dtype)
    return dataclasses.replace(projection, weight=weight, output_scale=output_scale)


def _scale_channels(layer: LayerWeights, inputs: CasInputs) -> LayerWeights:
    """CAS of the whole layer."""
    width, groups = layer.o.weight.shape[0], layer.num_heads // layer.num_kv_heads
    # One factor per channel of the values: the rows of a group's heads count together.
    heads = (width, layer.num_kv_heads, groups, layer.head_dim)
    o = jnp.swapaxes(layer.o.weight.reshape(heads), 1, 2).reshape(width * groups, -1)
    per_value = channel_absmean_scale(o).reshape(layer.num_kv_heads, layer.head_dim)
    layer = fold_value_output(layer, per_value)
    if layer.is_up_linear:
        layer = fold_up_down(layer, channel_absmean_scale(layer.down.weight))
    if inputs != "all":
        return layer
    qkv = [layer.q.weight, layer.k.weight, layer.v.weight]
    gate_up = [layer.gate.weight, layer.up.weight]
    if layer.attention_norm is not None:
        together = qkv + gate_up if layer.parallel else qkv
        layer = fold_attention_input(layer, channel_absmean_scale(together))
    if layer.mlp_norm is not None:
        layer = fold_mlp_input(layer, channel_absmean_scale(gate_up))
    return layer


def _smooth_keys(
    layer: LayerWeights, statistics: KeyStatistics | None, smoothing: Smoothing
) -> LayerWeights:
    """CRS and RPN, whichever was asked for."""
    if statistics is None:
        raise ValueError("statistics=None: RPN and CRS need the statistics of the layer's keys")
    statistics.validate()
    _of_heads(layer, "statistics.absmax", statistics.absmax, layer.head_dim)
    if statistics.rotary_dim != layer.rotary_dim:
        raise ValueError(f"{statistics.rotary_dim=} must be the layer's, {layer.rotary_dim}")
    if statistics.interleaved != layer.interleaved:
        raise ValueError(f"{statistics.interleaved=} must be the layer's, {layer.interleaved}")
    chosen = None
    if smoothing.crs:
        beta = smoothing.beta if smoothing.rpn else None
        scale, chosen = channel_rope_scale(
            statistics.absmax,
            num_pairs=smoothing.num_pairs,
            beta=beta,
            rotary_dim=layer.rotary_dim,
            interleaved=layer.interleaved,
        )
        layer = dataclasses.replace(layer, key_channel_scale=scale)
    if smoothing.rpn:
        norm = rope_preserving_norm(statistics.pair_norm, alpha=smoothing.alpha, exclude=chosen)
        layer = fold_query_key(layer, norm)
    return layer


def _of_heads(layer: LayerWeights, name: str, scale: jax.Array, size: int) -> jax.Array:
    if scale.shape != (layer.num_kv_heads, size):
        raise ValueError(f"{name}.shape={scale.shape} must be ({layer.num_kv_heads}, {size})")
    return scale
