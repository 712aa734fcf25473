"""What RPN and CRS need to know of a layer's keys, gathered over a calibration text."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from turbojax._pytrees import pytree
from turbojax.numerics.int8 import absolute_maximum
from turbojax.smoothing._values import check_maxima, widened
from turbojax.smoothing.attention import split_pairs


@pytree
@dataclasses.dataclass(frozen=True)
class KeyStatistics:
    """Largest values of one layer's keys. A pytree; start from `init`, then `update`.

    Works under `jit`, `vmap` and `scan`. A key that is not finite makes its channels' values NaN,
    which the functions that use them refuse.

    Attributes:
      pair_norm: ``[K, H/2]``, largest norm of each pair of channels before RoPE, see `split_pairs`.
      absmax: ``[K, H]``, largest absolute value of each channel after RoPE.
      tokens: int32 scalar, how many tokens were seen.
      rotary_dim: channels that RoPE rotates; all if None.
      interleaved: whether it rotates channels 2i and 2i + 1 together.
    """

    pair_norm: jax.Array
    absmax: jax.Array
    tokens: jax.Array
    rotary_dim: int | None = dataclasses.field(default=None, metadata={"static": True})
    interleaved: bool = dataclasses.field(default=False, metadata={"static": True})

    @classmethod
    def init(
        cls,
        num_kv_heads: int,
        head_dim: int,
        rotary_dim: int | None = None,
        interleaved: bool = False,
    ) -> "KeyStatistics":
        """Statistics of no tokens at all.

        Raises:
          ValueError: if `head_dim` is odd.
        """
        if head_dim % 2:
            raise ValueError(f"{head_dim=} must be even: RoPE rotates pairs")
        return cls(
            jnp.zeros((num_kv_heads, head_dim // 2), jnp.float32),
            jnp.zeros((num_kv_heads, head_dim), jnp.float32),
            jnp.zeros((), jnp.int32),
            rotary_dim,
            interleaved,
        )

    def update(
        self, key: jax.Array, rotated: jax.Array, mask: jax.Array | None = None
    ) -> "KeyStatistics":
        """With more keys.

        Args:
          key: ``[..., K, H]``, before RoPE.
          rotated: ``[..., K, H]``, the same keys after RoPE and before CRS.
          mask: optional bool ``[...]``, False for tokens that do not count, such as padding.

        Returns:
          New statistics, float64 if the keys are.

        Raises:
          TypeError: if the keys are not floating point.
          ValueError: if shapes do not fit, or there are no tokens.
        """
        key, rotated = widened("key", key), widened("rotated", rotated)
        if key.shape[-2:] != self.absmax.shape or key.size == 0:
            raise ValueError(f"{key.shape=} must be [..., {self.absmax.shape}], no axis empty")
        if rotated.shape != key.shape:
            raise ValueError(f"{rotated.shape=} must equal {key.shape=}")
        tokens = key.shape[:-2]
        if mask is not None:
            if mask.shape != tokens:
                raise ValueError(f"{mask.shape=} must be {tokens}, one per token")
            present = mask[..., None, None]
            key, rotated = jnp.where(present, key, 0), jnp.where(present, rotated, 0)
        first, second = split_pairs(key, self.rotary_dim, self.interleaved)
        count = jnp.ones(tokens, jnp.int32) if mask is None else mask.astype(jnp.int32)
        seen = KeyStatistics(
            _maximum_over_tokens(jnp.hypot(first, second)),
            _maximum_over_tokens(rotated),
            jnp.sum(count, dtype=jnp.int32),
            self.rotary_dim,
            self.interleaved,
        )
        return self.merge(seen)

    def merge(self, other: "KeyStatistics") -> "KeyStatistics":
        """Statistics of the tokens of both.

        Raises:
          ValueError: if they are of rotary embeddings of other pairs.
        """
        if other.rotary_dim != self.rotary_dim:
            raise ValueError(f"{other.rotary_dim=} must equal {self.rotary_dim=}")
        if other.interleaved != self.interleaved:
            raise ValueError(f"{other.interleaved=} must equal {self.interleaved=}")
        return KeyStatistics(
            _maximum(self.pair_norm, other.pair_norm),
            _maximum(self.absmax, other.absmax),
            self.tokens + other.tokens,
            self.rotary_dim,
            self.interleaved,
        )

    def validate(self) -> None:
        """Raises unless the statistics can be used: shapes fit, values are finite, tokens seen.

        Raises:
          TypeError: if they are not floating point.
          ValueError: otherwise.
        """
        norm = check_maxima("pair_norm", self.pair_norm)
        absmax = check_maxima("absmax", self.absmax)
        if absmax.shape != (norm.shape[0], 2 * norm.shape[1]):
            raise ValueError(f"{absmax.shape=} must have two channels per pair of {norm.shape=}")
        if not isinstance(self.tokens, jax.core.Tracer) and int(self.tokens) < 1:
            raise ValueError(f"tokens={int(self.tokens)} must be at least 1: calibrate first")


def _maximum_over_tokens(x: jax.Array) -> jax.Array:
    axes = tuple(range(x.ndim - 2))
    return absolute_maximum(x, axes).reshape(x.shape[-2:]) if axes else absolute_maximum(x, ())


def _maximum(a: jax.Array, b: jax.Array) -> jax.Array:
    """Elementwise maximum in the wider dtype; NaN if one is."""
    dtype = np.result_type(a.dtype, b.dtype)
    a, b = a.astype(dtype), b.astype(dtype)
    return jnp.where(jnp.isnan(a) | jnp.isnan(b), jnp.nan, jnp.maximum(a, b))
