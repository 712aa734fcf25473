"""Pooled attention, gradients of keys and values (multi-scale KV pooling, Li, 2025, Algorithm 3).

Roofline, for one sequence of 16,384 tokens, 16 heads of 128, bfloat16, every block at level 1: 4.4
T operations, 5.5 ms at 800 T/s on an H100, times the density; bytes 0.18 ms. Target: 400 T/s, 11
ms. Seen: 10.7 ms, 412 T/s.

One launch for each level. A program takes a tile of groups of one KV head and walks over the query
blocks that its list names, for all query heads of the group; keys are rows, so that both sums
stay in registers. How many tokens a group stands for is a constant factor of its row of weights,
and multiplied in at the end.

Roofline in full and versions: `docs/kernels/triton.md`.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

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
    Marks,
    Queries,
    Side,
    group_offsets,
    load_rows,
    mine,
)

# An entry of a list is a query block, shifted, and one bit for each block of the tile.
_BITS = 16
_State = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class Settings:
    level: int  # tokens of a group: 1, 2, 4 or 8
    rows: int  # groups of a program, a power of two that covers at most 16 blocks
    step: int  # queries at a time, a power of two, at most `block_q`
    block_q: int  # queries to a list's entry
    block_kv: int  # keys to a block, a power of two
    scale: float
    is_causal: bool  # a query sees a group if it sees the group's last token
    num_warps: int
    num_stages: int
    interpret: bool


class Lists(NamedTuple):
    """Query blocks by tile of keys, and their counts."""

    queries: Any  # int32 [B or 1, N or 1, tiles, T_r]
    counts: Any  # int32 [B or 1, N or 1, tiles, 2]


class _Tile(NamedTuple):
    """A program's tile of pooled keys."""

    k: jax.Array  # [rows, H]
    v: jax.Array  # [rows, H]
    last: jax.Array  # int32 [rows], position of a group's last token
    segment: jax.Array | None  # int32 [rows]
    block: jax.Array | None  # int32 [rows], number within the tile; None if there is one


def _row_tile(
    k: Side,
    v: Side,
    at: tuple[jax.Array, ...],
    length: jax.Array,
    marks: Marks,
    channels: Span,
    s: Settings,
) -> tuple[_Tile, jax.Array]:
    """The program's tile, and how many tokens its groups hold."""
    b, h, tile = at
    local = jnp.arange(s.rows, dtype=jnp.int32)
    group = tile * s.rows + local
    count = jnp.clip(length - group * s.level, 0, s.level)
    if s.level == 1:
        arrays, index = (k.tokens, v.tokens), (b, group[:, None], h)
    else:
        offset = group_offsets(k.tokens.shape[1])[s.level]
        arrays, index = (k.pooled, v.pooled), (b, h, (offset + group)[:, None])
    k_rows, v_rows = (load_rows(x, index, channels, count > 0) for x in arrays)
    log = s.block_kv.bit_length() - s.level.bit_length()  # log2 of the groups of a block
    block = local >> log if s.rows > 1 << log else None
    token = group * s.level
    return _Tile(k_rows, v_rows, token + count - 1, marks.of_keys(token, b), block), count


def _step(
    number: jax.Array,
    state: _State,
    *,
    queries: Queries,
    entries: Ref,
    at: tuple[jax.Array, ...],
    query_length: jax.Array,
    marks: Marks,
    tile: _Tile,
    channels: Span,
    is_masked: bool,
    s: Settings,
) -> _State:
    """Some queries of one query block; `at` is their place in the lists, then sequence and head."""
    dot = functools.partial(_common.dot, interpret=s.interpret)
    d_k, d_v, seen, entry = state
    *place, b, head = at
    steps = s.block_q // s.step
    bits = entry & ((1 << _BITS) - 1)
    position = (entry >> _BITS) * s.block_q + (number % steps) * s.step
    position = position + jnp.arange(s.step, dtype=jnp.int32)
    # Read one step before it is needed, so that it does not hold up the software pipeline.
    following = jnp.minimum((number + 1) // steps, entries.shape[-1] - 1)
    following = plgpu.load(entries.at[(*place, following)])
    is_real = position < query_length
    # Padding may hold anything; its weights are 0.
    index = (b, jnp.minimum(position, query_length - 1)[:, None], head)
    q, d_out = load_rows(queries.q, index, channels), load_rows(queries.d_out, index, channels)
    less = -plgpu.load(queries.lse.at[b, head, position], mask=is_real, other=jnp.inf)[None, :]
    d = plgpu.load(queries.d.at[b, head, position], mask=is_real, other=0.0)
    if tile.block is not None:
        less = jnp.where(((bits >> tile.block) & 1) != 0, 0.0, -jnp.inf)[:, None] + less
    x = _common.fma(dot(tile.k, q), s.scale * _common.LOG2_E, less, s.interpret)
    p = _common.exp2(x, s.interpret)
    if is_masked and s.is_causal:
        at_key = marks.positions(position, b)
        p = jnp.where(tile.last[:, None] <= at_key[None, :], p, 0.0)
    segment = marks.of_queries(position, b) if is_masked else None
    if tile.segment is not None and segment is not None:
        p = jnp.where(tile.segment[:, None] == segment[None, :], p, 0.0)
    d_v = d_v + dot(p.astype(d_out.dtype), d_out, contracting=(1, 0))
    d_s = p * (dot(tile.v, d_out) - d[None, :])
    d_k = d_k + dot(d_s.astype(q.dtype), q, contracting=(1, 0))
    return d_k, d_v, seen | bits, following


def _kernel(
    queries: Queries,
    k: Side,
    v: Side,
    lists: Lists,
    query_lengths: Ref,
    key_lengths: Ref,
    marks: Marks,
    d_k_ref: Ref,
    d_v_ref: Ref,
    *,
    s: Settings,
) -> None:
    _, kv_heads, groups, head_dim = d_k_ref.shape
    u, h, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    share = queries.q.shape[2] // kv_heads
    channels = whole(head_dim)
    key_length = plgpu.load(key_lengths.at[b])
    tile, count = _row_tile(k, v, (b, h, u), key_length, marks, channels, s)
    query_length = plgpu.load(query_lengths.at[b])
    lists_b, lists_n, _, _ = lists.queries.shape
    steps = s.block_q // s.step

    def one_head(number: jax.Array, state: _State) -> _State:
        head = h * share + number
        place = (mine(lists_b, b), mine(lists_n, head), u)
        stop = plgpu.load(lists.counts.at[(*place, jnp.int32(0))]) * steps
        step = functools.partial(
            _step,
            queries=queries,
            entries=lists.queries,
            at=(*place, b, head),
            query_length=query_length,
            marks=marks,
            tile=tile,
            channels=channels,
            s=s,
        )
        start = jnp.int32(0)
        first = plgpu.load(lists.queries.at[(*place, start)])
        state = (*state[:3], first)
        if s.is_causal or marks.keys:
            masked = plgpu.load(lists.counts.at[(*place, jnp.int32(1))]) * steps
            body = functools.partial(step, is_masked=True)
            state = jax.lax.fori_loop(start, masked, body, state)
            start = masked
        return jax.lax.fori_loop(start, stop, functools.partial(step, is_masked=False), state)

    zeros = jnp.zeros((s.rows, channels.padded), jnp.float32)
    state = (zeros, zeros, jnp.int32(0), jnp.int32(0))
    if share == 1:
        state = one_head(jnp.int32(0), state)
    else:
        state = jax.lax.fori_loop(0, share, one_head, state)
    d_k, d_v, seen, _ = state

    # Rows that nobody has attended to may hold anything, as may those of no tokens.
    block = tile.block if tile.block is not None else jnp.zeros_like(count)
    is_seen = (((seen >> block) & 1) != 0) & (count > 0)
    weight = count.astype(jnp.float32)[:, None]
    group = u * s.rows + jnp.arange(s.rows, dtype=jnp.int32)
    c = jnp.arange(channels.padded, dtype=jnp.int32)
    for ref, x, factor in ((d_k_ref, d_k, s.scale), (d_v_ref, d_v, 1.0)):
        plgpu.store(
            ref.at[b, h, group[:, None], c[None, :]],
            jnp.where(is_seen[:, None], x * (weight * factor), 0.0),
            mask=(group < groups)[:, None] & (c < head_dim)[None, :],
        )


def key_gradient(
    queries: Queries,
    k: Side,
    v: Side,
    lists: Lists,
    query_lengths: jax.Array,
    key_lengths: jax.Array,
    settings: Settings,
    marks: Marks = UNMARKED,
) -> tuple[jax.Array, jax.Array]:
    """The gradients of one level's keys and values: float32 ``[B, K, ceil(S / level), H]``.

    `lists` are the query blocks that attend to each tile of `settings.rows` groups at this level;
    others as `pooled_query_gradient.query_gradient`. Zeros where there is nothing.
    """
    batch, tokens, kv_heads, head_dim = k.tokens.shape
    groups = pl.cdiv(tokens, settings.level)
    arguments = (queries, k, v, lists, query_lengths, key_lengths, marks)
    return varying.pallas_call(
        functools.partial(_kernel, s=settings),
        grid=(pl.cdiv(groups, settings.rows), kv_heads, batch),
        in_specs=jax.tree.map(lambda _: _common.WHOLE, arguments),
        out_specs=[_common.WHOLE] * 2,
        out_shape=[jax.ShapeDtypeStruct((batch, kv_heads, groups, head_dim), jnp.float32)] * 2,
        compiler_params=_common.parameters(settings.num_warps, settings.num_stages),
        interpret=settings.interpret,
        name="turbojax_pooled_key_gradient",
    )(*arguments)
