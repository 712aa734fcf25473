"""How pages store a vector: one `Format` for keys, one for values, and the table of both by name.

What a format says is all that the pool, its checks, the allocator's copies, files and attention in
plain JAX know of it. So another way to store pages is a class here, or only a line of `FORMATS`;
for a kernel, its operands in `ops/paged_attention/triton.py` as well.
"""

import abc
import dataclasses
import math
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import polar


class Encoded(NamedTuple):
    """What vectors become.

    Attributes:
      data: ``[..., W]``, in the format's dtype.
      norm: float16 ``[...]`` where the format has norms: NaN where a vector was not finite or is
        beyond its range; None otherwise, and `data` is NaN there.
    """

    data: jax.Array
    norm: jax.Array | None = None


class Format(abc.ABC):
    """How one side of a page, its keys or its values, is stored.

    A vector `x` is stored as numbers `n` (`read`), a factor of the whole pool (`factor`) and
    perhaps a norm of its own: ``x = n * factor * norm``, in rotated channels if `is_rotated`.

    Attributes:
      has_norm: whether each token and head has a float16 norm.
      has_scale: whether the pool has a scale that its maker chooses.
      is_rotated: whether what is stored stands for a vector rotated by `turbojax.polar.rotate`.
      is_bounded: whether finite vectors may be beyond what can be stored.
    """

    has_norm: ClassVar[bool] = False
    has_scale: ClassVar[bool] = False
    is_rotated: ClassVar[bool] = False
    is_bounded: ClassVar[bool] = True

    @abc.abstractmethod
    def width(self, head_dim: int) -> int:
        """Elements of a stored vector of `head_dim` channels.

        Raises:
          ValueError: if there is no such vector.
        """

    @abc.abstractmethod
    def dtype(self, given: np.dtype) -> np.dtype:
        """That of stored vectors which are `given` to the pool in that dtype."""

    @abc.abstractmethod
    def encode(
        self, x: jax.Array, scale: jax.Array | None, rotation: polar.Rotation | None
    ) -> Encoded:
        """What ``[..., H]`` becomes; a vector's bits depend on nothing else.

        Args:
          x: the vectors.
          scale: float32 ``[]``, of the pool, if the format has one.
          rotation: if the format rotates.
        """

    @abc.abstractmethod
    def read(self, data: jax.Array) -> jax.Array:
        """The numbers stored in ``[..., W]``: float32 ``[..., H]``."""

    @abc.abstractmethod
    def factor(self, head_dim: int, scale: jax.Array | None) -> jax.Array:
        """What numbers are multiplied by, besides a norm: float32 ``[]``."""

    def decode(
        self, stored: Encoded, scale: jax.Array | None, rotation: polar.Rotation | None
    ) -> jax.Array:
        """The vectors that are stored, in float32 ``[..., H]``."""
        numbers = self.read(stored.data)
        factor = self.factor(numbers.shape[-1], scale)
        if stored.norm is not None:
            factor = (stored.norm.astype(jnp.float32) * factor)[..., None]
        x = factor * numbers
        if self.is_rotated:
            assert rotation is not None
            return polar.unrotate(x, rotation)
        return x

    def refusal(self, kv_dtype: str, side: str, scale: float) -> str:
        """What is wrong with a finite vector that became NaN, after its place.

        Args:
          kv_dtype: the pool's.
          side: ``"key"`` or ``"value"``.
          scale: the pool's, of this side; 1 if it has none.
        """
        raise NotImplementedError(f"{self} stores every finite vector")


@dataclasses.dataclass(frozen=True)
class Plain(Format):
    """A vector as it is, in the pool's dtype."""

    is_bounded: ClassVar[bool] = False

    def width(self, head_dim: int) -> int:
        """`H`."""
        return head_dim

    def dtype(self, given: np.dtype) -> np.dtype:
        """The same."""
        return given

    def encode(
        self, x: jax.Array, scale: jax.Array | None, rotation: polar.Rotation | None
    ) -> Encoded:
        """The same."""
        return Encoded(x)

    def read(self, data: jax.Array) -> jax.Array:
        """In float32."""
        return data.astype(jnp.float32)

    def factor(self, head_dim: int, scale: jax.Array | None) -> jax.Array:
        """1."""
        return jnp.float32(1)


@dataclasses.dataclass(frozen=True)
class Float8(Format):
    """A vector over the pool's scale in an 8-bit float.

    Attributes:
      name: of the dtype.
    """

    name: str
    has_scale: ClassVar[bool] = True

    def width(self, head_dim: int) -> int:
        """`H`."""
        return head_dim

    def dtype(self, given: np.dtype) -> np.dtype:
        """Of 8 bits."""
        return jnp.dtype(self.name)

    def encode(
        self, x: jax.Array, scale: jax.Array | None, rotation: polar.Rotation | None
    ) -> Encoded:
        """See `to_fp8`."""
        assert scale is not None
        return Encoded(to_fp8(x, scale, jnp.dtype(self.name)))

    def read(self, data: jax.Array) -> jax.Array:
        """In float32."""
        return data.astype(jnp.float32)

    def factor(self, head_dim: int, scale: jax.Array | None) -> jax.Array:
        """The scale."""
        assert scale is not None
        return scale

    def refusal(self, kv_dtype: str, side: str, scale: float) -> str:
        """Names the largest value."""
        largest = float(jnp.finfo(jnp.dtype(self.name)).max)
        return (
            f"holds values beyond {largest * scale:g}, the largest of "
            f"{kv_dtype=} with {side}_scale={scale:g}"
        )


@dataclasses.dataclass(frozen=True)
class Codes(Format):
    """Codes of rotated coordinates and a norm: `turbojax.polar` (PolarQuant, Han et al., 2025).

    Numbers are the centroids of `turbojax.polar.integer_centroids`, packed as by `polar.pack`.

    Attributes:
      bits: 2, 3 or 4, of a code.
    """

    bits: int
    has_norm: ClassVar[bool] = True
    is_rotated: ClassVar[bool] = True

    def width(self, head_dim: int) -> int:
        """``H * bits / 8`` bytes."""
        return polar.packed_width(head_dim, self.bits)

    def dtype(self, given: np.dtype) -> np.dtype:
        """uint8."""
        return jnp.dtype(jnp.uint8)

    def encode(
        self, x: jax.Array, scale: jax.Array | None, rotation: polar.Rotation | None
    ) -> Encoded:
        """See `polar.encode`."""
        assert rotation is not None
        codes, norm = polar.encode(x, rotation, self.bits)
        return Encoded(polar.pack(codes, self.bits), norm)

    def read(self, data: jax.Array) -> jax.Array:
        """Centroids as multiples of a half."""
        table, middle, _ = polar.integer_centroids(self.bits)
        centroids = jnp.asarray(np.asarray(table) - middle, jnp.float32)
        return centroids[polar.unpack(data, self.bits).astype(jnp.int32)]

    def factor(self, head_dim: int, scale: jax.Array | None) -> jax.Array:
        """A centroid's unit."""
        return jnp.float32(polar.integer_centroids(self.bits)[2] / math.sqrt(head_dim))

    def refusal(self, kv_dtype: str, side: str, scale: float) -> str:
        """Names the largest norm."""
        largest = float(jnp.finfo(jnp.float16).max)
        return f"has a norm beyond {largest:g}, the largest that {kv_dtype} stores in float16"


class Formats(NamedTuple):
    """Of both sides of a page."""

    key: Format
    value: Format

    @property
    def is_rotated(self) -> bool:
        """Whether either is."""
        return self.key.is_rotated or self.value.is_rotated


def _both(of_both: Format) -> Formats:
    return Formats(of_both, of_both)


FORMATS = {
    "auto": _both(Plain()),
    "fp8_e4m3": _both(Float8("float8_e4m3fn")),
    "fp8_e5m2": _both(Float8("float8_e5m2")),
    "turbo4": _both(Codes(4)),
    "k8v4": Formats(Float8("float8_e4m3fn"), Codes(4)),
    **{
        f"turbo_k{key}v{value}": Formats(Codes(key), Codes(value))
        for key in (4, 3, 2)
        for value in (4, 3, 2)
        if (key, value) != (4, 4)  # that is turbo4
    },
}
"""Every `kv_dtype`: how its keys, and how its values, are stored."""


def to_fp8(x: jax.Array, scale: jax.Array, dtype: np.dtype) -> jax.Array:
    """``x / scale`` (a product with the reciprocal) in 8 bits; NaN beyond the largest value."""
    information = jnp.finfo(dtype)
    x = x.astype(jnp.float32) * (1 / scale)
    # Rounded here, to nearest, ties to even, so that the conversion is exact: a backend may
    # convert in two steps, which rounds twice. The quantum and its inverse are powers of two, made
    # from their bits.
    smallest = np.float32(information.smallest_normal).view(np.int32)
    exponent = jax.lax.bitcast_convert_type(x, jnp.int32) & 0x7F800000
    exponent = jnp.maximum(exponent, int(smallest)) - (information.nmant << 23)
    quantum = jax.lax.bitcast_convert_type(exponent, jnp.float32)
    inverse = jax.lax.bitcast_convert_type((254 << 23) - exponent, jnp.float32)
    rounded = jnp.rint(x * inverse) * quantum
    fits = jnp.abs(x) <= float(information.max)
    return jnp.where(fits, rounded, jnp.nan).astype(dtype)
