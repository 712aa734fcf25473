"""What the gradient's two kernels share: settings, a tile's weights and score gradients."""

import dataclasses
import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.layouts import LOG2_E
from pallas_kernels.layouts import Ref as Ref
from pallas_kernels.mosaic import lane, ring, softmax
from pallas_kernels.mosaic.hopper.segments import Bounds
from pallas_kernels.mosaic.lane import Bool, Float, Int, fragments
from pallas_kernels.mosaic.products import wgmma
from pallas_kernels.mosaic.ring import COLUMN as COLUMN
from pallas_kernels.mosaic.ring import ROW as ROW
from pallas_kernels.mosaic.ring import ROWS as ROWS
from pallas_kernels.mosaic.ring import SCALAR
from pallas_kernels.mosaic.ring import WARPGROUPS as WARPGROUPS

MATRIX = plgpu.Layout.WGMMA
# Bytes of a row of a result that are written at once.
_WIDTH = 128


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is static in a call.

    Attributes:
      scale: factor of the scores.
      is_causal: a query sees keys up to its own position.
      window: optional (left, right).
      soft_cap: optional cap of the scores.
      approximate_tanh: whether the cap is the hardware's, as in a forward pass with e4m3 weights.
      block_q: queries that share a scale, a multiple of 64.
      block_kv: keys that share a scale, and values that do, a multiple of 64.
      stages: how many steps' operands are in shared memory.
      in_turns: whether the warpgroups of the gradient of keys weigh in turns, see `ring.Turns`.
      programs: how many run side by side, one to a multiprocessor.
    """

    scale: float
    is_causal: bool
    window: tuple[int, int] | None
    soft_cap: float | None
    approximate_tanh: bool
    block_q: int
    block_kv: int
    stages: int
    programs: int = 132
    in_turns: bool = False

    @property
    def together(self) -> int:
        """Slots of keys that the query gradient has in hand where nothing is hidden."""
        return min(self.stages, 2)

    @property
    def left(self) -> int | None:
        """How far back a query sees."""
        return None if self.window is None else self.window[0]

    @property
    def right(self) -> int | None:
        """How far ahead a query sees."""
        return 0 if self.is_causal else None if self.window is None else self.window[1]


class Operands(NamedTuple):
    """Arrays of a call, or references to them.

    Attributes:
      q8: codes of the queries ``[B, N, Tp, H]``, int8 or e4m3, or `q`; `Tp` and `Sp` are padded to
        whole blocks.
      q_scale: float32 ``[B, N, Tp / block_q]``.
      k8: codes of the keys ``[B, K, Sp, H]``, q8's dtype, or `k`.
      k_scale: float32 ``[B, K, Sp / block_kv]``.
      d8: gradients of the outputs that multiply the values: ``[B, N, Tp, H]``, int8 or e4m3, or
        `d_out`.
      d_scale: float32 ``[B, N, Tp / block_q]``.
      v8: values that multiply them, without their scales: ``[B, K, Sp, H]``, d8's dtype, or
        ``[B, S, K, H]``, q's dtype.
      v_scale: float32 ``[B, K, Sp / block_kv]``.
      q: ``[B, T, N, H]``, bfloat16 or float16; `T` and `S` are multiples of 8, `H` is 64, 128 or
        256.
      k: ``[B, S, K, H]``, q's dtype.
      d_out: ``[B, T, N, H]``, q's dtype; 0 where a query sees nothing.
      lse: float32 ``[B, N, Tq]``, `T` rounded up to 128: log-sum-exps in powers of two, ``inf`` for
        rows that do not exist or see nothing.
      delta: float32 ``[B, N, Tq]``: ``rowsum(d_out * out)`` less the residual's cotangent.
      query_lengths: int32 ``[B]``.
      key_lengths: int32 ``[B]``.
      shifts: int32 ``[B]``, by how much a query's position exceeds that of the key of its number;
        None if nowhere.
      query_ids: int32 ``[B, Tq]``, segments; with them the three that follow, else None.
      key_ids: int32 ``[B, Sk]``, `S` rounded up to 128.
      query_bounds: int32 ``[B, 4, Tq / 128]``, `segments.bounds` of queries among 64 keys each.
      key_bounds: int32 ``[B, 4, Sk / 128]``, of keys among 64 queries each.
      slopes: float32 ``[N]``, by which scores fall with the distance, in powers of two.
    """

    q8: Any
    q_scale: Any
    k8: Any
    k_scale: Any
    d8: Any
    d_scale: Any
    v8: Any
    v_scale: Any
    q: Any
    k: Any
    d_out: Any
    lse: Any
    delta: Any
    query_lengths: Any
    key_lengths: Any
    shifts: Any = None
    query_ids: Any = None
    key_ids: Any = None
    query_bounds: Any = None
    key_bounds: Any = None
    slopes: Any = None

    @property
    def given(self) -> dict[str, Any]:
        """Those that there are, by name."""
        return {name: x for name, x in self._asdict().items() if x is not None}

    def shift(self, b: jax.Array) -> jax.Array | int:
        """Of a sequence's positions."""
        return 0 if self.shifts is None else self.shifts[b]


def shifted(position: jax.Array, shift: jax.Array | int) -> jax.Array:
    """Their sum, or what there was if nothing is shifted."""
    return position if isinstance(shift, int) else position + shift


def bounds_at(bounds: Ref | None, b: jax.Array, tile: jax.Array) -> Bounds | None:
    """Of a tile, or of the last one if there is no such tile."""
    if bounds is None:
        return None
    tile = jnp.minimum(tile, bounds.shape[2] - 1)
    return Bounds(*(bounds[b, i, tile] for i in range(4)))


def rows_of(ref: Ref, b: jax.Array, head: jax.Array, rows: Any) -> Ref:
    """Tokens of a head, of codes or of an array that is not quantized."""
    is_16_bit = jnp.dtype(ref.dtype).itemsize == 2
    return ref.at[(b, rows, head) if is_16_bit else (b, head, rows)]


class Span(NamedTuple):
    """Steps of a tile, 64 others each: up to `inner` and from `outer` on something is hidden."""

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
) -> Span:
    """Steps of 64 others that some of `count` positions have to do with, and all of them.

    Args:
      first: of the positions.
      count: how many there are.
      length: others from there on are none.
      before: how far back one goes, or None.
      after: how far ahead, or None.
      together: of how many the steps in the middle are a multiple.
      segments: what those of the positions leave.
    """
    last = first + (count - 1)
    start, stop, full_start, full_stop = jnp.int32(0), length, jnp.int32(0), length
    if after is not None:
        stop = jnp.minimum(stop, last + (after + 1))
        full_stop = jnp.minimum(full_stop, first + (after + 1))
    if before is not None:
        start = jnp.maximum(first - before, 0)
        full_start = jnp.maximum(last - before, 0)
    if segments is not None:
        start, stop = jnp.maximum(start, segments.start), jnp.minimum(stop, segments.stop)
        full_start = jnp.maximum(full_start, segments.full_start)
        full_stop = jnp.minimum(full_stop, segments.full_stop)
    step = jnp.int32(ROWS)
    end = lax.div(jnp.maximum(stop, 0) + (step - 1), step)
    begin = jnp.minimum(lax.div(start, step), end)
    inner = jnp.clip(lax.div(full_start + (step - 1), step), begin, end)
    outer = jnp.clip(lax.div(jnp.maximum(full_stop, 0), step), inner, end)
    outer = outer - lax.rem(outer - inner, jnp.int32(together))
    return Span(begin, inner, outer, end)


def place_of(number: jax.Array, tiles: int) -> tuple[jax.Array, jax.Array]:
    """Row and tile of a number: rows in turn, which share operands, in pairs from both ends.

    In a causal call one end has much to do and the other one little: all pairs have equally much.

    Args:
      number: of `2 * ceil(tiles / 2)` a row; with an odd number of tiles one of them is none.
      tiles: of a row.
    """
    pairs = jnp.int32(pl.cdiv(tiles, 2))
    pair, is_second = lax.div(number, jnp.int32(2)), lax.rem(number, jnp.int32(2))
    row, place = lax.div(pair, pairs), lax.rem(pair, pairs)
    return row, jnp.where(is_second == 1, 2 * pairs - 1 - place, place)


def numbers(tokens: int) -> int:
    """How many numbers `place_of` takes for a row."""
    return 2 * pl.cdiv(tokens, 2 * WARPGROUPS * ROWS)


def product(a: Ref, b: Ref) -> jax.Array:
    """Starts ``a @ b.T`` of tiles in shared memory."""
    dtype = jnp.int32 if a.dtype == jnp.int8 else jnp.float32
    left, right = (ring.swizzle_of(x.shape[-1], x.dtype) for x in (a, b))

    def f(a: Any, b: Any) -> Any:
        return wgmma.start(a, b, swizzle=right, a_swizzle=left)

    kind = ring.array((a.shape[0], b.shape[0]), dtype)
    return ring.inline(f, (ring.tile_type(a), ring.tile_type(b)), kind)(a, b)


def add_product(total: jax.Array, words: jax.Array, b: Ref) -> jax.Array:
    """Starts ``total + a @ b``, `a` the words of a 16-bit operand, `b` in shared memory."""
    swizzle = ring.swizzle_of(b.shape[-1], b.dtype)

    def f(total: Any, words: Any, b: Any) -> Any:
        return wgmma.start(words, b, swizzle=swizzle, total=total, rows_are_depth=True)

    types = (MATRIX, MATRIX, ring.tile_type(b))
    return ring.inline(f, types, ring.array(total.shape, total.dtype))(total, words, b)


class _Mask(NamedTuple):
    """What hides pairs of a tile.

    Attributes:
      distance: the first query relative to the first key.
      stop: how many columns exist.
      ids: segments of the lane's two rows and of its columns, or None.
    """

    distance: Int
    stop: Int
    ids: tuple[list[Int], list[Int]] | None


def _visible(mask: _Mask, half: int, columns: int, rows_are_keys: bool, s: Settings) -> list[Bool]:
    """For each of a row's columns whether the query sees the key.

    Args:
      mask: what hides them.
      half: which of the thread's rows.
      columns: how many the thread holds of it.
      rows_are_keys: and columns queries; else the other way round.
      s: settings.
    """
    distance, stop, ids = mask
    row, t = fragments.row_and_place()
    two_t = t * 2
    row = row + 8 * half
    stop = stop - two_t
    masks = []
    for c in range(columns):
        column = lane.integer(8 * (c // 2) + c % 2)
        seen = column < stop
        # The key minus the query: from ``distance - left`` to ``distance + right``.
        if rows_are_keys:
            if s.right is not None:
                seen = seen & (column >= row - distance - s.right - two_t)
            if s.left is not None:
                seen = seen & (column <= row - distance + s.left - two_t)
        else:
            if s.right is not None:
                seen = seen & (column <= row + distance + s.right - two_t)
            if s.left is not None:
                seen = seen & (column >= row + distance - s.left - two_t)
        if ids is not None:
            seen = seen & ids[0][half].equals(ids[1][c])
        masks.append(seen)
    return masks


def _distances(distance: Int, half: int, columns: int, rows_are_keys: bool) -> list[Float]:
    """How far each of a row's columns is from it, of the first query relative to the first key."""
    row, t = fragments.row_and_place()
    row = row + 8 * half
    first = distance + t * 2 - row if rows_are_keys else distance + row - t * 2
    sign = 1 if rows_are_keys else -1
    steps = [lane.number(float(sign * (8 * (c // 2) + c % 2))) for c in range(columns)]
    return [lane.absolute(first.to_float() + step) for step in steps]


def _of_each(values: list[Float], half: int, columns: int, rows_are_keys: bool) -> list[Float]:
    """Numbers of queries, for the columns of one of the thread's rows."""
    return values if rows_are_keys else [values[half]] * columns


def _to_float(x: Any) -> Float:
    return x.to_float() if isinstance(x, Int) else x


def _mask(limits: tuple[Any, ...]) -> _Mask | None:
    """Of `limits_of` in a lane, and of ids of rows and columns."""
    if not limits:
        return None
    [distance], [stop], *ids = (fragments.scalars(x) for x in limits)
    return _Mask(distance, stop, (ids[0], ids[1]) if ids else None)


def _weigh(
    scores: Any,
    lse: Any,
    factor: Any,
    *others: Any,
    dtype: str,
    rows_are_keys: bool,
    s: Settings,
    is_linear: bool,
) -> tuple[Any, ...]:
    """`weigh` in a lane."""
    linear, limits = (others[:2], others[2:]) if is_linear else ((), others)
    scores = mgpu.optimization_barrier(scores)  # not before the product is there
    [c], logarithms, bounds = fragments.scalars(factor), fragments.scalars(lse), _mask(limits)
    rows, slopes = [], []
    for half, x in enumerate(fragments.by_row(scores)):
        each = _of_each(logarithms, half, len(x), rows_are_keys)
        x = [_to_float(v) for v in x]
        if s.soft_cap is not None:
            tanh = lane.tanh if s.approximate_tanh else softmax.tanh
            ratios = [tanh(v * c) for v in x]
            x = [v * s.soft_cap for v in ratios]
            slopes.append([(-v).fma(v, lane.number(1.0)) for v in ratios])
        unit = c if s.soft_cap is None else lane.number(LOG2_E)
        if linear:
            [slope], [distance] = (fragments.scalars(a) for a in linear)
            away = _distances(distance, half, len(x), rows_are_keys)
            each = [d.fma(slope, l) for d, l in zip(away, each, strict=True)]
        p = [lane.exp2(v.fma(unit, -l)) for v, l in zip(x, each, strict=True)]
        if bounds is not None:
            masks = _visible(bounds, half, len(x), rows_are_keys, s)
            p = [m.where(v, 0.0) for m, v in zip(masks, p, strict=True)]
        rows.append(p)
    results = [fragments.of_rows(rows)]
    if slopes:
        results.append(fragments.of_rows(slopes))
    if rows_are_keys:  # made here, by the barrier: the next product reads them
        words = fragments.carrier(fragments.half_words(rows, dtype))
        results.append(mgpu.optimization_barrier(words))
    return tuple(results)


def _gradients(
    weights: Any,
    products: Any,
    delta: Any,
    factor: Any,
    *others: Any,
    dtype: str,
    rows_are_keys: bool,
    s: Settings,
    is_linear: bool,
) -> Any:
    """`score_gradients` in a lane."""
    products = mgpu.optimization_barrier(products)  # not before they are there
    [c], deltas = fragments.scalars(factor), fragments.scalars(delta)
    slopes: Any = [None, None]
    if s.soft_cap is not None:
        slope, *others = others  # type: ignore[assignment]
        slopes = fragments.by_row(slope)
    sums: Any = None
    if is_linear:
        total, distance, *others = others  # type: ignore[assignment]
        sums, [distance] = fragments.scalars(total), fragments.scalars(distance)
    bounds = _mask(tuple(others))
    rows = []
    pairs = zip(fragments.by_row(weights), fragments.by_row(products), slopes, strict=True)
    for half, (p, x, slope) in enumerate(pairs):
        each = _of_each(deltas, half, len(x), rows_are_keys)
        d = [_to_float(v).fma(c, -e) for v, e in zip(x, each, strict=True)]
        d = [v * w for v, w in zip(d, p, strict=True)]
        if sums is not None:
            if bounds is not None:
                masks = _visible(bounds, half, len(x), rows_are_keys, s)
                d = [m.where(v, 0.0) for m, v in zip(masks, d, strict=True)]
            for v, w in zip(d, _distances(distance, half, len(x), rows_are_keys), strict=True):
                sums[half] = v.fma(w, sums[half])
        if slope is not None:
            d = [v * w for v, w in zip(d, slope, strict=True)]
        if bounds is not None:
            masks = _visible(bounds, half, len(x), rows_are_keys, s)
            d = [m.where(v, 0.0) for m, v in zip(masks, d, strict=True)]
        rows.append(d)
    words = mgpu.optimization_barrier(fragments.carrier(fragments.half_words(rows, dtype)))
    return words if sums is None else (words, fragments.row_array(sums))


def sum_of_four(x: jax.Array) -> jax.Array:
    """Of a row's lanes, which have each their own number."""

    def f(x: Any) -> Any:
        return fragments.row_array([lane.among_four(v, operator.add) for v in fragments.scalars(x)])

    return ring.inline(f, (ROW,), ring.array((ROWS,), jnp.float32, ROW))(x)


@dataclasses.dataclass(frozen=True)
class Tile:
    """The two elementwise steps of a tile ``[64, 64]`` of weights.

    Attributes:
      rows_are_keys: and columns queries; else the other way round.
      dtype: of the weights and gradients as operands: ``"bfloat16"`` or ``"float16"``.
      s: settings.
    """

    rows_are_keys: bool
    dtype: str
    s: Settings

    @property
    def _queries(self) -> Any:
        return COLUMN if self.rows_are_keys else ROW

    @property
    def _static(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "rows_are_keys": self.rows_are_keys, "s": self.s}

    def weigh(
        self,
        scores: jax.Array,
        lse: jax.Array,
        factor: jax.Array,
        limits: tuple[jax.Array, ...],
        linear: tuple[jax.Array, ...] = (),
    ) -> tuple[jax.Array, ...]:
        """Weights float32, with a soft cap its slopes, and if rows are keys the weights as words.

        Words are those of a 16-bit operand.

        Args:
          scores: products, waited for.
          lse: of the queries, in powers of two.
          factor: of the scores, in powers of two; with a soft cap, in units of it.
          limits: distance, columns and ids, see `_Mask`; none if nothing is hidden.
          linear: the slope by which scores fall, in powers of two, and the distance; or none.
        """
        types = (MATRIX, self._queries, SCALAR, *[SCALAR] * len(linear), *_types(limits))
        returns = [ring.array((ROWS, ROWS), jnp.float32)] * (1 if self.s.soft_cap is None else 2)
        if self.rows_are_keys:
            returns.append(ring.array((ROWS, 32), jnp.int32))
        f = functools.partial(_weigh, **self._static, is_linear=bool(linear))
        results: tuple[jax.Array, ...]
        results = ring.inline(f, types, tuple(returns))(scores, lse, factor, *linear, *limits)
        return results

    def score_gradients(
        self,
        weights: jax.Array,
        products: jax.Array,
        delta: jax.Array,
        factor: jax.Array,
        slopes: tuple[jax.Array, ...],
        limits: tuple[jax.Array, ...],
        linear: tuple[jax.Array, ...] = (),
    ) -> Any:
        """Words of ``weights * (factor * products - delta)``, times the soft cap's slopes.

        With `linear`, where rows are queries, what is to be added to and the distance, also the
        sums over each lane's columns of the scores' gradients times distances.
        """
        words: Any = ring.array((ROWS, 32), jnp.int32)
        types = [MATRIX, MATRIX, self._queries, SCALAR]
        types += [MATRIX] * len(slopes) + [ROW, SCALAR][: len(linear)] + _types(limits)
        f = functools.partial(_gradients, **self._static, is_linear=bool(linear))
        returns = (words, ring.array((ROWS,), jnp.float32, ROW)) if linear else words
        return ring.inline(f, tuple(types), returns)(
            weights, products, delta, factor, *slopes, *linear, *limits
        )


def _types(limits: tuple[jax.Array, ...]) -> list[Any]:
    return [SCALAR, SCALAR, ROW, COLUMN][: len(limits)]


def scores_factor(s: Settings) -> float:
    """Of products of unscaled codes, see `Tile.weigh`."""
    return s.scale * (LOG2_E if s.soft_cap is None else 1 / s.soft_cap)


def limits_of(
    query: jax.Array,
    key: jax.Array,
    columns: jax.Array,
    ids: tuple[Ref, Ref] | None,
    is_masked: bool,
) -> tuple[jax.Array, ...]:
    """See `_Mask`; `ids` of the rows and the columns in shared memory."""
    if not is_masked:
        return ()
    limits = (query - key, columns)
    return limits if ids is None else (*limits, ring.load(ids[0], ROW), ring.load(ids[1], COLUMN))


def arrived(x: jax.Array) -> jax.Array:
    """An accumulator that was waited for; nothing that uses it moves before this."""
    return ring.inline(mgpu.optimization_barrier, (MATRIX,), ring.array(x.shape, x.dtype))(x)


def is_seen(query: jax.Array, key: jax.Array, s: Settings) -> jax.Array:
    """Whether any of 64 queries sees any of 64 keys, as far as their positions say."""
    seen = jnp.bool_(True)
    if s.right is not None:
        seen = key <= query + (ROWS - 1 + s.right)
    if s.left is not None:
        seen = seen & (key + (ROWS - 1) >= query - s.left)
    return seen


def zeros(columns: int) -> jax.Array:
    """An accumulator."""
    return plgpu.layout_cast(jnp.zeros((ROWS, columns), jnp.float32), MATRIX)


def staging(dtype: Any) -> Any:
    """Memory of results on their way out."""
    return ring.tile((WARPGROUPS, ROWS, _WIDTH // jnp.dtype(dtype).itemsize), dtype)


def scale_at(scales: Ref, b: jax.Array, head: jax.Array, token: jax.Array, block: int) -> jax.Array:
    """The scale of a token's block."""
    number = jnp.minimum(lax.div(token, jnp.int32(block)), scales.shape[2] - 1)
    return scales[b, head, number]


def store(x: jax.Array, memory: Ref, target: Ref) -> None:
    """Writes ``[64, n]`` through shared memory, some channels at a time."""
    width = memory.shape[-1]
    for begin in range(0, x.shape[1], width):
        part = lax.slice(x, (0, begin), (ROWS, begin + width))
        memory[...] = part.astype(memory.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(memory, target.at[:, begin : begin + width])
        plgpu.wait_smem_to_gmem(0)


def along_rows(x: jax.Array, columns: int) -> jax.Array:
    """``x[..]`` of rows, repeated over the columns."""
    return lax.broadcast_in_dim(x, (ROWS, columns), (0,))


def iota() -> jax.Array:
    """The numbers of a warpgroup's rows."""
    return plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW)
