"""How pages store a vector: one `Format` for keys, one for values, and the table of both by name.

The pool, its checks, the allocator's copies, files and attention in plain JAX know only what a
format says. So another way to store pages is a class here, or only a line of `FORMATS`; a kernel
needs its operands in `triton.py` as well.
"""

import abc
import dataclasses
import math
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import polar

INT8_RANGE = 127
"""The largest integer of `Int8`, on either side of 0."""

LARGEST_SCALE = 65504.0
"""Of a vector of `Int8`: the largest float16."""

TINY = 2.0**-25
"""`Int8` stores vectors with no larger magnitude as zeros: it is half of the smallest float16."""

_EXPONENT, _MAGNITUDE = 0x7F800000, 0x7FFFFFFF
_SMALLEST_EXPONENT = (127 - 14) << 23  # of float16's normal numbers, as bits of float32


class Encoded(NamedTuple):
    """Encoded vectors.

    Attributes:
      data: ``[..., W]``, in the format's dtype.
      norm: float16 ``[...]`` where the format has norms, or a scale of each vector in their place:
        NaN where a vector was not finite or is beyond its range; None otherwise, and `data` is NaN
        there.
    """

    data: jax.Array
    norm: jax.Array | None = None


class Format(abc.ABC):
    """How one side of a page, its keys or its values, is stored.

    A vector `x` is stored as numbers `n` (`read`), a factor of the whole pool (`factor`) and
    perhaps a norm of its own: ``x = n * factor * norm``, in rotated channels if `is_rotated`.

    Attributes:
      has_norm: whether each token and head has a float16 norm, or a scale that takes its place.
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
        """Elements of a stored vector of `head_dim` channels; ValueError if there can be none."""

    @abc.abstractmethod
    def dtype(self, given: np.dtype) -> np.dtype:
        """The dtype of stored vectors, given that of the pool."""

    @abc.abstractmethod
    def encode(
        self, x: jax.Array, scale: jax.Array | None, rotation: polar.Rotation | None
    ) -> Encoded:
        """Encodes vectors ``[..., H]``, each independently of the others.

        `scale`, float32 ``[]``, is there if the format has one for the pool, `rotation` if it
        rotates.
        """

    @abc.abstractmethod
    def read(self, data: jax.Array) -> jax.Array:
        """The numbers stored in ``[..., W]``: float32 ``[..., H]``."""

    @abc.abstractmethod
    def factor(self, head_dim: int, scale: jax.Array | None) -> jax.Array:
        """The factor of the numbers, besides a norm: float32 ``[]``."""

    def decode(
        self, stored: Encoded, scale: jax.Array | None, rotation: polar.Rotation | None
    ) -> jax.Array:
        """The stored vectors, in float32 ``[..., H]``."""
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
        """What is wrong with a finite vector that became NaN; follows its place in a message."""
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
    """A vector over the pool's scale in an 8-bit float, whose dtype is `name`."""

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
class Int8(Format):
    """Integers of 8 bits, and a scale of each vector, stored as its norm; see `to_int8`."""

    has_norm: ClassVar[bool] = True

    def width(self, head_dim: int) -> int:
        """`H`."""
        return head_dim

    def dtype(self, given: np.dtype) -> np.dtype:
        """int8."""
        return jnp.dtype(jnp.int8)

    def encode(
        self, x: jax.Array, scale: jax.Array | None, rotation: polar.Rotation | None
    ) -> Encoded:
        """See `to_int8`."""
        return Encoded(*to_int8(x))

    def read(self, data: jax.Array) -> jax.Array:
        """In float32."""
        return data.astype(jnp.float32)

    def factor(self, head_dim: int, scale: jax.Array | None) -> jax.Array:
        """1: scales are tokens' own."""
        return jnp.float32(1)

    def refusal(self, kv_dtype: str, side: str, scale: float) -> str:
        """Names the largest value."""
        largest = INT8_RANGE * LARGEST_SCALE
        return f"holds values beyond {largest:.0f}, the largest that {kv_dtype} stores"


@dataclasses.dataclass(frozen=True)
class Codes(Format):
    """Codes of rotated coordinates and a norm: `turbojax.polar` (PolarQuant, Han et al., 2025).

    These are also the values beside 8-bit keys, in ``"k8v4"`` and ``"int8_v4"``. Uniform integers
    of 4 bits with a scale per token take as many bytes but lose more of the vectors' squares: 1.16
    to 2.5 % of the embedded model's values, by layer, to 0.83 to 0.90 % here; 1.38 % to 0.93 % of
    normal vectors of 128 channels, 8.2 % to 0.86 % where a few channels are loud. All that codes
    cost on top is a rotation of the output, as queries are rotated only for keys.

    Numbers are the centroids of `turbojax.polar.integer_centroids`, packed as by `polar.pack`. A
    code has 2, 3 or 4 `bits`.
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
    """The formats of both sides of a page."""

    key: Format
    value: Format

    @property
    def is_rotated(self) -> bool:
        """Whether one of them is."""
        return self.key.is_rotated or self.value.is_rotated


def _both(of_both: Format) -> Formats:
    return Formats(of_both, of_both)


FORMATS = {
    "auto": _both(Plain()),
    "fp8_e4m3": _both(Float8("float8_e4m3fn")),
    "fp8_e5m2": _both(Float8("float8_e5m2")),
    "int8": _both(Int8()),
    "int8_v4": Formats(Int8(), Codes(4)),
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


def to_int8(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Each vector's integers and scale: ``x`` is ``integers * scale`` but for rounding.

    The scale is the largest magnitude times 1 / 127 (a product of float32), rounded up to float16,
    so that no integer is beyond 127; integers are ``x / scale`` rounded to nearest, ties to even.
    What is approximate on some machine, a reciprocal, is corrected: the bits are the same on all.

    Integers are int8 ``[..., H]``, within 127; 0 where the scale is 0 or NaN. Scales are float16
    ``[...]``: 0 for a vector of zeros, and where no magnitude is beyond `TINY`; NaN where `x` is
    not finite or a magnitude is beyond 127 times 65504.
    """
    x = x.astype(jnp.float32)
    # As integers, magnitudes have the order of the numbers, and NaN is beyond all of them.
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) & _MAGNITUDE
    largest = jax.lax.bitcast_convert_type(jnp.max(bits, axis=-1), jnp.float32)
    is_tiny = largest <= TINY
    scale = _up_to_float16(jnp.where(is_tiny, 1, largest * np.float32(1 / INT8_RANGE)))
    is_valid = scale <= LARGEST_SCALE
    is_stored = is_valid & ~is_tiny
    integers = _quotients(x, jnp.where(is_stored, scale, 1)[..., None])
    integers = jnp.where(is_stored[..., None], integers, 0).astype(jnp.int8)
    scale = jnp.where(is_tiny, 0, scale)
    # Selected in float16: on other machines a conversion of NaN has other bits.
    return integers, jnp.where(is_valid, scale.astype(jnp.float16), jnp.float16(jnp.nan))


def _up_to_float16(x: jax.Array) -> jax.Array:
    """The smallest float16 that is not below `x`, positive, still in float32; more if too large."""
    exponent = jax.lax.bitcast_convert_type(x, jnp.int32) & _EXPONENT
    # The distance between float16 numbers of this exponent.
    exponent = jnp.maximum(exponent, _SMALLEST_EXPONENT) - (10 << 23)
    quantum = jax.lax.bitcast_convert_type(exponent, jnp.float32)
    inverse = jax.lax.bitcast_convert_type((254 << 23) - exponent, jnp.float32)
    return jnp.ceil(x * inverse) * quantum


def _quotients(x: jax.Array, scale: jax.Array) -> jax.Array:
    """``x / scale`` rounded to nearest, ties to even, of quotients within 127.

    A guess is off by one at most. The guess times the scale is exact, as the scale has 11 bits, and
    so is the remainder: past half of the scale, or at half from an odd guess, the neighbour is
    right.
    """
    guess = jnp.rint(x * (1 / scale))
    rest = x - guess * scale
    distance, half = jnp.abs(rest), scale * 0.5
    is_odd = (guess.astype(jnp.int32) & 1) == 1
    is_past = (distance > half) | ((distance == half) & is_odd)
    return guess + jnp.where(is_past, jnp.sign(rest), 0)
