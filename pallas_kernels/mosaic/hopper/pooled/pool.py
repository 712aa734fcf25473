"""Means of 2, 4 and 8 adjacent tokens, of keys and values in one launch, for Hopper.

Roofline, for 2 sequences, 16 heads, 16,384 tokens, head dim 128, bfloat16, keys and values:
  - bytes: 268 MB in, 7/8 of that out, 0.50 GB; 117 us at the 4.3 TB/s that a copy reaches on an
    H200, 168 at an H100's 3.0.
  - instructions: some 4 for a value (half an addition to unpack it, a selection for each word, 7/8
    of an addition, of a product and half of a conversion), 0.5 G: 18 us of all lanes.
Bytes are the floor: each is read and written once. Target: 130 us.

A lane takes eight channels of a group of eight tokens: eight loads of 16 bytes at once, and seven
means, sums of sums.

Versions, H200, jax 0.11.2, device time: two calls of the kernel by Triton 125 us; this one 96,
faster than a copy, since a part of the results stays in the cache.
"""

import dataclasses

import jax

from pallas_kernels.layouts import LEVELS
from pallas_kernels.mosaic import lane, lanes
from pallas_kernels.mosaic.lane import Float, Int, Pointer

NAME = "turbojax_pool_hopper"
CHANNELS = 8  # channels of a lane

_GROUP = LEVELS[-1]
_LANES, _WIDTH = 32, 2
_ROW_WORDS = CHANNELS * _WIDTH // 4

Pooled = tuple[jax.Array, jax.Array, jax.Array]  # means of 2, 4 and 8 tokens


@dataclasses.dataclass(frozen=True)
class Settings:
    batch: int  # `B`
    size: int  # tokens of the arrays, `S`
    heads: int  # `K`
    head_dim: int  # `H`, a multiple of 8
    groups: int  # of eight tokens, `P / 8`
    dtype: str  # ``"bfloat16"`` or ``"float16"``

    @property
    def items(self) -> int:
        return self.batch * self.groups * self.heads * (self.head_dim // CHANNELS)


def pool(
    key: jax.Array, value: jax.Array, key_lengths: jax.Array, *, multiple: int = _GROUP
) -> tuple[Pooled, Pooled]:
    """The means of groups of tokens, of keys and of values, each level in an array of its own.

    `key` and `value` are bfloat16 or float16 ``[B, S, K, H]``, `H` a multiple of 8; what is stored
    past `key_lengths`, int32 ``[B]``, is not used. Returns for each side three of
    ``[B, K, P / level, H]``, summed in float32, where `P` is the number of tokens rounded up to a
    multiple of `multiple`, itself a multiple of 8. A group at a sequence's end is the mean of the
    tokens that it holds, and 0 if it holds none.
    """
    batch, size, heads, head_dim = key.shape
    tokens = -(-size // multiple) * multiple
    s = Settings(batch, size, heads, head_dim, tokens // _GROUP, key.dtype.name)
    shapes = [(batch, heads, tokens // level, head_dim) for level in LEVELS[1:]]

    def body(arrays: list[Pointer], ids: list[Int]) -> None:
        lengths, *sides = arrays[:3]
        for i, x in enumerate(sides):
            with lane.when(ids[1].equals(i)):
                write(x, lengths, arrays[3 + 3 * i :][:3], ids[0] * _THREADS + lane.thread(), s)

    out = lanes.launch(
        body,
        NAME,
        [key_lengths, key, value],
        [jax.ShapeDtypeStruct(shape, key.dtype) for shape in 2 * shapes],
        grid={"tile": -(-s.items // _THREADS), "side": 2},
        warpgroups=1,
    )
    return (out[0], out[1], out[2]), (out[3], out[4], out[5])


_THREADS = _LANES * lanes.WARPS


def write(x: Pointer, lengths: Pointer, out: list[Pointer], item: Int, s: Settings) -> None:
    """Loads, sums and stores a lane's group.

    `x` is ``[B, S, K, H]``, `out` of each level ``[B, K, groups, H]``; `item` is
    ``((b * groups + g) * K + k) * (H / 8)`` plus which eight channels.
    """
    is_item = item < s.items
    item = item.minimum(s.items - 1)
    columns = s.head_dim // CHANNELS
    row, column = item // columns, item % columns
    place, head = row // s.heads, row % s.heads
    batch, group = place // s.groups, place % s.groups
    length = lengths.at(batch << 2).word().minimum(s.size)
    at = column * (CHANNELS * _WIDTH)
    sums = []
    for n in range(_GROUP):
        token = group * _GROUP + n
        there = batch * s.size + token.minimum(s.size - 1)
        source = x.times(there * s.heads + head, s.head_dim * _WIDTH).at(at)
        words = [(token < length).where(w, 0) for w in source.words(_ROW_WORDS)]
        sums.append([v for w in words for v in lane.half.unpack(w, s.dtype)])
    for level, target in zip(LEVELS[1:], out, strict=True):
        pairs = zip(sums[::2], sums[1::2], strict=True)
        sums = [[a + b for a, b in zip(*pair, strict=True)] for pair in pairs]
        each = _GROUP // level
        rows = (batch * s.heads + head) * (s.groups * each) + group * each
        for n, total in enumerate(sums):
            share = _share(group * each + n, level, length)
            means = [v * share for v in total]
            packed = [
                lane.half.pack(means[i], means[i + 1], s.dtype) for i in range(0, CHANNELS, 2)
            ]
            with lane.when(is_item):
                target.times(rows + n, s.head_dim * _WIDTH).at(at).store_words(packed)


def _share(group: Int, level: int, length: Int) -> Float:
    """1 over the tokens that a group of this level holds; 1 if it holds none."""
    count = (length - group * level).maximum(1).minimum(level)
    return lane.number(1.0) / count.to_float()
