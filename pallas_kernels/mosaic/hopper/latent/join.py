"""Results of a query's parts become one, for decode over latents on Hopper.

Roofline, for 16 heads of a sequence of 8,192 tokens in 128 parts: 4 MB in float32, 1 us at 4.3 TB/s
and twice the way to memory, 2 us. For 64 sequences, 16 heads, two parts: 4 MB, and 1 MB written.

A program has a row, or a quarter of its channels where there are many parts: then each of its
warps adds up every eighth part, and the first adds what they found. Both in order, so that a row's
bits depend on the parts that it sees alone; others were not written, and are not read. A lane has
four channels.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.layouts import LOG2_E
from pallas_kernels.mosaic import lane, lanes
from pallas_kernels.mosaic.hopper.latent.tiles import LATENT, TILE, Settings
from pallas_kernels.mosaic.hopper.paged_prompt.join import of_parts
from pallas_kernels.mosaic.lane import Float, Int, Pointer
from pallas_kernels.mosaic.pipeline import ROWS

_LANES, _CHANNELS = 32, 4
_SLICES = LATENT // (_LANES * _CHANNELS)
# Warps that share a row's parts, where there are more than one reads by itself.
SHARED, _FEW = 8, 4
# Of a warp's parts, so many are read before the first of them is needed.
_PARTS_IN_FLIGHT = 16


def _parts_of_row(row: Int, held: Int, real: Int, heads: int, s: Settings) -> tuple[Int, Int]:
    """The first part that a row's tile sees, and the one past the last: see `tiles.cut`."""
    begin, window = held - real, s.window
    first = row // ROWS * ROWS // heads
    last = ((row // ROWS * ROWS + (ROWS - 1)) // heads).minimum(real - 1)
    is_seen = (first < real) & (held >= 0) & (begin + last >= 0)
    least, start, tile = s.shortest // TILE, lane.integer(0), lane.integer(0)
    if window is not None:
        start = (begin - window).maximum(0) // s.shortest * least
        tile = (begin + first - window).maximum(0) // TILE
    size = ((held + (TILE - 1)) // TILE - start + (s.parts - 1)) // s.parts
    size = size.maximum(least).minimum(s.longest // TILE)
    end = ((begin + last + TILE) // TILE - start + (size - 1)) // size
    return is_seen.where((tile - start) // size, 0), is_seen.where(end, 0)


def _body(
    arrays: list[Pointer],
    ids: list[Int],
    *,
    shape: tuple[int, ...],
    rows: int,
    parts: int,
    is_padded: bool,
    dtype: str,
    s: Settings,
) -> None:
    batch, tokens, heads, _ = shape
    lengths, *query_lengths = arrays[: 2 if is_padded else 1]
    found, found_lse, out, out_lse, *memory = arrays[1 + len(query_lengths) :]
    thread = lane.special("tid.x")
    warp, own = lane.uniform(thread >> 5), thread & (_LANES - 1)
    piece, share, shared = (ids[1], warp, SHARED) if memory else (warp, lane.integer(0), 1)
    b, row = ids[0] // (tokens * heads), ids[0] % (tokens * heads)
    held, *some = (x.at(b * 4).word() for x in (lengths, *query_lengths))
    real = some[0] if some else lane.integer(tokens)
    start, end = _parts_of_row(row, held, real, heads, s)
    channel = (piece * _LANES + own) * _CHANNELS

    def index(i: Int) -> Int:
        return (i * batch + b) * rows + row

    def lse_of(i: Int) -> Float:
        return found_lse.times(index(i), 4).float()

    def larger(i: Int, top: list[Float]) -> list[Float]:
        mine = lse_of((i + own).minimum(end - 1))
        return [top[0].maximum(mine)]

    [top] = lane.loop(start, end, _LANES, [lane.number(float("-inf"))], larger)
    top = lane.reduce_lanes(top, lambda a, b: a.maximum(b), (1, 2, 4, 8, 16))
    shift = top.equals(float("-inf")).where(0.0, top)
    in_flight = min(_PARTS_IN_FLIGHT, -(-parts // shared))

    def add(i: Int, state: list[Float]) -> list[Float]:
        loaded = []
        for step in range(in_flight):
            at = i + share + step * shared
            is_there, at = at < end, at.minimum(end - 1)
            words = found.times(index(at), 4 * LATENT).at(channel * 4).words(_CHANNELS)
            loaded.append((is_there, lse_of(at), [x.as_float() for x in words]))
        for is_there, lse, some in loaded:
            weight = is_there.where(lane.exp2((lse - shift) * LOG2_E), 0.0)
            state = [
                state[0] + weight,
                *(x.fma(weight, total) for x, total in zip(some, state[1:], strict=True)),
            ]
        return state

    state = [lane.number(0.0)] * (1 + _CHANNELS)
    state = lane.loop(start, end, shared * in_flight, state, add)
    if memory:
        state = _of_all(state, share, own, memory[0])
    total, *sums = state
    x, lse, broken = of_parts(sums, total, shift, held)
    with lane.when(share.equals(0)):
        packed = [lane.half.pack(x[i], x[i + 1], dtype) for i in range(0, _CHANNELS, 2)]
        out.times(ids[0], 2 * LATENT).at(channel * 2).store_words(packed)
        with lane.when(channel.equals(0)):
            out_lse.times(ids[0], 4).store(lse + broken)


def _of_all(state: list[Float], share: Int, own: Int, memory: Pointer) -> list[Float]:
    """What a program's warps found for a lane's channels, and the sum of their weights."""
    total, *sums = state
    size = 16 * _LANES

    def at(warp: Int | int) -> tuple[Pointer, Pointer]:
        return memory.at(warp * size, own * 16), memory.at(warp * 4, size * SHARED)

    mine, weight = at(share)
    mine.store_words([x.as_int() for x in sums])
    with lane.when(own.equals(0)):
        weight.store(total)
    lane.block_barrier()
    found = [at(warp) for warp in range(SHARED)]
    loaded = [[w.float(), *(x.as_float() for x in at.words(_CHANNELS))] for at, w in found]
    return [lane.total(list(x)) for x in zip(*loaded, strict=True)]


def join(
    found: jax.Array,
    found_lse: jax.Array,
    lengths: jax.Array,
    query_lengths: jax.Array | None,
    shape: tuple[int, ...],
    dtype: Any,
    settings: Settings,
) -> tuple[jax.Array, jax.Array]:
    """Joins the parts of each row: ``[B, T, N, 512]`` and the log-sum-exps ``[B, T, N]``.

    `found`, float32 ``[parts, B, R, 512]``, is normalized, and `found_lse` are its log-sum-exps;
    rows past ``T * N`` are not read. Lengths are those of `kernel.attend`; `shape` and `dtype`
    (bfloat16 or float16) are the result's.
    """
    parts, _, rows = found_lse.shape
    of_padded = [] if query_lengths is None else [query_lengths]
    body = functools.partial(
        _body,
        shape=shape,
        rows=rows,
        parts=parts,
        is_padded=bool(of_padded),
        dtype=jnp.dtype(dtype).name,
        s=settings,
    )
    grid, memory, warpgroups = {"rows": shape[0] * shape[1] * shape[2]}, 0, 1
    if parts > _FEW:
        grid["slices"] = _SLICES
        memory, warpgroups = SHARED * (16 * _LANES + 4), SHARED // 4
    out, lse = lanes.launch(
        body,
        "turbojax_latent_join_hopper",
        [lengths, *of_padded, found, found_lse],
        [jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[:3], jnp.float32)],
        grid=grid,
        warpgroups=warpgroups,
        shared=memory,
    )
    return out, lse
