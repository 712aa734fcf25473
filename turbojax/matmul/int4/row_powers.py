"""Powers of two that bring the rows of a weight into the range of their scales' dtype."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

INT4_RANGE = 7
"""The code that a group's largest absolute value gets."""
LARGEST_POWER = 126
"""2^n and its reciprocal are normal float32 numbers up to here."""
SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)
"""Devices differ in how they treat smaller float32 numbers: they count as zeros."""


class Range(NamedTuple):
    """Which scales a dtype holds in full precision, or is to hold.

    Attributes:
      smallest: scale.
      largest: quotient that rounds to such a scale.
      top: `exponent` of the largest numbers a row is brought to, where there is most room below.
    """

    smallest: float
    largest: float
    top: int


E4M3_SCALES = Range(2.0**-9, 68.0, 9)
"""A scale is at most 64, since 7 * 64 is the largest e4m3 number. The next would be 72; a tie
rounds to 64, whose bits are even. Numbers from 7 * 2^5 to below 7 * 2^6 = 448 are at the top."""
FLOAT16_SCALES = Range(2.0**-14, 65504.0, 18)
"""Normal numbers. Those from 7 * 2^14 to below 7 * 2^15 are at the top."""


def row_powers(
    maximum: jax.Array, output_scale: jax.Array, scales: Range = E4M3_SCALES
) -> jax.Array:
    """The `n` by whose power ``2^n`` each row is multiplied before it is rounded: int32 ``[N]``.

    `n`, from -120 to 126, is 0 where the dtype holds the scale ``max|w| / 7`` of every group: in
    e4m3 where none is above 64 or, zero aside, below 2**-9. Otherwise it brings the row's largest
    number to the top, in e4m3 into ``[224, 448)``, where there is most room below; a row that only
    its small groups bring here is not made smaller. Then ``2^-n`` times the row's output scale is a
    normal number, if that scale is one.

    `maximum` are the groups' largest absolute values, float32 ``[N, groups]``, NaN where one is not
    finite. Such groups, and those below the smallest normal number, are left out.
    """
    is_held = holds_weights(maximum)
    largest = jnp.max(jnp.where(is_held, maximum, 0), axis=1)
    smallest = jnp.min(jnp.where(is_held, maximum, jnp.inf), axis=1)
    to_top = scales.top - exponent(largest)
    # At least 2^(k - 1) in absolute value.
    k = jnp.frexp(output_scale)[1]
    most = jnp.clip(LARGEST_POWER - 1 + k, 0, LARGEST_POWER)
    up = jnp.clip(to_top, 0, most)
    power = jnp.where(smallest < INT4_RANGE * scales.smallest, up, 0)
    return jnp.where(largest > INT4_RANGE * scales.largest, to_top, power)


def holds_weights(maximum: jax.Array) -> jax.Array:
    """Which groups have a largest absolute value that is finite and counts as more than zero."""
    return (maximum >= SMALLEST_NORMAL) & (maximum < jnp.inf)


def exponent(x: jax.Array) -> jax.Array:
    """The integer e with ``7/8 * 2^(e-1) <= x < 7/8 * 2^e`` of a normal positive number."""
    mantissa, power = jnp.frexp(x)
    return power + (mantissa >= 0.875).astype(power.dtype)


def power_of_two(n: jax.Array) -> jax.Array:
    """Exactly ``2^n`` in float32, for int32 n in -126..127: `exp2` is not exact everywhere."""
    return jax.lax.bitcast_convert_type((n.astype(jnp.int32) + 127) << 23, jnp.float32)
