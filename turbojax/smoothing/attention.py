"""Smoothing of keys around RoPE, which rotates channels i and i + H/2 together.

Where it rotates the first R channels of a head alone, these are pairs i, i + R/2. The others stay
where they are, so any two of them may count as a pair: here it is R + j and (R + H)/2 + j. Of RoPE
that rotates channels 2i and 2i + 1 together, all pairs are such neighbours.

Pairs without outliers are scaled before RoPE, at no cost, by one factor each, which commutes with
the rotation (RPN). The few pairs with outliers are scaled after it, channel by channel (CRS). FireQ
(Baek et al., 2025), section 3.2.1.
"""

import jax
import jax.numpy as jnp

from turbojax import _checks
from turbojax._programs import one_program
from turbojax.smoothing._values import check_maxima, factor_or_one, widened


def split_pairs(
    x: jax.Array, rotary_dim: int | None = None, interleaved: bool = False
) -> tuple[jax.Array, jax.Array]:
    """The first and the second channel of each pair, those that RoPE rotates before the others.

    `x` is ``[..., H]``, the two results ``[..., H/2]``. RoPE rotates `rotary_dim` of the channels,
    all if None, and with `interleaved` channels 2i and 2i + 1 together. Raises ValueError if there
    are not so many channels, or an odd number.
    """
    size = x.shape[-1]
    rotated = size if rotary_dim is None else rotary_dim
    if size % 2 or rotated % 2 or not 0 < rotated <= size:
        raise ValueError(f"{rotary_dim=} must be even and at most {size}, which must be even, too")
    if interleaved:
        return x[..., ::2], x[..., 1::2]
    a, b, c, d = jnp.split(x, (rotated // 2, rotated, (rotated + size) // 2), axis=-1)
    return jnp.concatenate([a, c], axis=-1), jnp.concatenate([b, d], axis=-1)


def of_channels(
    pairs: jax.Array, rotary_dim: int | None = None, interleaved: bool = False
) -> jax.Array:
    """``[..., H]``: for both channels of a pair its number in ``[..., H/2]``, see `split_pairs`."""
    if interleaved:
        return jnp.repeat(pairs, 2, axis=-1)
    half = pairs.shape[-1] if rotary_dim is None else rotary_dim // 2
    rotated, others = pairs[..., :half], pairs[..., half:]
    return jnp.concatenate([rotated, rotated, others, others], axis=-1)


def rope_preserving_norm(
    key_pair_norm: jax.Array, *, alpha: float = 8.0, exclude: jax.Array | None = None
) -> jax.Array:
    """RoPE-preserving normalization (RPN): ``s_i = alpha * max_n |(k_i, k_{i + H/2})|_2``.

    Keys are divided by it, queries multiplied. After that no pair of calibration is longer than
    ``1 / alpha``, before RoPE and after it. FireQ (Baek et al., 2025), Theorem 3.1.

    Args:
      key_pair_norm: ``[K, H/2]``, the largest norm of each pair of channels, of keys before RoPE.
      alpha: the common factor, positive.
      exclude: bool ``[K, H/2]``, pairs that are left alone because CRS scales them.

    Returns:
      ``[K, H/2]``, float32 or float64 as the norms, for both channels of a pair. 1 for pairs that
      are excluded or always zero.

    Raises:
      TypeError: if the norms are not floating point, `exclude` not bool or alpha not a number.
      ValueError: if shapes do not fit, alpha is not positive, or (outside `jit`) a norm is
        negative or not finite.
    """
    norm = check_maxima("key_pair_norm", key_pair_norm)
    _check_factor("alpha", alpha)
    scale = factor_or_one(norm * alpha)
    if exclude is None:
        return scale
    if exclude.dtype != jnp.bool_:
        raise TypeError(f"{exclude.dtype=} must be bool")
    if exclude.shape != norm.shape:
        raise ValueError(f"{exclude.shape=} must equal key_pair_norm.shape={norm.shape}")
    return jnp.where(exclude, 1, scale)


def channel_rope_scale(
    key_absmax: jax.Array,
    *,
    num_pairs: int = 8,
    beta: float | None = 8.0,
    rotary_dim: int | None = None,
    interleaved: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Channel-wise RoPE scaling (CRS): ``t_i = beta * max_n |k_i|`` for the pairs with outliers.

    Rotated keys are divided by it, rotated queries multiplied. FireQ (Baek et al., 2025),
    section 3.2.1, "Stage 2".

    Args:
      key_absmax: ``[K, H]``, the largest absolute value of each channel, of keys after RoPE.
      num_pairs: how many pairs of each head, those with the largest values.
      beta: the common factor, positive. None where RPN does not bring the other channels to a
        common size: then the reciprocal of the median of the other channels' largest values, so
        that the chosen channels become as large as those.
      rotary_dim: channels that RoPE rotates; all if None.
      interleaved: see `split_pairs`.

    Returns:
      scale: ``[K, H]``, float32 or float64 as `key_absmax`; 1 for channels of pairs that are not
        chosen, and for those that are always zero.
      chosen: bool ``[K, H/2]``.

    Raises:
      TypeError: if `key_absmax` is not floating point, `num_pairs` not an integer, or beta not a
        number.
      ValueError: if H is odd, `num_pairs` negative or more than ``H / 2``, beta not positive, or
        (outside `jit`) a value is negative or not finite; or if `rotary_dim` does not fit H.
    """
    absmax = check_maxima("key_absmax", key_absmax)
    size = absmax.shape[1]
    if size % 2:
        raise ValueError(f"key_absmax.shape={absmax.shape} must have an even number of channels")
    _checks.check_integer("num_pairs", num_pairs)
    if not 0 <= num_pairs <= size // 2:
        raise ValueError(f"{num_pairs=} must be between 0 and the head's {size // 2} pairs")
    if beta is not None:
        _check_factor("beta", beta)
    return _scale_largest_pairs(absmax, num_pairs, beta, rotary_dim, interleaved)


@one_program("num_pairs", "beta", "rotary_dim", "interleaved")
def _scale_largest_pairs(
    absmax: jax.Array,
    num_pairs: int,
    beta: float | None,
    rotary_dim: int | None,
    interleaved: bool,
) -> tuple[jax.Array, jax.Array]:
    heads, _ = absmax.shape
    pairs = jnp.maximum(*split_pairs(absmax, rotary_dim, interleaved))
    _, indices = jax.lax.top_k(pairs, num_pairs)
    chosen = jnp.zeros(pairs.shape, bool).at[jnp.arange(heads)[:, None], indices].set(True)
    channels = of_channels(chosen, rotary_dim, interleaved)
    scale = absmax / _common_size(absmax, channels) if beta is None else absmax * beta
    return jnp.where(channels, factor_or_one(scale), 1), chosen


def scale_rotated(
    query: jax.Array, key: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Applies CRS after RoPE: keys divided by `scale`, queries multiplied, scores unchanged.

    Args:
      query: ``[..., N, H]``, rotated.
      key: ``[..., K, H]``, rotated; head n of the queries attends to head ``n // (N / K)``.
      scale: ``[K, H]``, see `channel_rope_scale`.

    Returns:
      Query and key in their dtypes, computed in float32, or float64 if they are.

    Raises:
      TypeError: if an array is not floating point.
      ValueError: if the shapes do not fit.
    """
    scale = widened("scale", scale)
    heads, size = scale.shape
    if key.shape[-2:] != scale.shape or query.shape[-1] != size:
        raise ValueError(f"{query.shape=} and {key.shape=} must fit {scale.shape=}")
    _checks.check_head_groups(query.shape[-2], heads)
    per_query = jnp.repeat(scale, query.shape[-2] // heads, axis=0)
    return _multiply("query", query, per_query), _multiply("key", key, 1 / scale)


def _multiply(name: str, x: jax.Array, factor: jax.Array) -> jax.Array:
    wide = widened(name, x)
    factor = factor.astype(wide.dtype).reshape((1,) * (x.ndim - 2) + factor.shape)
    return (wide * factor).astype(x.dtype)


def _common_size(absmax: jax.Array, chosen: jax.Array) -> jax.Array:
    """``[K, 1]``: median over a head's channels that are neither chosen nor zero.

    Where there are none, the median is over the chosen ones; it is 1 where all are zero.
    """

    def median(mask: jax.Array) -> jax.Array:
        return jnp.nanmedian(jnp.where(mask, absmax, jnp.nan), axis=1, keepdims=True)

    present = absmax > 0
    others, all_channels = median(present & ~chosen), median(present)
    size = jnp.where(jnp.isnan(others), all_channels, others)
    return jnp.where(jnp.isnan(size), 1, size)


def _check_factor(name: str, x: float) -> None:
    if x is None:
        raise TypeError(f"{name}=None must be a number")
    _checks.check_number(name, x)
    _checks.check_positive(name, x)
