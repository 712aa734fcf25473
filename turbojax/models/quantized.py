"""A decoder whose linear layers are INT4 weights times e4m3 activations (FireQ).

It runs like a `Decoder`: `start`, `generate`, `stream` and `score` take either. Every linear layer
reads activations with one scale per token, quantized where they are made: the norms write them
directly, and the residual stream is added in the epilogue of the projection.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from turbojax.flax.norms import rms_norm
from turbojax.kv import Attend
from turbojax.kv.base import Cache
from turbojax.models.config import TransformerConfig
from turbojax.models.transformer import project
from turbojax.ops.fp8_tokens import quantize_activation, rms_norm_quantize
from turbojax.ops.int4_matmul import matmul
from turbojax.ops.options import PLAIN
from turbojax.quantizers.int4 import (
    Int4Weight,
    ScaleDtype,
    concatenate,
    dequantize,
    gate_and_up,
    quantize_weight,
)
from turbojax.quantizers.int4_layout import OUT_MULTIPLE, code_tiles, scale_tiles
from turbojax.smoothing import scale_rotated


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedLayer:
    """One pre-norm layer.

    Attributes:
      attention_norm: float32 ``[D]``, scale of the first norm.
      qkv: ``[(N + 2 K) H, D]``, query, key and value projections one after the other.
      o: ``[D, N H]``.
      mlp_norm: float32 ``[D]``.
      gate_up: gated, of ``[F, D]`` each.
      down: ``[D, F]``.
      key_channel_scale: float32 ``[K, H]`` or None: rotated keys are divided by it, and the queries
        of their group multiplied (CRS).
    """

    attention_norm: jax.Array
    qkv: Int4Weight
    o: Int4Weight
    mlp_norm: jax.Array
    gate_up: Int4Weight
    down: Int4Weight
    key_channel_scale: jax.Array | None = None

    def __call__(
        self,
        hidden: jax.Array,
        angles: jax.Array,
        attend: Attend,
        cache: Cache,
        config: TransformerConfig,
    ) -> tuple[jax.Array, Cache]:
        """Maps the residual stream ``[B, T, D]`` to the next layer's and updates the cache."""
        tokens = rms_norm_quantize(hidden, self.attention_norm, config.norm_eps)
        query, key, value = _heads(matmul(tokens, self.qkv), config)
        query, key = config.rope.rotate(query, angles), config.rope.rotate(key, angles)
        if self.key_channel_scale is not None:
            query, key = scale_rotated(query, key, self.key_channel_scale)
        out, cache = attend(query, key, value, cache, PLAIN)
        attended = quantize_activation(out.reshape(*hidden.shape[:2], -1))
        hidden = matmul(attended, self.o, residual=hidden)
        tokens = rms_norm_quantize(hidden, self.mlp_norm, config.norm_eps)
        inner = quantize_activation(matmul(tokens, self.gate_up, activation="swiglu"))
        return matmul(inner, self.down, residual=hidden), cache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedDecoder:
    """A decoder with INT4 weights, made by `quantize_model` or `random_quantized_decoder`.

    A pytree that is cheap to pass to `jit`.

    Attributes:
      embedding: ``[V, D]``, floating point or quantized.
      layers: one per layer.
      norm: float32 ``[D]``, scale of the last norm.
      lm_head: ``[V, D]``, floating point or quantized, or None where the embedding serves.
      config: the shape.
      dtype: of activations between the linear layers.
    """

    embedding: jax.Array | Int4Weight
    layers: tuple[QuantizedLayer, ...]
    norm: jax.Array
    lm_head: jax.Array | Int4Weight | None
    config: TransformerConfig = dataclasses.field(metadata={"static": True})
    dtype: np.dtype = dataclasses.field(metadata={"static": True})

    @property
    def nbytes(self) -> int:
        """Bytes of all weights, their padding included."""
        return _nbytes(self)

    @property
    def bits_per_weight(self) -> float:
        """Bits of codes and scales per weight of the quantized matrices, padding included."""
        leaves = jax.tree.leaves(self, is_leaf=lambda x: isinstance(x, Int4Weight))
        weights = [leaf for leaf in leaves if isinstance(leaf, Int4Weight)]
        return 8 * _nbytes(weights) / sum(w.out_size * w.in_size for w in weights)

    def hidden(
        self, tokens: jax.Array, positions: jax.Array, attend: Attend, caches: tuple[Cache, ...]
    ) -> tuple[jax.Array, tuple[Cache, ...]]:
        """The normed residual stream after the last layer; see `Decoder.hidden`."""

        # All layers share one trace and one lowered function; the compiler inlines it.
        @jax.jit
        def apply_layer(
            layer: QuantizedLayer, hidden: jax.Array, angles: jax.Array, cache: Cache
        ) -> tuple[jax.Array, Cache]:
            return layer(hidden, angles, attend, cache, self.config)

        angles = self.config.rope.angles(positions)
        hidden = take_rows(self.embedding, tokens).astype(self.dtype)
        new_caches = []
        for layer, cache in zip(self.layers, caches, strict=True):
            hidden, new_cache = apply_layer(layer, hidden, angles, cache)
            new_caches.append(new_cache)
        return rms_norm(hidden, self.norm, self.config.norm_eps), tuple(new_caches)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Projects ``[..., D]`` to float32 logits ``[..., V]``."""
        table = self.embedding if self.lm_head is None else self.lm_head
        if isinstance(table, Int4Weight):
            # The result has the dtype of what was quantized: logits are not rounded to 16 bits.
            return matmul(quantize_activation(hidden.astype(jnp.float32)), table)
        return project(hidden, table, self.dtype)


def check_config(config: TransformerConfig) -> None:
    """Checks that a `QuantizedDecoder` computes what a model of this shape does.

    It has two norms a layer, SwiGLU, plain attention and no biases. Smoothing takes channels i and
    i + H/2 of a head for a pair.

    Raises:
      NotImplementedError: naming the fields that say otherwise.
    """
    plain = {
        "activation": "silu",
        "qkv_bias": False,
        "output_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
        "attention_soft_cap": None,
        "final_soft_cap": None,
        "embedding_scale": None,
        "norm_offset": 0.0,
        "post_norms": False,
        "local_rope_theta": None,
    }
    wrong = [name for name, value in plain.items() if getattr(config, name) != value]
    if config.attention_scale not in (None, config.head_dim**-0.5):
        wrong.append("attention_scale")
    if config.rotary_dim not in (None, config.head_dim):
        wrong.append("rotary_dim")
    options = [config.attention_options(layer) for layer in range(config.num_layers)]
    if any(x.local_window_size is not None for x in options):
        wrong.append("local_windows")
    if wrong:
        values = ", ".join(f"{name}={getattr(config, name)!r}" for name in wrong)
        raise NotImplementedError(f"quantized models do not support {values}")


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


def random_quantized_decoder(
    config: TransformerConfig,
    *,
    scale_dtype: ScaleDtype = "e4m3",
    quantize_head: bool = False,
    dtype: DTypeLike = jnp.bfloat16,
    seed: int = 0,
) -> QuantizedDecoder:
    """A quantized decoder with random weights, for measuring speed.

    Made on the default device one matrix after the other, so that little but the codes themselves
    has to fit.

    Args:
      config: the shape.
      scale_dtype: of the groups of weights.
      quantize_head: whether the projection to logits has INT4 weights too.
      dtype: of activations, embedding and head.
      seed: of the weights.

    Raises:
      NotImplementedError: if a quantized decoder does not compute what this shape's model does.
    """
    check_config(config)
    dtype = jnp.dtype(dtype)
    keys = iter(jax.random.split(jax.random.key(seed), 7 * config.num_layers + 2))
    size, inner = config.hidden_size, config.intermediate_size
    kv_size = config.num_kv_heads * config.head_dim
    query_size = config.num_heads * config.head_dim
    # Both outputs of a layer add to the residual stream, see `transformer._output_gain`.
    gain = (2 * config.num_layers) ** -0.5

    def weight(out_size: int, in_size: int, gain: float = 1.0) -> Int4Weight:
        return random_weight(next(keys), (out_size, in_size), gain, scale_dtype)

    def layer() -> QuantizedLayer:
        return QuantizedLayer(
            attention_norm=jnp.ones(size, jnp.float32),
            qkv=concatenate([weight(n, size) for n in (query_size, kv_size, kv_size)]),
            o=weight(size, query_size, gain),
            mlp_norm=jnp.ones(size, jnp.float32),
            gate_up=gate_and_up(weight(inner, size), weight(inner, size)),
            down=weight(size, inner, gain),
        )

    def table() -> jax.Array:
        shape = (config.vocab_size, size)
        return jax.random.normal(next(keys), shape, dtype) * jnp.asarray(size**-0.5, dtype)

    head: jax.Array | Int4Weight | None = None
    if quantize_head:
        head = weight(config.vocab_size, size)
    elif not config.tie_embeddings:
        head = table()
    return QuantizedDecoder(
        embedding=table(),
        layers=tuple(layer() for _ in range(config.num_layers)),
        norm=jnp.ones(size, jnp.float32),
        lm_head=head,
        config=config,
        dtype=dtype,
    )


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def random_weight(
    key: jax.Array, shape: tuple[int, int], gain: float, scale_dtype: ScaleDtype
) -> Int4Weight:
    """Normal random weights ``[out, in]`` of standard deviation ``gain / sqrt(in)``."""
    scale = jnp.full(shape[0], gain * shape[1] ** -0.5, jnp.float32)
    values = jax.random.normal(key, shape, jnp.float32)
    return quantize_weight(values, scale_dtype=scale_dtype, output_scale=scale)


def _nbytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _heads(qkv: jax.Array, config: TransformerConfig) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Splits ``[B, T, (N + 2 K) H]`` into heads."""
    heads = qkv.reshape(*qkv.shape[:2], -1, config.head_dim)
    first, second = config.num_heads, config.num_heads + config.num_kv_heads
    return heads[:, :, :first], heads[:, :, first:second], heads[:, :, second:]
