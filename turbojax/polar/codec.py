"""Vectors as 4-bit codes of rotated coordinates and one norm (PolarQuant, Han et al., 2025)."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks
from turbojax._gradient import refuse_gradients
from turbojax.polar.centroids import centroids, check_bits, lloyd_max, thresholds
from turbojax.polar.rotation import (
    Rotation,
    check_head_dim,
    check_rotation,
    check_vectors,
    flip_signs,
    hadamard_product,
    unrotate,
)

LARGEST_NORM = 65504.0
"""The largest float16."""


def encode(x: jax.Array, rotation: Rotation, bits: int = 4) -> tuple[jax.Array, jax.Array]:
    """Codes and norm of each vector; `decode` gives back a vector of the same length.

    A coordinate of ``R x`` goes to the nearest of the ``2**bits`` centroids times ``|x|`` (ties
    upward), and the norm is ``|x|`` over the length of the chosen centroids. Every sum is taken in
    a fixed order: a vector's bits do not depend on the array it stands in.

    Args:
      x: ``[..., H]``, bfloat16, float16 or float32.
      rotation: of head dim `H`.
      bits: 2, 3 or 4.

    Returns:
      codes: uint8 ``[..., H]``, below ``2**bits``; arbitrary where the norm is 0 or NaN.
      norms: float16 ``[...]``. 0 for a zero vector and for one too short for float16's subnormal
        numbers; NaN where `x` is not finite and, under `jit`, where the norm exceeds 65504.

    Raises:
      TypeError: if `x` has another dtype, `rotation` is another kind or `bits` is no integer.
      ValueError: if the head dims differ or `bits` is another number, or, outside `jit`, if a
        finite vector's norm exceeds 65504.
      NotImplementedError: when it is differentiated.
    """
    check_vectors("x", x, rotation)
    check_bits(bits)
    codes, norms = refuse_gradients(_encode, "polar.encode", bits=int(bits))(x, rotation)
    check_norms("x", x, norms)
    return codes, norms


def decode(
    codes: jax.Array,
    norms: jax.Array,
    rotation: Rotation,
    bits: int = 4,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> jax.Array:
    """The vectors that codes and norms stand for, ``R^T (norm * centroids[codes])``.

    Args:
      codes: uint8 ``[..., H]``.
      norms: float16 ``[...]``.
      rotation: the one of `encode`.
      bits: those of `encode`.
      dtype: of the result: bfloat16, float16 or float32.

    Returns:
      ``[..., H]`` in `dtype`; NaN where a norm is or, under `jit`, a code is ``2**bits`` or more.

    Raises:
      TypeError: if a dtype or kind is another.
      ValueError: if shapes do not fit or `bits` is another number, or, outside `jit`, if a code is
        ``2**bits`` or more.
    """
    check_rotation(rotation)
    check_bits(bits)
    _check_codes("codes", codes, 2**bits)
    check_head_dim("codes", codes, rotation.head_dim)
    _check_norm_array(norms, codes.shape[:-1])
    dtype = jnp.dtype(dtype)
    if dtype not in _checks.FLOAT_DTYPES:
        raise TypeError(f"{dtype=!s} must be bfloat16, float16 or float32")
    return _decode(codes, norms, rotation, bits=int(bits)).astype(dtype)


def check_norms(name: str, x: jax.Array, norms: jax.Array) -> None:
    """Raises ValueError where `encode` gave a finite vector no norm; under `jit`, nothing is seen.

    For callers that encode inside their own `jit`.

    Args:
      name: of `x`, for the message.
      x: ``[..., H]``, what was encoded.
      norms: float16 ``[...]``, what `encode` returned.
    """
    if not _checks.is_concrete(x, norms):
        return
    missing = np.isnan(np.asarray(norms))
    if not missing.any():
        return
    vectors = np.asarray(x)[missing].astype(np.float64)
    lengths = np.sqrt((vectors**2).sum(-1))
    if np.isfinite(lengths).any():
        index = tuple(int(i) for i in np.argwhere(missing)[np.isfinite(lengths).argmax()])
        raise ValueError(
            f"{name}{list(index)} has length {lengths[np.isfinite(lengths)][0]:.6g}; "
            f"its norm over the centroids' must be at most {LARGEST_NORM:.0f}, the largest float16"
        )


def pack(codes: jax.Array) -> jax.Array:
    """Two codes per byte: dimension ``2 i`` in the low nibble of byte `i`, ``2 i + 1`` in the high.

    Args:
      codes: uint8 ``[..., H]`` below 16, `H` even.

    Returns:
      uint8 ``[..., H / 2]``.

    Raises:
      TypeError: if `codes` is not uint8.
      ValueError: if `H` is odd or, outside `jit`, a code is 16 or more.
    """
    _check_codes("codes", codes, 16)
    if codes.ndim < 1 or codes.shape[-1] % 2:
        raise ValueError(f"{codes.shape=} must be [..., H], H even")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: jax.Array) -> jax.Array:
    """The inverse of `pack`: uint8 ``[..., H]`` from uint8 ``[..., H / 2]``; same errors."""
    _check_codes("packed", packed, 256)
    if packed.ndim < 1:
        raise ValueError(f"{packed.shape=} must be [..., H / 2]")
    both = jnp.stack([packed & 15, packed >> 4], axis=-1)
    return both.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def to_interchange(packed: jax.Array, norms: jax.Array) -> jax.Array:
    """One byte string per vector: its nibbles, then its norm in little-endian float16.

    Args:
      packed: uint8 ``[..., H / 2]``, as `pack` gives it.
      norms: float16 ``[...]``.

    Returns:
      uint8 ``[..., H / 2 + 2]``: 66 bytes for a head dim of 128.

    Raises:
      TypeError: if a dtype is another.
      ValueError: if the shapes do not fit.
    """
    _check_codes("packed", packed, 256)
    if packed.ndim < 1:
        raise ValueError(f"{packed.shape=} must be [..., H / 2]")
    _check_norm_array(norms, packed.shape[:-1])
    # A conversion to smaller elements puts the lowest bits first.
    return jnp.concatenate([packed, jax.lax.bitcast_convert_type(norms, jnp.uint8)], axis=-1)


def from_interchange(content: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The inverse of `to_interchange`.

    Args:
      content: uint8 ``[..., H / 2 + 2]``.

    Returns:
      packed: uint8 ``[..., H / 2]``.
      norms: float16 ``[...]``.

    Raises:
      TypeError: if `content` is not uint8.
      ValueError: if it has fewer than 3 bytes per vector.
    """
    _check_codes("content", content, 256)
    if content.ndim < 1 or content.shape[-1] < 3:
        raise ValueError(f"{content.shape=} must be [..., H / 2 + 2]")
    return content[..., :-2], jax.lax.bitcast_convert_type(content[..., -2:], jnp.float16)


@functools.partial(jax.jit, static_argnames="bits")
def _encode(x: jax.Array, rotation: Rotation, *, bits: int) -> tuple[jax.Array, jax.Array]:
    # Squares over- and underflow only where the float16 norm does, so nothing is scaled before.
    x, head_dim = x.astype(jnp.float32), rotation.head_dim
    squares = _ordered_sum(_square(x))
    norm = jnp.sqrt(squares)
    coordinates = hadamard_product(flip_signs(x, rotation))  # sqrt(d) times those of R x
    codes, chosen = _nearest(coordinates, norm, bits)
    # One root of a quotient: XLA may turn a quotient of roots into a product with an approximation.
    corrected = jnp.sqrt(squares[..., 0] / (chosen * np.float32(1 / head_dim)))
    corrected = jnp.where(corrected <= LARGEST_NORM, corrected, jnp.nan)
    return codes, corrected.astype(jnp.float16)


def _nearest(coordinates: jax.Array, norm: jax.Array, bits: int) -> tuple[jax.Array, jax.Array]:
    """Codes of ``[..., d]``, and the sums ``[...]`` of their centroids' squares for N(0, 1).

    The squares are added as integers, exactly and so in any order: ``d`` of them fit into 31 bits.
    """
    squares = lloyd_max(bits) ** 2
    scale = 2.0 ** math.floor(math.log2((2**31 - 1) / (squares.max() + 1) / coordinates.shape[-1]))
    integers = [int(i) for i in np.rint(squares * scale)]
    codes = jnp.zeros(coordinates.shape, jnp.uint8)
    chosen = jnp.full(coordinates.shape, integers[0], jnp.int32)
    for threshold, integer in zip(thresholds(bits), integers[1:], strict=True):
        reached = coordinates >= norm * np.float32(threshold)
        codes = codes + reached.astype(jnp.uint8)
        chosen = jnp.where(reached, jnp.int32(integer), chosen)
    total = jnp.sum(chosen, axis=-1, dtype=jnp.int32)
    return codes, total.astype(jnp.float32) * np.float32(1 / scale)


def _square(x: jax.Array) -> jax.Array:
    """The squares of float32, to the same bits whether or not products are fused with additions.

    Of 12 bits each, the halves of `x` have exact products.
    """
    high = jax.lax.reduce_precision(x, 8, 11)
    low = x - high
    return high * high + ((high + high) * low + low * low)


def _ordered_sum(x: jax.Array) -> jax.Array:
    """The sum over the last axis, which is kept, in an order that only its size decides."""
    while x.shape[-1] % 2 == 0:
        x = x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2)
        x = x[..., 0, :] + x[..., 1, :]
    total = x[..., :1]
    for i in range(1, x.shape[-1]):
        total = total + x[..., i : i + 1]
    return total


@functools.partial(jax.jit, static_argnames="bits")
def _decode(codes: jax.Array, norms: jax.Array, rotation: Rotation, *, bits: int) -> jax.Array:
    table = jnp.asarray(centroids(bits, rotation.head_dim))
    values = jnp.take(table, codes.astype(jnp.int32), mode="fill", fill_value=jnp.nan)
    return unrotate(values * norms[..., None].astype(jnp.float32), rotation)


def _check_codes(name: str, codes: jax.Array, limit: int) -> None:
    if codes.dtype != jnp.uint8:
        raise TypeError(f"{name}.dtype={codes.dtype} must be uint8")
    if limit < 256 and _checks.is_concrete(codes) and codes.size:
        largest = int(np.asarray(codes).max())
        if largest >= limit:
            raise ValueError(f"{name} holds {largest}, must be below {limit}")


def _check_norm_array(norms: jax.Array, shape: tuple[int, ...]) -> None:
    if norms.dtype != jnp.float16:
        raise TypeError(f"norms.dtype={norms.dtype} must be float16")
    if norms.shape != shape:
        raise ValueError(f"{norms.shape=} must be {shape}, one per vector")
