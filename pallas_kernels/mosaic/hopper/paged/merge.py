"""The end of a call to pages: what programs found for a query is joined, normalized, rotated back.

A query's parts are joined in this order: each of four residues takes every fourth part, in order,
then the four are joined. So a query's bits depend on nothing but its own tokens. A run of channels
is a lane's.

Where programs left what they found in each block (`Settings.is_split`), a part's blocks are joined
first, in the order in which one program does it that takes the part: those of each of its warps,
then what the warps found.
"""

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.mosaic import lane, warp
from pallas_kernels.mosaic.hopper.paged.inputs import Arrays, Settings, table_width
from pallas_kernels.mosaic.hopper.paged.rotation import unrotated
from pallas_kernels.mosaic.lane import Float, Int, Pointer
from pallas_kernels.mosaic.warp import Partial

_GRID = ("tile", "pair")
_LANES, _RESIDUES = 32, 4
# Of a lane's entries of the table, and of a residue's parts, so many are read before the first of
# them is needed.
_PAGES_IN_FLIGHT, _PARTS_IN_FLIGHT = 4, 4
# Where there are many blocks to read.
_MOST_SLICES = 4
# Of a part's blocks of one warp, of which there are 8 to 32.
_BLOCKS_IN_FLIGHT = 16


@dataclasses.dataclass(frozen=True)
class Layout:
    """How queries are shared out to warps, as `warp.launch` needs it."""

    # Warps of a query: 16 where blocks are joined, 4 to a residue; else 4, a residue each; 1 where
    # there are no more parts than residues, which it reads one after the other.
    shared: int
    rows: int  # queries of a program
    # Programs of a query, each with some of the channels; 1 where outputs are rotated.
    slices: int = 1
    stages: int = 1

    @classmethod
    def of(cls, s: Settings, parts: int, head_dim: int) -> "Layout":
        if s.is_split:
            slices = 1 if s.has_norms else min(_MOST_SLICES, head_dim // _LANES)
            return cls(_RESIDUES * s.warps, 1, slices)
        return cls(1, 4) if parts <= _RESIDUES else cls(_RESIDUES, 1)

    @property
    def warps(self) -> int:
        return self.shared * self.rows

    @property
    def warpgroups(self) -> int:
        return self.warps // 4

    def warp_bytes(self, head_dim: int) -> int:
        return 4 * (head_dim + 4)


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """A query, and a lane's part of it."""

    a: Arrays  # arrays; `outputs` are the results
    partials: list[Pointer]  # outputs, maxima and sums of all programs
    s: Settings  # settings of the kernel before
    layout: Layout
    number: Int  # of the query among those of its KV head
    pair: Int  # ``batch * K + head``
    batch: Int
    length: Int  # tokens of the sequence
    position: Int  # of the query; -1 if it does not exist
    place: Int  # of the lane in its warp
    warp: Int  # of its warp among those of the query
    slice: Int  # which slice of the channels

    @classmethod
    def of(
        cls, a: Arrays, partials: list[Pointer], ids: list[Int], s: Settings, layout: Layout
    ) -> "Row":
        tile, pair = ids
        thread = lane.thread()
        own = lane.uniform(thread >> 5)
        row = tile // layout.slices * layout.rows + own // layout.shared
        batch = pair // a.kv_heads
        length, count = a.held(batch)
        token = row % a.tokens
        position = (token < count).where(length - count + token, -1)
        own = own % layout.shared
        place, part = thread & 31, tile % layout.slices
        return cls(a, partials, s, layout, row, pair, batch, length, position, place, own, part)

    @property
    def channels(self) -> int:
        return self.a.head_dim // (_LANES * self.layout.slices)

    @property
    def first(self) -> Int:
        return (self.slice * _LANES + self.place) * self.channels

    def seen(self, size: int) -> tuple[Int, Int]:
        """The first run of `size` tokens that the query sees, and the one past the last."""
        first = lane.integer(0)
        if self.s.window is not None:
            first = (self.position - self.s.window[0]).maximum(0) // size
        return first, (self.position + size) // size

    def load(self, number: Int, is_there: lane.Bool) -> Partial:
        """A result, or nothing if not `is_there`; the read is issued before that is known."""
        o, maxima, sums = self.partials
        index = number * self.a.rows + self.number
        words = o.times(index, 4 * self.a.head_dim).at(self.first << 2)
        m, l = (x.times(index, 4).float() for x in (maxima, sums))
        found = [is_there.where(x.as_float(), 0.0) for x in words.words(self.channels)]
        return found, is_there.where(m, float("-inf")), is_there.where(l, 0.0)

    def part(self, number: Int) -> Partial:
        first, stop = self.seen(self.s.part)
        count = self.a.count(self.s.part)
        place = self.pair * count + number.minimum(count - 1)
        return self.load(place, (number >= first) & (number < stop))

    def blocks(self, number: Int, which: Int) -> Partial:
        """The results of those blocks of a part that one warp of a program would take, joined."""
        s, total = self.s, warp.nothing(self.channels)
        first, stop = self.seen(s.step)
        held = (self.length + (s.block - 1)) // s.block
        count = self.a.count(s.run) * (s.run // s.block)
        steps = s.part // s.step
        for start in range(0, steps, _BLOCKS_IN_FLIGHT):
            loaded = []
            for i in range(start, min(steps, start + _BLOCKS_IN_FLIGHT)):
                step = number * steps + i
                block = step * s.warps + which
                is_there = (step >= first) & (step < stop) & (block < held)
                loaded.append(self.load(self.pair * count + block.minimum(count - 1), is_there))
            total = functools.reduce(warp.joined, loaded, total)
        return total

    def residue(self, number: Int) -> Partial:
        """Every fourth part, joined."""
        first, stop = self.seen(self.s.part)
        in_flight = min(_PARTS_IN_FLIGHT, pl.cdiv(self.a.count(self.s.part), _RESIDUES))

        def add(i: Int, flat: list[Any]) -> list[Any]:
            found = [self.part(i + _RESIDUES * j) for j in range(in_flight)]
            return _flat(functools.reduce(warp.joined, found, _partial(flat)))

        nothing = _flat(warp.nothing(self.channels))
        if self.a.count(self.s.part) <= _RESIDUES * in_flight:
            return _partial(add(number, nothing))  # which waits for no length
        start = first // _RESIDUES * _RESIDUES + number
        return _partial(lane.loop(start, stop, _RESIDUES * in_flight, nothing, add))

    def residue_of_blocks(self, number: Int, which: Int, memory: "_Memory") -> Partial:
        """Every fourth part, joined; this warp joins a share of their blocks."""
        first, stop = self.seen(self.s.part)

        def add(i: Int, flat: list[Any]) -> list[Any]:
            memory.store(self.warp, self.blocks(i + number, which))
            lane.block_barrier()
            of_warps = [memory.load(number * self.s.warps + k) for k in range(self.s.warps)]
            lane.block_barrier()
            part = functools.reduce(warp.joined, of_warps, warp.nothing(self.channels))
            return _flat(warp.joined(_partial(flat), part))

        nothing = _flat(warp.nothing(self.channels))
        if self.a.count(self.s.part) <= _RESIDUES:
            return _partial(add(lane.integer(0), nothing))
        start = first // _RESIDUES * _RESIDUES
        return _partial(lane.loop(start, stop, _RESIDUES, nothing, add))

    @property
    def needed(self) -> Int:
        return (self.length + (self.a.page_size - 1)) // self.a.page_size

    @property
    def first_needed(self) -> Int:
        """The first of these pages with a token in the window of some query."""
        if self.s.window is None:
            return lane.integer(0)
        _, count = self.a.held(self.batch)
        return (self.length - count - self.s.window[0]).maximum(0) // self.a.page_size

    def pages(self, start: Int) -> list[Int]:
        """The lane's pages of those from `start` on; past the last, some other one."""
        step, last = self.layout.shared * _LANES, (self.needed - 1).maximum(0)
        numbers = [(start + i * step + self.place).minimum(last) for i in range(_PAGES_IN_FLIGHT)]
        return [self.a.page(self.batch, number) for number in numbers]

    def has_bad_page(self, first: list[Int]) -> Int:
        """Not 0 if this warp's share of the table has a page that is needed and does not exist.

        `first` are the lane's first pages, read before.
        """
        if self.a.tables is None:
            return lane.integer(0)
        step = self.layout.shared * _LANES * _PAGES_IN_FLIGHT

        def look(i: Int, flat: list[Any]) -> list[Any]:
            *pages, bad = flat
            for page in pages:
                is_bad = (page < 0) | (page >= self.a.num_pages)
                bad = is_bad.where(lane.integer(1), bad)
            return [*self.pages(i + step), bad]

        start = self.first_needed + self.warp * _LANES
        *_, bad = lane.loop(start, self.needed, step, [*first, lane.integer(0)], look)
        return lane.ballot(bad > 0)


@dataclasses.dataclass(frozen=True, eq=False)
class _Memory:
    """Shared memory of the results of a query's warps, and of their flags."""

    area: Pointer
    row: Row

    def _at(self, number: Int | int) -> Pointer:
        return self.area.at(number * self.row.layout.warp_bytes(self.row.a.head_dim))

    def store(self, number: Int, found: Partial) -> None:
        row, own = self.row, self._at(number)
        for i, x in enumerate(found[0]):
            own.at(row.place * (4 * row.channels), 4 * i).store(x)
        with lane.when(row.place.equals(0)):
            for i, x in enumerate(found[1:]):
                own.at(4 * row.a.head_dim + 4 * i).store(x)

    def load(self, number: Int | int) -> Partial:
        row, kept = self.row, self._at(number)
        words = kept.at(row.place * (4 * row.channels)).words(row.channels)
        m, l = (kept.at(4 * row.a.head_dim + 4 * i).float() for i in (0, 1))
        return [x.as_float() for x in words], m, l

    def flag(self, number: Int | int) -> Pointer:
        return self._at(number).at(4 * self.row.a.head_dim + 8)


def _flat(partial: Partial) -> list[Float]:
    return [*partial[0], *partial[1:]]


def _partial(flat: list[Any]) -> Partial:
    return flat[:-2], flat[-2], flat[-1]


def _kernel(*refs: Any, s: Settings, layout: Layout) -> None:
    def body(refs: Any, inputs: Any, ids: list[Int], memory: tuple[Any, Any]) -> None:
        partials = [Pointer.to(x) for x in refs[6]]
        a = Arrays.of((*refs[:6], *refs[7:]), inputs, s)
        row = Row.of(a, partials, ids, s, layout)
        pages = row.pages(row.first_needed + row.warp * _LANES)
        if layout.shared == 1:
            with lane.when(row.number < a.rows):
                residues = [row.residue(lane.integer(i)) for i in range(_RESIDUES)]
                finish(row, residues, row.has_bad_page(pages))
            return
        kept = _Memory(Pointer.to(memory[0]), row)
        of_residue = layout.shared // _RESIDUES
        number, which = row.warp // of_residue, row.warp % of_residue
        found = row.residue_of_blocks(number, which, kept) if s.is_split else row.residue(number)
        kept.store(row.warp, found)
        bad = row.has_bad_page(pages)
        with lane.when(row.place.equals(0)):
            kept.flag(row.warp).store(bad)
        lane.block_barrier()
        with lane.when(row.warp.equals(0)):
            flags = [kept.flag(i).word() for i in range(layout.shared)]
            residues = [kept.load(i * of_residue) for i in range(_RESIDUES)]
            finish(row, residues, functools.reduce(operator.or_, flags))

    warp.inline(_GRID, refs, body)


def finish(row: Row, residues: list[Partial], bad: Int) -> None:
    """Joins residues, normalizes and writes the result; `bad` is 0 if all pages exist."""
    a = row.a
    o, top, l = functools.reduce(warp.joined, residues, warp.nothing(row.channels))
    is_good = a.said(row.batch).equals(row.length) & bad.equals(0)
    is_empty = l.equals(0.0)
    l = is_empty.where(1.0, l)
    # What sees nothing may have been multiplied with 0 times NaN.
    x = [is_empty.where(lane.number(0.0), lane.divide(v, l)) for v in o]
    if a.pages.signs is not None:
        x = unrotated(x, a.pages.signs.at(row.place * (4 * row.channels)), row.place)
    factor = lane.number(row.s.value_unit)
    if a.pages.value_scale is not None:
        factor = factor * a.pages.value_scale.float()
    head, token = row.pair % a.kv_heads * a.group + row.number // a.tokens, row.number % a.tokens
    index = (row.batch * a.tokens + token) * a.heads + head
    out, lse = a.outputs
    dtype = row.s.out_dtype or a.dtype
    width = 4 if dtype == "float32" else 2
    target = out.times(index, a.head_dim * width).at(row.first * width)
    nan = lane.number(float("nan"))
    for i, v in enumerate(x):
        target.at(width * i).store_as(is_good.where(v * factor, nan), dtype)
    top = is_good.where(top, nan)
    warp.write_residual(lse, index, row.first, top, l, is_empty & is_good)


def results(query: jax.Array, s: Settings) -> list[jax.ShapeDtypeStruct]:
    """The types of a call's output and log-sum-exp."""
    return [
        jax.ShapeDtypeStruct(query.shape, s.out_dtype or query.dtype),
        jax.ShapeDtypeStruct(query.shape[:3], jnp.float32),
    ]


def merge(
    query: jax.Array,
    pages: Any,
    tables: jax.Array | None,
    lengths: jax.Array,
    query_lengths: jax.Array | None,
    new_lengths: jax.Array | None,
    partials: tuple[jax.Array, ...],
    settings: Settings,
) -> tuple[jax.Array, jax.Array]:
    """Joins programs' results; arguments and result are those of the call, see `kernel`.

    `settings` are the same. `partials` are float32 ``[B * K, n, G * T, H]`` and twice ``[B * K, n,
    G * T]``: sums of weighted values, maxima in powers of two, and sums of weights of each part, or
    of each block in the order of the sequence's tokens. Those of which a query sees nothing may be
    anything.
    """
    batch, tokens, heads, head_dim = query.shape
    kv_heads, page_size = pages.key.shape[1:3]
    most = table_width(tables, settings) * page_size
    layout = Layout.of(settings, pl.cdiv(most, settings.part), head_dim)
    run = warp.launch(
        functools.partial(_kernel, s=settings, layout=layout),
        "turbojax_paged_merge_hopper",
        results(query, settings),
        dict(
            zip(
                _GRID,
                (
                    pl.cdiv(heads // kv_heads * tokens, layout.rows) * layout.slices,
                    batch * kv_heads,
                ),
                strict=True,
            )
        ),
        layout,
        head_dim,
    )
    out, residual = run(query, pages, tables, lengths, query_lengths, new_lengths, list(partials))
    return out, residual
