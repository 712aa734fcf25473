"""What paged attention works with: settings, arrays, a program's and a lane's place, the state."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pallas_kernels.layouts import LOG2_E as LOG2_E
from pallas_kernels.mosaic import lane, warp
from pallas_kernels.mosaic.lane import Float, Int, Pointer

# Queries of a column tile: each has two columns, a high and a low part.
TILE = 4
_TURBO4, _PLAIN = "turbo4", ("bfloat16", "float16")
_KV4, _K8V4, _MIXED = "kv4", "k8v4", "mixed"


class Stored(NamedTuple):
    """How keys, or values, of pages of the kind ``"mixed"`` are stored."""

    # Of a code: 2, 3 or 4, with a norm for each token; 8 of int8, with a scale for each, and of
    # e4m3, for keys only.
    bits: int
    # Of codes, ``2**bits`` numbers in 0..127, from which `middle` is subtracted.
    centroids: tuple[int, ...] = ()
    middle: float = 0.0  # a multiple of a half
    is_int8: bool = False  # whether 8 bits are int8

    @property
    def is_float(self) -> bool:
        return not (self.centroids or self.is_int8)


@dataclasses.dataclass(frozen=True)
class Settings:
    # What pages hold: ``"turbo4"``, ``"fp8_e4m3"``, ``"fp8_e5m2"``, or ``"bfloat16"`` or
    # ``"float16"``, which is the queries' dtype then; ``"kv4"`` and ``"k8v4"``, codes with a scale
    # for each token; ``"mixed"``, see `stored`.
    kind: str
    centroids: tuple[int, ...]  # turbo4: 16 numbers in 0..127, from which `middle` is subtracted
    middle: float  # turbo4: a multiple of a half
    scale: float
    value_unit: float  # factor of the outputs
    window: tuple[int, int] | None
    soft_cap: float | None
    rows: int  # queries of a program, a multiple of 4
    # Tokens whose blocks a warp adds up one after the other, a multiple of `step`; parts begin at
    # multiples of it.
    part: int
    # Whether a program takes a few steps, and leaves the result of each block to the merge, which
    # adds up the same in the same order; otherwise it takes a part.
    is_split: bool
    few: int  # tokens of such a program, or those of one step if there are more
    block: int  # tokens that a warp takes at a time, 16 to 64
    warpgroups: int  # of a program; each of their warps takes its own blocks
    stages: int  # blocks in flight for each warp
    # Bytes of shared memory for a warp at least. With less to do at a time, the programs that a
    # multiprocessor holds end sooner, and those left over at the end count less.
    reserve: int = 0
    # Without a table, the tokens that a sequence may have: token `p` is page ``p % n`` of its `n`
    # pages of one token.
    limit: int | None = None
    # For ``"mixed"``: how keys, and how values, are stored.
    stored: tuple[Stored, Stored] | None = None
    # Channels stored, if fewer than the queries'; the queries' others are 0, and those of outputs
    # are undefined.
    channels: int | None = None
    # Whether lanes copy pages, 16 bytes at a time: for GPUs without bulk copies.
    copies_words: bool = False
    out_dtype: str | None = None  # of the output, ``"float32"``; None for the queries'
    # Where new tokens come with the call, without `new_lengths`: sequences with fewer tokens than
    # this have one.
    max_length: int | None = None

    @property
    def is_contiguous(self) -> bool:
        return self.limit is not None

    @property
    def step(self) -> int:
        return self.block * self.warps

    @property
    def run(self) -> int:
        return max(self.step, self.few) if self.is_split else self.part

    @property
    def has_norms(self) -> bool:
        """Whether tokens have norms or scales."""
        return self.kind in (_TURBO4, _KV4, _K8V4, _MIXED)

    @property
    def rotates_queries(self) -> bool:
        """Whether keys are codes of rotated vectors."""
        return self.kind == _TURBO4 or bool(self.stored and self.stored[0].centroids)

    @property
    def key_runs(self) -> int:
        """Runs of channels, one for each code in a byte: a byte's codes are apart in the head."""
        return 2 if self.kind == _KV4 else 1

    @property
    def is_plain(self) -> bool:
        return self.kind in _PLAIN

    @property
    def tiles(self) -> int:
        return self.rows // TILE

    @property
    def has_rows(self) -> bool:
        """Whether rows of the products are queries, see `turbo4_rows`; short calls gain nothing."""
        return self.kind == _TURBO4 and self.rows == 4 * TILE and not self.is_split

    @property
    def entries(self) -> int:
        """How many queries a lane has results of, one of each tile or one of each eight rows."""
        return self.rows // 8 if self.has_rows else self.tiles

    def row(self, entry: int, here: "Place") -> Int:
        """The program's query that the lane's entry is of."""
        return here.g + 8 * entry if self.has_rows else here.t + TILE * entry

    def outputs(self, head_dim: int) -> int:
        """Of how many channels a lane has a query's outputs."""
        return head_dim // (4 if self.has_rows else 8)

    def writes(self, here: "Place") -> lane.Bool:
        """Whether this lane, of those with results of the same query, writes what is no channel."""
        return (here.t if self.has_rows else here.g).equals(0)

    @property
    def held(self) -> int:
        """Tokens of a block for which a lane has scores."""
        return self.block // 8

    @property
    def warps(self) -> int:
        return 4 * self.warpgroups

    def row_bytes(self, head_dim: int) -> int:
        if self.stored is not None:
            return (self.channels or head_dim) * self.stored[1].bits // 8
        if self.has_norms:
            return head_dim // 2
        return 2 * head_dim if self.is_plain else head_dim

    def key_bytes(self, head_dim: int) -> int:
        if self.stored is not None:
            return (self.channels or head_dim) * self.stored[0].bits // 8
        return head_dim if self.kind == _K8V4 else self.row_bytes(head_dim)

    def token_bytes(self, head_dim: int) -> int:
        codes = self.key_bytes(head_dim) + self.row_bytes(head_dim)
        if self.stored is not None:
            return codes + sum(0 if side.is_float else 2 for side in self.stored)
        return codes + (4 if self.has_norms else 0)

    def warp_bytes(self, head_dim: int) -> int:
        """A warp's shared memory: its blocks in flight, later its result; and a rotated query."""
        return self.query_offset(head_dim) + (4 * head_dim if self.rotates_queries else 0)

    def query_offset(self, head_dim: int) -> int:
        """Where the rotated query is in a warp's memory."""
        flight = self.stages * self.block * self.token_bytes(head_dim)
        return max(flight, self.rows * 4 * (head_dim + 2), self.reserve)


class Pages(NamedTuple):
    # Uint8 codes ``[P, K, page_size, H / 2]``, or int8, or floats of 8 or 16 bits ``[P, K,
    # page_size, H]``; of `Settings.stored` codes ``[P, K, page_size, H * bits / 8]``.
    key: Any
    value: Any  # the same
    # ``[P, K, page_size]``, float16 norms, or bfloat16 for the kinds with scales, or None.
    key_norm: Any
    value_norm: Any  # the same
    key_scale: Any  # float32 ``[1]``, factor of the keys, or None
    value_scale: Any  # the same of the values
    signs: Any  # float32 ``[H]``, of the rotation, or None


@dataclasses.dataclass(frozen=True, eq=False)
class Arrays(warp.Arrays):
    pages: Pages
    # ``[B, max_pages]``, or None: sequence `b` has the `room` pages from ``b * room`` on.
    tables: Pointer | None
    page_size: int
    max_pages: int  # of a sequence
    num_pages: int
    room: int  # pages of the pool for each sequence
    new_lengths: Pointer | None = None  # of sequences that get a new token, ``[B]``
    max_length: int | None = None  # see `Settings.max_length`

    def count(self, size: int) -> int:
        """How many pieces of `size` tokens a sequence has room for, rounded up."""
        return -(-self.max_pages * self.page_size // size)

    def page(self, batch: Int, number: Int) -> Int:
        """The number in the pool of a sequence's page `number`; past the last, some other."""
        number = number.minimum(self.max_pages - 1)
        if self.tables is None:
            return batch * self.room + number % self.room
        return self.tables.times(batch, 4 * self.max_pages).at(number << 2).word()

    def held(self, batch: Int) -> tuple[Int, Int]:
        """A sequence's tokens (0 if its length is more than it can have), and its queries."""
        length, count = self.said(batch), lane.integer(self.tokens)
        if self.query_lengths is not None:
            count = self.query_lengths.at(batch << 2).word().maximum(0).minimum(self.tokens)
        fits = (length >= 0) & (length <= self.max_pages * self.page_size)
        return fits.where(length, 0), count

    def said(self, batch: Int) -> Int:
        """How many tokens a sequence is said to hold, a new one included."""
        length, one = self.lengths.at(batch << 2).word(), lane.integer(1)
        if self.new_lengths is not None:
            return length + self.new_lengths.at(batch << 2).word().maximum(0).minimum(1)
        return (
            length if self.max_length is None else length + (length < self.max_length).where(one, 0)
        )

    @classmethod
    def of(cls, refs: Any, inputs: Any, s: Settings) -> "Arrays":
        """From Mosaic's references, and Pallas' own, which know shapes."""
        query, pages, tables = inputs[:3]
        names = [name for name in Pages._fields if getattr(pages, name) is not None]
        found = {name: Pointer.to(getattr(refs[1], name)) for name in names}
        _, tokens, heads, head_dim = query.shape
        return cls(
            query=Pointer.to(refs[0]),
            pages=Pages(**{name: found.get(name) for name in Pages._fields}),
            tables=None if refs[2] is None else Pointer.to(refs[2]),
            lengths=Pointer.to(refs[3]),
            query_lengths=None if refs[4] is None else Pointer.to(refs[4]),
            outputs=[Pointer.to(x) for x in refs[6:]],
            tokens=tokens,
            heads=heads,
            kv_heads=pages.key.shape[1],
            head_dim=head_dim,
            page_size=pages.key.shape[2],
            max_pages=table_width(tables, s),
            num_pages=pages.key.shape[0],
            room=pages.key.shape[0] // query.shape[0],
            new_lengths=None if refs[5] is None else Pointer.to(refs[5]),
            max_length=s.max_length,
            dtype=query.dtype.name,
        )


def table_width(tables: Any, s: Settings) -> int:
    if s.limit is not None:
        return s.limit
    return int(tables.shape[1])


@dataclasses.dataclass(frozen=True, eq=False)
class Program(warp.Program):
    """What a program works on; `run` is the number of its tokens among the sequence's runs."""

    run: Int
    length: Int

    @classmethod
    def of(cls, a: Arrays, ids: list[Int], s: Settings) -> "Program":
        tile, run, pair = ids
        batch, head = pair // a.kv_heads, pair % a.kv_heads
        length, query_length = a.held(batch)
        begin = length - query_length
        blocks, share = (length + (s.block - 1)) // s.block, s.run // s.block
        if s.window is None:
            start = run * share
            stop = (start + share).minimum(blocks)
        else:
            first = (begin - s.window[0]).maximum(0) // s.block
            run = run + first // share
            stop = (run * share + share).minimum(blocks)
            # Always from the same warp on, wherever the window begins.
            start = (run * share).maximum(first // s.warps * s.warps)
        return cls(
            tile=tile,
            run=run,
            pair=pair,
            batch=batch,
            head=head,
            length=length,
            begin=begin,
            query_length=query_length,
            start=start,
            stop=stop,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Place(warp.Place):
    """A lane's place in its warp; `number` is ``4 g + t``.

    Of a block of ``8 n`` tokens, lane ``4 g + t`` has the scores of query `t` of a tile with tokens
    ``n g + (i ^ odd)``, `i` from 0 to ``n - 1``. `odd` is the parity of those bits of `g` that tell
    neighbours apart, so that their rows of 64 bytes are in different banks.
    """

    number: Int
    odd: Int

    @classmethod
    def here(cls) -> "Place":
        number = lane.thread() & 31
        g = number >> 2
        return cls(g, number & 3, number, parity(g))

    @property
    def is_first(self) -> lane.Bool:
        return self.number.equals(0)


def parity(g: Int) -> Int:
    """`Place.odd` of the lanes in row `g`."""
    return (g ^ (g >> 1)) & 1


@dataclasses.dataclass(frozen=True, eq=False)
class Query:
    """A lane's part of the queries, one entry for each tile."""

    # The first product's second operand, of column `g`: the high part of query ``g // 2`` where `g`
    # is odd, else the low one.
    operands: list[list[Int]]
    start: list[tuple[Any, Any]]  # what the sums of query `t`'s two columns start from
    offset: list[Float]  # added to query `t`'s scores
    factor: list[Float]  # of query `t`'s scores; NaN where the query is not finite
    position: list[Int]  # of query `t`; -1 if it does not exist


@dataclasses.dataclass(frozen=True, eq=False)
class State:
    """A running softmax, one entry for each tile."""

    outputs: list[list[Float]]  # of query `t`, this lane's channels (`channel`)
    maxima: list[Float]  # of query `t`, in powers of two
    totals: list[Float]  # sums of weights of query `t`

    @classmethod
    def empty(cls, tiles: int, outputs: int) -> "State":
        zero = lane.number(0.0)
        lowest = [lane.number(float("-inf"))] * tiles
        return cls([[zero] * outputs for _ in range(tiles)], lowest, [zero] * tiles)

    def joined(self, block: "State") -> "State":
        pairs = zip(self._partials(), block._partials(), strict=True)
        outputs, maxima, totals = zip(*(warp.joined(x, y) for x, y in pairs), strict=True)
        return State([*outputs], [*maxima], [*totals])

    def _partials(self) -> list[warp.Partial]:
        return list(zip(self.outputs, self.maxima, self.totals, strict=True))

    def flat(self) -> list[Float]:
        return [*(x for tile in self.outputs for x in tile), *self.maxima, *self.totals]

    @classmethod
    def of(cls, flat: list[Any], tiles: int) -> "State":
        outputs, rest = flat[: -2 * tiles], flat[-2 * tiles :]
        size = len(outputs) // tiles
        split = [outputs[i * size : (i + 1) * size] for i in range(tiles)]
        return cls(split, rest[:tiles], rest[tiles:])


_DOWN, _SMALLEST = 2.0**-16, 2.0**-100

Convert = Callable[[Int], Sequence[Int]]  # from a word of a page to operand words
Multiply = Callable[[Sequence[Int], Sequence[Int], Sequence[Any]], list[Any]]
"""A warp's product, such as `lane.matmul`."""


def key_rows(keys: Pointer, row: int, held: int, here: Place, convert: Convert) -> Any:
    """Yields operand words lazily, two of the lane's `held` tokens (of `row` bytes) at a time."""
    first = keys.at(here.g * (held * row) + here.t * (row // 4))
    return (
        [
            [w for word in first.at((here.odd ^ j) * row).words(row // 16) for w in convert(word)]
            for j in (i, i + 1)
        ]
        for i in range(0, held, 2)
    )


def value_words(values: Pointer, row: int, held: int, here: Place) -> list[list[list[Int]]]:
    """Words of the lane's channels, for the tokens of both its lanes' scores, half after half."""
    loaded = []
    for half in (0, 1):
        g = (here.t << 1) + half
        first = values.at(g * (held * row) + here.g * (row // 8))
        odd = parity(g)
        loaded.append([first.at((odd ^ i) * row).words(row // 32) for i in range(held)])
    return loaded


def weight_words(planes: list[Int], here: Place) -> list[Int]:
    """Operand words of weights from the low and the high words of the lanes that computed them."""
    words = []
    for half in (0, 1):
        source = (((here.t << 1) + half) << 2) + (here.g >> 1)
        low, high = (lane.from_lane(x, source) for x in planes)
        words.append((here.g & 1).equals(1).where(high, low))
    return words


def multiplied(
    pair: Sequence[Sequence[Int]], words: list[Int], sums: list[Any], multiply: Multiply
) -> list[Any]:
    """The sums of two tokens' keys, operand words of each, times a query's `words`."""
    for k in range(0, len(words), 2):
        operand = [pair[0][k], pair[1][k], pair[0][k + 1], pair[1][k + 1]]
        sums = multiply(operand, words[k : k + 2], sums)
    return sums


def summed(rows: list[Int], words: list[Int], sums: list[Any], multiply: Multiply) -> list[Any]:
    """The sums of two channels' values, `rows` of a `value_rows`, times weights' `words`."""
    for k in range(0, len(words), 2):
        sums = multiply(rows[2 * k : 2 * k + 4], words[k : k + 2], sums)
    return sums


def largest(x: list[Float]) -> tuple[Float, Float]:
    """The largest magnitude of a row that four lanes share, and 0, or NaN unless all are finite."""
    top, bad = lane.number(0.0), lane.number(0.0)
    for v in x:
        top = lane.maximum(top, lane.maximum(v, -v))
        bad = lane.fma(v, 0.0, bad)
    top = lane.reduce_lanes(top, lane.maximum, (1, 2))
    return top, lane.reduce_lanes(bad, lambda u, v: u + v, (1, 2))


def scaled(x: list[Float]) -> tuple[list[Float], Float]:
    """A query's numbers divided by their largest magnitude, and that; NaN unless all are finite.

    Numbers below ``2**-84`` become 0, which changes no score.
    """
    top, bad = largest(x)
    # Far from where a reciprocal overflows, or is flushed to 0.
    top = lane.maximum(top * _DOWN, lane.number(_SMALLEST))
    inverse = lane.reciprocal(top)
    return [v * _DOWN * inverse for v in x], (top + bad) * (1 / _DOWN)
