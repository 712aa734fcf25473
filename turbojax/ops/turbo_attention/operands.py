"""The operands of the prefill kernels: codes in the layout that their matrix units want."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from turbojax.config import TurboConfig
from turbojax.ops.turbo_attention import numerics


class Operands(NamedTuple):
    """Quantized queries, keys and values, padded to whole blocks.

    Padding tokens are zero. `dtype` of the codes follows the mode: int8, float8_e4m3fn, or the
    inputs' own.

    Attributes:
      q: ``[B, N, Tp, H]``.
      q_scale: float32 ``[B, N, Tp / block_q]``.
      k: ``[B, K, Sp, H]``.
      k_scale: float32 ``[B, K, Sp / block_kv]``.
      v: ``[B, K, H, Sp]``: tokens are contiguous, because 8-bit matrix units cannot transpose.
      v_scale: float32 ``[B, K, Sp / block_kv]``.
    """

    q: jax.Array
    q_scale: jax.Array
    k: jax.Array
    k_scale: jax.Array
    v: jax.Array
    v_scale: jax.Array


Stage1 = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
"""The fields `k`, `k_scale`, `v` and `v_scale` of `Operands`."""


def quantize_operands(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_length: jax.Array,
    key_length: jax.Array,
    config: TurboConfig,
    stage1: Stage1 | None = None,
) -> Operands:
    """Stage 1 of Algorithm 1 for a whole call.

    Args:
      query: ``[B, T, N, H]``.
      key: ``[B, S, K, H]``.
      value: ``[B, S, K, H]``.
      query_length: int32 ``[B]``; what stands past it counts as zero.
      key_length: int32 ``[B]``.
      config: mode and block sizes.
      stage1: the keys' and values' part, if it is there already.
    """
    q = quantize_queries(query, query_length, config)
    if stage1 is not None:
        return Operands(*q, *stage1)
    k_blocks = blocks(key, key_length, config.block_kv)
    k, k_scale = numerics.quantize_scores_operand(k_blocks, config.mode, axis=(-2, -1))
    v_blocks = blocks(value, key_length, config.block_kv)
    v, v_scale = numerics.quantize_values(v_blocks, config.mode)
    return Operands(*q, _join(k), k_scale, jnp.swapaxes(_join(v), 2, 3), v_scale)


def quantize_queries(
    query: jax.Array, query_length: jax.Array, config: TurboConfig
) -> tuple[jax.Array, jax.Array]:
    """The fields `q` and `q_scale` of `Operands`."""
    q_blocks = blocks(query, query_length, config.block_q)
    q, q_scale = numerics.quantize_scores_operand(q_blocks, config.mode, axis=(-2, -1))
    return _join(q), q_scale


def blocks(x: jax.Array, length: jax.Array, block: int) -> jax.Array:
    """``[B, S, K, H]`` to blocks ``[B, K, n, block, H]``, zero past each length."""
    batch, size, heads, channels = x.shape
    valid = jnp.arange(size)[None] < length[:, None]
    x = jnp.where(valid[:, :, None, None], x, jnp.zeros((), x.dtype))
    x = jnp.pad(x, ((0, 0), (0, -size % block), (0, 0), (0, 0)))
    return jnp.transpose(x.reshape(batch, -1, block, heads, channels), (0, 3, 1, 2, 4))


def _join(x: jax.Array) -> jax.Array:
    """Blocks ``[B, K, n, block, H]`` to tokens ``[B, K, n * block, H]``."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])
