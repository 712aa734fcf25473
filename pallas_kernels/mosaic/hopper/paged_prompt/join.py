"""Results of a row's parts become one, for prompts in small chunks on Hopper.

Roofline, for 64 queries of 32 heads with 32,768 tokens in parts of 2,048: 2,048 rows of 16 parts,
17 MB in float32, 4 us at 4.3 TB/s. Operations do not count.

Parts are added in order, so that a row's bits do not depend on how many there might be: those that
a row's tile does not see were not written, and are not read. A thread has eight channels of a row.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.layouts import LOG2_E
from pallas_kernels.mosaic import lane, lanes
from pallas_kernels.mosaic.hopper.paged_prompt.tiles import Settings
from pallas_kernels.mosaic.lane import Float, Int, Pointer
from pallas_kernels.mosaic.pipeline import ROWS, WARPGROUPS

_THREADS, _TOGETHER = 128, 8


def side_by_side(q: jax.Array, s: Settings) -> jax.Array:
    """Queries ``[B, T, N, H]`` as ``[B, T * group, K, H]``, so that all rows of a tile are used."""
    batch, tokens, heads, head_dim = q.shape
    q = q.reshape(batch, tokens, heads // s.group, s.group, head_dim)
    return q.swapaxes(2, 3).reshape(batch, tokens * s.group, heads // s.group, head_dim)


def _body(
    arrays: list[Pointer],
    ids: list[Int],
    *,
    rows: tuple[int, ...],
    shape: tuple[int, ...],
    dtype: str,
    s: Settings,
    tile: int = WARPGROUPS * ROWS,
) -> None:
    assert s.part is not None
    lengths, query_lengths, found, found_lse, out, out_lse = arrays
    (batch, kv_heads, per_head), (_, tokens, heads, head_dim) = rows, shape
    per_row, per_tile = head_dim // _TOGETHER, tile
    thread = ids[0] * _THREADS + (lane.special("tid.x") & (_THREADS - 1))
    row, piece = thread // per_row, thread % per_row
    b, which, within = row // (kv_heads * per_head), row // per_head % kv_heads, row % per_head
    t, head = within // s.group, which * s.group + within % s.group
    of_tile = within // per_tile * per_tile
    first, last = of_tile // s.group, (of_tile + (per_tile - 1)) // s.group
    held, real = (x.at(b * 4).word() for x in (lengths, query_lengths))
    begin = held - real
    # The tile's parts: its last query sees most.
    end = begin + (last + 1).minimum(real)
    start = lane.integer(0)
    if s.window is not None:
        start = (begin + first - s.window).maximum(0)
    is_seen = (first < real) & (held >= 0) & (end > 0)
    start, end = start // s.part, (end.maximum(0) + (s.part - 1)) // s.part
    start, end = is_seen.where(start, 0), is_seen.where(end, 0)
    size = batch * kv_heads * per_head

    def lse_of(i: Int) -> Float:
        return found_lse.times(i * size + row, 4).float()

    def largest(i: Int, top: list[Float]) -> list[Float]:
        return [top[0].maximum(lse_of(i))]

    [top] = lane.loop(start, end, 1, [lane.number(float("-inf"))], largest)
    shift = top.equals(float("-inf")).where(0.0, top)

    def add(i: Int, state: list[Float]) -> list[Float]:
        weight = lane.exp2((lse_of(i) - shift) * LOG2_E)
        at = found.times(i * size + row, 4 * head_dim).at(piece * (4 * _TOGETHER))
        words = [w.as_float() for w in at.words(_TOGETHER)]
        sums = [x.fma(weight, total) for x, total in zip(words, state[1:], strict=True)]
        return [state[0] + weight, *sums]

    zero = lane.number(0.0)
    total, *sums = lane.loop(start, end, 1, [zero] * (1 + _TOGETHER), add)
    words, lse, broken = of_parts(sums, total, shift, held)
    target = (b * tokens + t) * heads + head
    with lane.when((row < size) & (t < tokens)):
        if dtype == "float32":
            at = out.times(target, 4 * head_dim).at(piece * (4 * _TOGETHER))
            for i in range(0, _TOGETHER, 4):
                at.at(4 * i).store_words([v.as_int() for v in words[i : i + 4]])
        else:
            packed = [lane.half.pack(words[i], words[i + 1], dtype) for i in range(0, _TOGETHER, 2)]
            out.times(target, 2 * head_dim).at(piece * (2 * _TOGETHER)).store_words(packed)
        with lane.when(piece.equals(0)):
            out_lse.times(target, 4).store(lse + broken)


def of_parts(
    sums: list[Float], total: Float, shift: Float, held: Int
) -> tuple[list[Float], Float, Float]:
    """A row's outputs, its log-sum-exp, and what is still to be added to that: NaN or 0.

    `sums` are of the parts' outputs times their weights ``exp(lse - shift)``, whose sum is `total`.
    All is NaN where `held` is negative.
    """
    nothing = total.equals(0.0)
    inverse = nothing.where(0.0, lane.reciprocal(nothing.where(1.0, total)))
    lse = nothing.where(float("-inf"), shift + lane.log2_of_any(total) * (1 / LOG2_E))
    broken = (held < 0).where(lane.number(float("nan")), 0.0)
    return [v * inverse + broken for v in sums], lse, broken


def join(
    found: jax.Array,
    found_lse: jax.Array,
    lengths: jax.Array,
    query_lengths: jax.Array,
    shape: tuple[int, ...],
    dtype: Any,
    settings: Settings,
    *,
    tile: int = WARPGROUPS * ROWS,
) -> tuple[jax.Array, jax.Array]:
    """Joins the parts of each row: ``[B, T, N, H]`` and the log-sum-exps ``[B, T, N]``.

    `found`, float32 ``[parts, B, K, R, H]``, is normalized, of the rows of `side_by_side`;
    `found_lse` are its log-sum-exps. Lengths are those of `kernel.attention`; `shape` and `dtype`
    (bfloat16, float16 or float32) are the result's. The rows of a `tile` saw the same parts.
    """
    rows, head_dim = found_lse.shape[1:], shape[3]
    name = jnp.dtype(dtype).name
    body = functools.partial(_body, rows=rows, shape=shape, dtype=name, tile=tile, s=settings)
    threads = rows[0] * rows[1] * rows[2] * (head_dim // _TOGETHER)
    out, lse = lanes.launch(
        body,
        "turbojax_paged_join_hopper",
        [lengths, query_lengths, found, found_lse],
        [jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[:3], jnp.float32)],
        grid={"rows": pl.cdiv(threads, _THREADS)},
        warpgroups=1,
    )
    return out, lse
