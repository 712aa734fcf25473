"""Caches of codes with a scale for each token (KV4, K8V4): how a warp multiplies with them.

Roofline, for 16 sequences of 32,768 tokens, 8 KV heads of 4 queries each, head dim 128, H200; the
frame is `kernel`'s: 132 bytes a token of KV4, 129 us, and 196 of K8V4, 191; instructions 58 and 69
us. Memory is the floor of both. Target: 140 and 205 us. Seen: 139 and 198, 95 % of the rate of a
copy.

They are read as pools in which each sequence has one page. Values are 4-bit codes; keys are too,
and meet queries rounded to e4m3 (KV4), or they are e4m3 and meet queries as they are (K8V4).
Products are of float16, summed in float32. A code plus 8 is four bits of a float16, a subnormal
number, after a mask and no more: of the upper of a byte's codes it is 16 times that of the lower,
which queries and outputs make up for. What the 8 contributes is known beforehand, from the
queries' or the weights' sums, and the sums of products start from it.

Queries of e4m3 are exact in float16, and so are products with codes: scores are those of the
definition, but for the order of the sums. Weights are sums of two float16, in two columns.

Roofline in full and versions: `docs/kernels/paged.md`.
"""

import abc
import dataclasses
import functools
from typing import Any, Self

from pallas_kernels.layouts import E4M3_MAX, float32
from pallas_kernels.mosaic import lane
from pallas_kernels.mosaic.hopper.paged.floats import planes
from pallas_kernels.mosaic.hopper.paged.inputs import (
    Place,
    Program,
    Query,
    Settings,
    key_rows,
    largest,
    multiplied,
    scaled,
    summed,
    value_words,
    weight_words,
)
from pallas_kernels.mosaic.lane import Float, Int, Pointer

# A word's lower and upper codes, and their signs.
_CODES, _SIGNS = (0x000F000F, 0x00F000F0), (0x00080008, 0x00800080)
# A two's complement code with its sign flipped is the code plus 8.
_MIDDLE = 8
# The value of float16's smallest number; an upper code's unit in units of a lower one.
_STEP, _UPPER = 2.0**-24, 16.0
# The largest weight of a block becomes this large, so that no weight's remainder is subnormal.
_RANGE = 2.0**14
OUTPUT_UNIT = 1 / (_RANGE * _STEP)  # factor of the outputs
_TINY = 1.1754943508222875e-38
# Bits of 2**-110, far from where a reciprocal overflows: parts of it are as exact.
_SMALLEST = (127 - 110) << 23
_ONE = 0x3C003C00


@dataclasses.dataclass(frozen=True, eq=False)
class Scaled(abc.ABC):
    """The products of a block in shared memory; subclasses share those with values."""

    head_dim: int
    s: Settings
    signs: list[Int]  # `_SIGNS`, in registers: the compiler copies constants before every use

    @classmethod
    def of(cls, head_dim: int, s: Settings) -> Self:
        return cls(head_dim, s, [lane.held(x) for x in _SIGNS])

    def unpacked(self, word: Int) -> list[Int]:
        """The lower codes plus 8 and the upper ones of bytes 0 and 2, then of bytes 1 and 3."""
        return [
            (x & mask) ^ sign
            for x in (word, word >> 8)
            for mask, sign in zip(_CODES, self.signs, strict=True)
        ]

    @abc.abstractmethod
    def query_operands(
        self, x: list[Float], here: Place
    ) -> tuple[list[Int], tuple[Any, Any], Float, Float]:
        """A query's operand words, its columns' starts, its offset, its scale."""

    @abc.abstractmethod
    def scores(self, slot: Pointer, query: Query, here: Place) -> list[list[Float]]:
        """Scores of each tile's query `t` with the lane's tokens."""

    def unseen(self, slot: Pointer, begin: Int, at: Program, here: Place) -> list[Int]:
        """Empty: codes are finite, and scales of tokens that are not seen are not used."""
        del slot, begin, at, here
        return []

    @property
    def _values(self) -> int:
        """Where values begin; scales of keys and of values follow."""
        return self.s.block * self.s.key_bytes(self.head_dim)

    def scales(self, side: int, slot: Pointer, here: Place) -> list[Float]:
        """Scales of the lane's tokens: of keys if `side` is 0, of values if 1."""
        held, block = self.s.held, self.s.block
        first = self._values + block * self.s.row_bytes(self.head_dim) + side * 2 * block
        # bfloat16 are the upper halves of float32.
        even = here.odd * 0x2200 + 0x1044
        odd = even ^ 0x2200
        return [
            lane.permute_bytes(word, 0, selector).as_float()
            for word in slot.at(first).at(here.g * (2 * held)).words(held // 2)
            for selector in (even, odd)
        ]

    def weighted(
        self,
        slot: Pointer,
        weights: list[list[Float]],
        visible: list[list[lane.Bool]],
        nonfinite: list[Int],
        here: Place,
    ) -> list[list[Float]]:
        """``weights x values`` over `OUTPUT_UNIT`, for each tile's query `t`."""
        del nonfinite
        scales = self.scales(1, slot, here)
        operands, factors, starts = [], [], []
        for p, seen in zip(weights, visible, strict=True):
            w = [v.where(x * n, 0.0) for v, x, n in zip(seen, p, scales, strict=True)]
            words, factor = _weight_operands(w, here)
            ones, sums = [lane.integer(_ONE)] * 4, [lane.number(0.0)] * 4
            for k in range(0, len(words), 2):
                sums = lane.half.matmul(ones, words[k : k + 2], sums)
            lower = [x * (-_MIDDLE * _STEP) for x in sums[:2]]
            operands.append(words)
            factors.append((factor, factor * (1 / _UPPER)))
            starts.append([*lower, *(x * _UPPER for x in lower)])
        out: list[list[Float]] = [[] for _ in weights]
        for rows in self._value_rows(slot.at(self._values), here):
            for tile, words in enumerate(operands):
                c = summed(rows, words, starts[tile], lane.half.matmul)
                out[tile] += [(c[2 * j] + c[2 * j + 1]) * factors[tile][j] for j in (0, 1)]
        return out

    def _value_rows(self, values: Pointer, here: Place) -> Any:
        """Yields the operand words of both codes of a byte, in the order of `channel`."""
        row, held = self.s.row_bytes(self.head_dim), self.s.held
        loaded = value_words(values, row, held, here)
        for j in range(row // 32):
            for selector in (0x5410, 0x7632):
                # [k-step and half of its tokens][lower, upper of a byte; of the next byte]
                found = [
                    self.unpacked(
                        lane.permute_bytes(loaded[half][k][j], loaded[half][k + 1][j], selector)
                    )
                    for k in range(0, held, 2)
                    for half in (0, 1)
                ]
                for byte in (0, 2):
                    yield [word for codes in found for word in codes[byte : byte + 2]]


@dataclasses.dataclass(frozen=True, eq=False)
class Kv4(Scaled):
    """The products of a block whose keys are 4-bit codes, like its values."""

    def query_operands(
        self, x: list[Float], here: Place
    ) -> tuple[list[Int], tuple[Any, Any], Float, Float]:
        """See `Scaled`; `x` has the lower and the upper channels; odd rows have an empty column."""
        scale = _scale(x)
        inverse = lane.number(1.0) / scale
        half = len(x) // 2
        words: list[Int] = []
        total, is_real = lane.number(0.0), (here.g & 1).equals(0)
        for i in range(0, half, 4):
            found = []
            for first, unit in ((i, 1.0), (half + i, 1 / _UPPER)):
                # Bytes 0 and 2 of a word, then 1 and 3, as `unpacked` gives them.
                codes = lane.pack_e4m3([x[first + k] * inverse for k in (0, 2, 1, 3)])
                pairs = [lane.half.unpack(word) for word in lane.half.from_e4m3(codes)]
                total = total + (pairs[0][0] + pairs[0][1]) + (pairs[1][0] + pairs[1][1])
                found.append([lane.half.pack(a * unit, b * unit) for a, b in pairs])
            words += [is_real.where(w, 0) for pair in zip(*found, strict=True) for w in pair]
        total = lane.reduce_lanes(total, lambda u, v: u + v, (1, 2))
        start = lane.from_lane(total, here.t << 3) * (-_MIDDLE * _STEP)
        zero = lane.number(0.0)
        return words, (start, zero), zero, scale

    def scores(self, slot: Pointer, query: Query, here: Place) -> list[list[Float]]:
        scales = self.scales(0, slot, here)
        out: list[list[Float]] = [[] for _ in query.operands]
        row = self.s.key_bytes(self.head_dim)
        for pair in key_rows(slot, row, self.s.held, here, self.unpacked):
            for tile, operands in enumerate(query.operands):
                start = [*query.start[tile], *query.start[tile]]
                c = multiplied(pair, operands, start, lane.half.matmul)
                for x in (c[0], c[2]):
                    factor = scales[len(out[tile])] * query.factor[tile]
                    out[tile].append(x * (1 / _STEP) * factor)
        return out


@dataclasses.dataclass(frozen=True, eq=False)
class K8v4(Scaled):
    """The products of a block whose keys are e4m3."""

    def query_operands(
        self, x: list[Float], here: Place
    ) -> tuple[list[Int], tuple[Any, Any], Float, Float]:
        x, top = scaled(x)
        pairs = [planes(x[k : k + 2]) for k in range(0, len(x), 2)]
        is_high, zero = (here.g & 1).equals(1), lane.number(0.0)
        return [is_high.where(high, low) for low, high in pairs], (zero, zero), zero, top

    def scores(self, slot: Pointer, query: Query, here: Place) -> list[list[Float]]:
        scales, zero = self.scales(0, slot, here), lane.number(0.0)
        out: list[list[Float]] = [[] for _ in query.operands]
        row = self.s.key_bytes(self.head_dim)
        for pair in key_rows(slot, row, self.s.held, here, lane.half.from_e4m3):
            for tile, operands in enumerate(query.operands):
                c = multiplied(pair, operands, [zero] * 4, lane.half.matmul)
                for j in (0, 1):
                    factor = scales[len(out[tile])] * query.factor[tile]
                    out[tile].append((c[2 * j] + c[2 * j + 1]) * factor)
        return out


KINDS: dict[str, type[Scaled]] = {"kv4": Kv4, "k8v4": K8v4}


def channel(number: int, here: Place, head_dim: int) -> Int:
    byte, is_upper = divmod(number, 2)
    return here.g * (head_dim // 16) + (byte + is_upper * (head_dim // 2))


def _scale(x: list[Float]) -> Float:
    """The scale of the query that four lanes share, with the bits of its definition."""
    top, bad = largest(x)
    scale = top * float32(1 / E4M3_MAX)
    return (scale < _TINY).where(1.0, scale) + bad


def _weight_operands(w: list[Float], here: Place) -> tuple[list[Int], Float]:
    """Operand words of weights, as fractions of the largest in the block, and that."""
    # Bits of non-negative floats are ordered like integers, with NaN the largest.
    bits = functools.reduce(lambda a, b: a.maximum(b), [x.as_int() for x in w])
    top = lane.reduce_lanes(bits, lambda a, b: a.maximum(b), (4, 8, 16))
    top = top.maximum(_SMALLEST).as_float()
    inverse = lane.reciprocal(top) * _RANGE
    words = []
    for k in range(0, len(w), 2):
        words += weight_words(list(planes([x * inverse for x in w[k : k + 2]])), here)
    return words, top
