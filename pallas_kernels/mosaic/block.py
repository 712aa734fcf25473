"""A block of tokens in the registers of a program: loaded once, measured, rounded, stored.

A lane holds eight channels of four tokens in a row, and of so many such groups that its program
holds the block: 16-byte loads of which a warp takes whole rows, and bytes that a lane can transpose
by itself. All of its loads are issued before the first of them is needed.

Rows of codes are stored as they are, in whole rows; with tokens last they go through shared memory,
so that 16 tokens of a channel are stored at once. Rows of shared memory are shifted by 16 bytes
every eight channels: a warp's stores, eight channels apart, then meet in a bank two at a time.
"""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

from pallas_kernels.layouts import next_power_of_2
from pallas_kernels.mosaic import eight_bits, lane
from pallas_kernels.mosaic.lane import Bool, Float, Int, Pointer

CHANNELS, TOKENS = 8, 4  # what a lane takes at once
MOST_WARPS = 16
SMALLEST = 16  # tokens of the smallest block: one 16-byte access of codes with tokens last
_WARP, _WARPGROUP = 32, 128
VALUES_PER_LANE = 64  # values of a lane in kernels that do much with them
_UNIT = 16  # bytes of a load or store
MAXIMA_BYTES = 4 * MOST_WARPS  # shared memory in which a program's warps exchange maxima

Words = list[list[list[Int]]]
"""For each of a lane's groups and each of its four tokens: words of eight values or codes."""


@dataclasses.dataclass(frozen=True)
class Block:
    tokens: int  # a power of two and at least 16
    head_dim: int  # channels in memory, a multiple of 8
    channels: int  # channels of the codes, a multiple of 8, at most 256
    dtype: str  # of the values: ``"bfloat16"``, ``"float16"`` or ``"float32"``
    warpgroups: int

    @property
    def threads(self) -> int:
        return _WARPGROUP * self.warpgroups

    @property
    def warps(self) -> int:
        return self.threads // _WARP

    @property
    def columns(self) -> int:
        return columns(self.channels)

    @property
    def groups(self) -> int:
        """Groups of four tokens that a lane holds."""
        return max(1, self.tokens // TOKENS * self.columns // self.threads)

    @property
    def value_bytes(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def words(self) -> int:
        """32-bit words of eight values."""
        return CHANNELS * self.value_bytes // 4

    @property
    def pitch(self) -> int:
        """Bytes of eight channels in shared memory, padding included."""
        return CHANNELS * self.tokens + _UNIT

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block whose tokens are last."""
        return self.channels // CHANNELS * self.pitch


def columns(channels: int) -> int:
    """How many lanes hold one token together."""
    return next_power_of_2(-(-channels // CHANNELS))


def default_warpgroups(tokens: int, channels: int, values: int = VALUES_PER_LANE) -> int:
    """As many warpgroups as leave each lane `values` values."""
    all_values = tokens * columns(channels) * CHANNELS
    most = MOST_WARPS * _WARP // _WARPGROUP
    return min(most, max(1, all_values // (_WARPGROUP * values)))


def default_tokens(channels: int) -> int:
    return _WARPGROUP * VALUES_PER_LANE // (columns(channels) * CHANNELS)


@dataclasses.dataclass(frozen=True, eq=False)
class Share:
    """A lane's part of a block; `thread` is the lane's number in the program."""

    block: Block
    thread: Int

    @property
    def column(self) -> Int:
        """Which eight channels the lane holds."""
        return self.thread % self.block.columns

    def group(self, number: int) -> Int:
        """Which four tokens the lane's group `number` is."""
        step = self.block.threads // self.block.columns
        return self.thread // self.block.columns + number * step

    def is_inside(self, number: int, columns: int) -> Bool | None:
        """Whether group `number` exists, for `columns` eights of channels; None if always."""
        inside: Bool | None = None
        if columns < self.block.columns:
            inside = self.column < columns
        if self.block.threads * TOKENS > self.block.tokens * self.block.columns:
            fits = self.group(number) < self.block.tokens // TOKENS
            inside = fits if inside is None else inside & fits
        return inside

    # Values ---------------------------------------------------------------------------------------

    def load(self, x: Pointer, row: int, first: Int, size: int, length: Int) -> Words:
        """The lane's values; 0 past `length` tokens and past the channels.

        `x` points to the sequence's first token of this head, tokens are `row` bytes apart, the
        block begins at token `first`, and memory holds `size` tokens.
        """
        b = self.block
        x = x.times(first.minimum(size - 1), row)
        last, count = (lane.integer(size - 1) - first).maximum(0), length - first
        there = b.head_dim // CHANNELS
        column = self.column.minimum(there - 1) if there < b.columns else self.column
        place = column * (CHANNELS * b.value_bytes)
        values, insides = [], []
        for number in range(b.groups):
            is_inside = self.is_inside(number, there)
            for i in range(TOKENS):
                token = self.group(number) * TOKENS + i
                values.append(x.at(token.minimum(last) * row, place).words(b.words))
                inside = token < count
                insides.append(inside if is_inside is None else inside & is_inside)
        known = [
            [inside.where(word, 0) for word in words]
            for inside, words in zip(insides, values, strict=True)
        ]
        return [known[i : i + TOKENS] for i in range(0, len(known), TOKENS)]

    def floats(self, words: Sequence[Int]) -> list[Float]:
        if self.block.dtype == "float32":
            return [w.as_float() for w in words]
        return [x for w in words for x in lane.half.unpack(w, self.block.dtype)]

    def largest(self, values: Words) -> Int:
        """The largest bit pattern among the lane's absolute values, as float32.

        As integers, bit patterns are in the order of the values, with infinity and NaN above all.
        """
        words = [w for group in values for token in group for w in token]
        if self.block.dtype == "float32":
            return lane.tree([w & 0x7FFFFFFF for w in words], Int.maximum)
        found = lane.tree([w & 0x7FFF7FFF for w in words], lane.maxima_of_halves)
        half = (found & 0xFFFF).maximum(found >> 16)
        return lane.half.unpack(half, self.block.dtype)[0].as_int()

    def tell(self, memory: Pointer, bits: Int) -> None:
        """Adds a lane's maximum to those in shared memory; a barrier must follow."""
        of_warp = lane.largest_of_warp(bits)
        with lane.when((self.thread & (_WARP - 1)).equals(0)):
            memory.at((self.thread >> 5) << 2).store(of_warp)

    def told(self, memory: Pointer) -> Int:
        """The largest bits that the program's lanes passed to `tell`."""
        return lane.tree(memory.words(self.block.warps), Int.maximum)

    # Codes ----------------------------------------------------------------------------------------

    def codes(self, values: Words, scale: Float, is_int8: bool) -> Words:
        """Codes of a lane's values, two words a token; with a NaN scale 0 (int8) or NaN (e4m3)."""
        halves = [
            (x[:4], x[4:]) for group in values for token in group for x in [self.floats(token)]
        ]
        numbers = [half for pair in halves for half in pair]
        if is_int8:
            words = self._int8(numbers, scale)
        else:
            inverse = lane.divide(lane.number(1.0), scale)
            words = [eight_bits.e4m3_word(x, inverse) for x in numbers]
        is_known = eight_bits.is_finite(scale)
        words = [is_known.where(w, 0 if is_int8 else 0x7F7F7F7F) for w in words]
        tokens = [words[i : i + 2] for i in range(0, len(words), 2)]
        return [tokens[i : i + TOKENS] for i in range(0, len(tokens), TOKENS)]

    def _int8(self, numbers: list[list[Float]], scale: Float) -> list[Int]:
        if self.block.dtype == "float32":
            inverse = lane.number(1.0) / scale
            return [eight_bits.int8_word(x, scale, inverse, exact=True) for x in numbers]
        rounding = eight_bits.Rounding.of(scale, self.block.dtype)
        return [rounding.word(x) for x in numbers]

    def store_rows(self, out: Pointer, codes: Words, *, permuted: bool) -> None:
        """Stores the codes of each token in a row; `out` points to the block's first token.

        If `permuted`, tokens are in the order of Hopper's matrix units: a product's accumulator,
        read as the 8-bit operand of the next product, permutes tokens within groups of 16, and has
        token ``4 t + 2 h + r`` at ``8 h + 2 t + r``.
        """
        channels = self.block.channels
        place = self.column * CHANNELS
        for number, group in enumerate(codes):
            four = self.group(number)
            for i, words in enumerate(group):
                row = four * TOKENS + i
                if permuted:
                    row = (four >> 2) * 16 + (four & 3) * 2 + (i >> 1) * 8 + (i & 1)
                with self.inside(number):
                    out.at(row * channels, place).store_words(words)

    def inside(self, number: int) -> Any:
        inside = self.is_inside(number, self.block.channels // CHANNELS)
        return contextlib.nullcontext() if inside is None else lane.when(inside)

    def transpose(self, memory: Pointer, codes: Words) -> None:
        """Puts codes in shared memory, tokens last; a barrier must follow."""
        at = memory.at(self.column * self.block.pitch)
        for number, group in enumerate(codes):
            here = at.at(self.group(number) * TOKENS)
            with self.inside(number):
                for half in range(2):
                    of_channels = transposed([words[half] for words in group])
                    for i, word in enumerate(of_channels):
                        here.at((4 * half + i) * self.block.tokens).store(word)

    def store_columns(self, out: Pointer, row: int, memory: Pointer) -> None:
        """Stores what `transpose` left in `memory`; channels of `out` are `row` tokens apart."""
        b = self.block
        units = b.tokens // _UNIT  # of a channel
        count = b.channels * units
        for begin in range(0, count, b.threads):
            unit = (self.thread + begin).minimum(count - 1)
            channel, place = unit // units, unit % units * _UNIT
            source = memory.at(channel * b.tokens, (channel >> 3) * _UNIT, place)
            words, at = source.words(4), out.times(channel, row).at(place)
            if begin + b.threads <= count:
                at.store_words(words)
                continue
            with lane.when(self.thread < count - begin):
                at.store_words(words)


def transposed(rows: Sequence[Int], picks: Sequence[Int | int] = (0x5140, 0x7362)) -> list[Int]:
    """Transposes four words of four bytes: byte `j` of word `i` becomes byte `i` of word `j`."""
    a, b, c, d = rows
    out = []
    for pick in picks:
        upper, lower = lane.permute_bytes(a, b, pick), lane.permute_bytes(c, d, pick)
        out += [lane.permute_bytes(upper, lower, half) for half in (0x5410, 0x7632)]
    return out
