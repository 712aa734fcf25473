"""Merging what several programs computed for one row, by log-sum-exp, lowered to Triton.

A row is a query of a KV head, row ``g * T + t`` query `t` of the head's `g`. Every program leaves
the sum of weighted values, the maximum that was taken off the scores, in powers of two, and the
sum of weights. They are small kernels by themselves; Hopper has its own.

`merge`: splits of a decode call, as many as the launch has. `merge_parts`: parts of a paged call. A
part is a run of tokens at a fixed place of the sequence, so that a row's result depends on nothing
but its own tokens: not on the table's width, nor on what else is attended to. Parts are merged
`_GROUP` at a time, these in a tree of fixed shape, and group after group; a part in which a row
sees nothing adds zeros, and one past its end is never read.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import varying
from pallas_kernels.layouts import LOG2_E, Ref, next_power_of_2

_GROUP = 32
_LN_2 = 1 / LOG2_E
# A whole array, which the kernel indexes itself.
_WHOLE = pl.BlockSpec(memory_space=pl.ANY)


def finish(o: jax.Array, m: jax.Array, l: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Normalizes sums of weighted values: the output and the log-sum-exp; 0 and ``-inf`` if empty.

    `o` is float32 ``[c, ...]``; `l`, the sums of weights, and the finite `m`, which was subtracted
    from the scores, in powers of two, are ``[...]``.
    """
    empty = l == 0
    total = jnp.where(empty, 1.0, l)
    return o / total[None], jnp.where(empty, -jnp.inf, m * _LN_2 + jnp.log(total))


def finite(m: jax.Array) -> jax.Array:
    """A running maximum that can be subtracted: 0 where nothing was seen yet."""
    return jnp.where(m > -jnp.inf, m, 0.0)


def merge(
    o: jax.Array,
    m: jax.Array,
    l: jax.Array,
    result: jax.Array | jax.ShapeDtypeStruct,
    kv_heads: int,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Merges splits: ``[B, T, N, H]`` in `result`'s dtype, and float32 log-sum-exps ``[B, T, N]``.

    Float32 inputs: unnormalized outputs `o` ``[B * K, splits, G * T, H]``; maxima `m` in powers of
    two, ``-inf`` in an empty split, and sums of weights `l`, both ``[B * K, splits, G * T]``. Only
    the shape and dtype of `result` are used.
    """
    batch, tokens, heads, _ = result.shape
    return varying.pallas_call(
        _merge_kernel,
        grid=(batch * kv_heads, heads // kv_heads * tokens),
        in_specs=[_WHOLE] * 3,
        out_specs=[_WHOLE] * 2,
        out_shape=[
            jax.ShapeDtypeStruct(result.shape, result.dtype),
            jax.ShapeDtypeStruct((batch, tokens, heads), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="turbojax_decode_merge",
    )(o, m, l)


def _merge_kernel(o_ref: Ref, m_ref: Ref, l_ref: Ref, out_ref: Ref, lse_ref: Ref) -> None:
    """Merges the splits of one row by log-sum-exp."""
    pair, row = pl.program_id(0), pl.program_id(1)
    _, splits, _, head_dim = o_ref.shape
    _, tokens, heads, _ = out_ref.shape
    group = o_ref.shape[2] // tokens
    kv_heads = heads // group
    i = jnp.arange(next_power_of_2(splits), dtype=jnp.int32)
    there = i < splits
    c = jnp.arange(next_power_of_2(head_dim), dtype=jnp.int32)
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
    lse = jnp.where(empty, -jnp.inf, shift / LOG2_E + jnp.log(total))
    b, t = pair // kv_heads, row % tokens
    head = pair % kv_heads * group + row // tokens
    plgpu.store(out_ref.at[b, t, head, c], out.astype(out_ref.dtype), mask=c < head_dim)
    plgpu.store(lse_ref.at[b, t, head], lse)


def merge_parts(
    o: jax.Array,
    m: jax.Array,
    l: jax.Array,
    lengths: jax.Array,
    query_lengths: jax.Array,
    *,
    part: int,
    tokens: int,
    heads: int,
    kv_heads: int,
    window: tuple[int, int] | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Merges parts of `part` tokens: float32 ``[B, T, N, H]`` and the log-sum-exp ``[B, T, N]``.

    Float32 inputs: sums of weighted values `o` ``[B * K, parts, R, H]`` with ``R >= G * T``; maxima
    `m` in powers of two, ``-inf`` where nothing is seen, and sums of weights `l`, both
    ``[B * K, parts, R]``. `lengths`, int32 ``[B]``, include the queries' own tokens.

    Row ``g * T + t`` is query `t` of the KV head's head `g`, at position
    ``length - query_length + t``. Only parts that hold a token it sees are read: the others, and
    rows from ``G * T`` on, need not be written.
    """
    batch, head_dim = o.shape[0] // kv_heads, o.shape[3]
    left = None if window is None else window[0]
    return varying.pallas_call(
        functools.partial(_merge_parts_kernel, size=part, left=left),
        grid=(heads // kv_heads * tokens, batch * kv_heads),
        in_specs=[_WHOLE] * 5,
        out_specs=[_WHOLE] * 2,
        out_shape=[
            jax.ShapeDtypeStruct((batch, tokens, heads, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((batch, tokens, heads), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="turbojax_paged_merge",
    )(o, m, l, lengths, query_lengths)


def _merge_parts_kernel(
    o_ref: Ref,
    m_ref: Ref,
    l_ref: Ref,
    lengths_ref: Ref,
    query_lengths_ref: Ref,
    out_ref: Ref,
    lse_ref: Ref,
    *,
    size: int,
    left: int | None,
) -> None:
    row, pair = pl.program_id(0), pl.program_id(1)
    batch, tokens, heads, head_dim = out_ref.shape
    kv_heads = m_ref.shape[0] // batch
    b, t = pair // kv_heads, row % tokens
    length, count = (plgpu.load(ref.at[b]) for ref in (lengths_ref, query_lengths_ref))
    position = jnp.where(t < count, length - count + t, -1)
    start, stop = jnp.int32(0), (position + size) // size
    if left is not None:
        start = jnp.maximum(position - left, 0) // size
    channel = jnp.arange(next_power_of_2(head_dim), dtype=jnp.int32)
    inside = channel < head_dim

    def group(
        i: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        o, top, total = state
        part = i * _GROUP + jnp.arange(_GROUP, dtype=jnp.int32)
        there = (part >= start) & (part < stop)
        m = plgpu.load(m_ref.at[pair, part, row], mask=there, other=-jnp.inf)
        l = plgpu.load(l_ref.at[pair, part, row], mask=there, other=0.0)
        of_parts = plgpu.load(
            o_ref.at[pair, part[:, None], row, channel[None, :]],
            mask=there[:, None] & inside[None, :],
            other=0.0,
        )
        new = jnp.maximum(top, jnp.max(m))
        shift = finite(new)
        weight, alpha = jnp.exp2(m - shift), jnp.exp2(top - shift)
        o = o * alpha + jnp.sum(of_parts * weight[:, None], axis=0)
        return o, new, total * alpha + jnp.sum(l * weight)

    empty = jnp.zeros(channel.shape, jnp.float32), jnp.float32(-jnp.inf), jnp.float32(0)
    groups = start // _GROUP, (stop + _GROUP - 1) // _GROUP
    o, top, total = jax.lax.fori_loop(*groups, group, empty)
    out, lse = finish(o, finite(top), total)
    head = pair % kv_heads * (heads // kv_heads) + row // tokens
    plgpu.store(out_ref.at[b, t, head, channel], out, mask=inside)
    plgpu.store(lse_ref.at[b, t, head], lse)
