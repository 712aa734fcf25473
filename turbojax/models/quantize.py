"""From a decoder to a quantized one: calibrate, smooth, round, layer by layer (FireQ).

Each layer is taken, seen by the calibration text, smoothed, rounded and released before the next
one is taken, so that only one layer of a `StoredDecoder` is in memory at a time.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks
from turbojax.matmul.int4.weight import (
    Int4Weight,
    ScaleDtype,
    concatenate,
    gate_and_up,
    quantize_weight,
)
from turbojax.models.checkpoint.weights import StoredDecoder
from turbojax.models.config import TransformerConfig
from turbojax.models.decoder import Decoder, LayerParams, adapted_linears, unstack
from turbojax.models.layer_by_layer import Calibration
from turbojax.models.quantized import QuantizedDecoder, check_quantizable
from turbojax.models.quantized_layer import (
    LINEARS,
    NORMS,
    QuantizedExperts,
    QuantizedLayer,
    QuantizedLinear,
    join_layer,
)
from turbojax.models.transformer import Transformer
from turbojax.numerics.fp8 import E4M3_MAX
from turbojax.smoothing import (
    KeyStatistics,
    LayerWeights,
    Projection,
    Smoothing,
    smooth_layer,
)

EVERYTHING = Smoothing()
"""CAS, PTS, RPN and CRS."""

Progress = Callable[[str, int], None]
"""Called with a phase, ``"calibration"`` or ``"layers"``, and how much is done since the last call:
layers, or tokens, which count once for every layer."""

_Watch = Callable[[int, LayerParams], KeyStatistics | None]


def quantize_model(
    model: Transformer | Decoder | StoredDecoder,
    tokens: np.ndarray | None = None,
    *,
    smoothing: Smoothing = EVERYTHING,
    scale_dtype: ScaleDtype = "e4m3",
    quantize_embedding: bool = False,
    quantize_head: bool = False,
    batch_size: int = 1,
    progress: Progress | None = None,
) -> QuantizedDecoder:
    """Quantizes the linear layers of a model's blocks to INT4 weights (FireQ, Baek et al., 2025).

    Activations become e4m3 with a scale per token as the model runs. Smoothing is folded into the
    weights in float32 before they are rounded, except CRS, which stays in the model.

    Besides the given model, memory holds the quantized one, one layer in float32, up to three times
    while it is smoothed, and the residual stream of the calibration text. Of a model from
    `open_decoder` only one layer or one table is in memory at a time; a `Transformer` is copied,
    see `unstack`.

    Args:
      model: the model, of any family.
      tokens: int ``[n, T]``, windows of real text for calibration; only `rpn` and `crs` need them.
      smoothing: what to do against outliers.
      scale_dtype: of the groups of weights: ``"e4m3"`` also rounds the dequantized weights to e4m3,
        which is what the fastest kernels compute; ``"bf16"`` multiplies after the products.
      quantize_embedding: also round the table of embeddings.
      quantize_head: also round the projection to logits, whose activations become e4m3 then. With
        tied embeddings it shares the table if that is quantized, too.
      batch_size: windows that run at once in calibration.
      progress: called as calibration and layers are done.

    Returns:
      The quantized decoder, which computes in the model's dtype.

    Raises:
      NotImplementedError: see `check_quantizable`.
      TypeError: if the model is of another type, such as a quantized one, or tokens or the batch
        size are not integers.
      ValueError: if the model is split over a mesh or has adapters, tokens are needed and missing
        or do not fit, a head has fewer pairs than CRS is to scale, `batch_size` is not positive, or
        a weight is not finite; the message names the layer.
    """
    if not isinstance(model, Transformer | Decoder | StoredDecoder):
        raise TypeError(
            f"model is a {type(model).__name__}, must be a Transformer, a Decoder or a "
            "StoredDecoder, not quantized before"
        )
    if not isinstance(model, Transformer) and model.axes is not None:
        raise ValueError(f"axes={model.axes} must be None: quantize the whole model, then split it")
    _checks.check_sizes(batch_size=batch_size)
    check_quantizable(model.config)
    pairs = model.config.head_dim // 2
    if smoothing.crs and smoothing.num_pairs > pairs:
        raise ValueError(
            f"num_pairs={smoothing.num_pairs} must be at most the {pairs} pairs of a head: leave "
            "CRS out (crs=False, --no-crs) or give Smoothing a smaller num_pairs"
        )
    if (smoothing.rpn or smoothing.crs) and tokens is None:
        raise ValueError("tokens=None: RPN and CRS need text for calibration")
    decoder = unstack(model) if isinstance(model, Transformer) else model
    calibration = None
    if (smoothing.rpn or smoothing.crs) and tokens is not None:
        calibration = Calibration(decoder, tokens, batch_size=batch_size)

    def watch(number: int, params: LayerParams) -> KeyStatistics | None:
        if calibration is None:
            return None
        advance = None if progress is None else lambda n: progress("calibration", n)
        return calibration.watch(params, advance)

    return _quantize(
        decoder, watch, smoothing, scale_dtype, quantize_embedding, quantize_head, progress
    )


def quantize_from(
    decoder: Decoder,
    statistics: Sequence[KeyStatistics | None],
    smoothing: Smoothing,
    *,
    scale_dtype: ScaleDtype = "e4m3",
    quantize_head: bool = False,
) -> QuantizedDecoder:
    """`quantize_model` after calibration: `statistics` are those of each layer, or None."""

    def watch(number: int, params: LayerParams) -> KeyStatistics | None:
        return statistics[number]

    return _quantize(
        decoder,
        watch,
        smoothing,
        scale_dtype,
        quantize_embedding=False,
        quantize_head=quantize_head,
        progress=None,
    )


def _quantize(
    decoder: Decoder | StoredDecoder,
    watch: _Watch,
    smoothing: Smoothing,
    scale_dtype: ScaleDtype,
    quantize_embedding: bool,
    quantize_head: bool,
    progress: Progress | None,
) -> QuantizedDecoder:
    """Takes each layer once, asks `watch` for the statistics of its keys, and releases it."""
    layers = []
    for number in range(decoder.config.num_layers):
        params = decoder.layers[number]
        seen = watch(number, params)
        weights, kept = layer_weights(params, decoder.config), kept_of(params)
        del params
        try:
            weights = smooth_layer(weights, seen, smoothing)
            layers.append(jax.block_until_ready(quantize_layer(weights, scale_dtype, kept)))
        except ValueError as error:
            raise ValueError(f"layer {number}: {error}") from error
        del weights
        if progress is not None:
            progress("layers", 1)
    embedding, lm_head = _tables(decoder, scale_dtype, quantize_embedding, quantize_head)
    return QuantizedDecoder(
        embedding=embedding,
        layers=tuple(layers),
        norm=_whole(decoder.norm, decoder.config),
        lm_head=lm_head,
        config=decoder.config,
        dtype=decoder.dtype,
    )


def layer_weights(params: LayerParams, config: TransformerConfig) -> LayerWeights:
    """A layer of a `Decoder` as smoothing sees it, in float32 and ``[out, in]``."""
    if found := adapted_linears(params):
        raise ValueError(f"the model has adapters of {found}, must have none: see merge_adapters")
    attention = params["attention"]

    def projection(part: str, name: str) -> Projection:
        linear = params[part][f"{name}_proj"]
        bias, kernel = linear.get("bias"), linear["kernel"].astype(jnp.float32)
        if kernel.ndim == 3:
            # Experts side by side, as channels of one wide layer.
            return Projection(_side_by_side(kernel, of_inputs=name == "down").T)
        return Projection(kernel.T, None if bias is None else bias.astype(jnp.float32))

    def router() -> Projection | None:
        found = params["mlp"].get("router")
        return None if found is None else Projection(found["kernel"].astype(jnp.float32).T)

    def norm(tree: LayerParams, name: str, *shape: int) -> jax.Array | None:
        if name not in tree:
            return None
        factor = _whole(tree[name]["scale"], config)
        if config.joint_qk_norm and shape:
            return factor.reshape(shape)
        return jnp.broadcast_to(factor, shape) if shape else factor

    return LayerWeights(
        attention_norm=norm(params, "attention_norm"),
        q=projection("attention", "q"),
        k=projection("attention", "k"),
        v=projection("attention", "v"),
        o=projection("attention", "o"),
        mlp_norm=norm(params, "mlp_norm"),
        gate=projection("mlp", "gate"),
        up=projection("mlp", "up"),
        down=projection("mlp", "down"),
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rotary_dim=config.rotary_dim,
        q_norm=norm(attention, "q_norm", config.num_heads, config.head_dim),
        k_norm=norm(attention, "k_norm", config.num_kv_heads, config.head_dim),
        attention_post_norm=norm(params, "attention_post_norm"),
        mlp_post_norm=norm(params, "mlp_post_norm"),
        router=router(),
        interleaved=config.rope_interleaved,
        parallel=config.parallel,
        is_up_linear=config.experts is None or config.experts.swiglu_limit is None,
    )


class Kept(NamedTuple):
    """Float32 arrays that smoothing does not change, with shapes as in `QuantizedExperts`."""

    sinks: jax.Array | None = None
    router_bias: jax.Array | None = None
    gate_up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None


_NOTHING = Kept()


def kept_of(params: LayerParams) -> Kept:
    """Sinks and experts' biases of a layer of a `Decoder`."""
    mlp, sinks = params["mlp"], params["attention"].get("sinks")
    sinks = None if sinks is None else sinks.astype(jnp.float32)
    if "bias" not in mlp.get("router", {}):
        return Kept(sinks)
    router, gate, up, down = (
        mlp[name]["bias"].astype(jnp.float32)
        for name in ("router", "gate_proj", "up_proj", "down_proj")
    )
    return Kept(sinks, router, jnp.concatenate([gate, up], axis=-1), down)


def layer_params(
    layer: LayerWeights, norm_offset: float = 0.0, *, joint_qk_norm: bool = False
) -> LayerParams:
    """The inverse of `layer_weights`: a layer for a `Decoder`, without factors of PTS and CRS.

    Norms of queries and keys may differ between heads. Sinks and biases of experts are left out.
    `norm_offset` and `joint_qk_norm` are those of the decoder's config.
    """

    def linears(*names: str) -> LayerParams:
        found = {name: getattr(layer, name) for name in names}
        return {
            f"{name}_proj": {
                "kernel": x.weight.T,
                **({} if x.bias is None else {"bias": x.bias}),
            }
            for name, x in found.items()
        }

    def norms(*names: str) -> LayerParams:
        found = {name: getattr(layer, name) for name in names}
        return {name: {"scale": x - norm_offset} for name, x in found.items() if x is not None}

    heads = norms("q_norm", "k_norm")
    if joint_qk_norm:
        heads = jax.tree.map(jnp.ravel, heads)
    mlp = linears("gate", "up", "down")
    if layer.router is not None:
        count = layer.router.weight.shape[0]
        for name in ("gate", "up", "down"):
            each = _each_expert(getattr(layer, name).weight, count, of_inputs=name == "down")
            mlp[f"{name}_proj"] = {"kernel": jnp.swapaxes(each, 1, 2)}
        mlp["router"] = {"kernel": layer.router.weight.T}
    return {
        **norms("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm"),
        "attention": {**linears("q", "k", "v", "o"), **heads},
        "mlp": mlp,
    }


def quantize_layer(
    layer: LayerWeights, scale_dtype: ScaleDtype = "e4m3", kept: Kept = _NOTHING
) -> QuantizedLayer:
    """Rounds the weights of a layer; biases, norms and routers stay float32."""

    def scaled(name: str) -> tuple[jax.Array, jax.Array | None]:
        projection: Projection = getattr(layer, name)
        weight, scale = projection.weight, projection.output_scale
        if scale_dtype == "e4m3":
            weight, scale = _within_e4m3(weight, jnp.float32(1) if scale is None else scale)
        return weight, scale

    def rounded(name: str) -> QuantizedLinear:
        (weight, scale), projection = scaled(name), getattr(layer, name)
        codes = quantize_weight(weight, scale_dtype=scale_dtype, output_scale=scale)
        bias = projection.bias
        return QuantizedLinear(codes, None if bias is None else bias.astype(jnp.float32))

    def factor(name: str) -> jax.Array | None:
        norm: jax.Array | None = getattr(layer, name)
        return None if norm is None else norm.astype(jnp.float32)

    def experts(router: jax.Array) -> QuantizedExperts:
        def stack(name: str) -> tuple[jax.Array, jax.Array]:
            weight, scale = scaled(name)
            each = _each_expert(weight, router.shape[0], of_inputs=name == "down")
            return each, jnp.full(len(each), 1.0 if scale is None else scale, jnp.float32)

        def one(w: tuple[jax.Array, jax.Array]) -> Int4Weight:
            return quantize_weight(w[0], scale_dtype=scale_dtype, output_scale=w[1])

        def both(pair: Any) -> Int4Weight:
            parts = [one(x) for x in pair]
            return gate_and_up(*parts) if layer.is_up_linear else concatenate(parts)

        # One expert after the other: all at once in float32 would be several times the weights.
        gate_up = jax.lax.map(both, (stack("gate"), stack("up")))
        down = jax.lax.map(one, stack("down"))
        return QuantizedExperts(router.T.astype(jnp.float32), gate_up, down, *kept[1:])

    names = LINEARS if layer.router is None else LINEARS[:4]
    return join_layer(
        {name: rounded(name) for name in names},
        {name: factor(name) for name in NORMS},
        layer.key_channel_scale,
        experts=None if layer.router is None else experts(layer.router.weight),
        sinks=kept.sinks,
    )


def _side_by_side(kernels: jax.Array, *, of_inputs: bool) -> jax.Array:
    """Experts' kernels ``[E, in, out]`` as one, ``[E in, out]`` or ``[in, E out]``."""
    count, inputs, outputs = kernels.shape
    if of_inputs:
        return kernels.reshape(count * inputs, outputs)
    return jnp.swapaxes(kernels, 0, 1).reshape(inputs, count * outputs)


def _each_expert(weight: jax.Array, count: int, *, of_inputs: bool) -> jax.Array:
    """Weights ``[E, out, in]`` of experts side by side, ``[out, E in]`` or ``[E out, in]``."""
    outputs, inputs = weight.shape
    if of_inputs:
        return jnp.swapaxes(weight.reshape(outputs, count, inputs // count), 0, 1)
    return weight.reshape(count, outputs // count, inputs)


def _whole(scale: jax.Array, config: TransformerConfig) -> jax.Array:
    """A norm's factor in float32, with the offset that checkpoints leave out."""
    wide = scale.astype(jnp.float32)
    return wide + jnp.float32(config.norm_offset) if config.norm_offset else wide


def _within_e4m3(weight: jax.Array, output_scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Halves a weight until e4m3 can hold 7 times its largest scale, and doubles its output scale.

    RPN makes queries larger by the factor by which it makes keys smaller, which can be too much for
    the format; PTS never scales down.
    """
    _, excess = jnp.frexp(jnp.max(jnp.abs(weight)) * (1 / E4M3_MAX))
    factor = jnp.ldexp(jnp.float32(1), jnp.maximum(excess, 0))
    return weight * (1 / factor), output_scale.astype(jnp.float32) * factor


def _tables(
    decoder: Decoder | StoredDecoder,
    scale_dtype: ScaleDtype,
    quantize_embedding: bool,
    quantize_head: bool,
) -> tuple[jax.Array | Int4Weight, jax.Array | Int4Weight | None]:
    """Embedding and head, quantized if asked for; the head is None where both are one table."""

    def made(table: jax.Array, is_rounded: bool) -> jax.Array | Int4Weight:
        return quantize_weight(table, scale_dtype=scale_dtype) if is_rounded else table

    embedding = made(decoder.embedding, quantize_embedding)
    if decoder.config.tie_embeddings and quantize_head == quantize_embedding:
        return embedding, None
    head = decoder.embedding if decoder.config.tie_embeddings else decoder.lm_head
    assert head is not None
    return embedding, made(head, quantize_head)
