"""Append to pages of integers: new vectors rotated, encoded and stored, in one launch.

Roofline, both in 4 bits, for 4 sequences of 4,096 tokens, 8 KV heads of 128: 84 MB, 28 us at the
3.0 TB/s of a copy on an H100; 1.3 G operations, 46 us, which is the floor. Target: 150 us, 10 for
one token of 64 sequences. Seen: 114 and 2.8 us (XLA 3,423 and 27.5).

The numbers are those of `turbojax.polar.encode`, and of `turbojax.caches.paged.formats.to_int8`,
bit for bit: the same additions in the same order,
squares whose sums do not depend on contraction, and a norm that comparisons decide.

A program takes some vectors of one side, in pieces of their channels: stages of the rotation
between pieces are additions of whole arrays. Within a piece a channel needs its partner, and
registers can be neither sliced nor shuffled here; but both channels of a pair get the sum over an
axis of two. Sums of integers wrap around, so subtracting a channel's own bits from the sum of both
gives its partner's bits, exactly.

Roofline in full and versions: `docs/kernels/triton.md`.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import varying
from pallas_kernels.layouts import Codec
from pallas_kernels.triton import _common
from pallas_kernels.triton._common import WHOLE, Ref, parameters

NAME = "turbojax_paged_append"

_LARGEST_NORM = 65504.0
# Sums of squares beyond which norms are 0, or too large for float16, whatever the codes are.
_TINY, _HUGE = 2.0**-60, 2.0**40
_SMALLEST_EXPONENT = (127 - 14) << 23  # of float16's normal numbers, as bits of float32
_EXPONENT = 0x7F800000
# Of int8: what counts as nothing; the float32 next to one over the largest integer.
_TINY_INTEGERS, _RECIPROCAL_RANGE = 2.0**-25, float(np.float32(1 / 127))


@dataclasses.dataclass(frozen=True)
class Settings:
    codecs: tuple[Codec | None, ...]  # of each side's codes; None for int8
    tokens: int  # of a sequence in this call, `T`
    rows: int  # vectors of a program, a power of two
    pieces: int  # into which a vector is cut, a power of two
    num_warps: int
    interpret: bool


class Pages(NamedTuple):
    """One side's codes, uint8 ``[P, K, page_size, H * bits / 8]``, and norms, float16 without `H`.

    Codes are packed as by `turbojax.polar.pack`. Or int8 ``[P, K, page_size, H]``, and scales.
    """

    codes: Ref
    norms: Ref


class _Place(NamedTuple):
    """Where the vectors of a program go, each int32 ``[R]``, and bool ``[R]``, whether they do."""

    page: jax.Array
    head: jax.Array
    slot: jax.Array
    kept: jax.Array


def append(
    vectors: tuple[jax.Array, ...],
    signs: jax.Array | None,
    block_tables: jax.Array,
    lengths: jax.Array,
    new_lengths: jax.Array,
    pages: tuple[Pages, ...],
    settings: Settings,
) -> tuple[Pages, ...]:
    """Stores tokens; those without a page in the pool are left out.

    For each side, `vectors` are bfloat16, float16 or float32 ``[B * T * K, H]``, `H` a power of
    two. `signs` are float32 ``[H]``, the rotation's; None if no side has codes. int32:
    `block_tables` ``[B, entries]``; `lengths` ``[B]``, tokens held before; `new_lengths` ``[B]``,
    how many of the `T` tokens are stored, the first ones. Returns the pages, in their own memory if
    they were donated.
    """
    sides = len(vectors)
    stored = (*(side.codes for side in pages), *(side.norms for side in pages))
    of_rotation = () if signs is None else (signs,)
    inputs = (block_tables, lengths, new_lengths, *of_rotation, *vectors, *stored)
    count = len(inputs) - len(stored)
    written: Any = varying.pallas_call(
        functools.partial(_kernel, s=settings),
        grid=(pl.cdiv(vectors[0].shape[0], settings.rows), sides),
        in_specs=[WHOLE] * len(inputs),
        out_specs=[WHOLE] * len(stored),
        out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in stored],
        input_output_aliases={count + i: i for i in range(len(stored))},
        compiler_params=parameters(settings.num_warps, 1),
        interpret=settings.interpret,
        name=NAME,
    )(*inputs)
    return tuple(map(Pages, written[:sides], written[sides:]))


def _kernel(tables: Ref, lengths: Ref, new_lengths: Ref, *refs: Ref, s: Settings) -> None:
    # The signs, vectors, and the aliased arrays twice: they are written through their outputs.
    sides = len(s.codecs)
    signs = refs[0] if len(refs) > 5 * sides else None
    refs = refs[-5 * sides :]
    tile, program_side = pl.program_id(0), pl.program_id(1)

    def write(x: Ref, pages: Pages, codec: Codec | None) -> None:
        number = tile * s.rows + jnp.arange(s.rows, dtype=jnp.int32)
        # Rows past the end read the last vector again and are not stored.
        row = jnp.minimum(number, x.shape[0] - 1)
        channels = _channels(x.shape[1], s)
        loaded = [plgpu.load(x.at[row[:, None], c[None, :]]) for c in channels]
        place = _find(row, number < x.shape[0], tables, lengths, new_lengths, pages.codes, s)
        if codec is None:
            packed, norm = _to_int8(loaded)
        else:
            assert signs is not None
            flips = [plgpu.load(signs.at[c])[None, :] for c in channels]
            packed, norm = _encode(loaded, flips, codec, s.interpret)
        _store_codes(packed, pages.codes, place)
        plgpu.store(pages.norms.at[place.page, place.head, place.slot], norm, mask=place.kept)

    for side, codec in enumerate(s.codecs):
        x, codes, norms = refs[side], refs[3 * sides + side], refs[4 * sides + side]
        one = functools.partial(write, x, Pages(codes, norms), codec)
        pl.when(program_side == side)(one)


def _channels(head_dim: int, s: Settings) -> list[jax.Array]:
    width = head_dim // s.pieces
    return [i * width + jnp.arange(width, dtype=jnp.int32) for i in range(s.pieces)]


def _find(
    row: jax.Array,
    is_row: jax.Array,
    tables: Ref,
    lengths: Ref,
    new_lengths: Ref,
    codes: Ref,
    s: Settings,
) -> _Place:
    num_pages, heads, page_size, _ = codes.shape
    token = jax.lax.div(row, jnp.int32(heads))
    sequence = jax.lax.div(token, jnp.int32(s.tokens))
    within = token - sequence * s.tokens
    # Where int32 overflows this wraps around to a negative number, which is out of range.
    position = plgpu.load(lengths.at[sequence]) + within
    # Page sizes are powers of two; negative positions give negative entries.
    entry = position >> (page_size.bit_length() - 1)
    last = tables.shape[1] - 1
    page = plgpu.load(tables.at[sequence, jnp.minimum(jnp.maximum(entry, 0), last)])
    has_page = (entry >= 0) & (entry <= last) & (page >= 0) & (page < num_pages)
    kept = is_row & has_page & (within < plgpu.load(new_lengths.at[sequence]))
    # Otherwise out of range, so that when interpreted it takes no other vector's place.
    page = jnp.where(kept, page, num_pages)
    return _Place(page, row - token * heads, position & (page_size - 1), kept)


def _store_codes(packed: list[list[jax.Array]], codes: Ref, place: _Place) -> None:
    """Stores the packed pieces of vectors, kind by kind: see `_pack`."""
    vector = place.page[:, None], place.head[:, None], place.slot[:, None]
    start = 0
    for pieces in packed:
        for piece in pieces:
            rows, width = piece.shape
            byte = start + jnp.arange(width, dtype=jnp.int32)
            mask = jnp.broadcast_to(place.kept[:, None], (rows, width))
            at = codes.at[(*vector, byte[None, :])]
            plgpu.store(at, piece.astype(codes.dtype), mask=mask)
            start += width


def _encode(
    loaded: list[jax.Array], flips: list[jax.Array], codec: Codec, interpret: bool
) -> tuple[list[list[jax.Array]], jax.Array]:
    """Codes and norms of vectors.

    `loaded` are pieces ``[R, c]`` as they come in, `flips` float32 ``[1, c]``, the signs of their
    channels. Returns the bytes of all pieces, kind by kind, see `_pack`; and norms, float16
    ``[R]``.
    """
    is_float32 = loaded[0].dtype == jnp.float32
    x = [piece.astype(jnp.float32) for piece in loaded]
    squares = _total([_square(piece) if is_float32 else piece * piece for piece in x])
    is_tiny, is_bounded = squares < _TINY, squares <= _HUGE
    squares = jnp.where(is_bounded & ~is_tiny, squares, 1.0)
    norm = jnp.where(is_tiny, 0.0, _exact_root(squares, interpret))
    # Of float32 that are not negative, bits are in the order of the numbers.
    thresholds = [_bits(norm * jnp.float32(t))[:, None] for t in codec.thresholds]
    rotated = _hadamard([piece * flip for piece, flip in zip(x, flips, strict=True)])
    packed, chosen = [], None
    for piece in rotated:
        codes, parts = _nearest(piece, thresholds, codec)
        chosen = parts if chosen is None else chosen + parts
        kinds = _pack(codes, codec.bits)
        packed.append([jnp.where(is_bounded[:, None], kind, 0) for kind in kinds])
    assert chosen is not None
    total = jnp.sum(chosen, axis=1, dtype=jnp.int32)
    corrected = _corrected(squares, total.astype(jnp.float32) * jnp.float32(codec.unit))
    corrected = jnp.where(is_tiny, 0.0, corrected)
    is_valid = is_bounded & (corrected <= _LARGEST_NORM)
    norms = jnp.where(is_valid, corrected.astype(jnp.float16), jnp.float16(jnp.nan))
    return [list(kind) for kind in zip(*packed, strict=True)], norms


def _to_int8(loaded: list[jax.Array]) -> tuple[list[list[jax.Array]], jax.Array]:
    """Integers and scales of vectors: one kind of pieces, int32 ``[R, c]``; float16 ``[R]``."""
    x = [piece.astype(jnp.float32) for piece in loaded]
    # As integers magnitudes are in the order of the numbers, and NaN is beyond all of them.
    largest = [jnp.max(_bits(piece) & 0x7FFFFFFF, axis=1) for piece in x]
    top = jax.lax.bitcast_convert_type(functools.reduce(jnp.maximum, largest), jnp.float32)
    is_tiny = top <= _TINY_INTEGERS
    scale = _up_to_float16(jnp.where(is_tiny, 1.0, top * _RECIPROCAL_RANGE))
    is_valid = scale <= _LARGEST_NORM
    is_stored = is_valid & ~is_tiny
    divisor = jnp.where(is_stored, scale, 1.0)[:, None]
    integers = [
        _quotients(jnp.where(is_stored[:, None], piece, 0.0), divisor, 1.0 / divisor) for piece in x
    ]
    scale = jnp.where(is_tiny, 0.0, scale)
    return [integers], jnp.where(is_valid, scale.astype(jnp.float16), jnp.float16(jnp.nan))


def _up_to_float16(x: jax.Array) -> jax.Array:
    """The smallest float16 not below positive `x`, as float32; it may exceed float16's range."""
    exponent = jnp.maximum(_bits(x) & _EXPONENT, _SMALLEST_EXPONENT) - (10 << 23)
    quantum = jax.lax.bitcast_convert_type(exponent, jnp.float32)
    scaled = x * jax.lax.bitcast_convert_type((254 << 23) - exponent, jnp.float32)
    # A value that is not finite has no integer; the scale is not finite either way.
    scaled = jnp.where(scaled < 4096.0, scaled, 4096.0)
    whole = scaled.astype(jnp.int32).astype(jnp.float32)
    whole = jnp.where(whole < scaled, whole + 1.0, whole)
    return jnp.where(jnp.abs(x) < jnp.inf, whole * quantum, jnp.inf)


def _quotients(x: jax.Array, scale: jax.Array, inverse: jax.Array) -> jax.Array:
    """int32 ``x / scale``, to nearest, ties to even; the remainder decides, see `to_int8`."""
    guess = _common.rint(x * inverse)
    number = guess.astype(jnp.float32)
    rest = x - number * scale
    distance, half = jnp.abs(rest), scale * 0.5
    is_past = (distance > half) | ((distance == half) & (guess & 1 == 1))
    return guess + jnp.where(is_past, jnp.where(rest < 0, -1, 1), 0)


def _square(x: jax.Array) -> jax.Array:
    """See `turbojax.polar.codec`; other dtypes have exact squares."""
    high = jax.lax.bitcast_convert_type(_bits(x) & ~0xFFF, jnp.float32)
    low = x - high
    return high * high + ((high + high) * low + low * low)


def _total(pieces: list[jax.Array]) -> jax.Array:
    """The sums over all channels: the upper half is added to the lower one until one is left."""
    while len(pieces) > 1:
        half = len(pieces) // 2
        pieces = [a + b for a, b in zip(pieces[:half], pieces[half:], strict=True)]
    x = pieces[0]
    # Every channel gets the sum, which keeps them where they are; in the end all are the same.
    half = x.shape[1] // 2
    while half:
        x = _added(x, half)
        half //= 2
    return jax.lax.bitcast_convert_type(jnp.max(_bits(x), axis=1), jnp.float32)


def _added(x: jax.Array, half: int) -> jax.Array:
    pairs = x.reshape(x.size // (2 * half), 2, half)
    both = jnp.sum(pairs, axis=1)[:, None, :]
    return jnp.broadcast_to(both, pairs.shape).reshape(x.shape)


def _hadamard(pieces: list[jax.Array]) -> list[jax.Array]:
    """For each pair (a, b) of channels `half` apart ``(a + b, a - b)``, for each `half` in turn."""
    width, half = pieces[0].shape[1], 1
    while half < width:
        pieces = [_stage(piece, half) for piece in pieces]
        half *= 2
    apart = 1
    while apart < len(pieces):
        new = []
        for i, own in enumerate(pieces):
            new.append(pieces[i - apart] - own if i & apart else own + pieces[i + apart])
        pieces, apart = new, 2 * apart
    return pieces


def _stage(x: jax.Array, half: int) -> jax.Array:
    shape = x.shape
    x = x.reshape(shape[0] * shape[1] // (2 * half), 2, half)
    bits = _bits(x)
    both = jnp.sum(bits, axis=1, dtype=jnp.int32)
    partner = jax.lax.bitcast_convert_type(both[:, None, :] - bits, jnp.float32)
    is_second = jnp.arange(2, dtype=jnp.int32)[None, :, None] == 1
    return (partner + jnp.where(is_second, -x, x)).reshape(shape)


def _nearest(
    x: jax.Array, thresholds: list[jax.Array], codec: Codec
) -> tuple[jax.Array, jax.Array]:
    """Codes and the squares of their levels, int32, of `x`, float32 ``[R, c]``.

    `thresholds` are int32 ``[R, 1]``, the bits of the positive ones.
    """
    # Ties go up: the magnitude of a negative number must exceed a threshold. That of -0 need not.
    negative = jnp.where(x < 0, -1, 0)
    size = (_bits(x) & 0x7FFFFFFF) + negative
    # One number for the code of a positive channel and the square: comparisons are used once, as
    # there are few registers for their results.
    half = 2 ** (codec.bits - 1)
    entries = [jnp.int32(2 * half * square + half + i) for i, square in enumerate(codec.squares)]
    chosen = jnp.full(x.shape, entries[0], jnp.int32)
    for threshold, entry in zip(thresholds, entries[1:], strict=True):
        chosen = jnp.where(size >= threshold, entry, chosen)
    # half + i, or half - 1 - i.
    return (chosen ^ negative) & (2 * half - 1), chosen >> codec.bits


def _pack(codes: jax.Array, bits: int) -> list[jax.Array]:
    """The bytes of codes ``[R, c]``, int32, as `turbojax.polar.pack` orders them.

    Of 4 and 2 bits one kind, ``[R, c / 2]`` and ``[R, c / 4]``. Of 3 bits two kinds, each of which
    a vector has for all its channels before the next begins: the lower two bits, ``[R, c / 4]``,
    and the highest ones, ``[R, c / 8]``.
    """
    if bits == 4:
        return [_joined(codes, 4 * _first(2))]
    lower = _joined(codes & 3, 2 * _first(4))
    if bits == 2:
        return [lower]
    of_four, half = _first(8) & 3, _first(8) >> 2
    return [lower, _joined(codes >> 2, 4 * (of_four >> 1) + 2 * half + (of_four & 1))]


def _first(count: int) -> jax.Array:
    return jnp.arange(count, dtype=jnp.int32)


def _joined(x: jax.Array, shifts: jax.Array) -> jax.Array:
    """Neighbours in one number, each shifted by its shift."""
    rows, width = x.shape
    together = x.reshape(rows * width // len(shifts), len(shifts)) << shifts[None, :]
    joined = jnp.sum(together, axis=1, dtype=jnp.int32)
    return joined.reshape(rows, width // len(shifts))


def _corrected(squares: jax.Array, levels: jax.Array) -> jax.Array:
    """The root of ``squares / levels`` rounded to float16, still float32; infinite if too large.

    The result is approximate until a comparison decides, see `turbojax.polar.codec`.
    """
    guess = jnp.sqrt(squares / levels)
    exponent = jnp.maximum(_bits(guess) & _EXPONENT, _SMALLEST_EXPONENT) - (10 << 23)
    quantum = jax.lax.bitcast_convert_type(exponent, jnp.float32)
    inverse = jax.lax.bitcast_convert_type((254 << 23) - exponent, jnp.float32)
    whole = (guess * inverse).astype(jnp.int32).astype(jnp.float32)
    middle = (whole + 0.5) * quantum
    up = jnp.where((middle * middle) * levels <= squares, 1.0, 0.0)
    too_large = (_LARGEST_NORM * _LARGEST_NORM) * levels < squares
    return jnp.where(too_large, jnp.inf, (whole + up) * quantum)


def _exact_root(x: jax.Array, interpret: bool) -> jax.Array:
    if interpret:
        return jnp.sqrt(x)
    [out] = plgpu.elementwise_inline_asm(
        "sqrt.rn.f32 $0, $1;",
        args=[x],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.float32)],
    )
    return out


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.int32)
