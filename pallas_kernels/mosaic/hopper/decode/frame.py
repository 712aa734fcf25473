"""The frame of the decode kernels: their call, a program's body, and the merge of its results."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.layouts import Side
from pallas_kernels.mosaic import lane, warp
from pallas_kernels.mosaic.hopper.decode.merge import merge
from pallas_kernels.mosaic.hopper.decode.types import Shape, SparseExponential, Width
from pallas_kernels.mosaic.lane import ClusterPointer, Float, Int, Pointer

# Programs of a cluster, on every Hopper GPU.
_LARGEST_CLUSTER = 8
# Bytes that a warp's lanes copy at once without bulk copies.
_BYTES_OF_WARP = 32 * 16


@dataclasses.dataclass(frozen=True)
class Settings:
    """A decode call's static settings.

    Raises:
      ValueError: if `splits` is not a multiple of `cluster`, or `cluster` is too large for the
        hardware.
    """

    exponential: SparseExponential | None  # SAS, or None for the exact one
    key_bits: tuple[int, ...]  # widths of the keys' code arrays
    value_bits: tuple[int, ...]  # widths of the values' code arrays
    block: int  # tokens of a cache block
    scale: float
    window: tuple[int, int] | None
    soft_cap: float | None
    rows: int  # queries of a program, 4 or 8
    splits: int  # programs that share a KV head's blocks, a multiple of `cluster`
    cluster: int  # how many of these merge their results among themselves, at most 8
    warpgroups: int  # of a program; each warp takes its own blocks
    stages: int  # blocks in flight for each warp
    # Whether a warp's lanes copy blocks, 16 bytes at a time, without clusters: for GPUs before
    # Hopper.
    copies_words: bool = False
    out_dtype: str | None = None  # of the output, ``"float32"``; None for the queries'

    def __post_init__(self) -> None:
        largest = 1 if self.copies_words else _LARGEST_CLUSTER
        if not 1 <= self.cluster <= largest:
            raise ValueError(f"{self.cluster=} must be from 1 to {largest}")
        if self.splits < 1 or self.splits % self.cluster:
            raise ValueError(f"{self.splits=} must be a positive multiple of {self.cluster=}")

    @property
    def parts(self) -> int:
        """How many results are written for a KV head's rows; 1 if they are final."""
        return self.splits // self.cluster

    @property
    def warps(self) -> int:
        return 4 * self.warpgroups

    @property
    def arrivals(self) -> int:
        """How many lanes start the copies of a block, and arrive at its barrier."""
        return 32 if self.copies_words else 1

    def warp_bytes(self, head_dim: int) -> int:
        return self.stages * stage_bytes(head_dim, self.block, self.key_bits, self.value_bits)


def stage_bytes(
    head_dim: int, block: int, key_bits: tuple[int, ...], value_bits: tuple[int, ...]
) -> int:
    """Shared memory of one block in flight, with the widest codes."""
    return Shape(head_dim, block, max(key_bits), max(value_bits), 4).bytes


@dataclasses.dataclass(frozen=True, eq=False)
class SidePointers:
    """The pointers of a `Side`; `heads` is how many heads each code array has."""

    codes: tuple[Pointer, ...]
    channel_scale: Pointer
    channel_zero: Pointer
    block_scale: Pointer
    head_slots: Pointer
    buffer: Pointer
    buffer_scale: Pointer
    heads: tuple[int, ...]

    def slot(self, pair: Int) -> Int:
        return self.head_slots.at(pair << 2).word()

    def width(self, pair: Int, bits: tuple[int, ...]) -> Width:
        """The width of a head's codes, given those of the code arrays."""
        return Width(bits, self.slot(pair) >= self.heads[0] if len(bits) == 2 else None)

    @classmethod
    def of(cls, refs: Any, side: Side) -> "SidePointers":
        names = Side._fields
        pointers = {name: jax.tree.map(Pointer.to, getattr(refs, name)) for name in names}
        return cls(**pointers, heads=tuple(x.shape[1] for x in side.codes))


@dataclasses.dataclass(frozen=True, eq=False)
class Arrays(warp.Arrays):
    key: SidePointers
    value: SidePointers
    buffered: Pointer  # how many of the tokens held are in the buffer, ``[B]``
    blocks: int  # how many a sequence has room for, `n`
    buffer_size: int  # in tokens

    def place(self, block: Int, s: Settings) -> Int:
        """Where a block is stored, with a window modulo the room; past the last, some block."""
        inside = block.maximum(0)
        return inside.minimum(self.blocks - 1) if s.window is None else inside % self.blocks

    def codes(self, side: SidePointers, at: "Program", width: Width, of_one_bit: int) -> Pointer:
        """The blocks of the program's head, `of_one_bit` bytes each for every bit of a code."""
        found, skipped = [], 0
        for codes, heads, bits in zip(side.codes, side.heads, width.bits, strict=True):
            slot = at.head if len(side.codes) == 1 else side.slot(at.pair) - skipped
            first = (at.batch * heads + slot) * self.blocks
            found.append(codes.times(first, bits * of_one_bit))
            skipped += heads
        if width.is_low is None:
            return found[0]
        return Pointer.choose(width.is_low, found[1], found[0])

    @classmethod
    def of(cls, refs: Any, inputs: Any) -> "Arrays":
        """From Mosaic's references, and Pallas' own, which know shapes."""
        q, key, value = inputs[:3]
        query, key_refs, value_refs, lengths, buffered, query_lengths, *outputs = refs
        _, tokens, heads, head_dim = q.shape
        return cls(
            query=Pointer.to(query),
            key=SidePointers.of(key_refs, key),
            value=SidePointers.of(value_refs, value),
            lengths=Pointer.to(lengths),
            buffered=Pointer.to(buffered),
            query_lengths=None if query_lengths is None else Pointer.to(query_lengths),
            outputs=[Pointer.to(x) for x in outputs],
            tokens=tokens,
            heads=heads,
            kv_heads=key.buffer.shape[1],
            head_dim=head_dim,
            blocks=key.block_scale.shape[2],
            buffer_size=key.buffer.shape[2],
            dtype=q.dtype.name,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Program(warp.Program):
    """What a program works on. Its units are blocks, and after the last one those of the buffer."""

    split: Int  # number of its share
    member: Int  # its number in its cluster
    blocks: Int  # compressed blocks of the sequence
    compressed: Int  # tokens in them
    buffered: Int  # tokens in the buffer

    @classmethod
    def of(cls, a: Arrays, ids: list[Int], s: Settings) -> "Program":
        """The program's place, and which units it takes."""
        tile, part, pair, *of_cluster = ids
        member = of_cluster[0] if of_cluster else lane.integer(0)
        split = part * s.cluster + member
        batch, head = pair // a.kv_heads, pair % a.kv_heads
        length, buffered = (x.at(batch << 2).word() for x in (a.lengths, a.buffered))
        query_length = lane.integer(a.tokens)
        if a.query_lengths is not None:
            query_length = a.query_lengths.at(batch << 2).word()
        begin, compressed = length - query_length, length - buffered
        blocks = compressed // s.block
        first = lane.integer(0)
        if s.window is not None:
            first = ((begin - s.window[0]).maximum(0) // s.block).minimum(blocks)
        buffer = a.buffer_size // s.block
        share = (blocks - first + (buffer - 1 + s.splits)) // s.splits
        start = first + split * share
        return cls(
            batch=batch,
            head=head,
            pair=pair,
            tile=tile,
            split=split,
            member=member,
            begin=begin,
            query_length=query_length,
            blocks=blocks,
            compressed=compressed,
            buffered=buffered,
            start=start,
            stop=(start + share).minimum(blocks + buffer),
        )

    def of_buffer(self, first: Int, step: int, s: Settings) -> tuple[Int, Int]:
        """The first of the buffer's units among every `step`-th from `first` on, and the end."""
        begin = first + ((self.blocks - first).maximum(0) + (step - 1)) // step * step
        held = (self.buffered + (s.block - 1)) // s.block
        return begin, self.stop.minimum(self.blocks + held)


def copies_of(
    a: Arrays, at: Program, shape: Shape, widths: tuple[Width, Width], s: Settings
) -> Callable[[Int, Pointer, Pointer], None]:
    """A function that starts the copies of a block to shared memory, for a barrier to wait for.

    One lane calls it, or all of the warp's if `copies_words`. `widths` are those of the head's keys
    and values; `shape` has the widest codes.
    """
    sources = {}
    sizes: dict[str, Int | int] = {name: a.head_dim for name, _ in shape.parts}
    of_one_bit = shape.block * a.head_dim // 8
    for name, side, width in (("key", a.key, widths[0]), ("value", a.value, widths[1])):
        sizes[name] = width.size(of_one_bit)
        sources[name] = a.codes(side, at, width, of_one_bit)
        sources[f"{name}_scale"] = side.channel_scale.times(at.pair * a.blocks, a.head_dim)
        sources[f"{name}_zero"] = side.channel_zero.times(at.pair * a.blocks, a.head_dim)
    total = lane.integer(0)
    for size in sizes.values():
        total = total + size

    def start_words(block: Int, target: Pointer, barrier: Pointer) -> None:
        place = block if s.window is None else a.place(block, s)
        for name, most in shape.parts:
            size = sizes[name]
            source, to = sources[name].times(place, size), target.at(shape.offset(name))
            for done in range(0, most, _BYTES_OF_WARP):
                own = ((lane.thread() & 31) << 4) + done
                is_inside = own < size
                with lane.when(is_inside):
                    lane.copy_words(source.at(own), to.at(own), is_inside)
        lane.arrive_after_copies(barrier)

    def start(block: Int, target: Pointer, barrier: Pointer) -> None:
        lane.expect_bytes(barrier, total)
        place = block if s.window is None else a.place(block, s)
        for name, size in sizes.items():
            source = sources[name].times(place, size)
            lane.copy(source, target.at(shape.offset(name)), size, barrier)

    return start_words if s.copies_words else start


def copying(s: Settings) -> Any:
    """The lanes of a warp that call `copies_of`'s function: all, or one that they elect."""
    return contextlib.nullcontext() if s.copies_words else lane.when(lane.elected())


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
    """Where those that share a program's rows leave results in shared memory, for `warp.merged`."""

    area: Pointer  # the first result
    count: int  # results of a program
    each: int  # bytes from one to the next
    row: int  # numbers from one row to the next
    channel: Callable[[Int], Int]  # which channel is at a place of a row


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
    lengths: tuple[jax.Array, jax.Array, jax.Array | None],
    s: Settings,
) -> tuple[jax.Array, jax.Array]:
    """Runs a decode kernel and merges its parts, if several; results as `decode.kernel.decode`.

    `query` is ``[B, T, N, H]``; `lengths` are int32 ``[B]`` each: tokens seen, tokens in the
    buffer, and real queries, None if all are.
    """
    batch, tokens, of_queries, head_dim = query.shape
    kv_heads = key.buffer.shape[1]
    rows, pairs = of_queries // kv_heads * tokens, batch * kv_heads
    parts = (pairs, s.parts, rows)
    result = jax.ShapeDtypeStruct(query.shape, s.out_dtype or query.dtype)
    out: list[Any] = [((*parts, head_dim), jnp.float32), (parts, jnp.float32), (parts, jnp.float32)]
    if s.parts == 1:
        out = [(query.shape, result.dtype), (query.shape[:3], jnp.float32)]
    cluster: dict[str, Any] = {"cluster": (s.cluster,), "cluster_names": _CLUSTER}
    run = warp.launch(
        functools.partial(kernel, s=s),
        name,
        [jax.ShapeDtypeStruct(*x) for x in out],
        dict(zip(_GRID, (pl.cdiv(rows, s.rows), s.parts, pairs), strict=True)),
        s,
        head_dim,
        **({} if s.copies_words else cluster),
    )
    results = run(query, key, value, *lengths)
    if s.parts == 1:
        return results[0], results[1]
    o, m, l = results
    return merge(o, m, l, result, kv_heads)
