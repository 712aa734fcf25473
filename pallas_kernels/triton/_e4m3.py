"""e4m3 in integer and 16-bit arithmetic: GPUs before compute capability 8.9 have no conversions.

Every e4m3 value is exact in float16, and so is the product of an e4m3 scale with a 4-bit integer.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.triton._common import rint

_MAGNITUDE, _INFINITY = 0x7FFFFFFF, 0x7F800000
# Bits of float32 448 and 2**-6, the largest and the smallest normal e4m3 value.
_LARGEST, _SMALLEST_NORMAL = 0x43E00000, 0x3C800000
_DROPPED = 20  # bits of a float32 mantissa that e4m3 lacks
_NAN = 0x7F


def _rounded(magnitude: jax.Array) -> jax.Array:
    """Bits of float32 >= 0 rounded to 4 significant bits, ties to even; at most 448. NaN stays."""
    odd = (magnitude >> _DROPPED) & 1
    rounded = (magnitude + ((1 << (_DROPPED - 1)) - 1) + odd) & -(1 << _DROPPED)
    return jnp.where(magnitude > _INFINITY, magnitude, jnp.minimum(rounded, _LARGEST))


def round_normal(x: jax.Array) -> jax.Array:
    """Rounds float32 multiples of 2**-9, the smallest e4m3 value, to e4m3 values, saturating.

    Nothing is rounded below the normal range; NaN stays.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    magnitude = bits & _MAGNITUDE
    rounded = jnp.where(magnitude < _SMALLEST_NORMAL, magnitude, _rounded(magnitude))
    return jax.lax.bitcast_convert_type(rounded | (bits & ~_MAGNITUDE), jnp.float32)


def to_bits(x: jax.Array) -> jax.Array:
    """int32 bits of float32 `x` rounded to e4m3, saturating; NaN stays NaN."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    magnitude = bits & _MAGNITUDE
    normal = (_rounded(magnitude) >> _DROPPED) - (120 << 3)
    small = jax.lax.bitcast_convert_type(jnp.minimum(magnitude, _SMALLEST_NORMAL), jnp.float32)
    code = jnp.where(magnitude < _SMALLEST_NORMAL, rint(small * 512.0), normal)
    code = jnp.where(magnitude > _INFINITY, _NAN, code)
    return code | ((bits >> 24) & 0x80)


def from_bits(bits: jax.Array) -> jax.Array:
    """The float32 values of e4m3 bits, given as int32 in 0..255."""
    magnitude = bits & _NAN
    # Below 8 the exponent is that of 8, without the leading one.
    normal = jax.lax.bitcast_convert_type((magnitude << _DROPPED) + (120 << 23), jnp.float32)
    value = jnp.where(magnitude < 8, magnitude.astype(jnp.float32) * (1 / 512), normal)
    value = jnp.where(magnitude == _NAN, jnp.nan, value)
    return jnp.where(bits >= 0x80, -value, value)


def nibble(x: jax.Array, high: bool, interpret: bool) -> jax.Array:
    """The high or low two's complement nibble of each int8 byte, as float16."""
    if interpret:
        wide = x.astype(jnp.int32)
        return (wide >> 4 if high else (wide << 28) >> 28).astype(jnp.float16)
    # A nibble with its sign flipped, in the mantissa of a power of two, is a float16 whose distance
    # to that with 8 in its place is the value.
    mask, base = (0x00F000F0, 0x54805480) if high else (0x000F000F, 0x64086408)
    asm = f"""{{
        .reg .b32 a, b, c, m;
        mov.b32 m, {mask:#x};
        mov.b32 c, {base:#x};
        prmt.b32 a, $2, 0, 0x4140;
        prmt.b32 b, $2, 0, 0x4342;
        lop3.b32 a, a, m, c, 0x6a;
        lop3.b32 b, b, m, c, 0x6a;
        sub.rn.f16x2 $0, a, c;
        sub.rn.f16x2 $1, b, c;
    }}"""
    [out] = plgpu.elementwise_inline_asm(
        asm,
        args=[x],
        constraints="=r,=r,r",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.float16)],
    )
    return out


def round_float16(x: jax.Array, has_e4m3: bool, interpret: bool) -> jax.Array:
    """Rounds float16 multiples of 2**-9 to e4m3 values, saturating; NaN stays."""
    if interpret or not has_e4m3:
        return round_normal(x.astype(jnp.float32)).astype(jnp.float16)
    asm = """{
        .reg .b16 c;
        cvt.rn.satfinite.e4m3x2.f16x2 c, $1;
        cvt.rn.f16x2.e4m3x2 $0, c;
    }"""
    [out] = plgpu.elementwise_inline_asm(
        asm,
        args=[x],
        constraints="=r,r",
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.float16)],
    )
    return out
