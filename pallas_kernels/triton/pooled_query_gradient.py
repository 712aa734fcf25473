"""Pooled attention, gradient of the queries (multi-scale KV pooling, Li, 2025, Algorithm 2).

Roofline, for one sequence of 16,384 tokens, 16 heads of 128, bfloat16, every block at level 1: 3.3
T operations, 4.1 ms at 800 T/s on an H100, times the density; bytes 0.11 ms. Target: 400 T/s, 8.2
ms. Seen: 5.77 ms, 572 T/s.

The same walk as forward: ``dS = P * (dP - D)`` with P from the log-sum-exp, ``dQ = scale dS K``.

Roofline in full and versions: `docs/kernels/triton.md`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import varying
from pallas_kernels.triton import _common
from pallas_kernels.triton._common import Ref
from pallas_kernels.triton._packed import Span, whole
from pallas_kernels.triton._pooled_common import (
    UNMARKED,
    Keys,
    Lists,
    Marks,
    Queries,
    Settings,
    Side,
    load_keys,
    load_rows,
    mine,
    walk,
)


class _Rows(NamedTuple):
    """A program's tile of queries."""

    q: jax.Array  # [tile, H]
    d_out: jax.Array  # [tile, H]
    lse: jax.Array  # float32 [tile]
    d: jax.Array  # float32 [tile]
    position: jax.Array  # int32 [tile]
    segment: jax.Array | None  # int32 [tile]


def _step(
    keys: Keys,
    d_q: jax.Array,
    *,
    rows: _Rows,
    at: tuple[jax.Array, jax.Array, Span],
    k: Side,
    v: Side,
    s: Settings,
) -> jax.Array:
    dot = functools.partial(_common.dot, interpret=s.interpret)
    tile = load_keys(k, keys, *at)
    less = -rows.lse[:, None]
    if keys.bias is not None:
        less = keys.bias[None, :] + less
    x = _common.fma(dot(rows.q, tile), s.scale * _common.LOG2_E, less, s.interpret)
    p = _common.exp2(x, s.interpret)
    d_s = p * (dot(rows.d_out, load_keys(v, keys, *at)) - rows.d[:, None])
    mask = keys.visible(rows.position, rows.segment)
    if mask is not None:
        d_s = jnp.where(mask, d_s, 0.0)
    return d_q + dot(d_s.astype(tile.dtype), tile, contracting=(1, 0))


def _kernel(
    queries: Queries,
    k: Side,
    v: Side,
    lists: Lists,
    query_lengths: Ref,
    key_lengths: Ref,
    marks: Marks,
    d_q_ref: Ref,
    *,
    s: Settings,
) -> None:
    _, tokens, heads, head_dim = queries.q.shape
    tile = pl.num_programs(0) - 1 - pl.program_id(0)
    head, b = pl.program_id(1), pl.program_id(2)
    h = head // (heads // k.tokens.shape[2])
    channels = whole(head_dim)
    position = tile * s.tile + jnp.arange(s.tile, dtype=jnp.int32)
    is_real = position < plgpu.load(query_lengths.at[b])
    index = (b, position[:, None], head)
    rows = _Rows(
        q=load_rows(queries.q, index, channels, is_real),
        d_out=load_rows(queries.d_out, index, channels, is_real),
        lse=plgpu.load(queries.lse.at[b, head, position], mask=is_real, other=jnp.inf),
        d=plgpu.load(queries.d.at[b, head, position], mask=is_real, other=0.0),
        position=marks.positions(position, b),
        segment=marks.of_queries(position, b),
    )
    lists_b, lists_n, _, _ = lists.blocks.shape
    at = (mine(lists_b, b), mine(lists_n, head), tile // (s.block_q // s.tile))
    step = functools.partial(_step, rows=rows, at=(b, h, channels), k=k, v=v, s=s)
    d_q = jnp.zeros((s.tile, channels.padded), jnp.float32)
    key_length = plgpu.load(key_lengths.at[b])
    segments = functools.partial(marks.of_keys, b=b)
    d_q = walk(step, d_q, lists, at, key_length, k.tokens.shape[1], s, segments) * s.scale
    # A query that sees nothing gets nothing, even from tiles with NaN.
    d_q = jnp.where(rows.lse[:, None] == jnp.inf, 0.0, d_q)
    c = jnp.arange(channels.padded, dtype=jnp.int32)
    plgpu.store(
        d_q_ref.at[b, position[:, None], head, c[None, :]],
        d_q.astype(d_q_ref.dtype),
        mask=(position < tokens)[:, None] & (c < head_dim)[None, :],
    )


def query_gradient(
    queries: Queries,
    k: Side,
    v: Side,
    lists: Lists,
    query_lengths: jax.Array,
    key_lengths: jax.Array,
    settings: Settings,
    marks: Marks = UNMARKED,
) -> jax.Array:
    """The gradient of the queries, ``[B, T, N, H]`` in their dtype, summed in float32.

    `queries` are queries, cotangents and forward's results; others are as forward had them.
    """
    batch, tokens, heads, _ = queries.q.shape
    arguments = (queries, k, v, lists, query_lengths, key_lengths, marks)
    return varying.pallas_call(
        functools.partial(_kernel, s=settings),
        grid=(pl.cdiv(tokens, settings.tile), heads, batch),
        in_specs=jax.tree.map(lambda _: _common.WHOLE, arguments),
        out_specs=_common.WHOLE,
        out_shape=jax.ShapeDtypeStruct(queries.q.shape, queries.q.dtype),
        compiler_params=_common.parameters(settings.num_warps, settings.num_stages),
        interpret=settings.interpret,
        name="turbojax_pooled_query_gradient",
    )(*arguments)
