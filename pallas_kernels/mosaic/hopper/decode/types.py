"""What decode works with: numerics, sizes, a lane's place, queries and the running softmax."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from pallas_kernels.layouts import INT8_RANGE as INT8_RANGE
from pallas_kernels.layouts import LOG2_E as LOG2_E
from pallas_kernels.mosaic import lane, warp
from pallas_kernels.mosaic.lane import Float, Int


@dataclasses.dataclass(frozen=True)
class SparseExponential:
    """SAS: a cubic times a power of its base, 0 below a threshold."""

    coefficients: tuple[float, ...]  # of the cubic on [0, 1), constant term first
    threshold: float  # in natural-log units
    unit: float  # powers of the base in one natural-log unit

    def __call__(self, x: Float) -> Float:
        """SAS of ``x <= 0``, which is in natural-log units times `unit`."""
        y = lane.maximum(-x, lane.number(0.0))
        whole = lane.floor(y)
        power = lane.exp2(whole * (-LOG2_E / self.unit))
        fraction = y - whole
        value = lane.number(self.coefficients[-1])
        for coefficient in reversed(self.coefficients[:-1]):
            value = lane.fma(value, fraction, coefficient)
        return (x < self.threshold * self.unit).where(0.0, value * power)


@dataclasses.dataclass(frozen=True)
class Numerics:
    """The softmax and what its weights are rounded to."""

    exponential: SparseExponential | None  # SAS, or None for the exact one
    window: tuple[int, int] | None
    soft_cap: float | None
    is_masked: bool  # whether some query may not see all tokens of a block

    @property
    def unit(self) -> float:
        """Units of the exponential's argument in one nat."""
        return LOG2_E if self.exponential is None else self.exponential.unit

    @property
    def largest(self) -> float:
        """The exponential at 0."""
        return 1.0 if self.exponential is None else self.exponential.coefficients[0]

    def exp(self, x: Float) -> Float:
        """The exponential; arguments count `unit` to a nat."""
        return lane.exp2(x) if self.exponential is None else self.exponential(x)

    def exact_exp(self, x: Float) -> Float:
        """The exact exponential of the same arguments, for differences of maxima."""
        return lane.exp2(x) if self.unit == LOG2_E else lane.exp2(x * (LOG2_E / self.unit))


def runs_of(bits: int) -> int:
    """Runs of an axis whose codes share bytes; with 3-bit codes, those of the lower two bits."""
    return 2 if bits == 4 else 4


@dataclasses.dataclass(frozen=True)
class Shape:
    head_dim: int  # a multiple of 32, of 64 if keys have 2- or 3-bit codes
    block: int  # tokens of a cache block: 64 or 128, or 32 if all codes have 4 bits
    key_bits: int  # 4, 3 or 2; shared memory has room for the widest
    value_bits: int  # likewise
    rows: int  # queries of a program, 4 or a multiple of 8

    @property
    def key_row(self) -> int:
        return self.head_dim * self.key_bits // 8

    @property
    def value_row(self) -> int:
        return self.block * self.value_bits // 8

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """The parts of a block in shared memory, and the bytes of each."""
        codes = (("key", self.block * self.key_row), ("value", self.head_dim * self.value_row))
        channels = ("key_scale", "key_zero", "value_scale", "value_zero")
        return codes + tuple((name, self.head_dim) for name in channels)

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self.parts)

    def offset(self, name: str) -> int:
        names = [part for part, _ in self.parts]
        return sum(size for _, size in self.parts[: names.index(name)])

    @property
    def score_tiles(self) -> int:
        """Column tiles of the first product, of 4 queries each."""
        return self.rows // 4

    @property
    def output_tiles(self) -> int:
        """Column tiles of the second product, of 8 queries each."""
        return max(1, self.rows // 8)

    @property
    def words(self) -> int:
        """Words of packed weights that a lane holds for each query."""
        return self.block // 32

    @property
    def outputs(self) -> int:
        """Output numbers that a lane holds."""
        return self.output_tiles * self.head_dim // 16 * 4


@dataclasses.dataclass(frozen=True, eq=False)
class Width:
    """The bits of the codes of the program's head, on one side."""

    bits: tuple[int, ...]  # widths of the side's code arrays, the wider first
    is_low: lane.Bool | None  # whether the head is in the second of two; None if there is one

    def either(self, kinds: Sequence[type], f: Callable[[int], list[Any]]) -> list[Any]:
        """``f(bits)``, numbers of these kinds, with code for each width, of which one runs."""
        if self.is_low is None:
            return f(self.bits[0])
        return lane.either(self.is_low, kinds, lambda: f(self.bits[1]), lambda: f(self.bits[0]))

    def size(self, of_one_bit: int) -> Int | int:
        wide, *narrow = (bits * of_one_bit for bits in self.bits)
        return wide if self.is_low is None else self.is_low.where(lane.integer(narrow[0]), wide)


@dataclasses.dataclass(frozen=True, eq=False)
class Place(warp.Place):
    """A lane's place in its warp, and what follows from it."""

    # ``g % 4``, by which the rows of one lane are permuted, so that lanes that load at the same
    # time access different banks.
    rotation: Int
    selector: Int  # selects the bytes of a word in this order

    @classmethod
    def here(cls) -> "Place":
        number = lane.thread() & 31
        g, t = number >> 2, number & 3
        rotation = g & 3
        return cls(g, t, rotation, (rotation * 0x1111) ^ 0x3210)


@dataclasses.dataclass(frozen=True, eq=False)
class Query:
    """A lane's part of the queries, one entry for each column tile of the first product."""

    # Of query ``g // 2``: for each operand word four words, each with one code in its byte.
    codes: list[list[list[Int]]]
    scale: list[Float]  # of query `t`, times the factor of the scores and the exponential's unit
    position: list[Int]  # of query `t`; -1 if it does not exist

    @staticmethod
    def kinds(tiles: int, head_dim: int) -> Sequence[type]:
        return [Int] * (tiles * head_dim // 4) + [Float] * tiles + [Int] * tiles

    def flat(self) -> list[Any]:
        codes = (code for tile in self.codes for words in tile for code in words)
        return [*codes, *self.scale, *self.position]

    @classmethod
    def of(cls, flat: list[Any], tiles: int) -> "Query":
        codes, rest = flat[: -2 * tiles], flat[-2 * tiles :]
        words = [codes[i : i + 4] for i in range(0, len(codes), 4)]
        count = len(words) // tiles
        split = [words[i * count : (i + 1) * count] for i in range(tiles)]
        return cls(split, rest[:tiles], rest[tiles:])


@dataclasses.dataclass(frozen=True, eq=False)
class State:
    # For each output tile and 16 channels: rows g, g + 8 at columns 2 t, 2 t + 1.
    outputs: list[Float]
    maxima: list[Float]  # of query `t` of each score tile, in the exponential's units
    totals: list[Float]  # this lane's part of the sums of weights

    @classmethod
    def empty(cls, shape: Shape) -> "State":
        lowest = [lane.number(float("-inf")) for _ in range(shape.score_tiles)]
        zeros = [lane.number(0.0) for _ in range(shape.outputs + shape.score_tiles)]
        return cls(zeros[: shape.outputs], lowest, zeros[shape.outputs :])

    def flat(self) -> list[Float]:
        return [*self.outputs, *self.maxima, *self.totals]

    @classmethod
    def of(cls, flat: list[Any], shape: Shape) -> "State":
        n, tiles = shape.outputs, shape.score_tiles
        return cls(flat[:n], flat[n : n + tiles], flat[n + tiles :])
