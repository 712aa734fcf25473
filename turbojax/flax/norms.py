"""RMSNorm, as a function and as an nnx module."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike


def rms_norm(
    x: jax.Array,
    scale: jax.Array,
    eps: float,
    offset: float = 0.0,
    *,
    centered: bool = False,
    over: tuple[str, ...] = (),
) -> jax.Array:
    """``x / sqrt(mean(x^2) + eps) * (offset + scale)`` over the last axis, computed in float32.

    `scale` is ``[size]``, or has further axes of `x` before it, such as a factor of each head.
    Gemma's checkpoints hold the scale less one: there `offset` is 1. With `centered` the mean of
    `x` is subtracted first, which makes it LayerNorm without a bias. Within `shard_map`, `over` are
    axes of a mesh over which the channels are split in equal parts; not with `centered`.
    """
    wide = x.astype(jnp.float32)
    if centered:
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    if over:
        square = jax.lax.pmean(square, over)
    inverse = jax.lax.rsqrt(square + eps)
    factor = scale.astype(jnp.float32).reshape((1,) * (x.ndim - scale.ndim) + scale.shape)
    if offset:
        factor = factor + jnp.float32(offset)
    return (wide * inverse * factor).astype(x.dtype)


class RMSNorm(nnx.Module):
    """`rms_norm` with its scale, an `nnx.Param` ``[size]``; at first ``offset + scale`` is 1."""

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        offset: float = 0.0,
        centered: bool = False,
        param_dtype: DTypeLike,
    ) -> None:
        self.scale = nnx.Param(jnp.full((size,), 1 - offset, param_dtype))
        self.eps = eps
        self.offset = offset
        self.centered = centered

    def __call__(self, x: jax.Array, over: tuple[str, ...] = ()) -> jax.Array:
        """Normalizes ``[..., size]``, in `x`'s dtype."""
        scale = self.scale[...]
        return rms_norm(x, scale, self.eps, self.offset, centered=self.centered, over=over)
