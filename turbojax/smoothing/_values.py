"""Checks and dtypes that all smoothing factors share."""

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks
from turbojax._programs import one_program


def widened(name: str, x: jax.Array) -> jax.Array:
    """`x` in float32, or in float64 if it has that dtype; TypeError if not floating point."""
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name}.dtype={x.dtype} must be floating point")
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


def check_finite(name: str, *arrays: jax.Array) -> None:
    """Raises ValueError if a value is NaN or infinite; traced values cannot be checked."""
    for x in arrays:
        if _checks.is_concrete(x) and not bool(np.isfinite(np.asarray(x)).all()):
            raise ValueError(f"{name} must be finite, and has values that are NaN or infinite")


def check_maxima(name: str, x: jax.Array) -> jax.Array:
    """The widened `x` if it can be maxima of absolute values.

    Raises TypeError if `x` is not floating point, ValueError for another rank, an empty axis, or
    (outside `jit`) a value that is negative, NaN or infinite.
    """
    x = widened(name, x)
    if x.ndim != 2 or 0 in x.shape:
        raise ValueError(f"{name}.shape={x.shape} must have 2 axes, none empty")
    check_finite(name, x)
    if _checks.is_concrete(x) and bool(np.any(np.asarray(x) < 0)):
        raise ValueError(f"{name} must not be negative: its smallest value is {np.min(x)}")
    return x


@one_program()
def factor_or_one(factor: jax.Array) -> jax.Array:
    """`factor`, and 1 where it or its reciprocal is not a normal finite number.

    So a channel of zeros, or of numbers almost as small, stays as it is. NaN stays NaN.
    """
    tiny = jnp.finfo(factor.dtype).tiny
    usable = (factor >= tiny) & (factor <= 1 / tiny)
    return jnp.where(usable | jnp.isnan(factor), factor, 1)
