"""The two products of a tile of keys: of 16-bit numbers, and of e4m3.

Both take turns: while one warpgroup multiplies, the other one computes exponentials. What a product
reads from registers, and where it sums, is not touched until a wait.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.layouts import E4M3_MAX, Ref
from pallas_kernels.mosaic import lane, pipeline
from pallas_kernels.mosaic.lane import Float, Int, Pointer, fragments
from pallas_kernels.mosaic.pipeline import ROW, ROWS
from pallas_kernels.mosaic.products import wgmma

_MATRIX = plgpu.Layout.WGMMA
# jax's types do not export it.
accumulator: Any = vars(plgpu)["ACC"]
_INFINITY_BITS = {"bfloat16": 0x7F80, "float16": 0x7C00}
_TINY = 2.0**-126

Then = Callable[[], None]  # called while a product is in flight


@dataclasses.dataclass(frozen=True)
class Sixteen:
    """Products of bfloat16 or float16, with all operands in shared memory."""

    q: Ref  # a warpgroup's queries ``[64, H]``
    k: Ref  # tiles of keys ``[stages, t, H]``
    v: Ref  # tiles of values, the same
    shift = 0.0
    query_factor = None

    def scores(self, slot: jax.Array, then: Then) -> jax.Array:
        """Float32 ``[64, t]`` of a tile of keys."""

        def f(out: Ref) -> jax.Array:
            plgpu.wgmma(out, self.q, pipeline.transposed(self.k.at[slot]))
            then()
            return out[...]

        return pl.run_scoped(f, accumulator((ROWS, self.k.shape[1]), jnp.float32))

    def prepare(self, o: jax.Array, p: jax.Array, alpha: jax.Array) -> tuple[jax.Array, ...]:
        """The sums before, rescaled, and weights as `add` takes them."""
        return o * pipeline.along(alpha, o.shape, 0), p.astype(self.v.dtype)

    def add(
        self, o: jax.Array, p: jax.Array, alpha: jax.Array, slot: jax.Array, then: Then
    ) -> jax.Array:
        """`o` plus the weighted values of a tile."""
        del alpha

        def f(out: Ref) -> None:
            plgpu.wgmma(out, p, self.v.at[slot])
            then()

        return pl.run_state(f)(accumulator.init(o))


@dataclasses.dataclass(frozen=True)
class Eight:
    """Products of e4m3: queries and weights from registers, each tile summed separately.

    The matrix unit sums such products coarsely, so its sum over a tile of values is added to the
    rest in float32.
    """

    q: jax.Array  # a warpgroup's queries, e4m3 ``[64, H]``, in registers
    query_factor: jax.Array  # the value of a row's 1, float32 ``[64]``
    k: Ref  # tiles of keys ``[stages, t, H]`` in shared memory
    v: Ref  # tiles of values ``[stages, H, t]``, tokens permuted as in `transpose`
    # Weights are up to 448, which is divided out with their sum.
    shift = math.log2(E4M3_MAX)

    @classmethod
    def of(cls, queries: Ref, k: Ref, v: Ref) -> "Eight":
        """From a warpgroup's 16-bit queries in shared memory, which it quantizes row by row."""
        rows, head_dim = queries.shape
        dtype = jnp.dtype(queries.dtype).name
        kinds = (
            pipeline.array((rows, head_dim), jnp.float8_e4m3fn, plgpu.Layout.WGMMA_8BIT),
            pipeline.array((rows,), jnp.float32, ROW),
        )
        f = functools.partial(_quantized, head_dim=head_dim, dtype=dtype)
        q, factor = pipeline.inline(f, (pipeline.tile_type(queries),), kinds)(queries)
        return cls(q, factor, k, v)

    def scores(self, slot: jax.Array, then: Then) -> jax.Array:
        return self._product(self.q, self.k.at[slot], then)

    def prepare(self, o: jax.Array, p: jax.Array, alpha: jax.Array) -> tuple[jax.Array, ...]:
        del alpha
        kind = pipeline.array(p.shape, jnp.float8_e4m3fn, plgpu.Layout.WGMMA_8BIT)
        return o, pipeline.inline(_packed, (_MATRIX,), kind)(p)

    def add(
        self, o: jax.Array, p: jax.Array, alpha: jax.Array, slot: jax.Array, then: Then
    ) -> jax.Array:
        """`o`, rescaled, plus the weighted values of a tile."""
        product = self._product(p, self.v.at[slot], then)
        return o * pipeline.along(alpha, o.shape, 0) + product

    def _product(self, a: jax.Array, b: Ref, then: Then) -> jax.Array:
        swizzle = pipeline.swizzle_of(b.shape[-1], b.dtype)
        kind = pipeline.array((ROWS, b.shape[0]), jnp.float32)

        def f(a: Any, b: Any) -> Any:
            return wgmma.start(a, b, swizzle=swizzle)

        out = pipeline.inline(f, (plgpu.Layout.WGMMA_8BIT, pipeline.tile_type(b)), kind)(a, b)
        then()
        plgpu.wgmma_wait(0)
        # Nothing that reads it comes before the wait.
        return pipeline.inline(mgpu.optimization_barrier, (_MATRIX,), kind)(out)


def _packed(p: Any) -> Any:
    rows = [
        [lane.pack_e4m3(x[i : i + 4]) for i in range(0, len(x), 4)] for x in fragments.by_row(p)
    ]
    return fragments.operand(rows, is_int=False)


def _quantized(queries: Any, *, head_dim: int, dtype: str) -> tuple[Any, Any]:
    """Queries in shared memory as an 8-bit register operand, and the value of a row's 1."""
    rows, scales = [], []
    for words in _row_words(Pointer.to(queries), head_dim):
        codes, scale = quantized_row(words, dtype)
        rows.append(codes)
        scales.append(scale)
    return fragments.operand(rows, is_int=False), fragments.row_array(scales)


def _row_words(queries: Pointer, head_dim: int) -> list[list[Int]]:
    """The words of the channels of each of a lane's two rows: four of every 16."""
    row, t = fragments.row_and_place()
    g, eight = row & 7, row >> 3
    found = []
    for half in (0, 1):
        words: list[Int] = []
        for i in range(head_dim // 16):
            # Eight rows of 64 channels lie together, pieces of 16 bytes interleaved.
            block = (eight + half) * (head_dim // 64) + i // 4
            piece = ((t >> 1) + 2 * (i % 4)) ^ g
            words += queries.at(block * 1024, g * 128, piece * 16, (t & 1) * 8).words(2)
        found.append(words)
    return found


def quantized_row(words: list[Int], dtype: str) -> tuple[list[Int], Float]:
    """A lane's part of a row of 16-bit numbers as words of e4m3, and the value of 1.

    Both are NaN if the row is not finite. The largest number of a row becomes 448.
    """
    found = lane.tree([w & 0x7FFF7FFF for w in words], lane.maxima_of_halves)
    bits = (found & 0xFFFF).maximum(found >> 16)
    bits = lane.reduce_lanes(bits, lambda a, b: a.maximum(b), (1, 2))
    top, _ = lane.half.unpack(bits, dtype)
    scale = top * (1 / E4M3_MAX)
    scale = (scale < _TINY).where(1.0, scale)
    scale = (bits >= _INFINITY_BITS[dtype]).where(float("nan"), scale)
    inverse = lane.divide(lane.number(1.0), scale)
    x = [v * inverse for w in words for v in lane.half.unpack(w, dtype)]
    return [lane.pack_e4m3(x[i : i + 4]) for i in range(0, len(x), 4)], scale
