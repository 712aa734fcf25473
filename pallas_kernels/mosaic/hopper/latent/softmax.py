"""The softmax of a tile of 64 tokens, in two halves: the second beside the product of the first.

Written for single lanes, which have 16 scores of each of two rows. A lane's sum of weights is that
of its own columns, until the end (`total`).

Sums are rescaled where a row's maximum has grown by more than `MARGIN` alone, by powers of two:
until then weights are larger than one, which takes nothing from their precision. Mostly no row of a
warp needs it, and then none is touched.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import lane, pipeline
from pallas_kernels.mosaic.lane import Float, fragments
from pallas_kernels.mosaic.pipeline import ROW, ROWS

_MATRIX = plgpu.Layout.WGMMA
_OF_ROWS = pipeline.array((ROWS,), jnp.float32, ROW)
MARGIN = 8.0


def maxima(
    scores: jax.Array, m: jax.Array, l: jax.Array, factor: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows' new maxima, factors of what was summed with `m`, and the lanes' sums `l` times these.

    Scores ``[64, 64]`` times the positive `factor` are powers of two. Maxima are ``-inf`` where
    nothing was visible yet.
    """

    def f(scores: Any, *rows: Any) -> Any:
        found = []
        for x, m, l in zip(fragments.by_row(scores), *map(fragments.scalars, rows), strict=True):
            top = lane.among_four(lane.tree(x, lane.maximum), lane.maximum) * factor
            top = (top > m + MARGIN).where(top, m)
            alpha = lane.exp2(m - _shift(top))
            found.append((top, alpha, l * alpha))
        return tuple(fragments.row_array(pair) for pair in zip(*found, strict=True))

    return pipeline.inline(f, (_MATRIX, ROW, ROW), (_OF_ROWS,) * 3)(scores, m, l)


def weights(
    scores: jax.Array, m: jax.Array, l: jax.Array, factor: float, half: int
) -> tuple[jax.Array, jax.Array]:
    """Weights of one half of the tokens, float32 ``[64, 32]``, and the lanes' sums with them."""

    def f(scores: Any, *rows: Any) -> Any:
        found, sums = [], []
        for x, m, l in zip(fragments.by_row(scores), *map(fragments.scalars, rows), strict=True):
            size, minus = len(x) // 2, -_shift(m)
            some = x[half * size : (half + 1) * size]
            p = [lane.exp2(v.fma(lane.number(factor), minus)) for v in some]
            found.append(p)
            sums.append(l + lane.tree(p, lambda a, b: a + b))
        return fragments.of_rows(found), fragments.row_array(sums)

    kinds = pipeline.array((ROWS, scores.shape[1] // 2), jnp.float32), _OF_ROWS
    return pipeline.inline(f, (_MATRIX, ROW, ROW), kinds)(scores, m, l)


def _shift(m: Float) -> Float:
    return m.equals(float("-inf")).where(0.0, m)


def total(l: jax.Array) -> jax.Array:
    """Rows' sums of weights, from their lanes'."""

    def f(l: Any) -> Any:
        pair = [lane.among_four(x, lambda a, b: a + b) for x in fragments.scalars(l)]
        return fragments.row_array(pair)

    return pipeline.inline(f, (ROW,), _OF_ROWS)(l)


def rescaled(o: jax.Array, alpha: jax.Array) -> jax.Array:
    """``[64, n]`` times factors of the rows; a warp whose factors are all 1 skips it."""

    def f(o: Any, alpha: Any) -> Any:
        rows, factors = fragments.by_row(o), fragments.scalars(alpha)
        flat, size = [x for row in rows for x in row], len(rows[0])
        is_one = factors[0].equals(1.0) & factors[1].equals(1.0)
        found = lane.either(
            lane.ballot(is_one).equals(-1),
            [Float] * len(flat),
            lambda: flat,
            lambda: [x * factors[i // size] for i, x in enumerate(flat)],
        )
        return fragments.of_rows([found[:size], found[size:]])

    return pipeline.inline(f, (_MATRIX, ROW), pipeline.array(o.shape, jnp.float32))(o, alpha)
