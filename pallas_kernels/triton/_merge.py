"""Merging the splits of a decode call by log-sum-exp."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.triton import _common
from pallas_kernels.triton._common import Ref


def _merge_kernel(o_ref: Ref, m_ref: Ref, l_ref: Ref, out_ref: Ref, lse_ref: Ref) -> None:
    """Merges the splits of one row by log-sum-exp."""
    pair, row = pl.program_id(0), pl.program_id(1)
    _, splits, _, head_dim = o_ref.shape
    _, tokens, heads, _ = out_ref.shape
    group = o_ref.shape[2] // tokens
    kv_heads = heads // group
    i = jnp.arange(_common.next_power_of_2(splits), dtype=jnp.int32)
    there = i < splits
    c = jnp.arange(_common.next_power_of_2(head_dim), dtype=jnp.int32)
    m = plgpu.load(m_ref.at[pair, i, row], mask=there, other=-jnp.inf)
    l = plgpu.load(l_ref.at[pair, i, row], mask=there, other=0.0)
    top = jnp.max(m)
    shift = jnp.where(top > -jnp.inf, top, 0.0)
    weight = jnp.exp2(m - shift)
    inside = (c < head_dim)[None, :]
    o = plgpu.load(
        o_ref.at[pair, i[:, None], row, c[None, :]],
        mask=there[:, None] & inside,
        other=0.0,
    )
    total = jnp.sum(l * weight)
    empty = total == 0
    total = jnp.where(empty, 1.0, total)
    out = jnp.sum(o * weight[:, None], axis=0) / total
    lse = jnp.where(empty, -jnp.inf, shift / _common.LOG2_E + jnp.log(total))
    b, t = pair // kv_heads, row % tokens
    head = pair % kv_heads * group + row // tokens
    plgpu.store(out_ref.at[b, t, head, c], out.astype(out_ref.dtype), mask=c < head_dim)
    plgpu.store(lse_ref.at[b, t, head], lse)


def merge(
    o: jax.Array, m: jax.Array, l: jax.Array, query: jax.Array, kv_heads: int, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Merges splits.

    Args:
      o: float32 ``[B * K, splits, G * T, H]``, unnormalized outputs.
      m: float32 ``[B * K, splits, G * T]``, maxima in powers of two, ``-inf`` in an empty split.
      l: float32, the same shape, sums of weights.
      query: ``[B, T, N, H]``, for its shape and dtype.
      kv_heads: `K`.
      interpret: run without a GPU.

    Returns:
      ``[B, T, N, H]`` in the query's dtype and the float32 log-sum-exp ``[B, T, N]``.
    """
    batch, tokens, heads, _ = query.shape
    return pl.pallas_call(
        _merge_kernel,
        grid=(batch * kv_heads, heads // kv_heads * tokens),
        in_specs=[_common.WHOLE] * 3,
        out_specs=[_common.WHOLE] * 2,
        out_shape=[
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            jax.ShapeDtypeStruct((batch, tokens, heads), jnp.float32),
        ],
        compiler_params=_common.parameters(num_warps=1, num_stages=1),
        interpret=interpret,
        name="turbojax_decode_merge",
    )(o, m, l)
