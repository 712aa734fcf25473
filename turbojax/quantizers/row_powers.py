"""Powers of two that bring the rows of a weight into the range of e4m3 scales."""

import jax
import jax.numpy as jnp
import numpy as np

INT4_RANGE = 7
"""The code that a group's largest absolute value gets."""
SMALLEST_SCALE = 2.0**-9
"""The smallest positive e4m3 number."""
LARGEST_POWER = 126
"""2^n and its reciprocal are normal float32 numbers up to here."""
_TOP = 9  # of `exponent`: numbers from 7 * 2^5 to below 7 * 2^6 = 448 have it
# A scale is at most 64, since 7 * 64 is the largest e4m3 number. The next would be 72; a tie rounds
# to 64, whose bits are even.
_LARGEST_QUOTIENT = 68.0
SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)
"""Devices differ in how they treat smaller float32 numbers: they count as zeros."""


def row_powers(maximum: jax.Array, output_scale: jax.Array) -> jax.Array:
    """The `n` by whose power ``2^n`` each row is multiplied before it is rounded.

    `n` is 0 where e4m3 holds the scale ``max|w| / 7`` of every group: where none is above 64 or,
    zero aside, below 2**-9. Otherwise it brings the row's largest number into ``[224, 448)``, for
    then there is most room below; a row that small groups alone bring here is not made smaller.
    Then ``2^-n`` times the row's output scale is a normal number, if that scale is one.

    Args:
      maximum: float32 ``[N, groups]``, largest absolute values; NaN where one is not finite. Such
        groups, and those below the smallest normal number, are left out.
      output_scale: float32 ``[N]``.

    Returns:
      int32 ``[N]``, from -120 to 126.
    """
    is_held = holds_weights(maximum)
    largest = jnp.max(jnp.where(is_held, maximum, 0), axis=1)
    smallest = jnp.min(jnp.where(is_held, maximum, jnp.inf), axis=1)
    to_top = _TOP - exponent(largest)
    # At least 2^(k - 1) in absolute value.
    k = jnp.frexp(output_scale)[1]
    most = jnp.clip(LARGEST_POWER - 1 + k, 0, LARGEST_POWER)
    up = jnp.clip(to_top, 0, most)
    power = jnp.where(smallest < INT4_RANGE * SMALLEST_SCALE, up, 0)
    return jnp.where(largest > INT4_RANGE * _LARGEST_QUOTIENT, to_top, power)


def holds_weights(maximum: jax.Array) -> jax.Array:
    """Which groups have a largest absolute value that is finite and counts as more than zero."""
    return (maximum >= SMALLEST_NORMAL) & (maximum < jnp.inf)


def exponent(x: jax.Array) -> jax.Array:
    """The integer e with ``7/8 * 2^(e-1) <= x < 7/8 * 2^e`` of a normal positive number."""
    mantissa, power = jnp.frexp(x)
    return power + (mantissa >= 0.875).astype(power.dtype)


def power_of_two(n: jax.Array) -> jax.Array:
    """Exactly ``2^n`` in float32, for int32 n in -126..127: `exp2` promises less."""
    return jax.lax.bitcast_convert_type((n.astype(jnp.int32) + 127) << 23, jnp.float32)
