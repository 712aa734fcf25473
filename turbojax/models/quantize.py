"""From a decoder to a quantized one: calibrate, smooth, round, layer by layer (FireQ)."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks
from turbojax.models.calibration import calibrate
from turbojax.models.config import TransformerConfig
from turbojax.models.decoder import Decoder, LayerParams, unstack
from turbojax.models.quantized import QuantizedDecoder, QuantizedLayer, check_config
from turbojax.models.transformer import Transformer
from turbojax.quantizers.fp8 import E4M3_MAX
from turbojax.quantizers.int4 import (
    Int4Weight,
    ScaleDtype,
    concatenate,
    gate_and_up,
    quantize_weight,
)
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
"""Called with a phase, ``"calibration"`` or ``"layers"``, and how many tokens or layers are done
since the last call."""


def quantize_model(
    model: Transformer | Decoder,
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

    Args:
      model: the model.
      tokens: int ``[n, T]``, windows of real text for calibration; only `rpn` and `crs` need them.
      smoothing: what to do against outliers.
      scale_dtype: of the groups of weights: ``"e4m3"`` rounds the dequantized weights to e4m3, too,
        which is what the fastest kernels compute; ``"bf16"`` multiplies after the products.
      quantize_embedding: also round the table of embeddings.
      quantize_head: also round the projection to logits, whose activations become e4m3 then. With
        tied embeddings it shares the table if that is quantized, too.
      batch_size: windows that run at once in calibration.
      progress: called as calibration and layers are done.

    Returns:
      The quantized decoder, which computes in the model's dtype.

    Raises:
      TypeError: if the model is another kind, such as a quantized one, or tokens or the batch size
        are not integers.
      NotImplementedError: naming the fields, if the model computes what a quantized one does not,
        see `check_config`.
      ValueError: if tokens are needed and missing or do not fit, a head has fewer pairs than CRS is
        to scale, `batch_size` is not positive, or a weight is not finite; the message
        names the layer.
    """
    if not isinstance(model, Transformer | Decoder):
        raise TypeError(
            f"model is a {type(model).__name__}, must be a Transformer or a Decoder, not "
            "quantized before"
        )
    check_config(model.config)
    _checks.check_sizes(batch_size=batch_size)
    pairs = model.config.head_dim // 2
    if smoothing.crs and smoothing.num_pairs > pairs:
        raise ValueError(
            f"num_pairs={smoothing.num_pairs} must be at most the {pairs} pairs of a head: leave "
            "CRS out (crs=False, --no-crs) or give Smoothing a smaller num_pairs"
        )
    if (smoothing.rpn or smoothing.crs) and tokens is None:
        raise ValueError("tokens=None: RPN and CRS need text for calibration")
    decoder = unstack(model) if isinstance(model, Transformer) else model
    statistics: tuple[KeyStatistics | None, ...] = (None,) * decoder.config.num_layers
    if (smoothing.rpn or smoothing.crs) and tokens is not None:
        advance = None if progress is None else lambda n: progress("calibration", n)
        statistics = calibrate(decoder, tokens, batch_size=batch_size, progress=advance)
    return quantize_from(
        decoder,
        statistics,
        smoothing,
        scale_dtype=scale_dtype,
        quantize_embedding=quantize_embedding,
        quantize_head=quantize_head,
        progress=progress,
    )


def quantize_from(
    decoder: Decoder,
    statistics: Sequence[KeyStatistics | None],
    smoothing: Smoothing,
    *,
    scale_dtype: ScaleDtype = "e4m3",
    quantize_embedding: bool = False,
    quantize_head: bool = False,
    progress: Progress | None = None,
) -> QuantizedDecoder:
    """`quantize_model` after calibration: `statistics` are those of each layer, or None.

    Raises:
      NotImplementedError, ValueError: as there.
    """
    check_config(decoder.config)
    layers = []
    for number, (params, seen) in enumerate(zip(decoder.layers, statistics, strict=True)):
        try:
            smooth = smooth_layer(layer_weights(params, decoder.config), seen, smoothing)
            layers.append(jax.block_until_ready(quantize_layer(smooth, scale_dtype)))
        except ValueError as error:
            raise ValueError(f"layer {number}: {error}") from error
        if progress is not None:
            progress("layers", 1)
    embedding, lm_head = _tables(decoder, scale_dtype, quantize_embedding, quantize_head)
    return QuantizedDecoder(
        embedding=embedding,
        layers=tuple(layers),
        norm=decoder.norm.astype(jnp.float32),
        lm_head=lm_head,
        config=decoder.config,
        dtype=decoder.dtype,
    )


def layer_weights(params: LayerParams, config: TransformerConfig) -> LayerWeights:
    """A layer of a `Decoder` as smoothing sees it, in float32 and ``[out, in]``."""

    def projection(part: str, name: str) -> Projection:
        return Projection(params[part][f"{name}_proj"]["kernel"].astype(jnp.float32).T)

    return LayerWeights(
        attention_norm=params["attention_norm"]["scale"].astype(jnp.float32),
        q=projection("attention", "q"),
        k=projection("attention", "k"),
        v=projection("attention", "v"),
        o=projection("attention", "o"),
        mlp_norm=params["mlp_norm"]["scale"].astype(jnp.float32),
        gate=projection("mlp", "gate"),
        up=projection("mlp", "up"),
        down=projection("mlp", "down"),
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )


def layer_params(layer: LayerWeights) -> LayerParams:
    """The inverse of `layer_weights`: a layer without biases and scales, for a `Decoder`."""

    def kernels(*names: str) -> LayerParams:
        return {f"{name}_proj": {"kernel": getattr(layer, name).weight.T} for name in names}

    return {
        "attention_norm": {"scale": layer.attention_norm},
        "attention": kernels("q", "k", "v", "o"),
        "mlp_norm": {"scale": layer.mlp_norm},
        "mlp": kernels("gate", "up", "down"),
    }


def quantize_layer(layer: LayerWeights, scale_dtype: ScaleDtype = "e4m3") -> QuantizedLayer:
    """Rounds the weights of a layer, smoothed or not.

    Raises:
      NotImplementedError: if a projection has a bias, which `QuantizedLayer` has no place for.
      ValueError: if a weight is not finite.
    """

    def rounded(name: str) -> Int4Weight:
        projection: Projection = getattr(layer, name)
        if projection.bias is not None:
            raise NotImplementedError(f"{name} has a bias, which is not supported here")
        weight, scale = projection.weight, projection.output_scale
        if scale_dtype == "e4m3":
            weight, scale = _within_e4m3(weight, jnp.float32(1) if scale is None else scale)
        return quantize_weight(weight, scale_dtype=scale_dtype, output_scale=scale)

    return QuantizedLayer(
        attention_norm=layer.attention_norm.astype(jnp.float32),
        qkv=concatenate([rounded(name) for name in ("q", "k", "v")]),
        o=rounded("o"),
        mlp_norm=layer.mlp_norm.astype(jnp.float32),
        gate_up=gate_and_up(rounded("gate"), rounded("up")),
        down=rounded("down"),
        key_channel_scale=layer.key_channel_scale,
    )


def _within_e4m3(weight: jax.Array, output_scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Halves a weight until e4m3 takes 7 times its largest scale, and doubles its output for it.

    RPN makes queries as much larger as it makes keys smaller, which can be too much for the format;
    PTS never scales down.
    """
    _, excess = jnp.frexp(jnp.max(jnp.abs(weight)) * (1 / E4M3_MAX))
    factor = jnp.ldexp(jnp.float32(1), jnp.maximum(excess, 0))
    return weight * (1 / factor), output_scale.astype(jnp.float32) * factor


def _tables(
    decoder: Decoder, scale_dtype: ScaleDtype, quantize_embedding: bool, quantize_head: bool
) -> tuple[jax.Array | Int4Weight, jax.Array | Int4Weight | None]:
    """Embedding and head, quantized where asked for; the head is None where both are one table."""
    shared = decoder.lm_head is None
    head_table = decoder.embedding if decoder.lm_head is None else decoder.lm_head

    def rounded(table: jax.Array) -> Int4Weight:
        return quantize_weight(table, scale_dtype=scale_dtype)

    embedding = rounded(decoder.embedding) if quantize_embedding else decoder.embedding
    if shared and quantize_head == quantize_embedding:
        return embedding, None
    return embedding, rounded(head_table) if quantize_head else head_table
