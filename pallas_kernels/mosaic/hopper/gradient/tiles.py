"""What the gradient's two kernels share: settings, operands, steps of a tile, products."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.layouts import LOG2_E
from pallas_kernels.layouts import Ref as Ref
from pallas_kernels.mosaic import bias as biases
from pallas_kernels.mosaic import pipeline
from pallas_kernels.mosaic.hopper.segments import Bounds, visible
from pallas_kernels.mosaic.pipeline import COLUMN as COLUMN
from pallas_kernels.mosaic.pipeline import ROW as ROW
from pallas_kernels.mosaic.pipeline import ROWS as ROWS
from pallas_kernels.mosaic.pipeline import WARPGROUPS as WARPGROUPS
from pallas_kernels.mosaic.products import wgmma

MATRIX = plgpu.Layout.WGMMA
# Bytes of a row of a result that are written at once.
_WIDTH = 128


@dataclasses.dataclass(frozen=True)
class Settings:
    scale: float
    is_causal: bool
    window: tuple[int, int] | None
    soft_cap: float | None
    # Whether the cap is the hardware's, as in a forward pass with e4m3 weights.
    approximate_tanh: bool
    block_q: int  # queries that share a scale, a multiple of 64
    block_kv: int  # keys that share a scale, and values that do, a multiple of 64
    stages: int  # how many steps' operands are in shared memory
    programs: int = 132  # how many run side by side, one to a multiprocessor
    # Whether the warpgroups of the gradient of keys weigh in turns, see `pipeline.PingPong`.
    ping_pong: bool = False
    # Whether the query gradient's slots have 128 keys and not 64, see `queries`. Then nothing but
    # positions hides keys, and weights are those of plain scores.
    is_wide: bool = False

    @property
    def keys(self) -> int:
        """Keys of a slot of the query gradient."""
        return 2 * ROWS if self.is_wide else ROWS

    @property
    def together(self) -> int:
        """Slots of keys that the query gradient holds at once where nothing is hidden."""
        return 1 if self.is_wide else min(self.stages, 2)

    @property
    def left(self) -> int | None:
        return None if self.window is None else self.window[0]

    @property
    def right(self) -> int | None:
        return 0 if self.is_causal else None if self.window is None else self.window[1]


class Operands(NamedTuple):
    """Arrays of a call, or references to them."""

    # Codes of the queries ``[B, N, Tp, H]``, int8 or e4m3, or `q`; `Tp` and `Sp` are padded to
    # whole blocks.
    q8: Any
    q_scale: Any  # float32 ``[B, N, Tp / block_q]``
    k8: Any  # codes of the keys ``[B, K, Sp, H]``, q8's dtype, or `k`
    k_scale: Any  # float32 ``[B, K, Sp / block_kv]``
    # Gradients of the outputs that multiply the values: ``[B, N, Tp, H]``, int8 or e4m3, or `d_out`
    d8: Any
    d_scale: Any  # float32 ``[B, N, Tp / block_q]``
    # Values that multiply them, without their scales: ``[B, K, Sp, H]``, d8's dtype, or ``[B, S, K,
    # H]``, q's dtype.
    v8: Any
    v_scale: Any  # float32 ``[B, K, Sp / block_kv]``
    # ``[B, T, N, H]``, bfloat16 or float16; `T` and `S` are multiples of 8, `H` is 64, 128 or 256.
    q: Any
    k: Any  # ``[B, S, K, H]``, q's dtype
    d_out: Any  # ``[B, T, N, H]``, q's dtype; 0 where a query sees nothing
    # Float32 ``[B, N, Tq]``, `T` rounded up to 128: log-sum-exps in powers of two, ``inf`` for rows
    # that do not exist or see nothing.
    lse: Any
    delta: Any  # float32 ``[B, N, Tq]``: ``rowsum(d_out * out)`` less the residual's cotangent
    query_lengths: Any  # int32 ``[B]``
    key_lengths: Any  # int32 ``[B]``
    # Int32 ``[B]``, by how much a query's position exceeds that of the key of its number; None if
    # nowhere.
    shifts: Any = None
    query_ids: Any = None  # int32 ``[B, Tq]``, segments; None where there are none
    key_ids: Any = None  # int32 ``[B, Sk]`` beside them, `S` rounded up to 128
    # Int32 ``[B, 2, Tq]``, instead of segments: from which key on each query sees them, and up to
    # which.
    own: Any = None
    # Int32 ``[B, 4, Tq / 128]``, `segments.Bounds` of queries among 64 keys each; with segments or
    # `own`, and so are the three that follow.
    query_bounds: Any = None
    key_bounds: Any = None  # int32 ``[B, 4, Sk / 128]``, of keys among 64 queries each
    query_order: Any = None  # int32 ``[B * Tq / 128]``, `segments.order` of tiles of queries
    key_order: Any = None  # int32 ``[B * Sk / 128]``, of keys
    slopes: Any = None  # float32 ``[N]``, by which scores fall with the distance, in powers of two
    # ``[B or 1, N or 1, T' or 1, S']``, added to scores; `T'` and `S'` are at least the numbers of
    # queries and of keys, `S'` is a multiple of 4.
    bias: Any = None
    # Float32 ``[B]``, by which a sequence's share of the bias' gradient is multiplied; None for 1.
    gains: Any = None

    @property
    def given(self) -> dict[str, Any]:
        return {name: x for name, x in self._asdict().items() if x is not None}

    @property
    def kind_of_bias(self) -> biases.Bias | None:
        return None if self.bias is None else biases.Bias.of(self.bias)

    def shift(self, b: jax.Array) -> jax.Array | int:
        return 0 if self.shifts is None else self.shifts[b]


def shifted(position: jax.Array, shift: jax.Array | int) -> jax.Array:
    return position if isinstance(shift, int) else position + shift


def bounds_at(bounds: Ref | None, b: jax.Array, tile: jax.Array) -> Bounds | None:
    """Bounds of a tile, or of the last one if there is no such tile."""
    if bounds is None:
        return None
    tile = jnp.minimum(tile, bounds.shape[2] - 1)
    return Bounds(*(bounds[b, i, tile] for i in range(4)))


def rows_of(ref: Ref, b: jax.Array, head: jax.Array, rows: Any) -> Ref:
    """Tokens of a head, in an array of codes or in one that is not quantized."""
    is_16_bit = jnp.dtype(ref.dtype).itemsize == 2
    return ref.at[(b, rows, head) if is_16_bit else (b, head, rows)]


class Place(NamedTuple):
    """A slot, or 64 of its 128 rows."""

    slot: jax.Array
    half: jax.Array | None = None


def at(memory: Ref, place: Place) -> Ref:
    whole = memory.at[place.slot]
    return whole if place.half is None else whole.at[pl.ds(place.half * ROWS, ROWS)]


def columns(x: jax.Array, half: int) -> jax.Array:
    """64 of the columns of an accumulator ``[64, 128]``."""
    return lax.slice(x, (0, half * ROWS), (ROWS, (half + 1) * ROWS))


class Span(NamedTuple):
    """Steps of the others in a slot; those before `inner` and from `outer` on hide something."""

    begin: jax.Array
    inner: jax.Array
    outer: jax.Array
    end: jax.Array


def span(
    first: jax.Array,
    count: int,
    length: jax.Array,
    before: int | None,
    after: int | None,
    together: int = 1,
    segments: Bounds | None = None,
    size: int = ROWS,
) -> Span:
    """Steps of `size` others that some of `count` positions from `first` on see, and that all see.

    Others end at `length`, and each position sees `before` back and `after` ahead, or without
    limit. The steps in the middle are a multiple of `together`; `segments` limit what is seen
    further.
    """
    last = first + (count - 1)
    seen = visible(first, last, length, before, after, segments)
    start, stop, full_start, full_stop = seen
    step = jnp.int32(size)
    end = lax.div(jnp.maximum(stop, 0) + (step - 1), step)
    begin = jnp.minimum(lax.div(start, step), end)
    inner = jnp.clip(lax.div(full_start + (step - 1), step), begin, end)
    outer = jnp.clip(lax.div(jnp.maximum(full_stop, 0), step), inner, end)
    outer = outer - lax.rem(outer - inner, jnp.int32(together))
    return Span(begin, inner, outer, end)


def place_of(
    number: jax.Array, tiles: int, order: Ref | None, rows: int
) -> tuple[jax.Array, jax.Array]:
    """Row and tile of a number: rows in turn, which share operands, in pairs from both ends.

    In a causal call one end has much to do and the other little, so all pairs have equally much.
    There are `2 * ceil(tiles / 2)` numbers a row; with an odd number of tiles one is no tile. With
    `order` (`segments.order`) there are no pairs: all `rows` of a sequence take its tile one after
    the other.
    """
    if order is not None:
        entry, row = order[lax.div(number, jnp.int32(rows))], lax.rem(number, jnp.int32(rows))
        b, tile = lax.div(entry, jnp.int32(tiles)), lax.rem(entry, jnp.int32(tiles))
        return b * rows + row, tile
    pairs = jnp.int32(pl.cdiv(tiles, 2))
    pair, is_second = lax.div(number, jnp.int32(2)), lax.rem(number, jnp.int32(2))
    row, place = lax.div(pair, pairs), lax.rem(pair, pairs)
    return row, jnp.where(is_second == 1, 2 * pairs - 1 - place, place)


def share_of(total: int, order: Ref | None) -> pipeline.TileScheduler:
    return (
        pipeline.TileScheduler(total, together=2)
        if order is None
        else pipeline.TileScheduler(total, zigzag=True)
    )


def numbers(tokens: int, order: jax.Array | None) -> int:
    """How many numbers `place_of` takes for a row."""
    if order is not None:
        return pl.cdiv(tokens, WARPGROUPS * ROWS)
    return 2 * pl.cdiv(tokens, 2 * WARPGROUPS * ROWS)


def product(a: Ref, b: Ref) -> jax.Array:
    """Starts ``a @ b.T``; both are tiles in shared memory."""
    dtype = jnp.int32 if a.dtype == jnp.int8 else jnp.float32
    left, right = (pipeline.swizzle_of(x.shape[-1], x.dtype) for x in (a, b))

    def f(a: Any, b: Any) -> Any:
        return wgmma.start(a, b, swizzle=right, a_swizzle=left)

    kind = pipeline.array((a.shape[0], b.shape[0]), dtype)
    return pipeline.inline(f, (pipeline.tile_type(a), pipeline.tile_type(b)), kind)(a, b)


def add_product(total: jax.Array, words: jax.Array, b: Ref) -> jax.Array:
    """Starts ``total + a @ b``, `a` the words of a 16-bit operand, `b` in shared memory."""
    swizzle = pipeline.swizzle_of(b.shape[-1], b.dtype)

    def f(total: Any, words: Any, b: Any) -> Any:
        return wgmma.start(words, b, swizzle=swizzle, total=total, rows_are_depth=True)

    types = (MATRIX, MATRIX, pipeline.tile_type(b))
    return pipeline.inline(f, types, pipeline.array(total.shape, total.dtype))(total, words, b)


def scores_factor(s: Settings) -> float:
    """The factor of products of unscaled codes, see `Tile.weigh`."""
    return s.scale * (LOG2_E if s.soft_cap is None else 1 / s.soft_cap)


def loaded(ref: Ref) -> jax.Array:
    """A number for each column from shared memory, before what follows."""
    x = pipeline.load(ref, COLUMN)
    kind = pipeline.array(x.shape, x.dtype, COLUMN)
    return pipeline.inline(mgpu.optimization_barrier, (COLUMN,), kind)(x)


def arrived(x: jax.Array) -> jax.Array:
    return pipeline.inline(mgpu.optimization_barrier, (MATRIX,), pipeline.array(x.shape, x.dtype))(
        x
    )


def is_seen(query: jax.Array, key: jax.Array, s: Settings) -> jax.Array:
    """Whether any of 64 queries sees any of 64 keys, as far as their positions say."""
    seen = jnp.bool_(True)
    if s.right is not None:
        seen = key <= query + (ROWS - 1 + s.right)
    if s.left is not None:
        seen = seen & (key + (ROWS - 1) >= query - s.left)
    return seen


def zeros(columns: int) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((ROWS, columns), jnp.float32), MATRIX)


def staging(dtype: Any) -> Any:
    return pipeline.tile((WARPGROUPS, ROWS, _WIDTH // jnp.dtype(dtype).itemsize), dtype)


def scale_at(scales: Ref, b: jax.Array, head: jax.Array, token: jax.Array, block: int) -> jax.Array:
    number = jnp.minimum(lax.div(token, jnp.int32(block)), scales.shape[2] - 1)
    return scales[b, head, number]


def store(x: jax.Array, memory: Ref, target: Ref) -> None:
    """Writes ``[64, n]`` through shared memory, a few channels at a time."""
    width = memory.shape[-1]
    for begin in range(0, x.shape[1], width):
        part = lax.slice(x, (0, begin), (ROWS, begin + width))
        memory[...] = part.astype(memory.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(memory, target.at[:, begin : begin + width])
        plgpu.wait_smem_to_gmem(0)
