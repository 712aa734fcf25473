"""The linear layers around an attention with grouped queries and rotary positions."""

import functools
from typing import Any

import jax
from flax import nnx
from jax.typing import DTypeLike

from turbojax.flax.norms import RMSNorm
from turbojax.rotary import Rope


class AttentionProjections(nnx.Module):
    """Queries, keys and values of tokens, and what becomes of the attended values.

    Attributes:
      q_proj: ``[D, N H]``.
      k_proj: ``[D, K H]``.
      v_proj: ``[D, K H]``.
      o_proj: ``[N H, D]``.
      q_norm: `RMSNorm` of each head's query before it is rotated, or None.
      k_norm: the same of keys.
      rope: how positions turn queries and keys.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        rope: Rope,
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm_eps: float | None = None,
        norm_offset: float = 0.0,
        output_gain: float = 1.0,
        sharding: tuple[str | None, str | None] | None = None,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ) -> None:
        """Initializes random parameters.

        Args:
          hidden_size: width `D` of the residual stream.
          num_heads: query heads `N`.
          num_kv_heads: key/value heads `K`.
          rope: rotary embedding, which knows the width `H` of a head.
          qkv_bias: whether queries, keys and values have biases.
          output_bias: whether the output has one.
          qk_norm_eps: epsilon of norms of queries and keys; None for no such norms.
          norm_offset: of these norms, see `rms_norm`.
          output_gain: of the output's initial weights.
          sharding: mesh axes, or logical ones, over which the residual stream and the heads are
            split, such as ``(None, "model")``; None for no annotations. With them Flax wants a mesh
            where parameters are made.
          dtype: of the computation.
          param_dtype: of the parameters.
          rngs: source of the initial parameters (stream `params`).
        """
        make = functools.partial(linear, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        width, kv_width = num_heads * rope.head_dim, num_kv_heads * rope.head_dim
        inward = outward = None
        if sharding is not None:
            inward, outward = tuple(sharding), tuple(sharding[::-1])
        self.q_proj = make(hidden_size, width, sharding=inward, use_bias=qkv_bias)
        self.k_proj = make(hidden_size, kv_width, sharding=inward, use_bias=qkv_bias)
        self.v_proj = make(hidden_size, kv_width, sharding=inward, use_bias=qkv_bias)
        self.o_proj = make(
            width, hidden_size, sharding=outward, gain=output_gain, use_bias=output_bias
        )
        norm = functools.partial(
            RMSNorm, rope.head_dim, qk_norm_eps or 0.0, offset=norm_offset, param_dtype=param_dtype
        )
        self.q_norm = None if qk_norm_eps is None else norm()
        self.k_norm = None if qk_norm_eps is None else norm()
        self.rope = rope

    def heads(self, x: jax.Array, angles: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values.

        Args:
          x: ``[B, T, D]``.
          angles: float32 ``[B, T, 1, R/2]``, see `Rope.angles`.

        Returns:
          Query ``[B, T, N, H]`` and key ``[B, T, K, H]``, rotated, and value ``[B, T, K, H]``.
        """
        shape = (*x.shape[:2], -1, self.rope.head_dim)
        query, key = self.q_proj(x).reshape(shape), self.k_proj(x).reshape(shape)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        value = self.v_proj(x).reshape(shape)
        return self.rope.rotate(query, angles), self.rope.rotate(key, angles), value

    def output(self, attended: jax.Array) -> jax.Array:
        """Maps attended values ``[B, T, N, H]`` to ``[B, T, D]``."""
        return self.o_proj(attended.reshape(*attended.shape[:2], -1))


def linear(
    in_size: int,
    out_size: int,
    *,
    sharding: tuple[str | None, ...] | None = None,
    gain: float = 1.0,
    use_bias: bool = False,
    dtype: DTypeLike,
    param_dtype: DTypeLike,
    rngs: nnx.Rngs,
) -> nnx.Linear:
    """A linear layer whose weights have variance ``gain**2 / in_size``.

    Args:
      in_size: inputs.
      out_size: outputs.
      sharding: names of the axes over which inputs and outputs are split, see
        `AttentionProjections`.
      gain: of the initial weights.
      use_bias: whether there is a bias.
      dtype: of the computation.
      param_dtype: of the parameters.
      rngs: source of the initial parameters.
    """
    init = nnx.initializers.variance_scaling(gain**2, "fan_in", "truncated_normal")
    metadata: dict[str, Any] = {}
    if sharding is not None:
        metadata["kernel_metadata"] = {"out_sharding": sharding}
        if use_bias:
            metadata["bias_metadata"] = {"out_sharding": sharding[1:]}
    return nnx.Linear(
        in_size,
        out_size,
        use_bias=use_bias,
        dtype=dtype,
        param_dtype=param_dtype,
        kernel_init=init,
        rngs=rngs,
        **metadata,
    )
