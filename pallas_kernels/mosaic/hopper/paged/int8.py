"""Pages of int8 with a scale for each token: how they are written, and how a warp reads them.

Roofline, for 16 sequences of 32,768 tokens, 8 KV heads of 4 queries each, head dim 128, H200; the
frame is `kernel`'s: 260 bytes a token, 254 us; with codes of 4 bits as values 196, 191 us. Memory
is the floor. Target: 256 and 204 us, as of e4m3 and `k8v4`. Seen: 253.5 and 196.3, a copy's speed;
1 x 8k is a tenth behind e4m3's.

Products are of int8: queries and weights are integers of 15 bits in two columns (`integers`), of
which the middle of a table is 0 here. Scales are where codes have norms.

Roofline in full and versions: `docs/kernels/paged.md`.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from pallas_kernels.mosaic import eight_bits, lane, warp
from pallas_kernels.mosaic.hopper.paged.inputs import Place, key_rows, value_words
from pallas_kernels.mosaic.lane import Float, Int, Pointer

LARGEST_SCALE, NAN_SCALE = 65504.0, 0x7E00
# Vectors with no larger magnitude are zeros; the float32 next to one over the largest integer.
_TINY, _RECIPROCAL_RANGE = 2.0**-25, float(np.float32(1 / 127))
_SMALLEST_EXPONENT = (127 - 14) << 23  # of float16's normal numbers, as bits of float32
_EXPONENT = 0x7F800000


@dataclasses.dataclass(frozen=True, eq=False)
class Int8:
    """How a warp reads one side of a block; `head_dim` is `H`."""

    head_dim: int

    @property
    def key_order(self) -> list[int]:
        """The order of a lane's channels in operand words: as they are."""
        return list(range(self.head_dim // 4))

    def key_rows(self, keys: Pointer, held: int, here: Place) -> Iterator[list[list[Int]]]:
        rows: Iterator[list[list[Int]]] = key_rows(
            keys, self.head_dim, held, here, lambda word: [word]
        )
        return rows

    def channel(self, number: int, here: Place) -> Int:
        return here.g * (self.head_dim // 8) + number

    def value_rows(self, values: Pointer, held: int, here: Place) -> Iterator[list[Int]]:
        loaded = value_words(values, self.head_dim, held, here)
        for j in range(self.head_dim // 32):
            # [k-step][half of its tokens][channel of four]
            transposed = [
                [warp.transposed([loaded[half][k + b][j] for b in range(4)]) for half in (0, 1)]
                for k in range(0, held, 4)
            ]
            for first in (0, 2):
                yield [
                    word
                    for step in transposed
                    for half in (0, 1)
                    for word in step[half][first : first + 2]
                ]


# Writing: the arithmetic of `turbojax.caches.paged.formats.to_int8` -----------------------------


def encode(words: list[Int], x: list[Float], lanes: int, dtype: str) -> tuple[list[Int], Int]:
    """A lane's channels as words of four integers, and the bits of the vector's float16 scale.

    `words` of type `dtype` and the numbers `x` hold the same channels; a vector has `lanes`
    neighbouring lanes.
    """
    distances = [1 << i for i in range(lanes.bit_length() - 1)]
    bits = eight_bits.largest_bits(words, dtype)
    bits = lane.reduce_lanes(bits, lambda a, b: a.maximum(b), distances)
    largest = bits.as_float() if dtype == "float32" else lane.half.unpack(bits, dtype)[0]
    is_big = largest > _TINY  # neither is NaN
    scale = _up_to_float16(is_big.where(largest * _RECIPROCAL_RANGE, 1.0))
    is_stored = is_big & (lane.number(LARGEST_SCALE) >= scale)
    divisor = is_stored.where(scale, 1.0)
    inverse = lane.number(1.0) / divisor
    found = [
        is_stored.where(eight_bits.int8_word(x[i : i + 4], divisor, inverse, exact=True), 0)
        for i in range(0, len(x), 4)
    ]
    of_float16 = lane.half.pack(divisor, lane.number(0.0)) & 0xFFFF
    is_tiny = lane.number(_TINY) >= largest
    return found, is_tiny.where(lane.integer(0), is_stored.where(of_float16, NAN_SCALE))


def _up_to_float16(x: Float) -> Float:
    """The smallest float16 not below positive `x`, as float32; it may exceed float16's range."""
    exponent = (x.as_int() & _EXPONENT).maximum(_SMALLEST_EXPONENT) - (10 << 23)
    scaled = x * (lane.integer(254 << 23) - exponent).as_float()
    whole = lane.floor(scaled)
    whole = (scaled > whole).where(whole + 1.0, whole)
    return whole * exponent.as_float()
