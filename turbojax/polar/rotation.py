"""A fixed random rotation of head vectors: signs, then a normalized Hadamard transform.

Rotated coordinates of any vector are close to independent normal variables, so one scalar quantizer
serves all of them, and the dot product of a rotated query and a rotated key is that of the
originals.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks
from turbojax._pytrees import pytree

_SMALL_ORDERS = {1: 1, 3: 12, 5: 20, 7: 28}
"""The order of the small Hadamard matrix, by the odd part of the head dim."""


@pytree
@dataclasses.dataclass(frozen=True)
class Rotation:
    """The orthogonal map ``R = H / sqrt(d) @ diag(signs)`` of ``d`` channels.

    ``H`` is a Hadamard matrix of order ``d = m * 2**k``, the Kronecker product of one of order `m`
    in {1, 12, 20, 28} (Paley's) and Sylvester's of order ``2**k``. Made by `rotation`.

    Attributes:
      signs: float32 ``[d]``, each 1 or -1.
    """

    signs: jax.Array

    @property
    def head_dim(self) -> int:
        """Channels, ``d``."""
        return self.signs.shape[-1]

    def matrix(self) -> jax.Array:
        """``R`` as float32 ``[d, d]``: ``rotate(x) = matrix @ x`` up to rounding."""
        scaled = hadamard(self.head_dim).astype(np.float32) * _scale(self.head_dim)
        return jnp.asarray(scaled) * self.signs[None, :]


def rotation(head_dim: int, seed: int = 0) -> Rotation:
    """The rotation of this head dim and seed, the same on every machine.

    Args:
      head_dim: a power of two, or 12, 20 or 28 times one: 64, 80, 96, 112, 128, 160, 192, 256 ..
      seed: of the signs, the highest bits of numpy's PCG64 words.

    Raises:
      TypeError: if an argument is not an integer.
      ValueError: if there is no rotation of this head dim, or `seed` is negative.
    """
    _checks.check_sizes(head_dim=head_dim)
    _checks.check_integer("seed", seed)
    if seed < 0:
        raise ValueError(f"{seed=} must not be negative")
    small_order(head_dim)
    return Rotation(signs=jnp.asarray(_draw_signs(int(head_dim), int(seed))))


def rotate(x: jax.Array, rotation: Rotation) -> jax.Array:
    """``R x`` for vectors along the last axis.

    Butterflies add in a fixed order and one product scales, so a vector's bits do not depend on the
    array it is part of.

    Args:
      x: ``[..., H]``, bfloat16, float16 or float32.
      rotation: of head dim `H`.

    Returns:
      float32 ``[..., H]``.

    Raises:
      TypeError: if `x` has another dtype or `rotation` is another kind.
      ValueError: if `x` has another head dim.
    """
    check_vectors("x", x, rotation)
    return _rotate(x, rotation)


def unrotate(x: jax.Array, rotation: Rotation) -> jax.Array:
    """The inverse of `rotate`, ``R^T x``; arguments, result and errors are the same."""
    check_vectors("x", x, rotation)
    return _unrotate(x, rotation)


def check_vectors(name: str, x: jax.Array, rotation: Rotation) -> None:
    """Raises unless `x` holds floating-point vectors of the rotation's head dim."""
    check_rotation(rotation)
    _checks.check_float_dtype(name, x)
    check_head_dim(name, x, rotation.head_dim)


def check_rotation(rotation: Rotation) -> None:
    """Raises TypeError unless `rotation` is a `Rotation`."""
    if not isinstance(rotation, Rotation):
        raise TypeError(f"rotation is a {type(rotation).__name__}, must be a polar.Rotation")


def check_head_dim(name: str, x: jax.Array, head_dim: int) -> None:
    """Raises ValueError unless the last axis of `x` has this size."""
    if x.ndim < 1 or x.shape[-1] != head_dim:
        raise ValueError(f"{name}.shape={x.shape} must be [..., {head_dim}]")


def flip_signs(x: jax.Array, rotation: Rotation) -> jax.Array:
    """``diag(signs) x`` along the last axis, in float32."""
    return x.astype(jnp.float32) * rotation.signs.reshape(*[1] * (x.ndim - 1), -1)


def small_order(head_dim: int) -> int:
    """The `m` in {1, 12, 20, 28} of ``head_dim = m * 2**k``; ValueError if there is none."""
    odd = head_dim // (head_dim & -head_dim)
    order = _SMALL_ORDERS.get(odd)
    if order is None or head_dim % order:
        raise ValueError(f"{head_dim=} must be a power of two, or 12, 20 or 28 times one")
    return order


def hadamard(order: int) -> np.ndarray:
    """The Hadamard matrix of this order that rotations use: int8 ``[order, order]``, 1 or -1."""
    small = small_order(order)
    large = np.ones((1, 1), np.int8)
    while len(large) < order // small:
        large = np.kron(np.array([[1, 1], [1, -1]], np.int8), large)
    return np.kron(_small_hadamard(small), large)


def hadamard_product(y: jax.Array, *, transpose: bool = False) -> jax.Array:
    """``H y`` along the last axis of float32 ``[..., d]``, or ``H^T y``: only additions.

    Products are with 1 or -1, hence exact, and fusing them with an addition changes nothing.
    """
    shape, head_dim = y.shape, y.shape[-1]
    small = small_order(head_dim)
    half = 1
    while half < head_dim // small:
        # Of each pair (a, b): (a + b, a - b). Written with a reversal, an element is read once per
        # term, which lets XLA fuse several stages.
        y = y.reshape(*shape[:-1], head_dim // (2 * half), 2, half)
        signs = jnp.asarray([1, -1], jnp.float32).reshape(*[1] * (y.ndim - 2), 2, 1)
        y = y * signs + jax.lax.rev(y, (y.ndim - 2,))
        half *= 2
    if small > 1:
        matrix = _small_hadamard(small).astype(np.float32)
        y = _small_product(
            y.reshape(*shape[:-1], small, head_dim // small), matrix.T if transpose else matrix
        )
    return y.reshape(shape)


def _small_product(y: jax.Array, matrix: np.ndarray) -> jax.Array:
    """``matrix @ y`` for ``[..., m, n]`` with columns added from first to last."""

    def term(column: int) -> jax.Array:
        factor = matrix[:, column].reshape(*[1] * (y.ndim - 2), -1, 1)
        return y[..., column : column + 1, :] * jnp.asarray(factor)

    total = term(0)
    for column in range(1, len(matrix)):
        total = total + term(column)
    return total


@jax.jit
def _rotate(x: jax.Array, rotation: Rotation) -> jax.Array:
    return hadamard_product(flip_signs(x, rotation)) * _scale(rotation.head_dim)


@jax.jit
def _unrotate(x: jax.Array, rotation: Rotation) -> jax.Array:
    product = hadamard_product(x.astype(jnp.float32), transpose=True)
    return flip_signs(product, rotation) * _scale(rotation.head_dim)


def _scale(head_dim: int) -> np.float32:
    return np.float32(1 / math.sqrt(head_dim))


@functools.cache
def _draw_signs(head_dim: int, seed: int) -> np.ndarray:
    # Words of the bit generator: numpy may change what its distributions make of them.
    words = np.random.PCG64(seed).random_raw(head_dim)
    signs = np.where(words >> np.uint64(63), np.float32(-1), np.float32(1))
    signs.setflags(write=False)
    return signs


@functools.cache
def _small_hadamard(order: int) -> np.ndarray:
    """Paley's constructions: the first for 12 and 20 (q = 11, 19), the second for 28 (q = 13)."""
    if order == 1:
        return np.ones((1, 1), np.int8)
    prime = 13 if order == 28 else order - 1
    squares = {i * i % prime for i in range(1, prime)}
    character = np.array([0] + [1 if i in squares else -1 for i in range(1, prime)])
    border = np.zeros((prime + 1, prime + 1), np.int64)
    index = np.arange(prime)
    border[1:, 1:] = character[(index[:, None] - index[None, :]) % prime]
    border[0, 1:] = 1
    border[1:, 0] = 1 if prime % 4 == 1 else -1
    identity = np.eye(prime + 1, dtype=np.int64)
    if prime % 4 == 3:
        return (border + identity).astype(np.int8)
    matrix = np.kron(border, [[1, 1], [1, -1]]) + np.kron(identity, [[1, -1], [-1, -1]])
    return matrix.astype(np.int8)
