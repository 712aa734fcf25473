"""Decode over latents on Hopper: what is static, what is read, and the work of a program."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.layouts import Ref
from pallas_kernels.mosaic import lane, pipeline
from pallas_kernels.mosaic.hopper.paged_prompt.expand import Codec
from pallas_kernels.mosaic.hopper.paged_prompt.tiles import Span, span
from pallas_kernels.mosaic.lane import Int, Pointer
from pallas_kernels.mosaic.pipeline import ROW, ROWS, SCALAR

TILE = 64  # tokens that are multiplied at once
LATENT, ROPE = 512, 64  # channels: of the latent, and of the rotary part of a key
HALVES = 2  # halves of the latent's channels; each is summed by its own warpgroup
HALF = LATENT // HALVES


_LONGEST = 8192


@dataclasses.dataclass(frozen=True)
class Settings:
    scale: float  # factor of the products
    window: int | None = None  # how many earlier tokens a query sees, or None
    parts: int = 1  # that a sequence is cut into, but for the next two
    shortest: int = 64  # tokens of a part at least, if the sequence has them
    longest: int = _LONGEST  # and at most; multiples of a tile's
    tokens: int = 1  # queries of a sequence
    codec: Codec | None = None  # how the latent is stored if not in the query's 16 bits
    # Prefetch to the L2 cache the tile that is so many after the one being copied; 0 for none.
    l2_prefetch: int = 2
    registers: tuple[int, int] = (216, 72)  # of a thread that attends and of one that copies
    programs: int = 132  # how many run side by side, one to a multiprocessor


def settings(
    scale: float,
    batch: int,
    tokens: int,
    heads: int,
    *,
    window: int | None = None,
    codec: Codec | None = None,
    programs: int = 132,
) -> Settings:
    """Settings for a call of `batch` sequences with `tokens` queries each for every head.

    How a sequence is cut into parts, and so the bits of its results, depends on these sizes and on
    its own tokens: of one query on its position, of several not even on that, so that it does not
    matter where a prompt was cut.
    """
    rows = tokens * heads
    parts = parts_of(batch * -(-rows // ROWS), programs)
    if tokens > 1:
        shortest = longest = min(max(_LONGEST // parts // TILE * TILE, 1024), _LONGEST)
    else:
        # What parts leave is written and read again: 1 x 8k, 128 heads, took 21 us with 128 tokens.
        shortest, longest = TILE * min(max(1, batch * rows // 32), 8), _LONGEST
    # Copies of 16-bit latents take all of the time, so prefetching costs: 64 x 8k, 16 heads, 203 us
    # with 2 tiles, 193 with 1, 180 with none. Codes wait to be expanded: 206, 207 and 210.
    l2_prefetch = 0 if codec is None else 2
    return Settings(
        scale,
        window,
        parts,
        shortest,
        longest,
        tokens,
        codec,
        l2_prefetch=l2_prefetch,
        registers=(232, 40) if codec is None else (208, 88),
        programs=programs,
    )


# What `parts_of` assumes: tiles of a sequence, and how many take as long as a part's begin and end.
_TILES, _PER_PART = 128, 4


def parts_of(units: int, programs: int) -> int:
    """The parts with which so many units, 64 rows of a sequence each, are done soonest."""

    def time(parts: int) -> float:
        return -(-units * parts // programs) * (_TILES / parts + _PER_PART)

    return min(range(1, programs + 1), key=time)


def most_parts(width: int, tokens: int, s: Settings) -> int:
    """Parts of a sequence at most, whose `tokens` queries see at most `width` tokens."""
    if s.window is not None:
        width = min(width, s.window + tokens + TILE + s.shortest)
    return max(1, min(-(-width // s.shortest), max(s.parts, -(-width // s.longest))))


def count_parts(lengths: jax.Array, query_lengths: jax.Array | None, s: Settings) -> jax.Array:
    """The most parts that a sequence of these has, int32 ``[1]``."""
    lengths = jnp.maximum(lengths, 0)
    begin = lengths - (s.tokens if query_lengths is None else query_lengths)
    start, size = jax.vmap(functools.partial(cut, s=s))(lengths, begin)
    tiles = (lengths + (TILE - 1)) // TILE - start
    return jnp.max((tiles + (size - 1)) // size, keepdims=True)


def cut(length: jax.Array, begin: jax.Array, s: Settings) -> tuple[jax.Array, jax.Array]:
    """The first tile of a sequence's first part, and the tiles of a part.

    `begin` is the position of its first query.
    """
    least, tile, start = s.shortest // TILE, jnp.int32(TILE), jnp.int32(0)
    if s.window is not None:
        start = lax.div(jnp.maximum(begin - s.window, 0), jnp.int32(s.shortest)) * least
    count = lax.div(length + (TILE - 1), tile) - start
    size = lax.div(count + (s.parts - 1), jnp.int32(s.parts))
    return start, jnp.clip(size, least, s.longest // TILE)


class Inputs(NamedTuple):
    """What the kernel reads, see `kernel.attend`; queries are ``[B, R, channels]``."""

    q: Ref
    q_rope: Ref
    latent: Ref
    rope: Ref
    tables: Ref
    lengths: Ref
    query_lengths: Ref | None = None
    scale: Ref | None = None
    parts: Ref | None = None


class Work:
    """64 query rows of a sequence and a part of its tokens, given a piece of work's number.

    Numbers count all rows of a part first, so that programs that run together read the same
    latents; then all sequences, then the parts.

    Attributes:
      place: the number of its rows' tile.
      first: the first of its rows.
      rows: of each sequence.
      base: the number of the sequence's first row in the part's results.
      part: which part of the tokens it is.
      length: of the sequence.
      real: how many query tokens of the sequence are real.
      begin: position of the sequence's first query.
      is_broken: whether the sequence cannot be read.
      tiles: of tokens.
    """

    def __init__(self, number: jax.Array, x: Inputs, heads: int, s: Settings) -> None:
        batch, rows, _ = x.q.shape
        places = jnp.int32(pl.cdiv(rows, ROWS))
        self.place, number = lax.rem(number, places), lax.div(number, places)
        self.b, self.part = lax.rem(number, jnp.int32(batch)), lax.div(number, jnp.int32(batch))
        self.first, self.heads, self.rows = self.place * ROWS, heads, rows
        self.base = (self.part * batch + self.b) * rows
        length = x.lengths[self.b]
        self.is_broken, self.length = length < 0, jnp.maximum(length, 0)
        self.real = jnp.int32(s.tokens) if x.query_lengths is None else x.query_lengths[self.b]
        self.begin = self.length - self.real
        first = lax.div(self.first, jnp.int32(heads))
        last = jnp.minimum(lax.div(self.first + (ROWS - 1), jnp.int32(heads)), self.real - 1)
        last = jnp.where(first < self.real, self.begin + last, -1)
        start, size = cut(self.length, self.begin, s)
        start = start + self.part * size
        tiles = span(self.begin + first, last, TILE, s.window)
        self.tiles = Span(*(jnp.clip(at, start, start + size) for at in tiles))

    @property
    def is_any(self) -> jax.Array:
        return self.tiles.begin < self.tiles.end

    def token_of(self) -> jax.Array:
        row = pipeline.iota(ROW) + self.first
        return lax.div(row, jnp.full_like(row, self.heads))


# L2 prefetch --------------------------------------------------------------------------------------
# Tiles that are asked for in the L2 cache before there is room for them in shared memory: there is
# for two alone, so while they are attended to nothing would be on its way from memory.

TOKENS = 16  # tokens of a tile for each of a warpgroup's warps: all are in one page
_LANES, _LINE = 32, 128


def place() -> tuple[Int, Int]:
    thread = lane.special("tid.x")
    return (thread >> 5) & 3, thread & (_LANES - 1)


def first_row(tables: Pointer, numbers: list[Int], x: Inputs) -> Int:
    """The pool's number of this warp's first token in a tile; any number past the sequence's end.

    `numbers` are the sequence, the tile, and the sequence's length; only sizes of `x` are read.
    """
    b, tile, length = numbers
    page_size, max_pages = x.rope.shape[1], x.tables.shape[1]
    warp, _ = place()
    token = (tile * TILE + warp * TOKENS).minimum((length - 1).maximum(0))
    entry = (token // page_size).minimum(max_pages - 1)
    page = tables.at((b * max_pages + entry) * 4).word()
    return page * page_size + token % page_size // TOKENS * TOKENS


def ask_for(work: Work, j: jax.Array, x: Inputs) -> None:
    """Prefetches tile `j`; past a sequence's end, some other tile."""

    def f(refs: Any, *numbers: Any) -> None:
        asked_for([Pointer.to(ref) for ref in refs], [lane.scalar(n) for n in numbers], x)

    refs = (x.latent, x.rope, x.tables)
    types = ((plgpu.RefType(),) * len(refs), SCALAR, SCALAR, SCALAR)
    pipeline.inline(f, types)(refs, work.b, j, work.length)


def asked_for(arrays: list[Pointer], numbers: list[Int], x: Inputs) -> None:
    """A lane's part of `ask_for`; `arrays` are latents, rotary parts and tables."""
    *sources, tables = arrays
    row, (_, own) = first_row(tables, numbers, x), place()
    for source, ref in zip(sources, (x.latent, x.rope), strict=True):
        size = ref.shape[-1] * ref.dtype.itemsize
        lines = TOKENS * size // _LINE
        for i in range(0, lines, _LANES):
            line = own + i if lines >= _LANES else own & (lines - 1)
            lane.prefetch(source.times(row, size).at(line * _LINE))
