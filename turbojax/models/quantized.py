"""A decoder whose linear layers are INT4 weights times e4m3 activations (FireQ).

It runs like a `Decoder`: `start`, `generate`, `stream` and `score` take either. Linear layers read
activations with one scale per token, which are quantized where they are made: norms write them
directly, unless `with_activations` or adapters ask for unrounded ones. The residual stream is
added in the epilogue of the projection. It computes whatever a `Decoder` of the same config does.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from turbojax._pytrees import nbytes, pytree
from turbojax.caches.base import Cache
from turbojax.matmul.int4 import matmul
from turbojax.matmul.int4.api import check_token_kind
from turbojax.matmul.int4.layout import OUT_MULTIPLE, code_tiles, scale_tiles
from turbojax.matmul.int4.static import TokenKind
from turbojax.matmul.int4.weight import Int4Weight, dequantize
from turbojax.models.config import TransformerConfig
from turbojax.models.decoder import BaseDecoder, final_norm
from turbojax.models.quantized_layer import QuantizedLayer, QuantizedLinear
from turbojax.models.tensor_parallel.layout import (
    hidden_axes,
    local_config,
)
from turbojax.models.transformer import (
    embed,
    embed_split,
    finish_logits,
    project,
    scale_embeddings,
)


@pytree
@dataclasses.dataclass(frozen=True)
class QuantizedDecoder(BaseDecoder):
    """A decoder with INT4 weights, made by `quantize_model` or `random_quantized_decoder`.

    A pytree that is cheap to pass to `jit`.

    Attributes:
      embedding: ``[V, D]``, floating point or quantized.
      layers: one per layer.
      norm: float32 ``[D]``, factor of the last norm, with the config's offset.
      lm_head: ``[V, D]``, floating point or quantized, or None where the embedding serves.
      config: the shape, of the whole model.
      dtype: of activations between the linear layers.
      axes: see `Decoder`. On a mesh, the sizes of its weights are those that one device has, and
        their arrays are those of all devices, one after the other.
    """

    embedding: jax.Array | Int4Weight
    layers: tuple[QuantizedLayer, ...]
    lm_head: jax.Array | Int4Weight | None

    @property
    def bits_per_weight(self) -> float:
        """Bits of codes and scales per weight of the quantized matrices, padding included."""
        leaves = jax.tree.leaves(self, is_leaf=lambda x: isinstance(x, Int4Weight))
        weights = [leaf for leaf in leaves if isinstance(leaf, Int4Weight)]
        return (
            8 * nbytes(weights) / sum(math.prod((*w.stack, w.out_size, w.in_size)) for w in weights)
        )

    def with_activations(self, activations: TokenKind) -> "QuantizedDecoder":
        """The same weights, with tokens multiplied as `matmul` says; no array is copied.

        Tokens of a quantized head stay e4m3.

        Args:
          activations: ``"e4m3"``, which `quantize_model` makes decoders for, or ``"bf16"`` for
            unrounded tokens of 16 bits, which 4-bit checkpoints of other programs are for.

        Raises:
          ValueError: if it is neither.
          NotImplementedError: for ``"bf16"``, if there are experts.
        """
        check_token_kind(activations)
        if activations != "e4m3" and self.config.experts is not None:
            raise NotImplementedError(
                f"{activations=} is not supported of a decoder with experts: must be 'e4m3'"
            )

        def is_linear(x: Any) -> bool:
            return isinstance(x, QuantizedLinear)

        def change(x: Any) -> Any:
            return dataclasses.replace(x, activations=activations) if is_linear(x) else x

        layers = jax.tree.map(change, self.layers, is_leaf=is_linear)
        return dataclasses.replace(self, layers=layers)

    def apply(self, layer: QuantizedLayer, *operands: Any) -> tuple[jax.Array, Cache]:
        """See `BaseDecoder.apply`."""
        config = local_config(self.config, self.axes)
        done: tuple[jax.Array, Cache] = layer(*operands, config=config, axes=self.axes)
        return done

    def finish(self, hidden: jax.Array) -> jax.Array:
        """See `BaseDecoder.finish`."""
        return final_norm(hidden, self.norm, self.config)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """See `BaseDecoder.embed`; the table may be quantized."""
        table, over = self.embedding, hidden_axes(self.axes)
        if not isinstance(table, Int4Weight):
            return embed(table, tokens, self.config, self.dtype, over)

        def look(tokens: jax.Array, nothing: float) -> jax.Array:
            known = (tokens >= 0) & (tokens < table.out_size)
            rows = take_rows(table, jnp.where(known, tokens, 0))
            return jnp.where(known[..., None], rows, nothing).astype(self.dtype)

        if over:
            mine = functools.partial(look, nothing=0.0)
            return embed_split(mine, table.out_size, tokens, self.config, self.dtype, over)
        return scale_embeddings(look(tokens, jnp.nan), self.config)

    def _project(self, hidden: jax.Array) -> jax.Array:
        table = self.embedding if self.lm_head is None else self.lm_head
        if isinstance(table, Int4Weight):
            # The result has the dtype of what was quantized: logits are not rounded to 16 bits.
            return finish_logits(matmul(hidden.astype(jnp.float32), table), self.config)
        return project(hidden, table, self.dtype, self.config)


def take_rows(table: jax.Array | Int4Weight, index: jax.Array) -> jax.Array:
    """Rows ``[..., D]`` of a table ``[V, D]``; float32 if it is quantized."""
    if not isinstance(table, Int4Weight):
        return table[index]
    count = math.prod(index.shape)
    flat = jnp.pad(index.reshape(-1), (0, -count % OUT_MULTIPLE))
    at = (flat // OUT_MULTIPLE, slice(None), flat % OUT_MULTIPLE)
    zeros = None if table.zeros is None else scale_tiles(table.zeros[at])
    rows = dataclasses.replace(
        table,
        codes=code_tiles(table.codes[at].reshape(flat.size, -1)),
        scales=scale_tiles(table.scales[at]),
        output_scale=table.output_scale[flat],
        out_size=count,
        zeros=zeros,
    )
    return dequantize(rows).reshape(*index.shape, table.in_size)


def check_quantizable(config: TransformerConfig) -> None:
    """Raises NotImplementedError if a quantized decoder cannot have layers of this shape."""
    if config.latent is not None:
        raise NotImplementedError(
            f"latent attention is not supported in a quantized decoder: {config.latent} must be "
            "None; a cache of latents may be compressed (cache='latent_turbo4')"
        )
    experts = config.experts
    if experts is not None and (experts.shared_size is not None or experts.scores != "softmax"):
        raise NotImplementedError(
            "experts beside a shared one, or chosen by sigmoids, are not supported in a quantized "
            f"decoder: {experts}"
        )
    if experts is not None and experts.has_biases and experts.swiglu_limit is None:
        raise NotImplementedError(
            "experts with biases are supported in a quantized decoder with a swiglu_limit alone, "
            f"as gpt-oss has them: {experts}"
        )


def norm_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of the norms that layers of this config have, see `QuantizedLayer`."""
    shapes: dict[str, tuple[int, ...]] = {}
    if config.pre_norms:
        shapes["attention_norm"] = (config.hidden_size,)
        if not config.parallel:
            shapes["mlp_norm"] = (config.hidden_size,)
    if config.qk_norm:
        shapes["q_norm"] = config.num_heads, config.head_dim
        shapes["k_norm"] = config.num_kv_heads, config.head_dim
    if config.post_norms:
        shapes |= dict.fromkeys(("attention_post_norm", "mlp_post_norm"), (config.hidden_size,))
    return shapes
