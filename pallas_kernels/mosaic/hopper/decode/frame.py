"""The frame of the decode kernels: their call, a program's body, and the merge of its results."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.layouts import Side
from pallas_kernels.mosaic import lane, warp
from pallas_kernels.mosaic.hopper.decode.inputs import Arrays, Program, Settings
from pallas_kernels.mosaic.hopper.decode.merge import merge
from pallas_kernels.mosaic.lane import ClusterPointer, Float, Int, Pointer

_GRID, _CLUSTER = ("tile", "part", "pair"), ("member",)


def body(
    refs: tuple[Any, ...],
    run: Callable[[Arrays, list[Int], tuple[Pointer, Pointer]], None],
    s: Settings,
) -> None:
    """A kernel's body, written for single lanes.

    It calls ``run(arrays, ids, memory)``: the call's arrays, the program's number along each axis,
    and its shared memory for the warps and for their barriers.
    """

    def inner(refs: Any, inputs: Any, ids: list[Int], memory: tuple[Any, Any]) -> None:
        run(Arrays.of(refs, inputs), ids, (Pointer.to(memory[0]), Pointer.to(memory[1])))

    warp.inline(_GRID if s.copies_words else _GRID + _CLUSTER, refs, inner)


@dataclasses.dataclass(frozen=True, eq=False)
class Results:
    """Where those that share a program's rows leave results in shared memory, for `warp.merged`.

    Attributes:
      area: the first result.
      count: results of a program.
      each: bytes from one to the next.
      row: numbers from one row to the next.
      channel: which channel is at a place of a row.
    """

    area: Pointer
    count: int
    each: int
    row: int
    channel: Callable[[Int], Int]


def combine(a: Arrays, at: Program, found: Results, s: Settings, *, is_unrolled: bool) -> None:
    """Merges the results of a cluster's programs; each program writes its share of the elements."""
    areas: list[Pointer | ClusterPointer] = [found.area]
    if s.cluster > 1:
        lane.cluster_barrier()
        areas = [ClusterPointer.of(found.area, rank) for rank in range(s.cluster)]
    else:
        lane.block_barrier()
    threads, size = 32 * s.warps, s.rows * a.head_dim
    results = [x.at(i * found.each) for x in areas for i in range(found.count)]
    share = -(-size // s.cluster)

    def write(start: Int | int) -> None:
        number = lane.thread() + start
        element = at.member * share + number
        q, place = element // a.head_dim, element % a.head_dim
        row, channel = at.tile * s.rows + q, found.channel(place)
        with lane.when((number < share) & (element < size) & (row < a.rows)):
            inside = element if found.row == a.head_dim else q * found.row + place
            result = warp.merged(results, inside, q, s.rows, found.row, _highest)
            if a.is_final:
                _write_final(a, at, row, channel, result, s.out_dtype or a.dtype)
            else:
                part = at.pair * s.parts + at.split // s.cluster
                warp.write_partial(a, part * a.rows + row, channel, result)

    if is_unrolled:
        for start in range(0, share, threads):
            write(start)
    else:

        def step(start: Int, state: list[Any]) -> list[Any]:
            write(start)
            return state

        lane.loop(lane.integer(0), lane.integer(share), threads, [], step)
    if s.cluster > 1:  # no program ends while others read its memory
        lane.cluster_barrier()


def _highest(x: list[Float]) -> Float:
    return functools.reduce(lane.maximum, x)


def _write_final(
    a: Arrays, at: Program, row: Int, channel: Int, result: warp.Result, dtype: str
) -> None:
    o, top, l = result
    out, lse = a.outputs
    index = warp.output_row(a, at, row)
    is_empty = l.equals(0.0)
    total = is_empty.where(1.0, l)
    width = 4 if dtype == "float32" else 2
    out.times(index, a.head_dim * width).at(channel * width).store_as(o / total, dtype)
    warp.write_residual(lse, index, channel, top, total, is_empty)


def call(
    kernel: Callable[..., None],
    name: str,
    query: jax.Array,
    key: Side,
    value: Side,
    lengths: tuple[jax.Array, jax.Array, jax.Array],
    s: Settings,
) -> tuple[jax.Array, jax.Array]:
    """Runs a decode kernel and merges its parts, if several; results as `decode.kernel.decode`.

    `query` is ``[B, T, N, H]``; `lengths` are int32 ``[B]`` each: tokens seen, tokens in the
    buffer, and real queries.
    """
    batch, tokens, of_queries, head_dim = query.shape
    kv_heads = key.buffer.shape[1]
    rows, pairs = of_queries // kv_heads * tokens, batch * kv_heads
    parts = (pairs, s.parts, rows)
    result = jax.ShapeDtypeStruct(query.shape, s.out_dtype or query.dtype)
    out: list[Any] = [((*parts, head_dim), jnp.float32), (parts, jnp.float32), (parts, jnp.float32)]
    if s.parts == 1:
        out = [(query.shape, result.dtype), (query.shape[:3], jnp.float32)]
    run = warp.launch(
        functools.partial(kernel, s=s),
        name,
        [jax.ShapeDtypeStruct(*x) for x in out],
        dict(zip(_GRID, (pl.cdiv(rows, s.rows), s.parts, pairs), strict=True)),
        s,
        head_dim,
        **({} if s.copies_words else {"cluster": (s.cluster,), "cluster_names": _CLUSTER}),
    )
    results = run(query, key, value, *lengths)
    if s.parts == 1:
        return results[0], results[1]
    o, m, l = results
    return merge(o, m, l, result, kv_heads)
