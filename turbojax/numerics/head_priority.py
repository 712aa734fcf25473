"""Which heads keep more bits: the priority of a head (TurboAttention, Eqs. 11 and 12)."""

from typing import get_args

import jax
import jax.numpy as jnp

from turbojax.numerics.config import PriorityMethod
from turbojax.numerics.int8 import INT8_RANGE, quantize_int8


def head_priority(
    x: jax.Array, method: PriorityMethod = "gap_std", where: jax.Array | None = None
) -> jax.Array:
    """Priority of each head of keys or values; the lowest ones are given fewer bits.

    With a channel's gap its maximum minus its minimum over the tokens:

    - ``"gap_std"``: the head's gap (over tokens and channels) times the standard deviation of its
      channels' gaps (Eq. 11);
    - ``"min_max"``: the head's gap alone;
    - ``"variation"``: the standard deviation of the channels' gaps alone;
    - ``"entropy"``: Shannon entropy, in bits, of the head's values coded as int8 with one scale.

    The last three are the paper's ablation baselines (figure 7b).

    Args:
      x: floating point ``[B, S, K, H]``.
      method: one of the four names.
      where: optional bool ``[B, S]``, the tokens that count.

    Returns:
      float32 ``[B, K]``; 0 for a sequence without tokens, NaN where a value is not finite.

    Raises:
      TypeError: if `x` is not floating point or `where` not boolean.
      ValueError: if a shape or the method is none of these.
    """
    if method not in get_args(PriorityMethod):
        raise ValueError(f"{method=} must be one of {get_args(PriorityMethod)}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"x.dtype={x.dtype} must be floating point")
    if x.ndim != 4:
        raise ValueError(f"{x.shape=} must be [B, S, K, H]")
    if where is None:
        where = jnp.ones(x.shape[:2], jnp.bool_)
    if where.dtype != jnp.bool_:
        raise TypeError(f"where.dtype={where.dtype} must be bool")
    if where.shape != x.shape[:2]:
        raise ValueError(f"{where.shape=} must be {x.shape[:2]}, the first two axes of x")
    x, mask = x.astype(jnp.float32), where[:, :, None, None]
    if method == "entropy":
        return _entropy(x, mask)
    low = jnp.min(x, axis=1, where=mask, initial=jnp.inf)
    high = jnp.max(x, axis=1, where=mask, initial=-jnp.inf)
    gap = jnp.max(high, axis=-1) - jnp.min(low, axis=-1)
    spread = jnp.std(high - low, axis=-1)
    priority = {"gap_std": gap * spread, "min_max": gap, "variation": spread}[method]
    # On a CPU a vectorized minimum or maximum may lose a NaN, so NaN is checked for separately.
    finite = jnp.all(jnp.isfinite(x) | ~mask, axis=(1, 3))
    priority = jnp.where(finite, priority, jnp.nan)
    return jnp.where(jnp.any(where, axis=1)[:, None], priority, 0)


def _entropy(x: jax.Array, mask: jax.Array) -> jax.Array:
    codes, scale = quantize_int8(jnp.where(mask, x, 0), axis=(1, 3))

    def one_head(codes: jax.Array, mask: jax.Array) -> jax.Array:
        bins = codes.astype(jnp.int32) + INT8_RANGE
        weights = jnp.broadcast_to(mask, codes.shape).astype(jnp.float32)
        counts = jnp.zeros(2 * INT8_RANGE + 1, jnp.float32).at[bins].add(weights)
        share = counts / jnp.maximum(jnp.sum(counts), 1)
        return -jnp.sum(jnp.where(share > 0, share * jnp.log2(jnp.maximum(share, 1e-30)), 0))

    heads = jax.vmap(one_head, in_axes=(1, None))
    entropy = jax.vmap(heads)(codes, mask[..., 0])
    return jnp.where(jnp.isnan(scale), jnp.nan, entropy)


def rank_heads(priority: jax.Array, group: int | None = None) -> jax.Array:
    """Slots of the heads in order of falling priority (Eq. 12).

    Args:
      priority: float32 ``[B, K]``.
      group: neighbours that are ranked among themselves; None for all heads.

    Returns:
      int32 ``[B, K]``: ``slots[b, h]`` is the place of head `h`, 0 for the highest priority. Ties
      keep the heads' order; a NaN priority ranks highest, so that such a head is not degraded
      further.
    """
    finite = jnp.where(jnp.isnan(priority), jnp.inf, priority)
    finite = finite.reshape(finite.shape[0], -1, group or finite.shape[1])
    order = jnp.argsort(-finite, axis=-1, stable=True)
    return jnp.argsort(order, axis=-1).astype(jnp.int32).reshape(priority.shape)
