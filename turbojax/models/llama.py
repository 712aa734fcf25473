"""A Llama-family decoder in Flax nnx: RMSNorm, RoPE, grouped queries, SwiGLU.

The layers are one `Block` whose parameters carry a leading layer axis, applied with
`jax.lax.scan`: compile time does not grow with depth. For generation `turbojax.models.decoder`
takes the layers apart.
"""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from turbojax.models.config import LlamaConfig

Cache = Any


class Attend(Protocol):
    """How a layer attends, and what it does with its cache."""

    def __call__(
        self, query: jax.Array, key: jax.Array, value: jax.Array, cache: Cache
    ) -> tuple[jax.Array, Cache]:
        """Attends for one layer.

        Args:
          query: `[B, T, N, H]`, rotated.
          key: `[B, T, K, H]`, rotated.
          value: `[B, T, K, H]`.
          cache: this layer's slice of the caches, or None.

        Returns:
          The output `[B, T, N, H]` and the layer's new cache, of the same structure.
        """
        ...


def causal_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, cache: Cache = None
) -> tuple[jax.Array, Cache]:
    """Exact causal attention over the given tokens alone; the cache passes through untouched.

    `jax.nn.dot_product_attention`, which under strict dtype promotion has no gradient in bfloat16
    on a CPU; in float32 it has.
    """
    # jax's own function promotes bfloat16 with float32 inside: not allowed under strict promotion.
    with jax.numpy_dtype_promotion("standard"):
        return jax.nn.dot_product_attention(query, key, value, is_causal=True), cache


def rope_angles(positions: jax.Array, head_dim: int, theta: float) -> jax.Array:
    """Rotary angles `[B, T, 1, H/2]` float32 of the positions `[B, T]`."""
    exponent = jnp.arange(head_dim // 2, dtype=jnp.float32) * (2.0 / head_dim)
    frequencies = jnp.float32(theta) ** -exponent
    return positions.astype(jnp.float32)[:, :, None, None] * frequencies[None, None, None, :]


def rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Applies RoPE: channel i and channel i + H/2 turn together by the pair's angle.

    Args:
      x: `[B, T, heads, H]`.
      angles: `[B, T, 1, H/2]` float32.

    Returns:
      `[B, T, heads, H]` in x's dtype, computed in float32.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """`x / sqrt(mean(x^2) + eps) * scale` over the last axis, computed in float32.

    Args:
      x: `[..., size]`.
      scale: `[size]`.
      eps: added to the mean square.

    Returns:
      `[..., size]` in x's dtype.
    """
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    scale = scale.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + scale.shape)
    return (wide * inverse * scale).astype(x.dtype)


def project(hidden: jax.Array, table: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Float32 logits `[..., V]` of `[..., D]`, multiplied with `table [V, D]` in `dtype`."""
    return jnp.einsum(
        "...d,vd->...v", hidden, table.astype(dtype), preferred_element_type=jnp.float32
    )


class RMSNorm(nnx.Module):
    """`rms_norm` with its scale."""

    def __init__(self, size: int, eps: float, *, param_dtype: DTypeLike) -> None:
        self.scale = nnx.Param(jnp.ones((size,), param_dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalizes `[..., size]`, in x's dtype."""
        return rms_norm(x, self.scale[...], self.eps)


def _linear(
    in_size: int,
    out_size: int,
    gain: float,
    *,
    dtype: DTypeLike,
    param_dtype: DTypeLike,
    rngs: nnx.Rngs,
) -> nnx.Linear:
    """A bias-free linear layer whose weights have variance `gain**2 / in_size`."""
    init = nnx.initializers.variance_scaling(gain**2, "fan_in", "truncated_normal")
    return nnx.Linear(
        in_size,
        out_size,
        use_bias=False,
        dtype=dtype,
        param_dtype=param_dtype,
        kernel_init=init,
        rngs=rngs,
    )


class Attention(nnx.Module):
    """Grouped-query attention with RoPE; the attention itself is the caller's `attend`."""

    def __init__(
        self, config: LlamaConfig, *, dtype: DTypeLike, param_dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        self.config = config
        query_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        dtypes: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        # Both outputs of a block add to the residual stream; this gain keeps its variance at
        # initialization independent of depth.
        out_gain = (2 * config.num_layers) ** -0.5
        self.q_proj = _linear(config.hidden_size, query_size, 1.0, **dtypes)
        self.k_proj = _linear(config.hidden_size, kv_size, 1.0, **dtypes)
        self.v_proj = _linear(config.hidden_size, kv_size, 1.0, **dtypes)
        self.o_proj = _linear(query_size, config.hidden_size, out_gain, **dtypes)

    def __call__(
        self, x: jax.Array, angles: jax.Array, attend: Attend, cache: Cache
    ) -> tuple[jax.Array, Cache]:
        """Maps `[B, T, D]` to `[B, T, D]` and updates the layer's cache."""
        batch, length, _ = x.shape
        heads = (batch, length, -1, self.config.head_dim)
        query = rotate(self.q_proj(x).reshape(heads), angles)
        key = rotate(self.k_proj(x).reshape(heads), angles)
        value = self.v_proj(x).reshape(heads)
        out, cache = attend(query, key, value, cache)
        return self.o_proj(out.reshape(batch, length, -1)), cache


class FeedForward(nnx.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`."""

    def __init__(
        self, config: LlamaConfig, *, dtype: DTypeLike, param_dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        size, inner = config.hidden_size, config.intermediate_size
        dtypes: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.gate_proj = _linear(size, inner, 1.0, **dtypes)
        self.up_proj = _linear(size, inner, 1.0, **dtypes)
        self.down_proj = _linear(inner, size, (2 * config.num_layers) ** -0.5, **dtypes)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[B, T, D]` to `[B, T, D]`."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nnx.Module):
    """One pre-norm decoder layer."""

    def __init__(
        self, config: LlamaConfig, *, dtype: DTypeLike, param_dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        dtypes: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps, param_dtype=param_dtype)
        self.attention = Attention(config, **dtypes)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps, param_dtype=param_dtype)
        self.mlp = FeedForward(config, **dtypes)

    def __call__(
        self, hidden: jax.Array, angles: jax.Array, attend: Attend, cache: Cache
    ) -> tuple[jax.Array, Cache]:
        """Maps the residual stream `[B, T, D]` to the next layer's and updates the cache."""
        out, cache = self.attention(self.attention_norm(hidden), angles, attend, cache)
        hidden = hidden + out
        return hidden + self.mlp(self.mlp_norm(hidden)), cache


class Llama(nnx.Module):
    """A Llama-family decoder.

    Invariants:
      - Every parameter under `blocks` has a leading axis of `config.num_layers`.
      - `lm_head` is None if and only if `config.tie_embeddings`.
      - Norms, RoPE and logits are computed in float32, everything else in `dtype`.

    Attributes:
      config: the shape.
      dtype: compute dtype; the parameters are cast to it where they are used.
      remat: whether training recomputes each layer in the backward pass to save memory.
      unroll: layers per iteration of the scan. More compile time, less copying in training.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        remat: bool = False,
        unroll: int = 1,
        rngs: nnx.Rngs,
    ) -> None:
        """Initializes random parameters.

        Args:
          config: the shape.
          dtype: compute dtype, by default `param_dtype`.
          param_dtype: dtype of the parameters.
          remat: see the class.
          unroll: see the class.
          rngs: source of the initial parameters (stream `params`).
        """
        self.config = config
        self.dtype = jnp.dtype(param_dtype if dtype is None else dtype)
        self.remat = remat
        self.unroll = unroll
        init = nnx.initializers.normal(config.hidden_size**-0.5)
        table = (config.vocab_size, config.hidden_size)
        self.embedding = nnx.Param(init(rngs.params(), table, param_dtype))

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def create_blocks(rngs: nnx.Rngs) -> Block:
            return Block(config, dtype=self.dtype, param_dtype=param_dtype, rngs=rngs)

        self.blocks = create_blocks(rngs)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, param_dtype=param_dtype)
        self.lm_head = (
            None if config.tie_embeddings else nnx.Param(init(rngs.params(), table, param_dtype))
        )

    def __call__(
        self,
        tokens: jax.Array,
        *,
        positions: jax.Array | None = None,
        attend: Attend = causal_attention,
        caches: Cache = None,
    ) -> Any:
        """Predicts the next token at every position.

        Args:
          tokens: `[B, T]` integers in `[0, vocab_size)`.
          positions: `[B, T]` integers, where each token stands in its sequence; by default
            `arange(T)`.
          attend: called once per layer, after RoPE, see `Attend`.
          caches: any pytree whose leaves have a leading layer axis; each layer gets its slice.

        Returns:
          Logits `[B, T, vocab_size]` float32; with `caches` the pair of logits and new caches.

        Raises:
          TypeError: if tokens or positions are not integers.
          ValueError: if tokens are not `[B, T]` with T at most `max_length`, or positions have
            another shape, or a cache leaf has no leading axis of `num_layers`.
        """
        self._check(tokens, positions, caches)
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None, :], tokens.shape)
        angles = rope_angles(positions, self.config.head_dim, self.config.rope_theta)
        hidden = self.embedding[...][tokens].astype(self.dtype)
        hidden, new_caches = self._apply_blocks(hidden, angles, attend, caches)
        weight = self.embedding if self.lm_head is None else self.lm_head
        logits = project(self.norm(hidden), weight[...], self.dtype)
        return logits if caches is None else (logits, new_caches)

    def _apply_blocks(
        self, hidden: jax.Array, angles: jax.Array, attend: Attend, caches: Cache
    ) -> tuple[jax.Array, Cache]:
        """Scans the stacked layers over the residual stream `[B, T, D]`."""
        graph, params = nnx.split(self.blocks)

        def apply_block(hidden: jax.Array, layer: tuple[Any, Cache]) -> tuple[jax.Array, Cache]:
            params, cache = layer
            return nnx.merge(graph, params)(hidden, angles, attend, cache)

        body = jax.checkpoint(apply_block) if self.remat else apply_block
        return jax.lax.scan(body, hidden, (params, caches), unroll=self.unroll)

    def _check(self, tokens: jax.Array, positions: jax.Array | None, caches: Cache) -> None:
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise TypeError(f"tokens.dtype={tokens.dtype} must be an integer type")
        if tokens.ndim != 2:
            raise ValueError(f"tokens.shape={tokens.shape} must be [B, T]")
        if tokens.shape[1] > self.config.max_length:
            raise ValueError(
                f"tokens.shape={tokens.shape} must have at most max_length="
                f"{self.config.max_length} tokens per sequence"
            )
        if positions is not None and not jnp.issubdtype(positions.dtype, jnp.integer):
            raise TypeError(f"positions.dtype={positions.dtype} must be an integer type")
        if positions is not None and positions.shape != tokens.shape:
            raise ValueError(
                f"positions.shape={positions.shape} must equal tokens.shape={tokens.shape}"
            )
        for leaf in jax.tree.leaves(caches):
            if jnp.ndim(leaf) == 0 or leaf.shape[0] != self.config.num_layers:
                raise ValueError(
                    f"a cache leaf of shape {jnp.shape(leaf)} must have a leading axis of "
                    f"num_layers={self.config.num_layers}"
                )
