"""Smoothing of linear layers, offline: channel-wise absmean and per-tensor scaling.

FireQ (Baek et al., 2025), section 3.1.2.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks
from turbojax._programs import one_program
from turbojax.matmul.int4.row_powers import LARGEST_POWER, exponent, power_of_two
from turbojax.smoothing._values import check_finite, factor_or_one, widened

# An INT4 group's scale is max|w| / 7, and e4m3 has no positive number below 2^-9. Both limits of
# Def. 3.2 are 7/8 times a power of two: 7 * 2^-9 below, 7 * 2^6 = 448 above.
_LOW_EXPONENT = -6
_HIGH_EXPONENT = 9


def channel_absmean_scale(
    weight: jax.Array | Sequence[jax.Array], *, target: float | None = None
) -> jax.Array:
    """Channel-wise absmean scaling (CAS): ``lambda_i = target / mean_o |w[o, i]|``.

    Columns times `lambda` have one mean absolute value; what produces the inputs is divided by it.
    FireQ (Baek et al., 2025), Def. 3.1.

    Args:
      weight: floating point ``[out, in]``, or several of one input, whose rows count together.
      target: mean absolute value to reach, positive; None for the mean over the columns' own, so
        that the weights keep their size.

    Returns:
      ``[in]``, float32, or float64 if a weight is. 1 for columns of zeros and where the factor
      would not be a normal number.

    Raises:
      TypeError: if a weight is not floating point or the target not a number.
      ValueError: if a weight is not ``[out, in]`` or empty, inputs differ, the target is not
        positive, or (outside `jit`) a weight is not finite.
    """
    alone = isinstance(weight, jax.Array | np.ndarray)
    weights = [_check_weight("weight", w) for w in ([weight] if alone else weight)]
    if not weights:
        raise ValueError("weight must be at least one array")
    sizes = sorted({w.shape[1] for w in weights})
    if len(sizes) > 1:
        raise ValueError(f"weights that share an input must have one input size, not {sizes}")
    _checks.check_number("target", target)
    _checks.check_positive("target", target)
    dtype = np.result_type(*(w.dtype for w in weights))
    sums = sum(jnp.sum(jnp.abs(w), axis=0).astype(dtype) for w in weights)
    means = sums / sum(w.shape[0] for w in weights)
    goal = jnp.mean(means) if target is None else jnp.asarray(target, dtype)
    # A column of zeros divides to infinity, all of them to NaN.
    return factor_or_one(jnp.where(means == 0, 1, goal[None] / means))


def per_tensor_scale(weight: jax.Array) -> jax.Array:
    """Per-tensor scaling (PTS): the power of two by which a weight is kept from underflow.

    ``2^n`` with the smallest ``n >= 0`` for which scaling further

    1. no longer lowers the cumulative underflow ``sum max(0, 7 * 2^-9 - |w|)``, that is, no weight
       but zeros is below ``7 * 2^-9``; or
    2. risks overflow, because some weight lies in ``[7 * 2^5, 7 * 2^6)``.

    The output is multiplied with ``2^-n``; a bias is not scaled. FireQ (Baek et al., 2025),
    Def. 3.2. Where the definition would scale a weight beyond ``7 * 2^6 = 448``, because one is
    there already, `n` is 0; and it is at most 126, for which ``2^-n`` is a normal float32.

    Args:
      weight: floating point, any shape, not empty. Subnormal numbers count as zeros.

    Returns:
      A scalar, float32, or float64 if the weight is.

    Raises:
      TypeError: if the weight is not floating point.
      ValueError: if it is empty or (outside `jit`) not finite.
    """
    weight = widened("weight", weight)
    if weight.size == 0:
        raise ValueError(f"{weight.shape=} must not have an empty axis")
    check_finite("weight", weight)
    return _smallest_power(weight)


@one_program()
def _smallest_power(weight: jax.Array) -> jax.Array:
    magnitude = jnp.abs(weight)
    magnitude = jnp.where(magnitude < jnp.finfo(weight.dtype).tiny, 0, magnitude)
    largest = jnp.max(magnitude)
    # If all weights are zeros nothing underflows, as if the smallest were large.
    smallest = jnp.min(jnp.where(magnitude > 0, magnitude, 1))
    enough = _LOW_EXPONENT - exponent(smallest) + 1
    most = _HIGH_EXPONENT - exponent(largest)
    n = jnp.clip(jnp.minimum(enough, most), 0, LARGEST_POWER)
    delta = power_of_two(n).astype(weight.dtype)
    return jnp.where(jnp.all(magnitude < jnp.inf), delta, jnp.nan)


def _check_weight(name: str, weight: Any) -> jax.Array:
    weight = widened(name, weight)
    if weight.ndim != 2 or 0 in weight.shape:
        raise ValueError(f"{name}.shape={weight.shape} must be [out, in], no axis empty")
    check_finite(name, weight)
    return weight
