"""What the kernels of pooled attention share: the walk over a row of block lists, and its loads.

Pooled keys lie in two arrays: the tokens themselves as the caller has them, ``[B, S, K, H]``, and
the groups of 2, 4 and 8 tokens one after the other along the second axis of
``[B, K, G_2 + G_4 + G_8, H]``, see `pooled_pool.pool`. So a walk has two parts, and tiles of the
second may mix levels: at most one tile in each part is not full.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.layouts import LEVELS as LEVELS
from pallas_kernels.triton import _common
from pallas_kernels.triton._common import Ref
from pallas_kernels.triton._packed import Span


@dataclasses.dataclass(frozen=True)
class Settings:
    """Static settings of a walk over lists by query."""

    block_q: int  # queries to a row of the lists, a power of two
    block_kv: int  # keys to a block, a power of two, at least 16
    scale: float
    is_causal: bool  # a query sees a group if it sees the group's last token
    tile: int  # queries of a program; `block_q` if that is less
    tile_kv: int  # pooled keys of a step, a power of two
    num_warps: int
    num_stages: int
    interpret: bool


class Lists(NamedTuple):
    """Key blocks by query block, and their counts."""

    blocks: Any  # int32 [B or 1, N or 1, T_r, T_c]
    counts: Any  # int32 [B or 1, N or 1, T_r, 9]


class Side(NamedTuple):
    """Keys or values."""

    tokens: Any  # [B, S, K, H]
    pooled: Any  # [B, K, G_2 + G_4 + G_8, H]


class Marks(NamedTuple):
    """Segments and shifts, which limit what a query sees; each empty, or one array."""

    queries: tuple[Any, ...] = ()  # int32 [B, T], the segments of queries
    keys: tuple[Any, ...] = ()  # int32 [B, S], those of keys
    shift: tuple[Any, ...] = ()  # int32 [B], a query's position less a key's of the same index

    def positions(self, index: jax.Array, b: jax.Array) -> jax.Array:
        """Positions of queries, on the axis of keys."""
        return index + plgpu.load(self.shift[0].at[b]) if self.shift else index

    def of_queries(self, index: jax.Array, b: jax.Array) -> jax.Array | None:
        """Segments of queries, int32; past the end that of the last."""
        return _segments(self.queries, index, b)

    def of_keys(self, token: jax.Array, b: jax.Array) -> jax.Array | None:
        """Segments of keys, int32; past the end that of the last."""
        return _segments(self.keys, token, b)


UNMARKED = Marks()  # A call without segments and offsets


def _segments(of: tuple[Any, ...], index: jax.Array, b: jax.Array) -> jax.Array | None:
    if not of:
        return None
    return plgpu.load(of[0].at[b, jnp.minimum(index, of[0].shape[1] - 1)])


class Queries(NamedTuple):
    """What the gradients need of the queries.

    `lse` is in powers of two and ``+inf`` where a query sees nothing or is padding, which makes its
    weights vanish; `d` is ``rowsum(dO * O)`` less the cotangent of the log-sum-exp, and finite.
    """

    q: Any  # [B, T, N, H]
    d_out: Any  # [B, T, N, H]
    lse: Any  # float32 [B, N, T]
    d: Any  # float32 [B, N, T]


class Keys(NamedTuple):
    """The pooled keys of one step of a walk.

    `bias` is None if all stand for one token, `valid` if all exist, `last` if all are visible to
    all queries, and `segment` also if there are no segments.
    """

    is_pooled: bool
    row: jax.Array  # int32 [tile_kv], in `Side.tokens` or `Side.pooled`
    bias: jax.Array | None  # float32 [tile_kv], log2 of how many tokens they stand for
    valid: jax.Array | None  # bool [tile_kv]
    last: jax.Array | None  # int32 [tile_kv], position of their last token
    segment: jax.Array | None  # int32 [tile_kv]

    def visible(self, position: jax.Array, segment: jax.Array | None) -> jax.Array | None:
        """Which pooled keys each query sees: bool ``[queries, tile_kv]``, or None for all."""
        if self.valid is None:
            return None
        mask = jnp.broadcast_to(self.valid[None, :], (position.shape[0], self.valid.shape[0]))
        if self.last is not None:
            mask = mask & (self.last[None, :] <= position[:, None])
        if self.segment is not None and segment is not None:
            mask = mask & (self.segment[None, :] == segment[:, None])
        return mask


class _Run(NamedTuple):
    """Consecutive blocks of one level in a list."""

    log: int  # log2 of the level
    start: jax.Array  # the first one's number among the pooled keys of the walk
    first: jax.Array  # its position in the list


class _Part(NamedTuple):
    """One part of a walk: pooled keys 0 .. total, of which those before `complete` need no mask."""

    is_pooled: bool
    runs: tuple[_Run, ...]
    complete: jax.Array
    total: jax.Array


class _Place(NamedTuple):
    """Where pooled keys of a walk are; vectors, or constants if they have one level."""

    position: jax.Array  # of their block in the list; a scalar if they have one block
    offset: jax.Array  # int32 [tile_kv], in the block
    log: jax.Array | int
    base: jax.Array | int  # row of the level's first group


def group_offsets(tokens: int) -> dict[int, int]:
    """The first group's row of levels 2, 4 and 8 in `Side.pooled`, and as 16 the number of rows."""
    offsets, row = {}, 0
    for level in LEVELS[1:]:
        offsets[level] = row
        row += -(-tokens // level)
    return offsets | {16: row}


def mine(size: int, index: jax.Array) -> jax.Array:
    """`index`, or 0 on an axis of size one, which stands for all."""
    return index if size > 1 else jnp.int32(0)


def load_rows(ref: Ref, index: Any, channels: Span, valid: jax.Array | None = None) -> jax.Array:
    """Rows ``ref[index(row), channel]``, zeros where not `valid` and in the channels' padding."""
    c = jnp.arange(channels.padded, dtype=jnp.int32)
    masks = [] if channels.mask() is None else [(c < channels.size)[None, :]]
    masks += [] if valid is None else [valid[:, None]]
    together = None if not masks else masks[0] if len(masks) == 1 else masks[0] & masks[1]
    return plgpu.load(
        ref.at[(*index, c[None, :])],
        mask=together,
        other=None if together is None else jnp.zeros((), ref.dtype),
    )


def load_keys(side: Side, keys: Keys, b: jax.Array, h: jax.Array, channels: Span) -> jax.Array:
    row = keys.row[:, None]
    if keys.is_pooled:
        return load_rows(side.pooled, (b, h, row), channels, keys.valid)
    return load_rows(side.tokens, (b, row, h), channels, keys.valid)


def _parts(counts: Ref, at: tuple[jax.Array, ...], s: Settings) -> tuple[_Part, _Part]:
    """The part of the tokens, and that of the groups, where all complete blocks come first."""
    logs = range(len(LEVELS))
    rows = s.block_kv.bit_length() - 1  # log2 of the tokens of a block
    seen = [plgpu.load(counts.at[(*at, jnp.int32(n))]) for n in logs]
    complete = [plgpu.load(counts.at[(*at, jnp.int32(n + len(LEVELS)))]) for n in logs]
    first, position = [], jnp.int32(0)
    for n in logs:
        first.append(position)
        position = position + seen[n]
    start, runs = jnp.int32(0), []
    for n in logs[1:]:
        runs.append(_Run(n, start, first[n]))
        start = start + (complete[n] << (rows - n))
    without_mask = start
    for n in logs[1:]:
        runs.append(_Run(n, start, first[n] + complete[n]))
        start = start + ((seen[n] - complete[n]) << (rows - n))
    tokens = _Run(0, jnp.int32(0), first[0])
    return (
        _Part(False, (tokens,), complete[0] << rows, seen[0] << rows),
        _Part(True, tuple(runs), without_mask, start),
    )


def _locate(
    tile: jax.Array, part: _Part, is_edge: bool, offsets: dict[int, int], s: Settings
) -> _Place:
    """Where the pooled keys of a tile are; those past the end are treated as the last one."""
    rows = s.block_kv.bit_length() - 1
    first = tile * s.tile_kv
    if not part.is_pooled and s.tile_kv <= s.block_kv:
        offset = (first & (s.block_kv - 1)) + jnp.arange(s.tile_kv, dtype=jnp.int32)
        return _Place(part.runs[0].first + (first >> rows), offset, 0, 0)
    number = jnp.minimum(first + jnp.arange(s.tile_kv, dtype=jnp.int32), part.total - 1)
    run = part.runs[0]
    if not part.is_pooled:
        return _Place(run.first + (number >> rows), number & (s.block_kv - 1), 0, 0)
    log = jnp.full_like(number, run.log)
    base = jnp.full_like(number, offsets[2**run.log])
    start, position = jnp.broadcast_to(run.start, log.shape), jnp.broadcast_to(run.first, log.shape)
    # The first runs are those of complete blocks, one for each level.
    for run in part.runs[1 : None if is_edge else len(LEVELS) - 1]:
        here = number >= run.start
        log = jnp.where(here, run.log, log)
        base = jnp.where(here, offsets[2**run.log], base)
        start = jnp.where(here, run.start, start)
        position = jnp.where(here, run.first, position)
    number = number - start
    shift = rows - log
    return _Place(position + (number >> shift), number & ((1 << shift) - 1), log, base)


def _keys(
    part: _Part,
    key_length: jax.Array,
    is_edge: bool,
    offsets: dict[int, int],
    s: Settings,
    segments: Callable[[jax.Array], jax.Array | None],
    tile: jax.Array,
    block: jax.Array,
) -> Keys:
    place = _locate(tile, part, is_edge, offsets, s)
    rows = s.block_kv.bit_length() - 1
    group = (block << (rows - place.log)) + place.offset
    row = place.base + group if part.is_pooled else group
    if not is_edge:
        bias = place.log.astype(jnp.float32) if isinstance(place.log, jax.Array) else None
        return Keys(part.is_pooled, row, bias, None, None, None)
    token = group << place.log
    size = (1 << place.log) + jnp.zeros_like(token)
    count = jnp.clip(key_length - token, 0, size)
    number = tile * s.tile_kv + jnp.arange(s.tile_kv, dtype=jnp.int32)
    valid = (number < part.total) & (count > 0)
    bias = None
    if part.is_pooled:
        bias = jnp.log(jnp.maximum(count, 1).astype(jnp.float32)) * _common.LOG2_E
    last = token + count - 1 if s.is_causal else None
    return Keys(part.is_pooled, row, bias, valid, last, segments(token))


def walk(
    step: Callable[[Keys, Any], Any],
    state: Any,
    lists: Lists,
    at: tuple[jax.Array, ...],
    key_length: jax.Array,
    key_tokens: int,
    s: Settings,
    segments: Callable[[jax.Array], jax.Array | None],
) -> Any:
    """Hands all pooled keys that a query block sees to `step`, tile by tile.

    ``step(keys, state)`` returns the next state. `at` is the place of this query block in the
    lists, `key_length` the tokens of this sequence, `key_tokens` `S`; `segments` returns those of
    keys at the given tokens, or None.
    """
    offsets = group_offsets(key_tokens)
    for part in _parts(lists.counts, at, s):
        full = part.complete // s.tile_kv
        stop = (part.total + s.tile_kv - 1) // s.tile_kv
        for is_edge, bounds in ((False, (jnp.int32(0), full)), (True, (full, stop))):
            fetch = functools.partial(_fetch, lists.blocks, at, part, is_edge, offsets, s)
            keys = functools.partial(_keys, part, key_length, is_edge, offsets, s, segments)
            state = _loop(bounds, step, state, fetch, keys)
    return state


def _fetch(
    blocks: Ref,
    at: tuple[jax.Array, ...],
    part: _Part,
    is_edge: bool,
    offsets: dict[int, int],
    s: Settings,
    tile: jax.Array,
) -> jax.Array:
    """The blocks of a tile, including the one after the last."""
    position = _locate(tile, part, is_edge, offsets, s).position
    return plgpu.load(blocks.at[(*at, jnp.clip(position, 0, blocks.shape[-1] - 1))])


def _loop(
    bounds: tuple[jax.Array, jax.Array],
    step: Callable[[Keys, Any], Any],
    state: Any,
    fetch: Callable[[jax.Array], jax.Array],
    keys: Callable[[jax.Array, jax.Array], Keys],
) -> Any:
    """Runs `step` for all tiles within the bounds.

    Lists are read one step before they are needed: rows whose numbers the compiler would have to
    fetch in the same step do not fit its software pipeline.
    """

    def body(tile: jax.Array, carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        state, blocks = carry
        following = fetch(tile + 1)
        return step(keys(tile, blocks), state), following

    return jax.lax.fori_loop(*bounds, body, (state, fetch(bounds[0])))[0]
