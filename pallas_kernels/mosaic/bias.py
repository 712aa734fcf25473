"""A bias of attention scores in a warpgroup's registers: each lane loads what it adds.

Roofline: 2 bytes a score, from memory and from the L2 cache, fit beside the products; the 4 to 5
instructions for each score, beside 8, to unpack, scale, compare and select, do not. Target: 1.6
times the forward kernel without a bias. Seen on an H200: 2.6 times (1.59 and 0.60 ms), with one row
for all queries 1.8. Instructions and the smaller tiles bound it.

Lanes load for themselves, not the copy engine: shared memory is full in most launches; `T` may be
anything and `S` a multiple of 4; and there is no barrier to be wrong about. A warp's load covers
whole sectors of memory where keys are permuted (`_in_fours`), and otherwise two loads that follow
each other share them. Loads are started before what they are added to is computed. Axes of 1 are
index maps, and one row for all queries costs a load where others cost two.

Roofline in full and versions: `docs/kernels/attention.md`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.layouts import Ref
from pallas_kernels.mosaic import lane, pipeline
from pallas_kernels.mosaic.lane import Float, Int, fragments
from pallas_kernels.mosaic.lane.memory import Pointer
from pallas_kernels.mosaic.pipeline import ROWS, SCALAR

MULTIPLE = 4  # of what the number of a bias' keys must be a multiple: lanes load so many at once
# Words of the smallest array of registers.
_FEWEST = 4
_DTYPES = ("float32", "bfloat16", "float16")


def unsupported(dtype: Any) -> str | None:
    """Why lanes cannot load a bias of this dtype; None if they can."""
    name = jnp.dtype(dtype).name
    return None if name in _DTYPES else f"bias.dtype={name} must be one of {_DTYPES}"


@dataclasses.dataclass(frozen=True)
class Bias:
    """What is static of a bias ``[B or 1, N or 1, T or 1, S]``, `S` a multiple of 4."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, ref: Ref) -> "Bias":
        return cls(tuple(ref.shape), jnp.dtype(ref.dtype).name)

    @property
    def is_row(self) -> bool:
        """Whether all queries have the same."""
        return self.shape[2] == 1

    @property
    def size(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    @property
    def halves(self) -> int:
        """How many of a lane's two rows of queries have numbers of their own."""
        return 1 if self.is_row else 2

    def line(self, b: jax.Array, head: jax.Array) -> jax.Array:
        """The number of a head's first row among all rows."""
        batch, heads, tokens, _ = self.shape
        line = jnp.int32(0)
        if batch > 1:
            line = b * jnp.int32(heads)
        if heads > 1:
            line = line + head
        return line * jnp.int32(tokens)

    def row(self, line: Int, query: Int) -> Int:
        """The number of a query's row; past the last one that of the last."""
        return line if self.is_row else line + query.minimum(self.shape[2] - 1)

    @property
    def stride(self) -> int:
        return self.shape[3] * self.size


def of_scores(
    ref: Ref, line: jax.Array, query: jax.Array, key: jax.Array, stop: jax.Array, tile: int
) -> jax.Array:
    """Words of ``[64, tile]`` scores of permuted keys (`hopper.attention`), for `numbers`.

    `line` is `Bias.line`, `query` and `key` are the first ones. Keys from `stop` on, a multiple of
    4, are not loaded, and anything.
    """
    return _load(functools.partial(_in_fours, tile=tile), ref, tile, line, query, key, stop)


def of_queries(ref: Ref, line: jax.Array, query: jax.Array, key: jax.Array) -> jax.Array:
    """Words of ``[64, 64]`` scores, rows are queries. What is past the end is some other key's."""
    return _load(_in_pairs, ref, ROWS, line, query, key)


def of_keys(ref: Ref, line: jax.Array, query: jax.Array, key: jax.Array) -> jax.Array:
    """The same, rows are keys."""
    of_rows = Bias.of(ref).is_row
    return _load(_of_two_keys if of_rows else _in_columns, ref, ROWS, line, query, key)


def _load(f: Callable[..., list[Int]], ref: Ref, tile: int, *scalars: jax.Array) -> jax.Array:
    """Runs a lane's function of loads."""
    x = Bias.of(ref)
    count = tile // 4 * x.halves * x.size // 4
    count = _FEWEST if f is _of_two_keys else count

    def run(ref: Any, *scalars: Any) -> Any:
        words = f(Pointer.to(ref), *(lane.scalar(a) for a in scalars), x=x)
        return mgpu.optimization_barrier(fragments.carrier(words))  # loads are started here

    types = (plgpu.RefType(), *[SCALAR] * len(scalars))
    return pipeline.inline(run, types, pipeline.array((ROWS, 2 * count), jnp.int32))(ref, *scalars)


def store(ref: Ref, x: jax.Array, line: jax.Array, query: jax.Array, key: jax.Array) -> None:
    """Writes float32 ``[64, 64]``, rows are queries, rounded, to an array in a bias' shape.

    What is past its queries and keys is left out.
    """
    kind = Bias.of(ref)

    def run(ref: Any, values: Any, *scalars: Any) -> None:
        given = (lane.scalar(a) for a in scalars)
        _store(Pointer.to(ref), fragments.by_row(values), *given, x=kind)

    types = (plgpu.RefType(), plgpu.Layout.WGMMA, *[SCALAR] * 3)
    pipeline.inline(run, types)(ref, x, line, query, key)


def _store(
    start: Any, rows: list[list[Float]], line: Int, query: Int, key: Int, *, x: Bias
) -> None:
    row, t = fragments.row_and_place()
    first = key + t * 2
    for half, values in enumerate(rows):
        number = query + row + 8 * half
        at = start.times(line + number, x.stride)
        for i in range(0, len(values), 2):
            token = first + 4 * i
            with lane.when((number < x.shape[2]) & (token < x.shape[3])):
                target, low, high = at.at(token * x.size), values[i], values[i + 1]
                if x.size == 4:
                    target.store_words([low.as_int(), high.as_int()])
                else:
                    target.store(lane.half.pack(low, high, x.dtype))


def _in_fours(
    start: Any, line: Int, query: Int, key: Int, stop: Int, *, x: Bias, tile: int
) -> list[Int]:
    """Four keys in a row of every 16 are a lane's: a warp loads 8 rows of 32 or 64 bytes."""
    row, t = fragments.row_and_place()
    first, words = key + t * 4, []
    for half in range(x.halves):
        at = start.times(x.row(line, query + row + 8 * half), x.stride).at(first * x.size)
        for i in range(0, tile, 16):
            words += at.at(i * x.size).words_once(x.size, first + i < stop)
    return words


def _in_pairs(start: Any, line: Int, query: Int, key: Int, *, x: Bias) -> list[Int]:
    """Two keys in a row of every 8 are a lane's."""
    row, t = fragments.row_and_place()
    first, words = key + t * 2, []
    for half in range(x.halves):
        at = start.times(x.row(line, query + row + 8 * half), x.stride)
        for i in range(0, ROWS, 8):
            token = (first + i).minimum(x.shape[3] - 2)
            words += at.at(token * x.size).words(x.size // 2)
    return words


def _in_columns(start: Any, line: Int, query: Int, key: Int, *, x: Bias) -> list[Int]:
    """A key's numbers of two queries in a row of every 8, one load each."""
    row, t = fragments.row_and_place()
    columns = [query + t * 2 + (8 * (c // 2) + c % 2) for c in range(ROWS // 4)]
    rows = [start.times(x.row(line, column), x.stride) for column in columns]
    words = []
    for half in range(2):
        key_of_half = (key + row + 8 * half).minimum(x.shape[3] - 1)
        found = [_load_one(at, key_of_half, x) for at in rows]
        if x.size == 2:
            found = [a | (b << 16) for a, b in zip(found[::2], found[1::2], strict=True)]
        words += found
    return words


def _of_two_keys(start: Any, line: Int, query: Int, key: Int, *, x: Bias) -> list[Int]:
    """The numbers of a lane's two keys, for all queries; twice, for no array is smaller."""
    del query
    row, _ = fragments.row_and_place()
    at = start.times(line, x.stride)
    keys = [(key + row + 8 * half).minimum(x.shape[3] - 1) for half in range(2)]
    return [_load_one(at, one, x) for one in keys] * (_FEWEST // 2)


def _load_one(row: Any, key: Int, x: Bias) -> Int:
    at = row.at(key * x.size)
    found: Int = at.half() if x.size == 2 else at.word()
    return found


def numbers(words: Any, x: Bias, *, rows_are_keys: bool = False) -> list[list[Float]]:
    """What a lane adds to each of its two rows, float32, from the words that it loaded."""
    found = fragments.scalars(words)
    if x.is_row and rows_are_keys:
        return [[_floats([word], x)[0]] * (ROWS // 4) for word in found[:2]]
    values, halves = _floats(found, x), 2 if rows_are_keys else x.halves
    count = len(values) // halves
    rows = [values[i : i + count] for i in range(0, len(values), count)]
    return rows if halves == 2 else rows * 2


def _floats(words: Sequence[Int], x: Bias) -> list[Float]:
    if x.size == 4:
        return [word.as_float() for word in words]
    return [v for word in words for v in lane.half.unpack(word, x.dtype)]


def added(row: Sequence[Float], bias: Sequence[Float], unit: float) -> list[Float]:
    """Scores in some unit plus the bias: where that is ``-inf`` it hides even a NaN."""
    factor = lane.number(unit)
    return [
        b.equals(-math.inf).where(-math.inf, b.fma(factor, v))
        for b, v in zip(bias, row, strict=True)
    ]
