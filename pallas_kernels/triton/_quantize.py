"""Stage 1, stage 2 and packing of one block inside a kernel, shared by what quantizes.

Registers can be neither sliced nor concatenated in this lowering, so a block is held as equal
*runs* along the axis that packing shortens: half a byte pairs code `c` with code `c + n/2`, and so
on, so that bytes are shifts and ors of whole runs. With as many runs as the narrowest plane of a
width has codes in a byte, every width works, and the packed axis comes out in equal segments.

Numbers are those of `turbojax.quantizers`, bit for bit, in fewer operations: these count (see
`compress`). Integers live in float32, where an addition rounds, and are read from its bits.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.triton._common import E4M3_MAX, INT8_RANGE, Ref, fma, next_power_of_2, rint

# Widths of the planes of a code, low bits first (see turbojax.numerics.packing).
_PLANES = {2: (2,), 3: (2, 1), 4: (4,)}
# Adding it to float32 within +-2**22 leaves them, rounded half to even, in the low bits.
_ROUNDER = 12582912.0
_ROUNDER_BITS = 0x4B400000
_INFINITY_BITS = 0x7F800000
_TINY = 1.1754943508222875e-38
_RECIPROCAL_RANGE = 0.008403361774981022  # the float32 nearest to 1/119
_RECIPROCAL_E4M3_MAX = float(np.float32(1 / E4M3_MAX))
_VALUES_PER_THREAD = 64
_MOST_WARPS = 16


@dataclasses.dataclass(frozen=True)
class BlockLayout:
    """How a block of tokens is cut into runs, and where its codes go."""

    tokens: int  # of a block, a power of two and at least 16
    channels: int  # head dim, a multiple of 8
    bits: tuple[int, ...]  # widths in use, widest first
    heads: tuple[int, ...]  # how many slots have each width
    tokens_last: bool  # whether codes are packed along tokens (values) or channels (keys)

    @property
    def num_runs(self) -> int:
        """How many codes share a byte in the narrowest plane."""
        return 8 // min(width for bits in self.bits for width in _PLANES[bits])

    @property
    def run(self) -> int:
        """Tokens or channels of one run; also bytes of one segment of the packed axis."""
        return (self.tokens if self.tokens_last else self.channels) // self.num_runs

    @property
    def tile(self) -> tuple[int, int]:
        if self.tokens_last:
            return self.run, next_power_of_2(self.channels)
        return self.tokens, next_power_of_2(self.run)

    def slices(self, run: int, first: jax.Array, nothing: jax.Array) -> tuple[pl.Slice, pl.Slice]:
        """Where a run lies in an array of tokens and channels, if its block begins at `first`."""
        rows, columns = self.tile
        if self.tokens_last:
            return pl.Slice(first + run * self.run, rows), pl.Slice(nothing, columns)
        return pl.Slice(first, rows), pl.Slice(run * self.run + nothing, columns)

    def channel_mask(self) -> jax.Array | None:
        """Which channels of a tile a run has; None if all."""
        count = self.channels if self.tokens_last else self.run
        return None if count == self.tile[1] else jnp.arange(self.tile[1]) < count

    def mask(self) -> jax.Array | None:
        channels = self.channel_mask()
        return None if channels is None else jnp.broadcast_to(channels[None], self.tile)

    def transposed(self, x: jax.Array) -> jax.Array:
        """A tile in the order of its packed codes: channels first for values."""
        return x.T if self.tokens_last else x

    def transposed_mask(self) -> jax.Array | None:
        mask = self.mask()
        return None if mask is None else self.transposed(mask)


def unknown_zero(counter: jax.Array, vector: int) -> jax.Array:
    """0, of which the compiler knows only that it is a multiple of `vector`, a power of two.

    Added to the first channel of a tile, it limits the channels that one thread takes: otherwise
    16, for 16-byte accesses, which leaves few threads for the channels and many for the tokens, and
    a reduction over tokens goes through the shuffles of all those threads. Besides, a slice known
    to leave its array is refused, masked or not. `counter` is an int32 scalar, at least 0.
    """
    return jnp.minimum(counter, 0) * vector


def default_warps(values: int) -> int:
    return min(_MOST_WARPS, max(1, values // (32 * _VALUES_PER_THREAD)))


def channels_of(x: Ref, padded: int | None = None) -> tuple[jax.Array, jax.Array | None]:
    """Channels of ``[B, S, K, H]``, up to `padded` or a power of two, and which of them exist.

    The latter is None if all do.
    """
    count = x.shape[3]
    channel = jnp.arange(padded or next_power_of_2(count), dtype=jnp.int32)
    return channel, None if channel.shape[0] == count else channel < count


def load_tokens(
    x: Ref,
    sequence: jax.Array,
    token: jax.Array,
    head: jax.Array,
    channel: jax.Array,
    inside: jax.Array | None,
    length: jax.Array,
) -> jax.Array:
    """Tokens ``[block, channels]`` of ``[B, S, K, H]``, 0 past the length and past the channels."""
    mask = jnp.broadcast_to((token < length)[:, None], (token.shape[0], channel.shape[0]))
    mask = mask if inside is None else mask & inside[None]
    return plgpu.load(x.at[sequence, token[:, None], head, channel[None]], mask=mask, other=0.0)


def block_numbers(
    x: jax.Array, bits: jax.Array, dtype: jax.typing.DTypeLike, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """A block over its scale, rounded, and the scale, a float32 scalar.

    `x` is float32, `bits` as for `maximum_from_bits`. Numbers are float32 integers for int8, else
    e4m3; `as_codes` makes codes of either. With a scale of NaN, integers are 0 and e4m3 NaN.
    """
    maximum = maximum_from_bits(bits)
    if dtype == jnp.int8:
        scale = scale_from_maximum(maximum)
        rounded = stage1_codes(x, scale, interpret)
        return jnp.where(scale == scale, rounded, 0.0), scale
    scale = e4m3_scale_from_maximum(maximum)
    return e4m3_codes(x, scale), scale


def as_codes(numbers: jax.Array) -> jax.Array:
    return rint(numbers).astype(jnp.int8) if numbers.dtype == jnp.float32 else numbers


def maximum_from_bits(bits: jax.Array) -> jax.Array:
    """The float32 maximum of absolute values from their largest bits; NaN if one was not finite.

    As integers, bits of absolute values are in the order of the values, with infinity and NaN above
    all: unlike a maximum of floats, theirs loses no NaN.
    """
    maximum = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(bits < _INFINITY_BITS, maximum, jnp.nan)


def magnitude_bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF


def scale_from_maximum(maximum: jax.Array) -> jax.Array:
    """The stage-1 scale, rounded up to 16 significant bits; NaN unless `maximum` is finite."""
    bits = jax.lax.bitcast_convert_type(maximum * _RECIPROCAL_RANGE, jnp.int32)
    scale = jax.lax.bitcast_convert_type((bits + 255) & ~255, jnp.float32)
    scale = jnp.where(scale < _TINY, 1.0, scale)
    return jnp.where(maximum < jnp.inf, scale, jnp.nan)


def e4m3_scale_from_maximum(maximum: jax.Array) -> jax.Array:
    """The scale that brings `maximum`, a float32 scalar, to the largest e4m3 value."""
    scale = maximum * _RECIPROCAL_E4M3_MAX
    return jnp.where(scale < _TINY, 1.0, scale)


def e4m3_codes(x: jax.Array, scale: jax.Array) -> jax.Array:
    """``x / scale`` in e4m3, NaN where that is; `x` is at most 448 times it, up to rounding."""
    # Selected, because a conversion need not keep a NaN.
    codes = jnp.where(scale == scale, x * (1 / scale), jnp.nan)
    return codes.astype(jnp.float8_e4m3fn)


def permuted_positions(first: jax.Array, count: int) -> jax.Array:
    """Where Hopper's matrix units need the `count` tokens from `first` on, multiples of 16.

    A product's accumulator, read as the 8-bit operand of the next product, permutes tokens within
    groups of 16: token ``4t + 2h + r`` is at ``8h + 2t + r``, with `t` in 0..3, `h` and `r` in
    0..1. Keys stored in this order undo it.
    """
    token = first + jnp.arange(count, dtype=jnp.int32)
    return (token & -16) | ((token & 2) << 2) | ((token & 12) >> 1) | (token & 1)


def _shift(x: jax.Array, factor: jax.Array | float, interpret: bool) -> jax.Array:
    """``x * factor`` rounded half to even, plus `_ROUNDER`, in one instruction.

    In a kernel the addition rounds. Interpreted, XLA would drop it once `_ROUNDER` is subtracted.
    """
    if interpret:
        return jnp.round(x * factor) + _ROUNDER
    return fma(x, factor, _ROUNDER, interpret)


def stage1_codes(x: jax.Array, scale: jax.Array, interpret: bool) -> jax.Array:
    """``rint(x / scale)``, ties to even, exactly, as float32 integers.

    An approximate quotient is rounded first; the remainder of the value, exact because the scale
    has 16 significant bits, then decides whether it was rounded correctly. `x` is less than 2**21
    times `scale`.
    """
    shifted = _shift(x, 1 / scale, interpret)
    guess = shifted - _ROUNDER
    rest = fma(guess, -scale, x, interpret)
    # Past half a scale, or at half a scale from an odd guess, the neighbour is right. The low
    # bits of half a scale are free: with the last one set it is the next larger number.
    even = ~jax.lax.bitcast_convert_type(shifted, jnp.int32) & 1
    half = jax.lax.bitcast_convert_type(0.5 * scale, jnp.int32)
    limit = jax.lax.bitcast_convert_type(half | even, jnp.float32)
    sign = jax.lax.bitcast_convert_type(rest, jnp.int32) & ~0x7FFFFFFF
    one = jax.lax.bitcast_convert_type(sign | 0x3F800000, jnp.float32)
    return guess + jnp.where(jnp.abs(rest) >= limit, one, 0.0)


def clamped_stage1_codes(x: jax.Array, scale: jax.Array, interpret: bool) -> jax.Array:
    """`stage1_codes` for a scale that was fixed before; finite values beyond it become +-119."""
    largest = 128 * scale  # larger quotients are clamped anyway
    codes = stage1_codes(jnp.clip(x, -largest, largest), scale, interpret)
    return jnp.clip(codes, -INT8_RANGE, INT8_RANGE)


def write_block(
    layout: BlockLayout,
    runs: Sequence[jax.Array],
    codes: Sequence[jax.Ref],
    channel_scale: jax.Ref,
    channel_zero: jax.Ref,
    sequence: jax.Array,
    head: jax.Array,
    slot: jax.Array,
    block: jax.Array,
    *,
    nothing: jax.Array,
    interpret: bool,
) -> None:
    """Compresses one block of stage-1 codes and stores it (Eq. 10).

    `runs` are float32 integers, each of `layout.tile`. It writes `codes`, for each width uint8
    ``[B, K_i, n, block, H * bits / 8]``, or with tokens last ``[B, K_i, n, H, block * bits / 8]``,
    and `channel_scale` and `channel_zero`, int8 ``[B, K, n, H]``, at scalar indices: `sequence`,
    `head`, `slot`, the head's place among the slots of all widths, and `block`, along `n`.
    `nothing` is an `unknown_zero`.
    """
    top: Any
    top, *lower = (np.float32(2**bits - 1) for bits in layout.bits)
    if lower:
        top = jnp.where(slot < layout.heads[0], top, lower[0])
    columns = layout.tile[1]
    inside = layout.channel_mask()

    def quantize(group: Sequence[jax.Array], first: int) -> list[jax.Array]:
        """Codes of runs that share their channels, the first of which is `first`."""
        low, high = group[0], group[0]
        for run in group[1:]:
            low, high = jnp.minimum(low, run), jnp.maximum(high, run)
        low, high = jnp.min(low, axis=0), jnp.max(high, axis=0)
        # A quotient by 15, 7 or 3 is never halfway, so that it need not be exact.
        steps = _shift(high - low, 1 / top, interpret) - _ROUNDER
        scale = jnp.maximum(1.0, steps)
        reciprocal = 1 / scale
        zero = _shifted_quotient(low, reciprocal, interpret) - _ROUNDER
        # 127 / scale rounded down; half a unit keeps clear of the whole numbers.
        limit = _shift(127.5 * reciprocal - 0.5, 1.0, interpret) - _ROUNDER
        smallest = jnp.maximum(0.0, -limit - zero) + (zero + _ROUNDER)
        largest = jnp.minimum(top, limit - zero) + (zero + _ROUNDER)
        at = (sequence, head, block, pl.Slice(first + nothing, columns))
        plgpu.store(channel_scale.at[at], rint(scale).astype(jnp.int8), mask=inside)
        plgpu.store(channel_zero.at[at], rint(zero).astype(jnp.int8), mask=inside)
        offset = (rint(zero) + _ROUNDER_BITS)[None]

        def codes_of(run: jax.Array) -> jax.Array:
            shifted = _shifted_quotient(run, reciprocal[None], interpret)
            clipped = jnp.clip(shifted, smallest[None], largest[None])
            return jax.lax.bitcast_convert_type(clipped, jnp.int32) - offset

        return [codes_of(run) for run in group]

    if layout.tokens_last:
        q2 = quantize(runs, 0)
    else:
        q2 = [quantize([run], i * layout.run)[0] for i, run in enumerate(runs)]
    first_slot = 0
    for array, bits, heads in zip(codes, layout.bits, layout.heads, strict=True):
        place = (sequence, slot - first_slot, block)
        store = functools.partial(_store_packed, layout, q2, bits, array, place, nothing)
        if len(layout.bits) == 1:
            store()
        else:
            pl.when((slot >= first_slot) & (slot < first_slot + heads))(store)
        first_slot += heads


def _shifted_quotient(numerator: jax.Array, reciprocal: jax.Array, interpret: bool) -> jax.Array:
    """Half-to-even rounding of an integer over a channel's scale, plus `_ROUNDER`.

    Exact although the reciprocal is not: see `turbojax.numerics.progressive`.
    """
    shifted = _shift(numerator, reciprocal * 4096, interpret)
    if interpret:
        return _shift(shifted - _ROUNDER, 1 / 4096, interpret)
    # The second sum's constant takes the first `_ROUNDER` away again.
    return fma(shifted, 1 / 4096, _ROUNDER - _ROUNDER / 4096, interpret)


def _store_packed(
    layout: BlockLayout,
    q2: Sequence[jax.Array],
    bits: int,
    codes: jax.Ref,
    place: tuple[jax.Array, ...],
    nothing: jax.Array,
) -> None:
    mask = layout.transposed_mask()
    for i, segment in enumerate(pack_runs(q2, bits)):
        packed = i * layout.run
        if layout.tokens_last:
            at = pl.Slice(nothing, layout.tile[1]), pl.Slice(packed, layout.run)
        else:
            at = pl.Slice(0, layout.tokens), pl.Slice(packed + nothing, layout.tile[1])
        value = layout.transposed(segment.astype(jnp.uint8))
        plgpu.store(codes.at[(*place, *at)], value, mask=mask)


def pack_runs(runs: Sequence[jax.Array], bits: int) -> list[jax.Array]:
    """Packs codes given as equal runs of an axis (the layout of `turbojax.quantizers.pack`).

    `runs` are int32 codes below ``2**bits``, a multiple of 2, 8, 4 arrays for 4, 3, 2 bits. Returns
    int32 bytes: the packed axis, as segments of a run's length in their order.
    """
    segments, shift = [], 0
    for width in _PLANES[bits]:
        if len(_PLANES[bits]) == 1:
            plane = list(runs)
        else:
            plane = [(run >> shift) & (2**width - 1) for run in runs]
        parts = 8 // width
        count = len(runs) // parts  # runs of a part: segments of this plane
        for i in range(count):
            segment = plane[i]
            for part in range(1, parts):
                segment = segment | (plane[part * count + i] << (part * width))
            segments.append(segment)
        shift += width
    return segments
