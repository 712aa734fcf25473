"""Tiles of many queries to pages on Hopper: what is static, which rows, which keys they see."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.layouts import Ref
from pallas_kernels.mosaic import pipeline
from pallas_kernels.mosaic.pipeline import ROW, ROWS, WARPGROUPS

# Heads of a group that share a tile: each has at least eight tokens of a warpgroup's.
_MOST_TOGETHER = 8
# Channels up to which a tile has 128 tokens.
_PART = 128


@dataclasses.dataclass(frozen=True)
class Settings:
    """A call's static settings.

    Raises:
      ValueError: if there are sinks with parts, or an output's dtype without.
    """

    window: int | None  # how many earlier tokens a query sees, or None
    soft_cap: float | None
    stages: int  # tiles of keys and values in shared memory
    # Tokens of the parts that programs take, a multiple of a tile's, to be joined; or None: then a
    # program takes all that its rows see.
    part: int | None = None
    # How many rows of the kernel's queries are one token's, with all heads of a group side by side
    # as those of one head; 1 where heads are apart.
    group: int = 1
    registers: tuple[int, int] = (232, 40)  # of a thread that attends and of one that copies
    programs: int = 132  # how many run side by side, one to a multiprocessor
    # Of the output, ``"float32"``, only with parts; None for the queries'.
    out_dtype: str | None = None
    has_sinks: bool = False  # whether there are sinks, only without parts

    def __post_init__(self) -> None:
        if self.part is None and self.out_dtype is not None:
            raise ValueError(f"{self.out_dtype=} must be None without parts")
        if self.part is not None and self.has_sinks:
            raise ValueError(f"{self.has_sinks=} must be False with parts")


def together(group: int) -> int:
    """Heads of a group that share a tile: a power of two that divides `group`."""
    return min(group & -group, _MOST_TOGETHER)


def query_slots(head_dim: int) -> int:
    """Tiles of query rows in shared memory: this one's and, if there is room, the next one's."""
    return 2 if head_dim <= _PART else 1


def tile_tokens(head_dim: int) -> int:
    """Keys of a tile, which are multiplied at once."""
    return 128 if head_dim <= _PART else 64


class Inputs(NamedTuple):
    """What the kernel reads, see `attention`."""

    q: Ref
    k: Ref
    v: Ref
    tables: Ref
    lengths: Ref
    query_lengths: Ref
    factors: Ref
    parts: Ref
    nonfinite: Ref | None = None
    has_nonfinite: Ref | None = None
    sinks: Ref | None = None

    @property
    def is_transposed(self) -> bool:
        """Whether values are e4m3 tiles of `transpose`, with their tokens side by side."""
        return self.nonfinite is not None


class Span(NamedTuple):
    """Tiles of keys of a tile of queries; all queries see all of those from `inner` to `outer`."""

    begin: jax.Array
    inner: jax.Array
    outer: jax.Array
    end: jax.Array


def span(first: jax.Array, last: jax.Array, tile: int, window: int | None) -> Span:
    """Tiles of keys that queries at positions `first` to `last` see; none if `last` is negative."""
    size = jnp.int32(tile)
    end = lax.div(jnp.maximum(last + size, 0), size)
    begin = inner = jnp.int32(0)
    if window is not None:
        begin = jnp.minimum(lax.div(jnp.maximum(first - window, 0), size), end)
        inner = lax.div(jnp.maximum(last - window + (size - 1), 0), size)
        inner = jnp.clip(inner, begin, end)
    outer = jnp.clip(lax.div(jnp.maximum(first + 1, 0), size), inner, end)
    return Span(begin, inner, outer, end)


class Work:
    """A tile of 128 query rows, by its number: the last tokens of all sequences and heads first.

    With parts it is a tile and a part of the tokens: all tiles of a head first, then all heads, and
    then the next part, so that programs that run together read the same keys and values.

    Attributes:
      head: the first of its `together` heads, which have `tokens` queries each, a half for either
        warpgroup.
      h: their KV head.
      first: the first of these queries: a token, or with `Settings.group` a row.
      real: how many queries of the sequence are real.
      part: which part of the tokens it is, 0 if there are none.
      begin: position of the sequence's first query.
      is_broken: whether the sequence cannot be read.
      tiles: of keys.
    """

    def __init__(self, number: jax.Array, x: Inputs, s: Settings) -> None:
        heads, kv_heads = x.q.shape[2], x.k.shape[1]
        group = heads // kv_heads
        self.together = together(group)
        self.tokens = WARPGROUPS * ROWS // self.together
        sets = jnp.int32(heads // self.together)
        rows, places = x.q.shape[0] * sets, pl.cdiv(x.q.shape[1], self.tokens)
        size = rows * places
        self.part = x.parts[0] + lax.div(number, size)
        if s.part is None:
            row, place = lax.rem(number, rows), lax.div(number, rows)
        else:
            number = lax.rem(number, size)
            row, place = lax.div(number, jnp.int32(places)), lax.rem(number, jnp.int32(places))
        self.b, one = lax.div(row, sets), lax.rem(row, sets)
        self.set = one
        self.place = places - 1 - place
        self.head = one * self.together
        self.h = lax.div(self.head, jnp.int32(group))
        self.first = self.place * self.tokens
        length = x.lengths[self.b]
        self.is_broken, self.length = length < 0, jnp.maximum(length, 0)
        self.real = x.query_lengths[self.b]
        self.begin = self.length - self.real
        self.group = s.group
        real = self.real * s.group
        first, last = self.first, jnp.minimum(self.first + self.tokens, real) - 1
        if s.group > 1:
            first, last = (lax.div(row, jnp.int32(s.group)) for row in (first, last))
        last = jnp.where(self.first < real, self.begin + last, -1)
        self.tiles = span(self.begin + first, last, tile_tokens(x.q.shape[3]), s.window)
        if x.has_nonfinite is not None:
            # Wherever values were not finite, rows that see them must become NaN.
            is_whole = x.has_nonfinite[self.b, self.h] == 0
            begin, inner, outer, end = self.tiles
            inner, outer = (jnp.where(is_whole, at, begin) for at in (inner, outer))
            self.tiles = Span(begin, inner, outer, end)
        if s.part is not None:
            per_part = s.part // tile_tokens(x.q.shape[3])
            start = self.part * per_part
            self.tiles = Span(*(jnp.clip(at, start, start + per_part) for at in self.tiles))

    def transposed(self, j: jax.Array, x: Inputs) -> jax.Array:
        """The number of its sequence's tile `j` among those of `transpose.transpose`."""
        per_sequence = x.v.shape[0] // x.q.shape[0]
        return self.b * per_sequence + j

    def token_of(self, me: jax.Array) -> jax.Array:
        each = self.tokens // WARPGROUPS
        row = pipeline.iota(ROW)
        row = (row & (each - 1)) + (self.first + me * each)
        return row if self.group == 1 else lax.div(row, jnp.full_like(row, self.group))


def pieces(page_size: int, tile: int) -> int:
    """Copies that make up a tile."""
    return max(1, tile // page_size)


def count_parts(tables: jax.Array, k: jax.Array, s: Settings) -> int:
    """The number of parts of the tokens that tables may name; 1 if there are no parts."""
    return 1 if s.part is None else pl.cdiv(tables.shape[1] * k.shape[2], s.part)


def parts_seen(lengths: jax.Array, query_lengths: jax.Array, s: Settings) -> jax.Array:
    """The first part that any sequence's queries see, and how many from there; int32 ``[2]``."""
    if s.part is None:
        return jnp.asarray([0, 1], jnp.int32)
    end = jnp.max(-(-jnp.maximum(lengths, 0) // s.part))
    first = jnp.int32(0)
    if s.window is not None:
        start = jnp.maximum(lengths - query_lengths - s.window, 0) // s.part
        first = jnp.minimum(jnp.min(jnp.where(lengths > 0, start, end)), end)
    return jnp.stack([first, jnp.maximum(end - first, 1)])


def count(q: jax.Array, kv_heads: int) -> int:
    batch, tokens, heads, _ = q.shape
    each = together(heads // kv_heads)
    return batch * (heads // each) * pl.cdiv(tokens, WARPGROUPS * ROWS // each)
