"""Values stored in 8 to 2 bits as 16-bit operands of a product, and queries to go with them."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

KEYS, VALUES = "keys", "values"

VALUE_OFFSET = 128.0  # the offset of operands of values that are made from codes

_SUBNORMAL = 2.0**-24

# The first word of results is written before arguments are read for the second: not into theirs.
_RESULTS = "=&r", "=r"


class Codec(NamedTuple):
    """Codes: `table` holds 16, 8 or 4 integers in 0..127, of which `half` is the middle."""

    table: tuple[int, ...]
    half: float

    @property
    def bits(self) -> int:
        return len(self.table).bit_length() - 1

    @property
    def pieces(self) -> int:
        """How many channels' codes begin in one byte; each becomes a separate operand."""
        return 2 if self.bits == 4 else 4


def key_unit(interpret: bool) -> float:
    """The factor of keys of codes: as float16 subnormals their bits are the integers."""
    return 1.0 if interpret else _SUBNORMAL


def look_up(
    x: jax.Array, high: jax.Array | None, codec: Codec, kind: str, interpret: bool
) -> tuple[jax.Array, ...]:
    """Table entries of packed codes: one array for each of the codes that a byte of `x` holds.

    `x` is uint8 ``[t, c]``: nibbles (`codec.pieces` is 2), or the lower two bits of four codes
    each. For 3 bits `high` is uint8 ``[t, c]``: the bytes that have the codes' third bits in the
    lower bits of each nibble (for bytes of `x` at even places) or in the upper ones (at odd
    places). With `kind` `KEYS` results are float16, times `key_unit`; with `VALUES` bfloat16, plus
    `VALUE_OFFSET`.
    """
    dtype, offset, above = jnp.float16, 0.0, 0
    if kind == VALUES:
        dtype, offset, above = jnp.bfloat16, VALUE_OFFSET, 0x43434343
    if interpret:
        codes = (_code(x, high, j, codec) for j in range(codec.pieces))
        return tuple((_entries(n, codec.table) + offset).astype(dtype) for n in codes)
    return tuple(_look_up(x, high, codec, above, dtype, j) for j in range(codec.pieces))


def _code(x: jax.Array, high: jax.Array | None, j: int, codec: Codec) -> jax.Array:
    """Code `j` of each byte in int32."""
    wide = x.astype(jnp.int32)
    if codec.pieces == 2:
        return wide >> 4 * j & 15
    low = wide >> 2 * j & 3
    if high is None:
        return low
    odd = jnp.arange(x.shape[1], dtype=jnp.int32)[None, :] & 1
    return low | (high.astype(jnp.int32) >> (4 * (j // 2) + j % 2 + 2 * odd) & 1) << 2


def _look_up(
    x: jax.Array,
    high: jax.Array | None,
    codec: Codec,
    above: int,
    dtype: jax.typing.DTypeLike,
    j: int,
) -> jax.Array:
    table = bytes(codec.table).ljust(16, b"\0")
    words = [int.from_bytes(table[i : i + 4], "little") for i in range(0, 16, 4)]
    names: dict[str, int | str] = dict(zip(("t0", "t1", "t2", "t3"), words, strict=True))
    args = [x]
    if codec.pieces == 2:
        # Codes of a piece are in the lower nibbles, or in the upper ones.
        asm, in_upper = _LOOK_UP, j == 1
    else:
        asm, in_upper = _LOOK_UP_FEW, j >= 2
        names |= {"shift": 2 * (j % 2), "selectors": _SELECTORS}
        if high is not None:
            even = jnp.arange(x.shape[1], dtype=jnp.int32)[None, :] & 1 == 0
            even = jnp.where(even, jnp.int32(255), jnp.int32(0)).astype(jnp.uint8)
            args += [high, jnp.broadcast_to(even, x.shape)]
            names |= {"selectors": _SELECTORS_OF_3.format(shift=j % 2)}
    [out] = plgpu.elementwise_inline_asm(
        asm.format(above=above, wanted=0x4341 if in_upper else 0x4240, **names),
        args=[jax.lax.bitcast_convert_type(y, jnp.int8) for y in args],
        constraints=",".join([*_RESULTS, *["r"] * len(args)]),
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, dtype)],
    )
    return out


# Nibbles of four bytes: bytes by two permutes each half, then each between bytes of zeros (the bits
# of a float16 subnormal) or under the upper byte of a bfloat16 128. All but the last permutes are
# the same for low and high nibbles, and the assembler does them once. It would also load a constant
# into a register anew for every permute (which takes at most one constant), a quarter of all
# instructions. Combined with `zero`, whose value the assembler does not know, constants become
# values that it keeps in registers.
_LOOK_UP = """{{
.reg .b32 x, y, a, b, zero, t0, t1, t2, t3, above;
mov.u32 zero, %lanemask_lt;
shr.u32 zero, zero, 31;
xor.b32 t0, zero, {t0:#x};
xor.b32 t1, zero, {t1:#x};
xor.b32 t2, zero, {t2:#x};
xor.b32 t3, zero, {t3:#x};
xor.b32 above, zero, {above:#x};
xor.b32 y, $2, 0x88888888;
prmt.b32 a, t0, t1, $2;
prmt.b32 b, t2, t3, y;
or.b32 a, a, b;
prmt.b32 $0, a, above, {wanted:#x};
shr.u32 x, $2, 16;
shr.u32 y, y, 16;
prmt.b32 a, t0, t1, x;
prmt.b32 b, t2, t3, y;
or.b32 a, a, b;
prmt.b32 $1, a, above, {wanted:#x};
}}"""

# Codes of 2 and 3 bits: of each byte two codes at a time become nibbles, which one permute looks up
# in at most eight entries; the rest is as above.
_LOOK_UP_FEW = """{{
.reg .b32 x, h, y, a, zero, t0, t1, above;
mov.u32 zero, %lanemask_lt;
shr.u32 zero, zero, 31;
xor.b32 t0, zero, {t0:#x};
xor.b32 t1, zero, {t1:#x};
xor.b32 above, zero, {above:#x};
shr.u32 x, $2, {shift};
and.b32 x, x, 0x33333333;
{selectors}
prmt.b32 a, t0, t1, x;
prmt.b32 $0, a, above, {wanted:#x};
shr.u32 y, x, 16;
prmt.b32 a, t0, t1, y;
prmt.b32 $1, a, above, {wanted:#x};
}}"""
_SELECTORS = ""
# The third bits of a byte at an even place lie two bits lower than those at an odd one.
_SELECTORS_OF_3 = """shl.b32 h, $3, 2;
and.b32 h, h, $4;
not.b32 y, $4;
and.b32 y, y, $3;
or.b32 h, h, y;
shr.u32 h, h, {shift};
and.b32 h, h, 0x44444444;
or.b32 x, x, h;"""


def _entries(code: jax.Array, table: tuple[int, ...]) -> jax.Array:
    """float32 entries of int32 codes; kernels cannot index a table."""
    choose = lambda value, i: jnp.where(code == i, jnp.float32(table[i]), value)  # noqa: E731
    return functools.reduce(choose, range(len(table)), jnp.zeros(code.shape, jnp.float32))


def fp8_to_float16(x: jax.Array, interpret: bool) -> jax.Array:
    """float16 values of float8_e4m3fn or float8_e5m2, exact, NaN and infinities too."""
    if interpret:
        return x.astype(jnp.float16)
    is_e5m2 = x.dtype == jnp.float8_e5m2
    [out] = plgpu.elementwise_inline_asm(
        _E5M2 if is_e5m2 else _E4M3,
        args=[jax.lax.bitcast_convert_type(x, jnp.int8)],
        constraints=",".join([*_RESULTS, "r"]),
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.float16)],
    )
    return out


def int8_to_16_bits(x: jax.Array, kind: str, interpret: bool) -> jax.Array:
    """int8 as float16 for keys, as bfloat16 for values; exact."""
    dtype = jnp.bfloat16 if kind == VALUES else jnp.float16
    if interpret:
        return x.astype(jnp.float32).astype(dtype)
    [out] = plgpu.elementwise_inline_asm(
        _INT8_VALUES if kind == VALUES else _INT8_KEYS,
        args=[x],
        constraints=",".join([*_RESULTS, "r"]),
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, dtype)],
    )
    return out


# Conversions take four times as long as logic. Under 0x64 a byte is the float16 1024 plus it; the
# sign's complement makes it the integer plus 128.
_INT8_KEYS = """{
.reg .b32 x, over;
xor.b32 x, $2, 0x80808080;
mov.b32 over, 0x64806480;
prmt.b32 $0, x, 0x64646464, 0x4140;
prmt.b32 $1, x, 0x64646464, 0x4342;
sub.rn.f16x2 $0, $0, over;
sub.rn.f16x2 $1, $1, over;
}"""
# Under 0x43 seven bits are the bfloat16 128 plus them, and the sign alone is 128 or 256, which is
# what that is too large by.
_INT8_VALUES = """{
.reg .b32 x, s, minus, a, b;
and.b32 x, $2, 0x7f7f7f7f;
and.b32 s, $2, 0x80808080;
mov.b32 minus, 0xbf80bf80;
prmt.b32 $0, x, 0x43434343, 0x4140;
prmt.b32 $1, x, 0x43434343, 0x4342;
prmt.b32 a, s, 0x43434343, 0x4140;
prmt.b32 b, s, 0x43434343, 0x4342;
fma.rn.bf16x2 $0, a, minus, $0;
fma.rn.bf16x2 $1, b, minus, $1;
}"""

# The upper byte of a float16 is an e5m2.
_E5M2 = """{
prmt.b32 $0, $2, 0, 0x1404;
prmt.b32 $1, $2, 0, 0x3424;
}"""
_E4M3 = """{
.reg .b16 low, high;
mov.b32 {low, high}, $2;
cvt.rn.f16x2.e4m3x2 $0, low;
cvt.rn.f16x2.e4m3x2 $1, high;
}"""


def to_float16(pieces: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Rows divided by a power of two to fit float16, where 11 bits of the largest are left.

    `pieces` are floating point ``[R, c]``, channels of the same rows. Returns float16 pieces of at
    most 2, and the float32 powers ``[R]``, NaN for a row that is not finite.
    """
    wide = tuple(x.astype(jnp.float32) for x in pieces)
    largest = functools.reduce(jnp.maximum, (jnp.max(jnp.abs(x), axis=1) for x in wide))
    exponent = jax.lax.bitcast_convert_type(largest, jnp.int32) & 0x7F800000
    # Those of zero, infinity and their inverses are not powers of two.
    exponent = jnp.clip(exponent, 1 << 23, 253 << 23)
    power = jax.lax.bitcast_convert_type(exponent, jnp.float32)
    inverse = jax.lax.bitcast_convert_type((254 << 23) - exponent, jnp.float32)
    # 0 for finite rows; a maximum may lose a NaN.
    spoiled = functools.reduce(jnp.add, (jnp.sum(x * 0.0, axis=1) for x in wide))
    return tuple((x * inverse[:, None]).astype(jnp.float16) for x in wide), power + spoiled
