"""How a token's latent is stored: unchanged, in e4m3 with a scale of its own, or as polar codes."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks, polar
from turbojax.caches.paged.formats import Codes, Encoded, Format, Plain
from turbojax.numerics.fp8 import quantize_fp8
from turbojax.polar.codec import check_norms


@dataclasses.dataclass(frozen=True)
class TokenFloat8(Format):
    """A vector over a scale of its own in e4m3: see `turbojax.quantizers.quantize_fp8`.

    The scale is float32, the vector's largest absolute value over 448: no finite vector is beyond
    the range. It takes the place of a norm.
    """

    has_norm: ClassVar[bool] = True
    is_bounded: ClassVar[bool] = False

    def width(self, head_dim: int) -> int:
        """The channels."""
        return head_dim

    def dtype(self, given: np.dtype) -> np.dtype:
        """float8_e4m3fn."""
        return jnp.dtype(jnp.float8_e4m3fn)

    def encode(
        self, x: jax.Array, scale: jax.Array | None, rotation: polar.Rotation | None
    ) -> Encoded:
        """Codes, and scales in the place of norms; both NaN where a vector is not finite."""
        return Encoded(*quantize_fp8(x, axis=x.ndim - 1))

    def read(self, data: jax.Array) -> jax.Array:
        """In float32."""
        return data.astype(jnp.float32)

    def factor(self, head_dim: int, scale: jax.Array | None) -> jax.Array:
        """1."""
        return jnp.float32(1)


LATENT_FORMATS: dict[str, Format] = {
    "bfloat16": Plain(),
    "fp8_e4m3": TokenFloat8(),
    "turbo4": Codes(4),
}
"""Every way to store a latent, by its name. ``"bfloat16"`` keeps the dtype that is given."""

LATENT_DTYPES = tuple(LATENT_FORMATS)


class Tokens(NamedTuple):
    """What a cache holds of tokens, or what new ones become.

    Attributes:
      latent: ``[..., W]`` in the format's dtype.
      scale: float32 ``[...]``: in e4m3 the factor of a token's codes, in turbo4 its norm; NaN where
        a latent was not finite. None for latents as they are.
      rope: ``[..., R]`` in the cache's dtype.
    """

    latent: jax.Array
    scale: jax.Array | None
    rope: jax.Array


class Holder:
    """What a cache of latents and a pool of their pages have in common.

    Attributes:
      latent: as in `Tokens`, the last axis that of a token.
      scale: as in `Tokens`.
      rope: as in `Tokens`.
      kv_dtype: one of `LATENT_DTYPES`.
      latent_dim: channels of the latent, `C`.
      dtype: of queries, latents and rotary keys.
      seed: of the rotation of codes.
    """

    latent: jax.Array
    scale: jax.Array | None
    rope: jax.Array
    kv_dtype: str
    latent_dim: int
    dtype: np.dtype
    seed: int

    @property
    def rope_dim(self) -> int:
        """Channels of the rotary key, `R`."""
        return self.rope.shape[-1]

    @property
    def format(self) -> Format:
        """How a latent is stored."""
        return LATENT_FORMATS[self.kv_dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token: latent, scale and rotary key."""
        scale = 0 if self.scale is None else self.scale.dtype.itemsize
        parts = (x.shape[-1] * x.dtype.itemsize for x in (self.latent, self.rope))
        return sum(parts) + scale

    @property
    def rotation(self) -> polar.Rotation:
        """The rotation of latents that are stored as codes; ValueError if they are not."""
        if not self.format.is_rotated:
            raise ValueError(f"kv_dtype={self.kv_dtype!r} has no rotation: it has no codes")
        return polar.rotation(self.latent_dim, self.seed)

    @property
    def tokens(self) -> Tokens:
        """All that is stored."""
        return Tokens(self.latent, self.scale, self.rope)


def empty(
    rows: tuple[int, ...],
    latent_dim: int,
    rope_dim: int,
    kv_dtype: str,
    dtype: jax.typing.DTypeLike,
    seed: int,
) -> dict[str, Any]:
    """The fields of a `Holder` with room for `rows`, zeros.

    Raises TypeError or ValueError, also for a seed that the format does not use.
    """
    _checks.check_sizes(latent_dim=latent_dim, rope_dim=rope_dim)
    if kv_dtype not in LATENT_FORMATS:
        raise ValueError(f"{kv_dtype=} must be one of {', '.join(LATENT_FORMATS)}")
    dtype, stored = jnp.dtype(dtype), LATENT_FORMATS[kv_dtype]
    if dtype not in _checks.FLOAT_DTYPES:
        raise TypeError(f"{dtype=!s} must be bfloat16, float16 or float32")
    _checks.check_integer("seed", seed)
    if seed and not stored.is_rotated:
        raise ValueError(f"{seed=} has no use with {kv_dtype=}: only codes are of rotated vectors")
    if stored.is_rotated:
        polar.rotation(latent_dim, seed)  # raises unless there is one
    return {
        "latent": jnp.zeros((*rows, stored.width(latent_dim)), stored.dtype(dtype)),
        "scale": jnp.zeros(rows, jnp.float32) if stored.has_norm else None,
        "rope": jnp.zeros((*rows, rope_dim), dtype),
        "kv_dtype": kv_dtype,
        "latent_dim": int(latent_dim),
        "dtype": dtype,
        "seed": int(seed),
    }


def encode(holder: Holder, latent: jax.Array, rope: jax.Array) -> Tokens:
    """Encodes latents ``[..., C]`` and rotary keys ``[..., R]``; a token's bits depend on it alone.

    Infinity in a rotary key becomes NaN: a score of ``-inf`` would give the weight 0, as if the
    token were not there.
    """
    rotation = holder.rotation if holder.format.is_rotated else None
    stored = holder.format.encode(latent, None, rotation)
    scale = None if stored.norm is None else stored.norm.astype(jnp.float32)
    return Tokens(stored.data, scale, jnp.where(jnp.isfinite(rope), rope, jnp.nan))


def decode(holder: Holder, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
    """The stored latents and rotary keys, float32 ``[..., C]`` and ``[..., R]``."""
    rotation = holder.rotation if holder.format.is_rotated else None
    latent = holder.format.decode(Encoded(tokens.latent, tokens.scale), None, rotation)
    return latent, tokens.rope.astype(jnp.float32)


def check_tokens(holder: Holder, latent: jax.Array, rope: jax.Array) -> None:
    """Raises unless these are tokens ``[B, T, C]`` and ``[B, T, R]`` for this cache."""
    for name, x, channels in (
        ("latent", latent, holder.latent_dim),
        ("rope", rope, holder.rope_dim),
    ):
        if x.ndim != 3 or 0 in x.shape or x.shape[2] != channels:
            raise ValueError(
                f"{name}.shape={x.shape} must be [B, T, {channels}], as the cache was made for, "
                "no axis empty"
            )
        if x.dtype != holder.dtype:
            raise TypeError(f"{name}.dtype={x.dtype} must equal cache.dtype={holder.dtype}")
    if latent.shape[:2] != rope.shape[:2]:
        raise ValueError(f"{latent.shape=} and {rope.shape=} must have the same [B, T]")


def check_range(latent: jax.Array, scale: jax.Array | None, lengths: jax.Array) -> None:
    """Raises ValueError, outside `jit`, where a finite latent became NaN in codes."""
    if scale is None or not _checks.is_concrete(latent, scale, lengths):
        return
    real = np.arange(latent.shape[1])[None] < np.asarray(lengths)[:, None]
    check_norms("latent", latent, jnp.asarray(np.where(real, np.asarray(scale), 0)))
