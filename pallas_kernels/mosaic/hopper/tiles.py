"""Tiles of prefill attention on Hopper: what is static, which queries, which keys they see."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layouts import Ref
from pallas_kernels.mosaic.hopper.segments import Bounds, visible
from pallas_kernels.mosaic.pipeline import ROWS
from pallas_kernels.mosaic.softmax import Exponential, Policy


@dataclasses.dataclass(frozen=True)
class Settings:
    mode: str  # ``"int8"``, ``"int8_fp8"`` or ``"fp8"``
    exponential: Exponential  # the softmax's
    block_q: int  # query tokens that share a scale, a multiple of 64
    block_kv: int  # key tokens that share a scale, 64 or 128
    scale: float
    is_causal: bool
    window: tuple[int, int] | None
    soft_cap: float | None
    # Key and value blocks in shared memory, at least 2: a tile's keys are awaited before the values
    # of the tile before are read.
    stages: int = 4
    programs: int = 132  # how many run side by side, one to a multiprocessor
    # Whether a tile's scores are computed during the exponentials of the one before.
    intra_warpgroup_overlap: bool = False
    # Key tokens that are attended to at once, `block_kv` or, with `intra_warpgroup_overlap` and
    # weights in e4m3, a multiple of it.
    tile: int = 128
    consumers: int = 2  # warpgroups that attend, with 64 queries each
    ping_pong: bool = False  # whether they compute exponentials in turns, see `pipeline.PingPong`
    # Whether queries see only keys of their own segment, or within their own bounds.
    has_segments: bool = False
    has_slopes: bool = False
    has_bias: bool = False

    @property
    def hides_first(self) -> bool:
        """Whether first keys are hidden from some queries that see later ones."""
        return self.policy.left is not None or self.has_segments

    @property
    def changes_scores(self) -> bool:
        """Whether scores differ from scaled products even where nothing is hidden."""
        return self.soft_cap is not None or self.has_slopes or self.has_bias

    @property
    def rows(self) -> int:
        return self.consumers * ROWS

    @property
    def policy(self) -> Policy:
        left, right = self.window or (None, None)
        if self.is_causal:
            right = 0
        return Policy(
            exponential=self.exponential,
            is_int8=self.mode == "int8",
            left=left,
            right=right,
            soft_cap=self.soft_cap,
        )


class Span(NamedTuple):
    """Key tiles of a tile of queries: ``begin`` alone, then up to `inner`, `outer` and `end`.

    Every query sees those from `inner` to `outer` without a mask; `full_first` says whether the
    first one too.
    """

    begin: jax.Array
    inner: jax.Array
    outer: jax.Array
    end: jax.Array
    full_first: jax.Array


def _span(first: jax.Array, length: jax.Array, s: Settings, segments: Bounds | None) -> Span:
    """Key tiles that some of the queries from position `first` on see, and those that all see.

    At least one tile, even if there is no key. `first` is relative to the first key, `length` is
    the number of keys, and `segments` are the bounds of the queries' segments.
    """
    p = s.policy
    last = first + s.rows - 1
    seen = visible(first, last, length, p.left, p.right, segments)
    start, stop, full_start, full_stop = seen
    block = jnp.int32(s.tile)
    end = lax.div(stop + (block - 1), block)
    begin = lax.div(start, block)
    end = jnp.maximum(end, 1)
    begin = jnp.minimum(begin, end - 1)
    full_first = (begin * block >= full_start) & ((begin + 1) * block <= full_stop)
    # The first block is processed by itself.
    inner = jnp.clip(lax.div(full_start + (block - 1), block), begin + 1, end)
    outer = jnp.clip(lax.div(full_stop, block), inner, end)
    return Span(begin, inner, outer, end, full_first)


class Work:
    """A tile of queries of one head, by its number."""

    def __init__(
        self,
        number: jax.Array,
        tiles: int,
        heads: int,
        k: Ref,
        lengths: tuple[Ref, Ref],
        s: Settings,
        shifts: Ref | None = None,
        bounds: Ref | None = None,
        order: Ref | None = None,
    ) -> None:
        rows = jnp.int32(k.shape[0] * heads)
        row = lax.rem(number, rows)
        self.b, self.head = lax.div(row, jnp.int32(heads)), lax.rem(row, jnp.int32(heads))
        self.h = lax.div(self.head, jnp.int32(heads // k.shape[1]))
        # The last tiles of a causal call have most to do: they start first.
        self.tile = tiles - 1 - lax.div(number, rows)
        if order is not None:
            entry, self.head = (
                order[lax.div(number, jnp.int32(heads))],
                lax.rem(number, jnp.int32(heads)),
            )
            self.b, self.tile = lax.div(entry, jnp.int32(tiles)), lax.rem(entry, jnp.int32(tiles))
            self.h = lax.div(self.head, jnp.int32(heads // k.shape[1]))
        self.first = self.tile * s.rows
        self.length = lengths[1][self.b]
        self.query_length = lengths[0][self.b]
        # By how much a query's position exceeds that of the key of its number.
        self.shift = None if shifts is None else shifts[self.b]
        self.segments = None
        if bounds is not None:
            self.segments = Bounds(*(bounds[self.b, i, self.tile] for i in range(4)))
        self.blocks = _span(self.position(self.first), self.length, s, self.segments)

    def position(self, query: jax.Array) -> jax.Array:
        """A query's position relative to that of the first key."""
        return query if self.shift is None else query + self.shift
