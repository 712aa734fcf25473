"""Pages of int8 with a scale for each token: how they are written, and how a warp reads them.

Roofline, for 16 sequences, 8 KV heads with 4 queries each, 32,768 tokens, head dim 128, so 4.19 M
tokens of a KV head; the frame is `kernel`'s:
  - bytes that must move: 260 a token, 1,091 MB; with codes of 4 bits as values 196, 822 MB. At the
    4.3 TB/s that a copy reaches on an H200 254 and 191 us, at an H100's 3.0 364 and 274.
  - instructions: keys are operands as they are, and 16 values are turned by 8 permutes, where 16
    numbers in e4m3 are converted by 16 instructions and turned by 8: fewer than for e4m3.
  Memory is the floor. Target: the 256 us that e4m3 takes on an H200, and `k8v4`'s 204.

Versions, H200, jax 0.11.2, us at 16 x 32k, 64 x 4k and 1 x 8k:
                  cuDNN in bfloat16  464, 238, 14.8;  e4m3 249, 130, 12.5;  `k8v4` 199, 114, 12.6
  v1, as above    int8               253.5, 133.4, 13.9: 1.83, 1.79, 1.06 times cuDNN, as a copy
                  int8_v4            196.3, 102.4, 12.6: 2.36, 2.33, 1.18 times; 98 % of a copy
  Rows: `benchmarks/results/paged_int8_2026-11-29.json`. 1 x 8k is a tenth behind e4m3's: int8 takes
  the same launches, which were tuned for that.

Products are of int8: queries and weights are integers of 15 bits in two columns (`integers`), of
which the middle of a table is 0 here. Scales are where codes have norms.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from pallas_kernels.mosaic import eight_bits, lane
from pallas_kernels.mosaic.hopper.paged.inputs import Place
from pallas_kernels.mosaic.hopper.paged.operands import key_rows, value_words
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
            turned = [
                [_transposed([loaded[half][k + b][j] for b in range(4)]) for half in (0, 1)]
                for k in range(0, held, 4)
            ]
            for first in (0, 2):
                yield [
                    word
                    for step in turned
                    for half in (0, 1)
                    for word in step[half][first : first + 2]
                ]


def _transposed(words: list[Int]) -> list[Int]:
    """Four channels each of four tokens as four tokens each of four channels."""
    pairs = [
        [lane.permute_bytes(a, b, selector) for a, b in (words[:2], words[2:])]
        for selector in (0x5140, 0x7362)
    ]
    return [
        lane.permute_bytes(low, high, selector)
        for low, high in pairs
        for selector in (0x5410, 0x7632)
    ]


# Writing: the arithmetic of `turbojax.caches.paged.formats.to_int8` --------------------------------


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
