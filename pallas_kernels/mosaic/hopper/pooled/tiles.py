"""What pooled attention's kernels on Hopper share: tiles of pooled keys, and their loading."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.layouts import LEVELS as LEVELS
from pallas_kernels.layouts import LOG2_E as LOG2_E
from pallas_kernels.layouts import Ref as Ref
from pallas_kernels.mosaic import pipeline
from pallas_kernels.mosaic.pipeline import COLUMN as COLUMN
from pallas_kernels.mosaic.pipeline import ROW as ROW
from pallas_kernels.mosaic.pipeline import ROWS as ROWS
from pallas_kernels.mosaic.pipeline import WARPGROUPS as WARPGROUPS

# Pooled keys that are copied, and multiplied, together.
TILE = 128
# A block that no array has: copies of it give zeros.
_NOWHERE = 2**20
# jax's types do not export it.
accumulator: Any = vars(plgpu)["ACC"]


@dataclasses.dataclass(frozen=True)
class Settings:
    block_q: int  # query tokens that share a list, a multiple of 128
    block_kv: int  # key tokens of a block, 64 or 128
    scale: float  # factor of the scores, not negative
    is_causal: bool  # a query sees the pooled keys whose last token is not after it
    stages: int  # tiles in shared memory
    programs: int = 132  # how many run side by side, one to a multiprocessor
    has_segments: bool = False  # a query sees only the pooled keys of its segment
    # Whether a query's position differs from that of the key with the same index.
    is_shifted: bool = False

    @property
    def factor(self) -> float:
        """Takes products to scores in powers of two."""
        return self.scale * LOG2_E

    @property
    def chunk(self) -> int:
        """Pooled keys of a block of level 8; tiles are made of multiples of it."""
        return self.block_kv // LEVELS[-1]

    @property
    def chunks(self) -> int:
        return TILE // self.chunk

    def pieces(self, level: int) -> int:
        return TILE * level // self.block_kv

    def rows(self, level: int) -> int:
        return self.block_kv // level


class Marks(NamedTuple):
    """Segments and shifts, which limit what a query sees; None where a call has none."""

    queries: Ref  # int32 ``[B, Tp]``, the segments of queries, `T` rounded up to whole blocks
    keys: Ref  # int32, the segments of keys, in the order in which a kernel needs them
    shift: Ref  # int32 ``[B]``, a query's position less a key's of the same index

    @classmethod
    def of(cls, refs: Sequence[Ref], s: Settings) -> "Marks":
        queries, keys = refs[:2] if s.has_segments else (None, None)
        return cls(queries, keys, refs[-1] if s.is_shifted else None)

    def position(self, first: jax.Array, b: jax.Array) -> jax.Array:
        """The position of query `first`, on the axis of keys."""
        return first if self.shift is None else first + self.shift[b]


def segment_memory(s: Settings, *shape: int) -> list[Any]:
    return [plgpu.SMEM(shape, jnp.int32)] if s.has_segments else []


def hide(
    x: jax.Array,
    first: jax.Array,
    segment: Sequence[Ref],
    columns: Sequence[jax.Array],
    s: Settings,
) -> jax.Array:
    """Scores ``[64, columns]`` with ``-inf`` for what their rows do not see.

    `first` is the position of the first row. `segment` is int32 ``[64]`` of the rows, or empty;
    `columns` are int32: the last token of each pooled key, and with segments its segment.
    """
    last, *others = columns
    if s.is_causal:
        position = pipeline.iota(ROW) + first
        seen = pipeline.along(last, x.shape, 1) <= pipeline.along(position, x.shape, 0)
        x = jnp.where(seen, x, -jnp.inf)
    for mine, other in zip(segment, others, strict=True):
        seen = pipeline.along(other, x.shape, 1) == pipeline.along(
            pipeline.load(mine, ROW), x.shape, 0
        )
        x = jnp.where(seen, x, -jnp.inf)
    return x


def store(x: jax.Array, staging: Ref, target: Ref) -> None:
    """Writes ``[64, H]``, as many channels at a time as `staging` has."""
    width = staging.shape[1]
    for begin in range(0, x.shape[1], width):
        staging[...] = lax.slice(x, (0, begin), (ROWS, begin + width)).astype(staging.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staging, target.at[:, pl.ds(begin, width)])
        plgpu.wait_smem_to_gmem(0)


def product(*pairs: tuple[Any, Any], columns: int) -> Any:
    """Products of warpgroups' rows: all are started, then waited for."""

    def run(*sums: Ref) -> tuple[jax.Array, ...]:
        for out, (a, b) in zip(sums, pairs, strict=True):
            plgpu.wgmma(out, a, b)
        return tuple(out[...] for out in sums)

    return pl.run_scoped(run, *[accumulator((ROWS, columns), jnp.float32)] * len(pairs))


def add_product(total: jax.Array, a: Any, b: Any) -> jax.Array:
    return pl.run_state(lambda out: plgpu.wgmma(out, a, b))(accumulator.init(total))


def pick(level: jax.Array, values: tuple[jax.Array | int, ...]) -> jax.Array:
    first, *others = (jnp.asarray(value, jnp.int32) for value in values)
    for number, value in enumerate(others, 1):
        first = jnp.where(level == number, value, first)
    return first


def _sums(values: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """The sum of the values before each value, and the sum of all."""
    sums = [jnp.int32(0)]
    for value in values:
        sums.append(sums[-1] + value)
    return tuple(sums)


class Walk(NamedTuple):
    """The tiles of pooled keys that a tile of queries attends to, in order.

    First, level by level, those made of complete blocks. Then the edges: what is left of all
    levels, the finest first, so that no block is cut by the end of a tile.
    """

    at: tuple[Any, ...]  # the query block's place in the lists
    first: tuple[jax.Array, ...]  # where each level begins in the list
    whole: tuple[jax.Array, ...]  # tiles of complete blocks, of each level
    left: tuple[jax.Array, ...]  # where in the list each level goes on at the edges
    starts: tuple[jax.Array, ...]
    """The chunk of the edges where each level begins, and their number."""
    invalid: jax.Array  # whether a level is invalid
    num_whole: jax.Array
    total: jax.Array


def walk(blocks: Ref, counts: Ref, at: tuple[jax.Array, ...], s: Settings) -> Walk:
    """Reads what query block ``at = (b, head, i)`` attends to."""
    b, head, i = at
    place = (b if blocks.shape[0] > 1 else 0, head if blocks.shape[1] > 1 else 0, i)
    read = [counts[(*place, n)] for n in range(9)]
    have, complete = tuple(read[:4]), read[4:8]
    first = _sums(have)
    whole, left, chunks = [], [], []
    for number, level in enumerate(LEVELS):
        pieces = jnp.int32(s.pieces(level))
        tiles = lax.div(complete[number], pieces)
        whole.append(tiles)
        left.append(first[number] + tiles * pieces)
        chunks.append((have[number] - tiles * pieces) * (LEVELS[-1] // level))
    starts = _sums(tuple(chunks))
    num_whole = _sums(tuple(whole))[-1]
    edges = lax.div(starts[-1] + (s.chunks - 1), jnp.int32(s.chunks))
    return Walk(
        at=place,
        first=first[:4],
        whole=tuple(whole),
        left=tuple(left),
        starts=starts,
        invalid=read[8],
        num_whole=num_whole,
        total=num_whole + edges,
    )


def level_of(x: jax.Array, ends: tuple[jax.Array, ...]) -> jax.Array:
    """How many of three ends, in ascending order, are at most `x`."""
    return functools.reduce(jnp.add, [(x >= end).astype(jnp.int32) for end in ends])


def bias_of(w: Walk, t: jax.Array) -> jax.Array:
    return level_of(t, _sums(w.whole)[1:4]).astype(jnp.float32)


def barriers(query_arrivals: int, s: Settings) -> tuple[list[Any], list[Any]]:
    """Barriers of queries, keys and values: for what is ready, and for what is free again.

    `query_arrivals` copies make up a warpgroup's queries.
    """
    # A tile is ready when its chunks are, and what belongs to it.
    tile = plgpu.Barrier(num_arrivals=s.chunks + 1, num_barriers=s.stages)
    free = plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=s.stages)
    return (
        [plgpu.Barrier(num_arrivals=query_arrivals, num_barriers=WARPGROUPS), tile, tile],
        [plgpu.Barrier(num_barriers=WARPGROUPS), free, free],
    )


def column_memory(s: Settings) -> list[Any]:
    memory = [plgpu.SMEM((s.stages, TILE), dtype) for dtype in (jnp.float32, jnp.int32)]
    return memory + segment_memory(s, s.stages, TILE)


class Source(NamedTuple):
    """Keys or values, and where tiles of them go."""

    at: tuple[jax.Array, jax.Array]  # sequence and KV head
    levels: Sequence[Ref]  # ``[B, S, K, H]``, then ``[B, K, G, H]`` of levels 2, 4 and 8
    tiles: Ref  # ``[stages, TILE, H]``
    ready: Ref  # barriers, which expect an arrival for each chunk of a tile, and one more
    free: Ref  # barriers that say that a tile's place is free


def _copy_block(
    source: Source, number: int, block: jax.Array, chunk: int, slot: jax.Array, s: Settings
) -> None:
    """Copies a block of level `number` to where chunk `chunk` of a tile begins."""
    rows = s.rows(LEVELS[number])
    span = pl.ds(block * rows, rows)
    index = (source.at[0], span, source.at[1]) if number == 0 else (*source.at, span)
    target = source.tiles.at[slot, pl.ds(chunk * s.chunk, rows)]
    plgpu.copy_gmem_to_smem(source.levels[number].at[index], target, source.ready.at[slot])
    # As if its chunks had come one by one.
    for _ in range(LEVELS[-1] // LEVELS[number] - 1):
        plgpu.barrier_arrive(source.ready.at[slot])


def produce(
    w: Walk,
    slot: jax.Array,
    blocks: Ref,
    sources: Sequence[Source],
    columns: Sequence[Ref],
    key_length: jax.Array,
    s: Settings,
    segments: Ref | None = None,
) -> jax.Array:
    """Copies the tiles of a walk to shared memory; returns the slot after the last tile.

    `slot` is the first tile's. `sources` are keys and values. `columns` are ``[stages, TILE]``, for
    the edges: float32 log2 of a column's tokens, ``-inf`` where there are none; int32 the last of
    them; with segments int32 theirs. They are ready and free with the keys. `segments` are int32
    ``[B, TILE + S + TILE]``, those of the tokens from `TILE` on.
    """
    for number, level in enumerate(LEVELS):

        def whole(t: jax.Array, slot: jax.Array, number: int = number, level: int = level) -> Any:
            pieces = s.pieces(level)
            place = w.first[number] + t * pieces
            chosen = [blocks[(*w.at, place + p)] for p in range(pieces)]
            for source in sources:
                plgpu.barrier_wait(source.free.at[slot])
                for p, block in enumerate(chosen):
                    chunk = p * (LEVELS[-1] // level)
                    _copy_block(source, number, block, chunk, slot, s)
                plgpu.barrier_arrive(source.ready.at[slot])
            return pipeline.next_slot(slot, s.stages)

        slot = lax.fori_loop(jnp.int32(0), w.whole[number], whole, slot)

    def edge(t: jax.Array, slot: jax.Array) -> jax.Array:
        first = (t - w.num_whole) * s.chunks
        chosen = [_edge_block(w, first + c, blocks) for c in range(s.chunks)]
        for n, source in enumerate(sources):
            plgpu.barrier_wait(source.free.at[slot])
            for c, (block, kind) in enumerate(chosen):
                for number, level in enumerate(LEVELS):
                    if c % (LEVELS[-1] // level) == 0:
                        copy = functools.partial(_copy_block, source, number, block, c, slot, s)
                        pl.when(kind == number)(copy)

                # Zeros where no block is left.
                nothing = jnp.full_like(block, _NOWHERE)
                fill = functools.partial(_copy_block, source, 3, nothing, c, slot, s)
                pl.when(kind == len(LEVELS))(fill)
            if n == 0:
                targets = [x.at[slot] for x in columns]
                _write_columns(w, first, chosen, key_length, targets[:2], s)
                if segments is not None:
                    of_block = segments.at[source.at[0]]
                    _write_segments(w, first, chosen, of_block, targets[2], s)
            plgpu.barrier_arrive(source.ready.at[slot])
        return pipeline.next_slot(slot, s.stages)

    return lax.fori_loop(w.num_whole, w.total, edge, slot)


def _edge_block(w: Walk, chunk: jax.Array, blocks: Ref) -> tuple[jax.Array, jax.Array]:
    """The block of a chunk of the edges, and its level's number.

    The number is 4 past the last chunk, and -1 where a block that began before continues; then its
    level is that of the chunks before.
    """
    kind = level_of(chunk, w.starts[1:4])
    within = chunk - pick(kind, w.starts[:4])
    log_chunks = 3 - kind  # of a block
    place = pick(kind, w.left) + lax.shift_right_logical(within, log_chunks)
    block = blocks[(*w.at, jnp.minimum(place, blocks.shape[3] - 1))]
    begins = (within & (lax.shift_left(jnp.int32(1), log_chunks) - 1)) == 0
    kind = jnp.where(begins, kind, -1)
    return block, jnp.where(chunk < w.starts[-1], kind, len(LEVELS))


def _write_columns(
    w: Walk,
    first: jax.Array,
    chosen: list[tuple[jax.Array, jax.Array]],
    key_length: jax.Array,
    targets: list[Ref],
    s: Settings,
) -> None:
    """Describes the columns of a tile of the edges, see `produce`; one column per thread."""
    layout = plgpu.Layout.WG_STRIDED((TILE,), vec_size=1)
    column = pipeline.iota(layout, TILE)

    def fill(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x, column.shape)

    log_chunk = s.chunk.bit_length() - 1
    piece = lax.shift_right_logical(column, jnp.full_like(column, log_chunk))
    block = jnp.zeros_like(column)
    for c, (one, _) in enumerate(chosen):
        block = jnp.where(piece == c, one, block)
    chunk = piece + first
    level = jnp.zeros_like(column)
    for end in w.starts[1:4]:
        level = level + jnp.where(chunk >= end, 1, 0)
    start = fill(w.starts[0])
    for number in range(1, len(LEVELS)):
        start = jnp.where(level == number, fill(w.starts[number]), start)
    chunks = lax.shift_right_logical(jnp.full_like(column, LEVELS[-1]), level)  # of a block
    row = ((chunk - start) & (chunks - 1)) * s.chunk + (column & (s.chunk - 1))
    begin = block * s.block_kv + lax.shift_left(row, level)
    end = jnp.minimum(begin + lax.shift_left(jnp.full_like(column, 1), level), fill(key_length))
    exists = (chunk < w.starts[-1]) & (end > begin)
    count = jnp.where(exists, end - begin, 1).astype(jnp.float32)
    targets[0][...] = jnp.where(exists, jnp.log(count) * LOG2_E, -jnp.inf)
    targets[1][...] = end - 1


def _write_segments(
    w: Walk,
    first: jax.Array,
    chosen: list[tuple[jax.Array, jax.Array]],
    segments: Ref,
    target: Ref,
    s: Settings,
) -> None:
    """The segments of the columns of a tile of the edges; one column per thread.

    A block of means has one segment. Blocks of level 1, the first ones, begin where a block can, so
    a column needs the segment as far from its block's first token as the column is from the block's
    first column.
    """
    layout = plgpu.Layout.WG_STRIDED((TILE,), vec_size=1)
    column = pipeline.iota(layout, TILE)

    def along_columns(size: int) -> jax.Array:
        return lax.shift_right_logical(column, jnp.full_like(column, size.bit_length() - 1))

    piece, place = along_columns(s.chunk), along_columns(s.block_kv)
    found = jnp.zeros_like(column)
    for c, (block, _) in enumerate(chosen):
        one = segments[TILE + block * s.block_kv]
        found = jnp.where(piece == c, one, found)
    is_token = piece + first < w.starts[1]
    for p in range(TILE // s.block_kv):
        block, _ = chosen[p * LEVELS[-1]]
        begin = TILE + (block - p) * s.block_kv
        each = plgpu.layout_cast(segments[pl.ds(begin, TILE)], layout)
        found = jnp.where(is_token & (place == p), each, found)
    target[...] = found
