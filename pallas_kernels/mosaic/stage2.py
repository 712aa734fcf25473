"""Stage 2 of a block in a program's lanes: channelwise codes of int8 codes, packed and stored.

Lanes find the extremes of their eight channels, two channels at once; a thread of each channel
then finds its scale and zero, and what a code needs of them, which lanes read again. Codes go
through shared memory to be packed: a byte has codes of channels, or of tokens, that are far apart.

Numbers are those of `turbojax.numerics.progressive`. Integers live in float32, where an addition
rounds, and are read from its bits.
"""

import dataclasses
from collections.abc import Callable

from pallas_kernels.mosaic import block as blocks
from pallas_kernels.mosaic import eight_bits, lane
from pallas_kernels.mosaic.block import CHANNELS, Block, Share, Words
from pallas_kernels.mosaic.lane import Float, Int, Pointer

# Widths of the planes of a code, low bits first (see turbojax.numerics.packing).
_PLANES = {2: (2,), 3: (2, 1), 4: (4,)}
# Restores halves of an integer in float32, see turbojax.numerics.progressive.
_FINE = 4096.0
_WARP = 32
_LANE_BYTES = 4 * CHANNELS  # lowest and highest codes of eight channels
_CHANNEL_BYTES = 16


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a block's codes are stored."""

    tokens: int  # of a block
    channels: int  # head dim
    bits: tuple[int, ...]  # widths in use, widest first
    heads: tuple[int, ...]  # how many slots have each width
    tokens_last: bool  # whether codes are packed along tokens (values) or channels (keys)

    @property
    def rows(self) -> int:
        return self.channels if self.tokens_last else self.tokens

    @property
    def row(self) -> int:
        return self.tokens if self.tokens_last else self.channels


@dataclasses.dataclass(frozen=True, eq=False)
class Arrays:
    """Where blocks are stored."""

    # Uint8, one for each width: ``[B, K_i, n, block, H * bits / 8]``, with tokens last ``[B, K_i,
    # n, H, block * bits / 8]``.
    codes: list[Pointer]
    channel_scale: Pointer  # int8 ``[B, K, n, H]``
    channel_zero: Pointer  # int8 ``[B, K, n, H]``
    block_scale: Pointer  # float32 ``[B, K, n]``
    blocks: int  # `n`
    layout: Layout


@dataclasses.dataclass(frozen=True, eq=False)
class Target:
    batch: Int
    head: Int
    heads: int  # `K`
    slot: Int  # the head's place among the slots of all widths
    number: Int  # along `n`

    def of_head(self, a: Arrays) -> Int:
        """Index of the block among those of all heads."""
        return (self.batch * self.heads + self.head) * a.blocks + self.number


def shared_bytes(block: Block, layout: Layout) -> int:
    """A program's memory behind `blocks.MAXIMA_BYTES`."""
    staged = block.shared_bytes if layout.tokens_last else layout.tokens * _pitch(layout)
    return _staging(block) + staged


def _staging(block: Block) -> int:
    """Where codes are staged: behind what lanes and channels exchange."""
    return block.warps * block.columns * _LANE_BYTES + block.channels * _CHANNEL_BYTES


def _pitch(layout: Layout) -> int:
    """Bytes of a token's codes in shared memory, for rows of a warp in different banks."""
    return -(-layout.channels * 3 // 32) * 16


def staging(block: Block, memory: Pointer) -> Pointer:
    """Shared memory that holds codes only; `write` needs it after its first barrier."""
    return memory.at(blocks.MAXIMA_BYTES + _staging(block))


def tell_extremes(share: Share, codes: Words, memory: Pointer) -> None:
    """Puts channels' lowest and highest stage-1 codes in shared memory; a barrier must follow."""
    b = share.block
    lowest: list[Int] = []
    highest: list[Int] = []
    for number, group in enumerate(codes):
        pairs = [_as_halves(words) for words in group]
        columns = [[pair[i] for pair in pairs] for i in range(CHANNELS // 2)]
        low = [lane.tree(c, lane.minima_of_halves) for c in columns]
        high = [lane.tree(c, lane.maxima_of_halves) for c in columns]
        inside = share.is_inside(number, b.columns)
        if inside is not None:  # a group that does not exist has no extremes
            low = [inside.where(x, 0x7FFF7FFF) for x in low]
            high = [inside.where(x, 0x80008000) for x in high]
        lowest = _each(lane.minima_of_halves, lowest, low)
        highest = _each(lane.maxima_of_halves, highest, high)
    distance = b.columns
    while distance < _WARP:
        lowest = [lane.minima_of_halves(x, lane.partner(x, distance)) for x in lowest]
        highest = [lane.maxima_of_halves(x, lane.partner(x, distance)) for x in highest]
        distance *= 2
    place = memory.at(blocks.MAXIMA_BYTES).at((share.thread >> 5) * (b.columns * _LANE_BYTES))
    place = place.at(share.column * _LANE_BYTES)
    with lane.when((share.thread & (_WARP - 1)) < b.columns):
        place.store_words(lowest)
        place.at(_LANE_BYTES // 2).store_words(highest)


def _each(op: Callable[[Int, Int], Int], a: list[Int], b: list[Int]) -> list[Int]:
    return [op(x, y) for x, y in zip(a, b, strict=True)] if a else b


def _as_halves(words: list[Int]) -> list[Int]:
    return [lane.permute_bytes(w, 0, pick) for w in words for pick in (0x9180, 0xB3A2)]


def write(share: Share, codes: Words, memory: Pointer, a: Arrays, at: Target) -> None:
    """Compresses and stores a block, after its `tell_extremes` and a barrier."""
    layout = a.layout
    _channels(share, memory, a, at)
    lane.block_barrier()
    second = _codes(share, codes, memory)
    staged = staging(share.block, memory)
    if layout.tokens_last:
        share.transpose(staged, second)
    else:
        _stage_rows(share, second, staged, _pitch(layout))
    lane.block_barrier()
    first = 0
    for out, bits, heads in zip(a.codes, layout.bits, layout.heads, strict=True):
        slot = at.slot - first
        size = layout.rows * layout.row * bits // 8
        block = out.times((at.batch * heads + slot) * a.blocks + at.number, size)
        if len(layout.bits) == 1:
            _pack(share, staged, block, layout, bits)
        else:
            with lane.when((slot >= 0) & (slot < heads)):
                _pack(share, staged, block, layout, bits)
        first += heads


def _channels(share: Share, memory: Pointer, a: Arrays, at: Target) -> None:
    """Scales and zeros of all channels, a thread each."""
    b, layout = share.block, a.layout
    told = memory.at(blocks.MAXIMA_BYTES)
    kept = told.at(b.warps * b.columns * _LANE_BYTES)
    top = lane.number(float(2 ** layout.bits[0] - 1))
    inverse = lane.number(1 / (2 ** layout.bits[0] - 1))
    if len(layout.bits) > 1:
        is_first = at.slot < layout.heads[0]
        top = is_first.where(top, float(2 ** layout.bits[1] - 1))
        inverse = is_first.where(inverse, 1 / (2 ** layout.bits[1] - 1))
    here = at.of_head(a)
    for begin in range(0, layout.channels, b.threads):
        channel = share.thread + begin
        if begin + b.threads <= layout.channels:
            _channel(channel, told, kept, b, (top, inverse), a, here)
        else:
            with lane.when(channel < layout.channels):
                inside = channel.minimum(layout.channels - 1)
                _channel(inside, told, kept, b, (top, inverse), a, here)


def _channel(
    channel: Int,
    told: Pointer,
    kept: Pointer,
    b: Block,
    top: tuple[Float, Float],
    a: Arrays,
    here: Int,
) -> None:
    rounder, layout = lane.number(lane.ROUNDER), a.layout
    pick = (channel & 1).equals(0).where(lane.integer(0x9910), 0xBB32)
    place = told.at((channel >> 3) * _LANE_BYTES, (channel & 6) << 1)
    found = []
    for offset, op in ((0, lane.minima_of_halves), (_LANE_BYTES // 2, lane.maxima_of_halves)):
        of_warps = [place.at(w * b.columns * _LANE_BYTES + offset).word() for w in range(b.warps)]
        found.append(lane.permute_bytes(lane.tree(of_warps, op), 0, pick).to_float())
    low, high = found
    # A quotient by 15, 7 or 3 is never halfway, so that it need not be exact.
    steps = (high - low).fma(top[1], rounder) - lane.ROUNDER
    scale = lane.maximum(steps, lane.number(1.0))
    reciprocal = lane.rounded_quotient(lane.number(1.0), scale)
    fine = reciprocal * _FINE
    zero = _quotient(low, fine) - lane.ROUNDER
    # 127 / scale rounded down; half a unit keeps clear of the whole numbers.
    limit = ((reciprocal * 127.5 - 0.5) + lane.ROUNDER) - lane.ROUNDER
    base = zero + lane.ROUNDER
    smallest = lane.maximum(-limit - zero, lane.number(0.0)) + base
    largest = lane.minimum(limit - zero, top[0]) + base
    words = [fine.as_int(), smallest.as_int(), largest.as_int(), base.as_int()]
    kept.at(channel * _CHANNEL_BYTES).store_words(words)
    for out, number in ((a.channel_scale, scale), (a.channel_zero, zero)):
        # As an integer: ptxas of CUDA 13.0 converts a float of which one byte is stored.
        code = lane.permute_bytes((number + lane.ROUNDER).as_int(), 0, 0x4440)
        out.times(here, layout.channels).at(channel).store_low(code, 8)


def _quotient(numerator: Float, fine: Float) -> Float:
    """Half-to-even rounding of an integer over a channel's scale, plus `ROUNDER`.

    Exact although the reciprocal is not: see `turbojax.numerics.progressive`.
    """
    shifted = numerator.fma(fine, lane.number(lane.ROUNDER))
    # The second sum's constant takes the first rounder away again.
    offset = lane.number(lane.ROUNDER - lane.ROUNDER / _FINE)
    return shifted.fma(lane.number(1 / _FINE), offset)


def _codes(share: Share, codes: Words, memory: Pointer) -> Words:
    b = share.block
    kept = memory.at(blocks.MAXIMA_BYTES + b.warps * b.columns * _LANE_BYTES)
    # Codes of lanes past the last channel are not stored.
    column = share.column.minimum(b.channels // CHANNELS - 1)
    place = kept.at(column * (CHANNELS * _CHANNEL_BYTES))
    out: Words = [[[] for _ in group] for group in codes]
    for half in range(2):
        channels = [place.at((4 * half + i) * _CHANNEL_BYTES).words(4) for i in range(4)]
        for group, results in zip(codes, out, strict=True):
            for words, result in zip(group, results, strict=True):
                result.append(_word(words[half], channels))
    return out


def _word(word: Int, channels: list[list[Int]]) -> Int:
    numbers = []
    given = zip(eight_bits.int8_numbers(word), channels, strict=True)
    for code, (fine, smallest, largest, base) in given:
        rounded = _quotient(code, fine.as_float())
        rounded = lane.maximum(rounded, smallest.as_float())
        rounded = lane.minimum(rounded, largest.as_float())
        numbers.append(rounded.as_int() - base)
    return lane.pack_bytes(numbers)


def _stage_rows(share: Share, codes: Words, staged: Pointer, pitch: int) -> None:
    for number, group in enumerate(codes):
        for i, words in enumerate(group):
            token = share.group(number) * blocks.TOKENS + i
            with share.inside(number):
                staged.at(token * pitch, share.column * CHANNELS).store_words(words)


def _pack(share: Share, staged: Pointer, out: Pointer, layout: Layout, bits: int) -> None:
    """Packs and stores the staged codes; planes follow each other along a row."""
    row = layout.row * bits // 8
    begin, shift = 0, 0
    for width in _PLANES[bits]:
        length = layout.row * width // 8  # bytes of the plane, in each row
        # A lane takes as many bytes at once as the alignment of planes and rows allows.
        size = next(n for n in (16, 8, 4, 1) if length % n == 0 and row % n == 0)
        units = length // size
        mask = 0x01010101 * (2**width - 1) if len(_PLANES[bits]) > 1 else None
        count, threads = layout.rows * units, share.block.threads
        for first in range(0, count, threads):
            unit = (share.thread + first).minimum(count - 1)
            number, place = unit // units, unit % units * size
            source = _row(staged, number, layout).at(place)
            parts = [_load(source.at(part * length), size) for part in range(8 // width)]
            if mask is not None:
                parts = [[(word >> shift) & mask for word in part] for part in parts]
            packed = parts[0]
            for i, part in enumerate(parts[1:], 1):
                packed = [a | (b << (i * width)) for a, b in zip(packed, part, strict=True)]
            at = out.at(number * row, place + begin)
            if first + threads <= count:
                _store(at, packed, size)
            else:
                with lane.when(share.thread < count - first):
                    _store(at, packed, size)
        begin, shift = begin + length, shift + width


def _load(source: Pointer, size: int) -> list[Int]:
    return [source.byte()] if size == 1 else source.words(size // 4)


def _store(at: Pointer, words: list[Int], size: int) -> None:
    if size == 1:
        at.store_low(words[0], 8)
    elif size == 4:
        at.store(words[0])
    else:
        at.store_words(words)


def _row(staged: Pointer, number: Int, layout: Layout) -> Pointer:
    if layout.tokens_last:
        return staged.at(number * layout.tokens, (number >> 3) * 16)
    return staged.at(number * _pitch(layout))
