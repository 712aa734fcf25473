"""The end of a decode program: its warps' results, merged, and what it writes."""

import functools
from typing import Any

from pallas_kernels.mosaic import lane
from pallas_kernels.mosaic.hopper.decode.inputs import Arrays, Program, Settings
from pallas_kernels.mosaic.hopper.decode.types import LOG2_E, Numerics, Place, Shape, State
from pallas_kernels.mosaic.lane import ClusterPointer, Float, Int, Pointer


def keep(shape: Shape, state: State, area: Pointer, here: Place, n: Numerics) -> None:
    """Writes a warp's result to shared memory: outputs, maxima in powers of two, sums."""
    lane.warp_barrier()
    size = shape.rows * shape.head_dim * 4
    per_tile = shape.outputs // shape.output_tiles
    with lane.when((here.t << 1) < min(shape.rows, 8)):
        for tile in range(shape.output_tiles):
            for k in range(shape.head_dim // 8):
                channel = here.g * (shape.head_dim // 8) + ((here.rotation ^ (k % 4)) + k // 4 * 4)
                for j in (0, 1):
                    row = (here.t << 1) + (8 * tile + j)
                    index = (row * shape.head_dim + channel) << 2
                    area.at(index).store(state.outputs[tile * per_tile + 2 * k + j])
    for tile in range(shape.score_tiles):
        total = lane.reduce_lanes(state.totals[tile], lambda x, y: x + y, (4, 8, 16))
        with lane.when(here.g.equals(0)):
            at = area.at((here.t + 4 * tile) << 2, size)
            at.store(state.maxima[tile] * (LOG2_E / n.unit))
            at.at(4 * shape.rows).store(total)


def combine(a: Arrays, at: Program, area: Pointer, s: Settings) -> None:
    """Merges the results of the cluster's warps; each program writes its share of the channels."""
    areas: list[Pointer | ClusterPointer] = [area]
    if s.cluster > 1:
        lane.cluster_barrier()
        areas = [ClusterPointer.of(area, rank) for rank in range(s.cluster)]
    else:
        lane.block_barrier()
    threads, step, size = 32 * s.warps, s.warp_bytes(a.head_dim), s.rows * a.head_dim
    results = [x.at(warp * step) for x in areas for warp in range(s.warps)]
    share = -(-size // s.cluster)
    for start in range(0, share, threads):
        number = lane.thread() + start
        element = at.member * share + number
        q, channel = element // a.head_dim, element % a.head_dim
        row = at.tile * s.rows + q
        with lane.when((number < share) & (element < size) & (row < a.rows)):
            maxima = [x.at(q << 2, 4 * size).float() for x in results]
            sums = [x.at(q << 2, 4 * (size + s.rows)).float() for x in results]
            outputs = [x.at(element << 2).float() for x in results]
            top = functools.reduce(lane.maximum, maxima)
            shift = (top > float("-inf")).where(top, 0.0)
            weights = [lane.exp2(m - shift) for m in maxima]
            o, l = (
                lane.total([x * w for x, w in zip(values, weights, strict=True)])
                for values in (outputs, sums)
            )
            if a.is_final:
                _write_final(a, at, (row, channel), (o, top, l))
            else:
                part = at.pair * s.parts + at.split // s.cluster
                write_partial(a, part * a.rows + row, channel, (o, top, l))
    if s.cluster > 1:  # no program ends while others read its memory
        lane.cluster_barrier()


def _write_final(
    a: Arrays, at: Program, place: tuple[Int, Int], result: tuple[Float, Float, Float]
) -> None:
    (row, channel), (o, top, l) = place, result
    out, lse = a.outputs
    head, token = at.head * a.group + row // a.tokens, row % a.tokens
    index = (at.batch * a.tokens + token) * a.heads + head
    is_empty = l.equals(0.0)
    total = is_empty.where(1.0, l)
    width = 4 if a.dtype == "float32" else 2
    out.times(index, a.head_dim * width).at(channel * width).store_as(o / total, a.dtype)
    with lane.when(channel.equals(0)):
        value = top * (1 / LOG2_E) + lane.log2(total) * (1 / LOG2_E)
        lse.times(index, 4).store(is_empty.where(float("-inf"), value))


def write_partial(a: Any, index: Int, channel: Int, result: tuple[Float, Float, Float]) -> None:
    """Writes an element of one of several results: output, maximum and sum.

    Args:
      a: has `outputs` and `head_dim`.
      index: of the result's row among those of all results.
      channel: of the output.
      result: what to write.
    """
    o, maxima, sums = a.outputs
    o.times(index, 4 * a.head_dim).at(channel << 2).store(result[0])
    with lane.when(channel.equals(0)):
        maxima.times(index, 4).store(result[1])
        sums.times(index, 4).store(result[2])
