"""Weights and score gradients of a tile of the gradient's two kernels, in registers."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp

from pallas_kernels.layouts import LOG2_E, Ref
from pallas_kernels.mosaic import bias as biases
from pallas_kernels.mosaic import lane, pipeline, softmax
from pallas_kernels.mosaic.hopper.gradient.tiles import MATRIX, Settings
from pallas_kernels.mosaic.lane import Bool, Float, Int, fragments
from pallas_kernels.mosaic.pipeline import COLUMN, ROW, ROWS, SCALAR


class _Mask(NamedTuple):
    """What hides pairs of a tile."""

    distance: Int  # position of the first query relative to the first key
    stop: Int  # how many columns exist
    # Segments of the lane's two rows and of its columns, or None.
    ids: tuple[list[Int], list[Int]] | None = None
    # From which key on the lane's queries see them, up to which, and the tile's first key; or None.
    own: tuple[list[Int], list[Int], Int] | None = None


def _visible(mask: _Mask, half: int, columns: int, rows_are_keys: bool, s: Settings) -> list[Bool]:
    """Whether the query sees the key, for each of the columns of row `half` of the thread's two."""
    distance, stop, ids, own = mask
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
        if own is not None:
            starts, ends, first = own
            if rows_are_keys:
                key = row + first
                seen = seen & (key >= starts[c]) & (key < ends[c])
            else:
                seen = seen & (column >= starts[half] - first - two_t)
                seen = seen & (column < ends[half] - first - two_t)
        masks.append(seen)
    return masks


def _distances(distance: Int, half: int, columns: int, rows_are_keys: bool) -> list[Float]:
    """Each column's distance from the row; `distance` is the first query's from the first key."""
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
    """A `_Mask` in a lane, from what `limits_of` gives."""
    if not limits:
        return None
    [distance], [stop], *rest = (fragments.scalars(x) for x in limits)
    if len(rest) == 3:
        starts, ends, [first] = rest
        return _Mask(distance, stop, own=(starts, ends, first))
    return _Mask(distance, stop, (rest[0], rest[1]) if rest else None)


def _weigh(
    scores: Any,
    lse: Any,
    factor: Any,
    *others: Any,
    dtype: str,
    rows_are_keys: bool,
    s: Settings,
    is_linear: bool,
    bias: biases.Bias | None = None,
) -> tuple[Any, ...]:
    linear, limits = (others[:2], others[2:]) if is_linear else ((), others)
    if bias is not None:
        words, *limits = limits  # type: ignore[assignment]
        added = biases.numbers(words, bias, rows_are_keys=rows_are_keys)
    scores = mgpu.optimization_barrier(scores)  # not before the product is done
    [c], logarithms, bounds = (
        fragments.scalars(factor),
        fragments.scalars(lse),
        _mask(tuple(limits)),
    )
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
        if bias is not None:
            down = lane.number(-LOG2_E)
            each = [b.fma(down, l) for b, l in zip(added[half], each, strict=True)]
        p = [lane.exp2(v.fma(unit, -l)) for v, l in zip(x, each, strict=True)]
        if bias is not None:  # whatever the score; `_gradients` knows -0
            p = [b.equals(-math.inf).where(-0.0, v) for b, v in zip(added[half], p, strict=True)]
        if bounds is not None:
            masks = _visible(bounds, half, len(x), rows_are_keys, s)
            p = [m.where(v, 0.0) for m, v in zip(masks, p, strict=True)]
        rows.append(p)
    results = [fragments.of_rows(rows)]
    if slopes:
        results.append(fragments.of_rows(slopes))
    if rows_are_keys:  # the barrier fixes them here: the next product reads them
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
    has_bias: bool = False,
) -> Any:
    products = mgpu.optimization_barrier(products)  # not before the products are done
    [c], deltas = fragments.scalars(factor), fragments.scalars(delta)
    slopes: Any = [None, None]
    if s.soft_cap is not None:
        slope, *others = others  # type: ignore[assignment]
        slopes = fragments.by_row(slope)
    bounds = _mask(tuple(others))
    rows = []
    pairs = zip(fragments.by_row(weights), fragments.by_row(products), slopes, strict=True)
    for half, (p, x, slope) in enumerate(pairs):
        each = _of_each(deltas, half, len(x), rows_are_keys)
        d = [_to_float(v).fma(c, -e) for v, e in zip(x, each, strict=True)]
        d = [v * w for v, w in zip(d, p, strict=True)]
        if slope is not None:
            d = [v * w for v, w in zip(d, slope, strict=True)]
        if has_bias:  # a weight of -0 is that of a pair which the bias hides
            d = [(w.as_int() < 0).where(0.0, v) for w, v in zip(p, d, strict=True)]
        if bounds is not None:
            masks = _visible(bounds, half, len(x), rows_are_keys, s)
            d = [m.where(v, 0.0) for m, v in zip(masks, d, strict=True)]
        rows.append(d)
    return mgpu.optimization_barrier(fragments.carrier(fragments.half_words(rows, dtype)))


def _add_gradients(
    sums: Any,
    weights: Any,
    products: Any,
    delta: Any,
    lse: Any,
    factor: Any,
    gain: Any,
    *limits: Any,
    s: Settings,
) -> Any:
    products = mgpu.optimization_barrier(products)  # not before the products are done
    [c], [share] = fragments.scalars(factor), fragments.scalars(gain)
    bounds, rows = _mask(limits), []
    of_rows = zip(fragments.scalars(delta), fragments.scalars(lse), strict=True)
    arrays = (fragments.by_row(a) for a in (sums, weights, products))
    for half, (total, p, x, (e, l)) in enumerate(zip(*arrays, of_rows, strict=True)):
        d = [_to_float(v).fma(c, -e) * w for v, w in zip(x, p, strict=True)]
        # A query that sees nothing, or a pair that is hidden, adds nothing, not even a NaN.
        blind = l.equals(math.inf)
        d = [(blind | (w.as_int() < 0)).where(0.0, v) for w, v in zip(p, d, strict=True)]
        if bounds is not None:
            masks = _visible(bounds, half, len(x), False, s)
            d = [m.where(v, 0.0) for m, v in zip(masks, d, strict=True)]
        rows.append([v.fma(share, old) for v, old in zip(d, total, strict=True)])
    return mgpu.optimization_barrier(fragments.of_rows(rows))


@dataclasses.dataclass(frozen=True)
class Tile:
    """The two elementwise steps of a tile ``[64, 64]`` of weights."""

    rows_are_keys: bool  # whether rows are keys and columns queries, or the reverse
    dtype: str  # of the weights and gradients as operands: ``"bfloat16"`` or ``"float16"``
    s: Settings
    bias: biases.Bias | None = None  # what is static of a bias, or None

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
        added: tuple[jax.Array, ...] = (),
    ) -> tuple[jax.Array, ...]:
        """Weights float32, with a soft cap its slopes, and if rows are keys the weights as words.

        Words are those of a 16-bit operand. `scores` are products that were waited for, `lse` is
        that of the queries in powers of two, and `factor` takes scores to powers of two, or with a
        soft cap to units of it. `limits` are as of `limits_of`, none if nothing is hidden; `linear`
        is the slope by which scores fall, in powers of two, and the distance, or none; `added` are
        the bias' words, of `biases.of_keys` or `of_queries`, or none.
        """
        types = (MATRIX, self._queries, SCALAR, *[SCALAR] * len(linear), *[MATRIX] * len(added))
        types = (*types, *self._types(limits))
        returns = [pipeline.array((ROWS, ROWS), jnp.float32)] * (
            1 if self.s.soft_cap is None else 2
        )
        if self.rows_are_keys:
            returns.append(pipeline.array((ROWS, 32), jnp.int32))
        f = functools.partial(_weigh, **self._static, is_linear=bool(linear), bias=self.bias)
        given = (scores, lse, factor, *linear, *added, *limits)
        results: tuple[jax.Array, ...] = pipeline.inline(f, types, tuple(returns))(*given)
        return results

    def score_gradients(
        self,
        weights: jax.Array,
        products: jax.Array,
        delta: jax.Array,
        factor: jax.Array,
        slopes: tuple[jax.Array, ...],
        limits: tuple[jax.Array, ...],
    ) -> jax.Array:
        """Words of ``weights * (factor * products - delta)``, times the soft cap's slopes."""
        types = [MATRIX, MATRIX, self._queries, SCALAR]
        types += [MATRIX] * len(slopes) + self._types(limits)
        f = functools.partial(_gradients, **self._static, has_bias=self.bias is not None)
        words: jax.Array = pipeline.inline(f, tuple(types), pipeline.array((ROWS, 32), jnp.int32))(
            weights, products, delta, factor, *slopes, *limits
        )
        return words

    def add_gradients(
        self,
        sums: jax.Array,
        weights: jax.Array,
        products: jax.Array,
        delta: jax.Array,
        lse: jax.Array,
        factor: jax.Array,
        gain: jax.Array,
        limits: tuple[jax.Array, ...],
    ) -> jax.Array:
        """`sums` plus `gain` times what `score_gradients` has without a cap's slopes, in float32.

        Rows are queries.
        """
        types = (MATRIX, MATRIX, MATRIX, ROW, ROW, SCALAR, SCALAR, *self._types(limits))
        f = functools.partial(_add_gradients, s=self.s)
        found: jax.Array = pipeline.inline(f, types, pipeline.array((ROWS, ROWS), jnp.float32))(
            sums, weights, products, delta, lse, factor, gain, *limits
        )
        return found

    def limits_of(
        self,
        query: jax.Array,
        key: jax.Array,
        columns: jax.Array,
        ids: tuple[Ref, Ref] | None,
        own: tuple[Ref, Ref] | None,
        is_masked: bool,
    ) -> tuple[jax.Array, ...]:
        """The fields of `_Mask`: `ids` of the rows and the columns, or `own`, in shared memory.

        `query` is the position of the tile's first query relative to the first key of all.
        """
        if not is_masked:
            return ()
        limits = (query - key, columns)
        if own is not None:
            return (*limits, *(pipeline.load(ref, self._queries) for ref in own), key)
        if ids is not None:
            return (*limits, pipeline.load(ids[0], ROW), pipeline.load(ids[1], COLUMN))
        return limits

    def _types(self, limits: tuple[jax.Array, ...]) -> list[Any]:
        rest = [self._queries, self._queries, SCALAR] if len(limits) == 5 else [ROW, COLUMN]
        return [SCALAR, SCALAR, *rest][: len(limits)]
