"""What the kernels of this package share: rounding, exponentials, products, launch settings."""

import functools
import math
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

Ref = Any
"""An array in memory, as kernels see it; jax's own type does not know `at`."""

LOG2_E = math.log2(math.e)
INT8_RANGE = 119.0
E4M3_MAX = 448.0

# An operand that the kernel indexes by itself.
WHOLE = pl.BlockSpec(memory_space=pl.ANY)

# Added to float32 below 2**22 it leaves their integer, rounded half to even, in the low bits; there
# is no `round` in this lowering.
_ROUNDER = 12582912.0
_ROUNDER_BITS = 0x4B400000


class Exponential(Protocol):
    """``exp`` of non-positive arguments, made of a kernel's own instructions.

    Arguments count in units that its owner chooses (nats, or powers of two).
    """

    def __call__(self, x: jax.Array, *, floor: Any, exp2: Any) -> jax.Array: ...


def evaluate(exp: Exponential, x: jax.Array, interpret: bool) -> jax.Array:
    """`exp` of float32 `x`."""
    return exp(
        x,
        floor=functools.partial(_floor, interpret=interpret),
        exp2=functools.partial(exp2, interpret=interpret),
    )


def exp2(x: jax.Array, interpret: bool) -> jax.Array:
    """``2 ** x`` in one instruction, within two units in the last place; tiny results are 0."""
    if interpret:
        return jnp.exp2(x)
    return _float_asm("ex2.approx.ftz.f32 $0, $1;", x)


def _floor(x: jax.Array, interpret: bool) -> jax.Array:
    """Rounds float32 in [0, 2**22) down, through an addition that rounds down."""
    if interpret:
        return jnp.floor(x)
    return _float_asm(f"add.rm.f32 $0, $1, 0f{_ROUNDER_BITS:08X};", x) - _ROUNDER


def _float_asm(asm: str, x: jax.Array) -> jax.Array:
    [out] = plgpu.elementwise_inline_asm(
        asm,
        args=[x],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.float32)],
    )
    return out


def rint(x: jax.Array) -> jax.Array:
    """Rounds float32 within +-2**22 to int32, ties to even."""
    return jax.lax.bitcast_convert_type(x + _ROUNDER, jnp.int32) - _ROUNDER_BITS


def rint_to_int8(x: jax.Array) -> jax.Array:
    """Rounds float32 within +-127 to int8, ties to even; the low byte of the sum is the code."""
    return jax.lax.bitcast_convert_type(x + _ROUNDER, jnp.int32).astype(jnp.int8)


def dot(
    a: jax.Array, b: jax.Array, interpret: bool, contracting: tuple[int, int] = (1, 1)
) -> jax.Array:
    """A matrix product to int32 or float32; float32 operands are split into three tf32 products.

    Args:
      a: int8, float8, bfloat16, float16 or float32.
      b: the same dtype.
      interpret: whether this runs without a GPU.
      contracting: the axis of each that is summed over.
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
    """``cap * tanh(x / cap)``, of infinities too; there is no `tanh` without loss here."""
    e = jnp.exp2(jnp.abs(x) * (-2 * LOG2_E / cap))
    capped = cap * ((1 - e) / (1 + e))
    return jnp.where(x < 0, -capped, capped)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << (n - 1).bit_length()


def parameters(num_warps: int, num_stages: int) -> Any:
    """Launch settings; naming them selects the Triton lowering on every jax version."""
    return plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages)
