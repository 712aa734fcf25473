"""Pooled attention, forward (multi-scale KV pooling, Li, 2025, Algorithm 1).

Roofline, for one sequence of 16,384 tokens, 16 heads of 128, bfloat16, every block at level 1: 2.2
T operations, 2.7 ms at 800 T/s on an H100, times the density; bytes 0.09 ms. Target: 480 T/s, 4.6
ms. Seen: 4.68 ms (cuDNN 3.16), a mixture of density 0.16 1.09. What bounds it: no overlap of
products and softmax within a program, rows gathered with a pointer each, a loop that waits for the
lists.

One program takes a tile of queries of one head and walks over the pooled keys that its row of the
lists names, see `_pooled_common.walk`.

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
    Settings,
    Side,
    load_keys,
    load_rows,
    mine,
    walk,
)

_LN_2 = 1 / _common.LOG2_E
_State = tuple[jax.Array, jax.Array, jax.Array]


class _Query(NamedTuple):
    """A program's tile of queries."""

    rows: jax.Array  # [tile, H]
    position: jax.Array  # int32 [tile]
    segment: jax.Array | None  # int32 [tile]
    b: jax.Array
    h: jax.Array  # KV head


def _step(
    keys: Keys, state: _State, *, query: _Query, k: Side, v: Side, channels: Span, s: Settings
) -> _State:
    o, m, l = state
    at = (query.b, query.h, channels)
    factor = abs(s.scale) * _common.LOG2_E
    x = _common.dot(query.rows, load_keys(k, keys, *at), s.interpret)
    mask = keys.visible(query.position, query.segment)
    # The maximum is that of scores without a bias, which adds 3 at most.
    if mask is not None:
        x = jnp.where(mask, x * factor, -jnp.inf)
        factor = 1.0
    new = jnp.maximum(m, jnp.max(x, axis=1) * factor)
    shift = jnp.where(new > -jnp.inf, new, 0.0)
    less = -shift[:, None]
    if keys.bias is not None:
        less = keys.bias[None, :] + less
    p = _common.exp2(_common.fma(x, factor, less, s.interpret), s.interpret)
    values = load_keys(v, keys, *at)
    # Values are added to a decayed sum, so that the product accumulates in place.
    alpha = _common.exp2(m - shift, s.interpret)
    o = o * alpha[:, None] + _common.dot(p.astype(values.dtype), values, s.interpret, (1, 0))
    return o, new, l * alpha + jnp.sum(p, axis=1)


def _kernel(
    q_ref: Ref,
    k: Side,
    v: Side,
    lists: Lists,
    query_lengths: Ref,
    key_lengths: Ref,
    marks: Marks,
    out_ref: Ref,
    lse_ref: Ref,
    *,
    s: Settings,
) -> None:
    _, tokens, heads, head_dim = q_ref.shape
    # The last tiles of a causal call have most to do: they start first.
    tile = pl.num_programs(0) - 1 - pl.program_id(0)
    head, b = pl.program_id(1), pl.program_id(2)
    h = head // (heads // k.tokens.shape[2])
    channels = whole(head_dim)
    position = tile * s.tile + jnp.arange(s.tile, dtype=jnp.int32)
    is_token = position < tokens
    rows = load_rows(q_ref, (b, position[:, None], head), channels, is_token)
    if s.scale < 0:  # factors of the scores are positive, so that they do not move maxima
        rows = (-rows.astype(jnp.float32)).astype(rows.dtype)
    lists_b, lists_n, _, _ = lists.blocks.shape
    at = (mine(lists_b, b), mine(lists_n, head), tile // (s.block_q // s.tile))
    query = _Query(rows, marks.positions(position, b), marks.of_queries(position, b), b, h)
    step = functools.partial(_step, query=query, k=k, v=v, channels=channels, s=s)
    state = (
        jnp.zeros((s.tile, channels.padded), jnp.float32),
        jnp.full((s.tile,), -jnp.inf, jnp.float32),
        jnp.zeros((s.tile,), jnp.float32),
    )
    key_length = plgpu.load(key_lengths.at[b])
    segments = functools.partial(marks.of_keys, b=b)
    o, m, l = walk(step, state, lists, at, key_length, k.tokens.shape[1], s, segments)

    is_padding = position >= plgpu.load(query_lengths.at[b])
    nothing = (l == 0) | is_padding
    total = jnp.where(nothing, 1.0, l)
    out = jnp.where(nothing[:, None], 0.0, o * (1 / total)[:, None])
    lse = jnp.where(nothing, -jnp.inf, m * _LN_2 + jnp.log(total))
    is_wrong = (plgpu.load(lists.counts.at[(*at, jnp.int32(8))]) != 0) & ~is_padding
    out, lse = jnp.where(is_wrong[:, None], jnp.nan, out), jnp.where(is_wrong, jnp.nan, lse)
    c = jnp.arange(channels.padded, dtype=jnp.int32)
    plgpu.store(
        out_ref.at[b, position[:, None], head, c[None, :]],
        out.astype(out_ref.dtype),
        mask=is_token[:, None] & (c < head_dim)[None, :],
    )
    plgpu.store(lse_ref.at[b, position, head], lse, mask=is_token)


def forward(
    q: jax.Array,
    k: Side,
    v: Side,
    lists: Lists,
    query_lengths: jax.Array,
    key_lengths: jax.Array,
    settings: Settings,
    marks: Marks = UNMARKED,
    out_dtype: jax.typing.DTypeLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attends to pooled keys, ``[B, T, N, H]`` queries with keys and values of their dtype.

    `lists` are the blocks that each block of queries attends to, by level; lengths are int32
    ``[B]``, at most `T` and `S`. Returns ``[B, T, N, H]`` in `out_dtype` (by default q's) and the
    float32 log-sum-exp ``[B, T, N]``; 0 and ``-inf`` for queries that see nothing, NaN in rows of
    the lists that are marked as wrong.
    """
    batch, tokens, heads, _ = q.shape
    arguments = (q, k, v, lists, query_lengths, key_lengths, marks)
    return varying.pallas_call(
        functools.partial(_kernel, s=settings),
        grid=(pl.cdiv(tokens, settings.tile), heads, batch),
        in_specs=jax.tree.map(lambda _: _common.WHOLE, arguments),
        out_specs=[_common.WHOLE] * 2,
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, out_dtype or q.dtype),
            jax.ShapeDtypeStruct((batch, tokens, heads), jnp.float32),
        ],
        compiler_params=_common.parameters(settings.num_warps, settings.num_stages),
        interpret=settings.interpret,
        name="turbojax_pooled_forward",
    )(*arguments)
