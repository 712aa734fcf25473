"""What the kernels of this package share: rounding, exponentials, products, launch settings."""

import functools
import struct
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.layouts import E4M3_MAX as E4M3_MAX
from pallas_kernels.layouts import INT8_RANGE as INT8_RANGE
from pallas_kernels.layouts import LOG2_E as LOG2_E
from pallas_kernels.layouts import Ref as Ref
from pallas_kernels.layouts import next_power_of_2 as next_power_of_2

# A whole array, which the kernel indexes itself.
WHOLE = pl.BlockSpec(memory_space=pl.ANY)

# Added to float32 below 2**22 it leaves their integer, rounded half to even, in the low bits; there
# is no `round` in this lowering.
_ROUNDER = 12582912.0
_ROUNDER_BITS = 0x4B400000


class Exponential(Protocol):
    """``exp`` of non-positive arguments, in instructions that a kernel supports.

    Its owner chooses the unit of arguments: nats, or powers of two.
    """

    def __call__(self, x: jax.Array, *, floor: Any, exp2: Any, fma: Any) -> jax.Array: ...


def evaluate(exp: Exponential, x: jax.Array, interpret: bool) -> jax.Array:
    return exp(
        x,
        floor=functools.partial(_floor, interpret=interpret),
        exp2=functools.partial(exp2, interpret=interpret),
        fma=functools.partial(fma, interpret=interpret),
    )


def exp2(x: jax.Array, interpret: bool) -> jax.Array:
    """``2 ** x`` in one instruction, within two units in the last place; tiny results are 0."""
    if interpret:
        return jnp.exp2(x)
    return _float_asm("ex2.approx.ftz.f32 $0, $1;", x)


def fma(a: jax.Array, b: jax.Array | float, c: jax.Array | float, interpret: bool) -> jax.Array:
    """``a * b + c`` in one instruction, all float32: the compiler does not fuse the two here."""
    if interpret:
        return a * b + c
    args, names = [a], []
    for x in (b, c):
        if isinstance(x, float):
            names.append(f"0f{struct.unpack('<I', struct.pack('<f', x))[0]:08X}")
        else:
            args.append(jnp.broadcast_to(x, a.shape))
            names.append(f"${len(args)}")
    return _float_asm(f"fma.rn.f32 $0, $1, {', '.join(names)};", *args)


def _floor(x: jax.Array, interpret: bool) -> jax.Array:
    """Rounds float32 in [0, 2**22) down, through an addition that rounds down."""
    if interpret:
        return jnp.floor(x)
    return _float_asm(f"add.rm.f32 $0, $1, 0f{_ROUNDER_BITS:08X};", x) - _ROUNDER


def _float_asm(asm: str, *args: jax.Array) -> jax.Array:
    [out] = plgpu.elementwise_inline_asm(
        asm,
        args=args,
        constraints=",".join(["=f"] + ["f"] * len(args)),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, jnp.float32)],
    )
    return out


def rint(x: jax.Array) -> jax.Array:
    """Rounds float32 within +-2**22 to int32, ties to even."""
    return jax.lax.bitcast_convert_type(x + _ROUNDER, jnp.int32) - _ROUNDER_BITS


def round_product(x: jax.Array, factor: jax.Array | float, interpret: bool) -> jax.Array:
    """``x * factor``, within +-127, rounded to int8, ties to even, as the low byte of one sum."""
    shifted = fma(x, factor, _ROUNDER, interpret)
    return jax.lax.bitcast_convert_type(shifted, jnp.int32).astype(jnp.int8)


def dot(
    a: jax.Array, b: jax.Array, interpret: bool, contracting: tuple[int, int] = (1, 1)
) -> jax.Array:
    """A matrix product to int32 or float32; float32 operands are split into three tf32 products.

    Both operands have one dtype: int8, float8, bfloat16, float16 or float32. `contracting` are the
    axes that are summed over.
    """
    dtype, precision = jnp.float32, None  # type: Any, Any
    if a.dtype == jnp.int8:
        dtype = jnp.int32
    elif a.dtype == jnp.float32:
        precision = jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    if interpret and dtype == jnp.float32:  # a CPU has none of these
        a, b, precision = a.astype(dtype), b.astype(dtype), jax.lax.Precision.HIGHEST
    dimensions = (((contracting[0],), (contracting[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=dtype)


def soft_cap(x: jax.Array, cap: float) -> jax.Array:
    """``cap * tanh(x / cap)``, of infinities too; Triton has no accurate `tanh`."""
    e = jnp.exp2(jnp.abs(x) * (-2 * LOG2_E / cap))
    capped = cap * ((1 - e) / (1 + e))
    return jnp.where(x < 0, -capped, capped)


def parameters(num_warps: int, num_stages: int) -> Any:
    return plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages)


# Stage 1 of query rows ----------------------------------------------------------------------------
# `_quantize` computes the same codes in fewer operations on bit patterns. On rows whose channels
# are no power of two (masked loads of 48 channels) that gave wrong codes on an H100, though not in
# interpret mode nor for whole blocks; this form was right there, and for a few rows its cost does
# not matter.


def quantize_rows(
    parts: tuple[jax.Array, ...], mode: str
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Quantizes rows, cut into parts ``[R, c]`` along their channels, with one scale each.

    By `mode`, parts become int32 codes (``"int8"``), e4m3 values as bfloat16 (``"fp8"``), or stay
    as they are (``"float"``). Scales are float32 ``[R]``, NaN where a row is not finite.
    """
    if mode == "float":
        return parts, jnp.ones(parts[0].shape[0], jnp.float32)
    wide = tuple(x.astype(jnp.float32) for x in parts)
    magnitudes = [jnp.abs(x) for x in wide]
    maximum = functools.reduce(jnp.maximum, [jnp.max(x, axis=1) for x in magnitudes])
    # A maximum loses NaN here.
    nonfinite = [jnp.max(jnp.where(x < jnp.inf, 0.0, 1.0), axis=1) for x in magnitudes]
    bad = functools.reduce(jnp.maximum, nonfinite)
    if mode == "fp8":
        scale = _or_nan(maximum * float(np.float32(1 / E4M3_MAX)), bad)
        return tuple(_to_e4m3(x, scale[:, None]) for x in wide), scale
    scale = _round_scale(maximum * float(np.float32(1 / INT8_RANGE)))
    scale = _or_nan(scale, bad)
    return tuple(_to_codes(x, scale[:, None]) for x in wide), scale


def _or_nan(scale: jax.Array, bad: jax.Array) -> jax.Array:
    tiny = float(np.finfo(np.float32).tiny)
    return jnp.where(bad > 0, jnp.nan, jnp.where(scale < tiny, 1.0, scale))


def _round_scale(scale: jax.Array) -> jax.Array:
    """Rounds up to 16 significant bits."""
    bits = jax.lax.bitcast_convert_type(scale, jnp.int32)
    return jax.lax.bitcast_convert_type((bits + 255) & -256, jnp.float32)


def _to_e4m3(x: jax.Array, scale: jax.Array) -> jax.Array:
    value = jnp.minimum(jnp.maximum(x * (1 / scale), -E4M3_MAX), E4M3_MAX)
    return value.astype(jnp.float8_e4m3fn).astype(jnp.float32).astype(jnp.bfloat16)


def _to_codes(x: jax.Array, scale: jax.Array) -> jax.Array:
    """``rint(x / scale)``, made exact by comparisons as in `turbojax.numerics.int8`."""
    limit = INT8_RANGE
    code = rint(jnp.minimum(jnp.maximum(x * (1 / scale), -limit), limit))
    guess = code.astype(jnp.float32)
    rest, half = x - guess * scale, 0.5 * scale
    is_odd = (code & 1) == 1
    above = (rest > half) | (is_odd & (rest == half))
    below = (rest < -half) | (is_odd & (rest == -half))
    code = code + above.astype(jnp.int32) - below.astype(jnp.int32)
    code = jnp.minimum(jnp.maximum(code, -int(limit)), int(limit))
    return jnp.where((jnp.abs(x) < jnp.inf) & (scale < jnp.inf), code, 0)
