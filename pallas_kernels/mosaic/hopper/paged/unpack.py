"""Codes of 4, 3 or 2 bits of a block in shared memory as operand words of centroids.

A permute looks four codes up whose nibbles are together in 16 bits, in a table of eight bytes, so
one word of selectors gives two operand words. Fields of 2 bits become nibbles by a mask, half of
them after a shift; third bits lie so that a shift puts two of them where they belong
(`turbojax.polar.pack`). Of 4 bits two halves of the table are looked up, one of which gives 0.

Of keys an operand word is four channels of a token, of values four tokens of a channel: there
tokens' nibbles are first put beside each other.
"""

import dataclasses
import math
from collections.abc import Iterator

from pallas_kernels.mosaic import lane
from pallas_kernels.mosaic.hopper.paged.inputs import Place, Stored, parity
from pallas_kernels.mosaic.lane import Int, Pointer

_FIELDS, _THIRDS, _LOW_NIBBLES = 0x33333333, 0x44444444, 0x0F0F0F0F
# Channels of a unit, those of a word of fields of 2 bits, or of a word of nibbles.
_UNIT = {2: 16, 3: 16, 4: 8}
# The order in which operand words have a unit's channels, of keys.
_KEYS = {
    2: (0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15),
    3: (0, 2, 8, 10, 1, 3, 9, 11, 4, 6, 12, 14, 5, 7, 13, 15),
    4: (0, 1, 2, 3, 4, 5, 6, 7),
}
# Which two channels of a unit a word of selectors has, of values; first those of low nibbles.
_VALUES = {
    2: ((0, 4), (1, 5), (8, 12), (9, 13), (2, 6), (3, 7), (10, 14), (11, 15)),
    3: ((0, 8), (1, 9), (4, 12), (5, 13), (2, 10), (3, 11), (6, 14), (7, 15)),
    4: ((0, 2), (4, 6), (1, 3), (5, 7)),
}
# Bytes 0 and 1, and 2 and 3, of both words; bytes 0 and 2, and 1 and 3.
_NEIGHBOURS, _SECONDS = (0x5140, 0x7362), (0x6240, 0x7351)

Loaded = tuple[list[Int], list[Int]]
"""Words of nibbles or fields of a token's channels, and words of their third bits."""


@dataclasses.dataclass(frozen=True, eq=False)
class Codes:
    """How a warp reads one side of a block."""

    bits: int
    head_dim: int
    # Of a stored vector. What is read past it belongs to other vectors, and is not used.
    channels: int
    # The centroids, four in a word, of 4 bits the upper ones from the last on; in registers, as the
    # compiler copies a constant before every permute.
    table: list[Int]
    minus: Int | None = None  # -1, in a register

    @classmethod
    def of(cls, stored: Stored, head_dim: int, channels: int) -> "Codes":
        table = [*stored.centroids[:8], *reversed(stored.centroids[8:])]
        found = [int.from_bytes(bytes(table[i : i + 4]), "little") for i in range(0, len(table), 4)]
        minus = lane.held(-1) if stored.bits == 4 else None
        return cls(stored.bits, head_dim, channels, [lane.held(word) for word in found], minus)

    @property
    def row(self) -> int:
        return self.channels * self.bits // 8

    @property
    def _width(self) -> int:
        """Bits of a code that lie together: 3-bit codes have their third bit elsewhere."""
        return 4 if self.bits == 4 else 2

    def look_up(self, word: Int) -> tuple[Int, Int]:
        """The centroids of the codes in the nibbles of a word's low half and of its high half."""
        if self.bits < 4:
            # Of two words the third bit chooses one; of four entries it is 0.
            a, b = self.table[0], self.table[-1]
            return lane.permute_bytes(a, b, word), lane.permute_bytes(a, b, word >> 16)
        a, b, c, d = self.table
        assert self.minus is not None
        low, high = (
            # A selector with its highest bit set gives the sign of a byte, which is 0. Adding, and
            # the complement, are done by multipliers: permutes, shifts and logic are one unit's.
            lane.permute_bytes(a, b, x) + lane.permute_bytes(c, d, x * self.minus + self.minus)
            for x in (word, word >> 16)
        )
        return low, high

    def _parts(self, row: Pointer, number: Int, channels: int) -> Loaded:
        """Part `number` of a token's channels, in parts of `channels`."""
        low = self._load(row, 0, number, channels * self._width // 8)
        if self.bits != 3:
            return low, []
        return low, self._load(row, self.channels // 4, number, channels // 8)

    def _load(self, row: Pointer, first: int, number: Int, size: int) -> list[Int]:
        """The words of piece `number`, of pieces of `size` bytes from the row's byte `first` on."""
        at = row.at(number * size, first)
        if size == 2:
            return [at.half()]
        width = math.gcd(self.row, first, size, 16)
        return [word for i in range(0, size, width) for word in at.at(i).words(width // 4)]

    # Keys ---------------------------------------------------------------------------------------

    @property
    def key_order(self) -> list[int]:
        unit = _UNIT[self.bits]
        return [i + k for i in range(0, self.head_dim // 4, unit) for k in _KEYS[self.bits]]

    def key_rows(self, keys: Pointer, held: int, here: Place) -> Iterator[list[list[Int]]]:
        """Yields operand words, two of the lane's `held` tokens at a time."""
        first = keys.at(here.g * (held * self.row))
        for i in range(0, held, 2):
            pair = [self._key(first.at((here.odd ^ j) * self.row), here) for j in (i, i + 1)]
            if self.bits == 3:
                yield self._of_three_bits(pair)
            else:
                yield [[w for word in low for w in self._of_a_word(word)] for low, _ in pair]

    def _key(self, row: Pointer, here: Place) -> Loaded:
        return self._parts(row, here.t, self.head_dim // 4)

    def _of_a_word(self, word: Int) -> list[Int]:
        words = [word] if self.bits == 4 else [word & _FIELDS, (word >> 2) & _FIELDS]
        return [w for x in words for w in self.look_up(x)]

    def _of_three_bits(self, pair: list[Loaded]) -> list[list[Int]]:
        """Operand words of two tokens at once, so that their third bits fill a word."""
        found: list[list[Int]] = [[], []]
        for i in range(len(pair[0][0])):
            (a, b), (c, d) = ([token[0][i] for token in pair], [token[1][i // 2] for token in pair])
            # Bytes whose third bits are the lower ones of their nibbles, and the upper ones.
            even, odd = (lane.permute_bytes(a, b, selector) for selector in (0x6420, 0x7531))
            third = lane.permute_bytes(c, d, 0x7632 if i % 2 else 0x5410)
            for word in _with_thirds(even, odd, third):
                for out, w in zip(found, self.look_up(word), strict=True):
                    out.append(w)
        return found

    # Values -------------------------------------------------------------------------------------

    @property
    def _is_shared(self) -> bool:
        """Whether two rows of lanes share the channels of a word."""
        return self.head_dim // 8 < _UNIT[self.bits]

    def channel(self, number: int, here: Place) -> Int:
        pairs = _VALUES[self.bits]
        if self._is_shared:
            first, last = pairs[number // 2][number % 2], (here.g & 1) * 2
            return (here.g >> 1) * _UNIT[self.bits] + last + first
        unit, rest = divmod(number, 2 * len(pairs))
        pair, half = divmod(rest, 2)
        return here.g * (self.head_dim // 8) + (_UNIT[self.bits] * unit + pairs[pair][half])

    def value_rows(self, values: Pointer, held: int, here: Place) -> Iterator[list[Int]]:
        """Yields operand words, two channels at a time, in the order of `channel`."""
        loaded = []
        for half in (0, 1):
            g = (here.t << 1) + half
            first, swap = values.at(g * (held * self.row)), parity(g)
            loaded.append([self._value(first.at((swap ^ i) * self.row), here) for i in range(held)])
        for i in range(len(loaded[0][0][0])):
            # [k-step][half of its tokens][pair of channels]
            words = [
                [self._transposed(loaded[half][k : k + 4], i) for half in (0, 1)]
                for k in range(0, held, 4)
            ]
            for pair in range(len(words[0][0])):
                yield [
                    word
                    for step in words
                    for half in (0, 1)
                    for word in self.look_up(step[half][pair])
                ]

    def _value(self, row: Pointer, here: Place) -> Loaded:
        """The lane's eighth of a value; in a word that two share, as the low nibbles."""
        if not self._is_shared:
            return self._parts(row, here.g, self.head_dim // 8)
        place, shift = here.g >> 1, (here.g & 1) << 2
        low, high = self._parts(row, place, self.head_dim // 4)
        return [x >> shift for x in low], [x >> shift for x in high]

    def _transposed(self, tokens: list[Loaded], i: int) -> list[Int]:
        """Selectors of four tokens' codes in their words `i`, two channels each."""
        nibbles = _merged([low[i] for low, _ in tokens])[: 1 if self._is_shared else 2]
        pick = _SECONDS if self.bits == 3 else _NEIGHBOURS
        transposed = [[lane.permute_bytes(*x, selector) for selector in pick] for x in nibbles]
        if self.bits == 4:
            return [word for words in transposed for word in words]
        if self.bits == 2:
            return [
                x & _FIELDS for words in transposed for word in words for x in (word, word >> 2)
            ]
        thirds = _merged([high[i // 2] for _, high in tokens])
        return [
            selectors
            for (even, odd), x in zip(transposed, thirds, strict=False)
            for selectors in _with_thirds(even, odd, lane.permute_bytes(*x, _NEIGHBOURS[i % 2]))
        ]


def _merged(words: list[Int]) -> list[tuple[Int, Int]]:
    """Low nibbles of two tokens in every byte, for tokens 0 and 1, 2 and 3; then high ones."""
    low, high = [], []
    for a, b in (words[:2], words[2:]):
        up, down = b << 4, a >> 4
        low.append(((a ^ up) & _LOW_NIBBLES) ^ up)
        high.append(((down ^ b) & _LOW_NIBBLES) ^ b)
    return [(low[0], low[1]), (high[0], high[1])]


def _with_thirds(even: Int, odd: Int, third: Int) -> list[Int]:
    """Selectors from fields of 2 bits and third bits.

    The third bits of the bytes of `even` are the lower two bits of the nibbles of `third`, those of
    `odd` the upper two.
    """
    return [
        (even & _FIELDS) | ((third << 2) & _THIRDS),
        ((even >> 2) & _FIELDS) | ((third << 1) & _THIRDS),
        (odd & _FIELDS) | (third & _THIRDS),
        ((odd >> 2) & _FIELDS) | ((third >> 1) & _THIRDS),
    ]
