"""Results of 64 rows from registers to global memory, those rows that there are."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.layouts import Ref
from pallas_kernels.mosaic import lane, ring
from pallas_kernels.mosaic.lane import Pointer, fragments
from pallas_kernels.mosaic.ring import ROW, SCALAR

_EIGHT = 8


def channels(
    x: jax.Array, out: Ref, base: jax.Array, first: jax.Array, rows: int, channel: jax.Array
) -> None:
    """Stores the channels of `x`, float32 ``[64, n]``, to `out`, ``[.., rows, H]``, at `channel`.

    `base` is the number of the sequence's first row in `out`, and `first` that of the first row of
    `x` in the sequence; rows past the sequence's `rows` are not stored.
    """
    width, dtype = out.shape[-1], jnp.dtype(out.dtype)

    def f(x: Any, out: Any, *numbers: Any) -> None:
        start, row, column = (lane.scalar(n) for n in numbers)
        own, t = fragments.row_and_place()
        for half, values in enumerate(fragments.by_row(x)):
            at = row + own + (_EIGHT * half)
            with lane.when(at < rows):
                target = Pointer.to(out).times(start + at, width * dtype.itemsize)
                target = target.at((column + t * 2) * dtype.itemsize)
                for i in range(0, len(values), 2):
                    pair, here = values[i : i + 2], target.at(4 * i * dtype.itemsize)
                    if dtype.itemsize == 2:
                        here.store(lane.half.pack(pair[0], pair[1], dtype.name))
                    else:
                        here.store_words([v.as_int() for v in pair])

    kinds = (plgpu.Layout.WGMMA, plgpu.RefType(), SCALAR, SCALAR, SCALAR)
    ring.inline(f, kinds)(x, out, base, first, channel)


def numbers(x: jax.Array, out: Ref, base: jax.Array, first: jax.Array, rows: int) -> None:
    """Stores a number of each row, float32 ``[64]``, to ``[.., rows]``; see `channels`."""

    def f(x: Any, out: Any, *numbers: Any) -> None:
        start, row = (lane.scalar(n) for n in numbers)
        own, t = fragments.row_and_place()
        for half, value in enumerate(fragments.scalars(x)):
            at = row + own + (_EIGHT * half)
            with lane.when(t.equals(0) & (at < rows)):
                Pointer.to(out).times(start + at, 4).store(value)

    ring.inline(f, (ROW, plgpu.RefType(), SCALAR, SCALAR))(x, out, base, first)
