"""Vectors as codes of rotated coordinates and one norm (PolarQuant, Han et al., 2025)."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks
from turbojax._gradient import refuse_gradients
from turbojax.polar.centroids import centroids, check_bits, lloyd_max, thresholds
from turbojax.polar.packing import check_codes
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

TINY, HUGE = 2.0**-60, 2.0**40
"""Sums of squares below and above which a norm is 0 or no float16, whatever the codes are."""

_EXPONENT = 0x7F800000
_LOW_BITS = 0xFFF
_SMALLEST_EXPONENT = (127 - 14) << 23  # of float16's normal numbers, as bits of float32


def encode(x: jax.Array, rotation: Rotation, bits: int = 4) -> tuple[jax.Array, jax.Array]:
    """Codes and norm of each vector; `decode` gives back a vector of the same length.

    A coordinate of ``R x`` goes to the nearest of the ``2**bits`` centroids times ``|x|`` (ties
    upward), and the norm is ``|x|`` over the length of the chosen centroids. Every sum is taken in
    a fixed order: a vector's bits do not depend on the array it is part of.

    Args:
      x: ``[..., H]``, bfloat16, float16 or float32.
      rotation: of head dim `H`.
      bits: 2, 3 or 4.

    Returns:
      codes: uint8 ``[..., H]``, below ``2**bits``; arbitrary where the norm is 0 or NaN.
      norms: float16 ``[...]``. 0 for a zero vector and for one too short for float16's subnormal
        numbers; NaN where `x` is not finite and, under `jit`, where the norm exceeds 65504.

    Raises:
      TypeError: if `x` has another dtype, `rotation` is another kind or `bits` is not an integer.
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
    check_codes("codes", codes, 2**bits)
    check_head_dim("codes", codes, rotation.head_dim)
    _check_norm_array(norms, codes.shape[:-1])
    dtype = jnp.dtype(dtype)
    if dtype not in _checks.FLOAT_DTYPES:
        raise TypeError(f"{dtype=!s} must be bfloat16, float16 or float32")
    return _decode(codes, norms, rotation, bits=int(bits)).astype(dtype)


def check_norms(name: str, x: jax.Array, norms: jax.Array) -> None:
    """Raises ValueError where `encode` gave a finite vector no norm; not under `jit`.

    For callers that encode inside their own `jit`.
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
    check_codes("packed", packed, 256)
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
    check_codes("content", content, 256)
    if content.ndim < 1 or content.shape[-1] < 3:
        raise ValueError(f"{content.shape=} must be [..., H / 2 + 2]")
    return content[..., :-2], jax.lax.bitcast_convert_type(content[..., -2:], jnp.float16)


@functools.partial(jax.jit, static_argnames="bits")
def _encode(x: jax.Array, rotation: Rotation, *, bits: int) -> tuple[jax.Array, jax.Array]:
    # Squares over- and underflow only where the float16 norm does, so nothing is scaled before.
    x = x.astype(jnp.float32)
    squares = _ordered_sum(_square(x))
    is_tiny, is_bounded = squares < TINY, squares <= HUGE
    squares = jnp.where(is_bounded & ~is_tiny, squares, 1)
    norm = jnp.where(is_tiny, 0, _exact_root(squares))
    coordinates = hadamard_product(flip_signs(x, rotation))  # sqrt(d) times those of R x
    codes, levels = _nearest(coordinates, norm, level_tables(bits, rotation.head_dim))
    corrected = _corrected(squares[..., 0], levels)
    corrected = jnp.where(is_tiny[..., 0], 0, corrected)
    is_valid = is_bounded[..., 0] & (corrected <= LARGEST_NORM)
    # Selected in float16: on other machines a conversion of NaN has other bits.
    norms = jnp.where(is_valid, corrected.astype(jnp.float16), jnp.float16(jnp.nan))
    return jnp.where(is_bounded, codes, jnp.uint8(0)), norms


class LevelTables(NamedTuple):
    """What `encode` compares with and adds up.

    Attributes:
      thresholds: float32 between the levels for N(0, 1), increasing.
      squares: the levels' squares as integers in some unit, as large as `d` of them fit 31 bits:
        they are added exactly, and so in any order.
      unit: float32, that unit over `d`.
    """

    thresholds: tuple[float, ...]
    squares: tuple[int, ...]
    unit: float


@functools.cache
def level_tables(bits: int, head_dim: int) -> LevelTables:
    """Tables for codes of `bits` of `head_dim` channels."""
    squares = lloyd_max(bits) ** 2
    scale = 2.0 ** math.floor(math.log2((2**31 - 1) / (squares.max() + 1) / head_dim))
    return LevelTables(
        thresholds=tuple(float(np.float32(t)) for t in thresholds(bits)),
        squares=tuple(int(i) for i in np.rint(squares * scale)),
        unit=float(np.float32(1 / head_dim) / np.float32(scale)),
    )


def _nearest(
    coordinates: jax.Array, norm: jax.Array, tables: LevelTables
) -> tuple[jax.Array, jax.Array]:
    """Codes of ``[..., d]``, and the mean squares ``[...]`` of their levels for N(0, 1)."""
    codes = jnp.zeros(coordinates.shape, jnp.uint8)
    chosen = jnp.full(coordinates.shape, tables.squares[0], jnp.int32)
    for threshold, integer in zip(tables.thresholds, tables.squares[1:], strict=True):
        reached = coordinates >= norm * np.float32(threshold)
        codes = codes + reached.astype(jnp.uint8)
        chosen = jnp.where(reached, jnp.int32(integer), chosen)
    total = jnp.sum(chosen, axis=-1, dtype=jnp.int32)
    return codes, total.astype(jnp.float32) * np.float32(tables.unit)


def _corrected(squares: jax.Array, levels: jax.Array) -> jax.Array:
    """The root of ``squares / levels`` rounded to float16, still float32; more if too large.

    Division and roots are approximate on a GPU, and XLA rewrites them. So they are used only to
    find between which two float16 numbers the root lies; whether it reaches their midpoint (whose
    square is exact, of 24 bits) is decided by a comparison: the same bits everywhere, in kernels
    too.
    """
    guess = jnp.sqrt(squares / levels)
    # The distance between float16 numbers of this exponent.
    exponent = jax.lax.bitcast_convert_type(guess, jnp.int32) & _EXPONENT
    exponent = jnp.maximum(exponent, _SMALLEST_EXPONENT) - (10 << 23)
    quantum = jax.lax.bitcast_convert_type(exponent, jnp.float32)
    inverse = jax.lax.bitcast_convert_type((254 << 23) - exponent, jnp.float32)
    whole = jnp.floor(guess * inverse)
    middle = (whole + 0.5) * quantum
    up = ((middle * middle) * levels <= squares).astype(jnp.float32)
    too_large = np.float32(LARGEST_NORM**2) * levels < squares
    return jnp.where(too_large, jnp.inf, (whole + up) * quantum)


def _exact_root(x: jax.Array) -> jax.Array:
    """The square root of float32 from `TINY` to `HUGE`, rounded to nearest wherever it is taken."""
    root = jnp.sqrt(x)
    for _ in range(2):  # an approximation may be two units off
        root = _nearer_root(root, x)
    return root


def _nearer_root(root: jax.Array, x: jax.Array) -> jax.Array:
    """`root` or the float32 next to it, if that is nearer to the root of `x`.

    The remainder, `x` minus the root's square, is exact enough to decide: the halves of the root
    have 12 bits each, so their products are exact and only the last subtraction rounds.
    """
    bits = jax.lax.bitcast_convert_type(root, jnp.int32)
    below, high, above = (
        jax.lax.bitcast_convert_type(i, jnp.float32)
        for i in (bits - 1, bits & ~_LOW_BITS, bits + 1)
    )
    low = root - high
    rest = ((x - high * high) - (high + high) * low) - low * low
    step = (rest > root * (above - root)).astype(jnp.int32)
    step = step - (rest <= root * (below - root)).astype(jnp.int32)
    return jax.lax.bitcast_convert_type(bits + step, jnp.float32)


def _square(x: jax.Array) -> jax.Array:
    """The squares of float32, to the same bits whether or not products are fused with additions.

    The halves of `x` have 12 bits each, so their products are exact.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    high = jax.lax.bitcast_convert_type(bits & ~_LOW_BITS, jnp.float32)
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


def _check_norm_array(norms: jax.Array, shape: tuple[int, ...]) -> None:
    if norms.dtype != jnp.float16:
        raise TypeError(f"norms.dtype={norms.dtype} must be float16")
    if norms.shape != shape:
        raise ValueError(f"{norms.shape=} must be {shape}, one per vector")
