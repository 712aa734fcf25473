"""Attention within whole sequences, as rows of the tables have it: static, hashable `Attend`s.

What no cache or op of turbojax has (other degrees of SAS, codes without a rotation) is simulated
here: the numbers are those that an implementation would compute, in plain JAX and in float32.
"""

import dataclasses
import functools
import math
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import polar
from turbojax.attention.options import PLAIN, AttentionOptions
from turbojax.caches import PooledAttention
from turbojax.caches.whole import attend_within, causal_attention
from turbojax.numerics.config import TurboConfig
from turbojax.numerics.sas import SAS

Rounding = Any
"""A hashable function from keys or values ``[B, T, K, H]`` to what is left of them."""


class Whole(Protocol):
    """An `Attend` that can be static under `jit`, and what it takes for the layers' caches."""

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        cache: Any = None,
        options: AttentionOptions = PLAIN,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """See `turbojax.caches.Attend`."""

    def marks(self, num_layers: int) -> tuple[jax.Array | None, ...]:
        """What stands for each layer's cache: None, or a float32 scalar that it writes."""


class _Unmarked:
    """No layer is unlike the others, and none has anything to report."""

    def marks(self, num_layers: int) -> tuple[jax.Array | None, ...]:
        return (None,) * num_layers


@dataclasses.dataclass(frozen=True)
class Exact(_Unmarked):
    def __call__(self, query, key, value, cache=None, options=PLAIN, sinks=None):  # type: ignore[no-untyped-def]
        return causal_attention(query, key, value, cache, options, sinks)


@dataclasses.dataclass(frozen=True)
class Turbo(_Unmarked):
    """`turbo_attention` without a cache."""

    config: TurboConfig
    implementation: str | None = None

    def __call__(self, query, key, value, cache=None, options=PLAIN, sinks=None):  # type: ignore[no-untyped-def]
        static = (self.config, options, self.implementation, sinks)
        return attend_within(query, key, value, None, *static), cache


@dataclasses.dataclass(frozen=True)
class Rounded(_Unmarked):
    """Exact attention to rounded keys and values: a cache that rounds each token by itself."""

    rounding: Rounding

    def __call__(self, query, key, value, cache=None, options=PLAIN, sinks=None):  # type: ignore[no-untyped-def]
        key, value = self.rounding(key), self.rounding(value)
        return causal_attention(query, key, value, cache, options, sinks)


@dataclasses.dataclass(frozen=True)
class Pooled:
    """Pooled attention, whose layers report their density.

    Attributes:
      pooled: the policy and its blocks.
      dense_layers: so many first layers attend exactly.
    """

    pooled: PooledAttention
    dense_layers: int = 0

    def marks(self, num_layers: int) -> tuple[jax.Array | None, ...]:
        """See `Whole.marks`: None for layers that attend exactly."""
        if self.dense_layers >= num_layers:
            raise ValueError(f"{self.dense_layers=} must be below the model's {num_layers} layers")
        pooled = (jnp.zeros((), jnp.float32),) * (num_layers - self.dense_layers)
        return (None,) * self.dense_layers + pooled

    def __call__(self, query, key, value, cache=None, options=PLAIN, sinks=None):  # type: ignore[no-untyped-def]
        if cache is None:
            return causal_attention(query, key, value, cache, options, sinks)
        levels = self.pooled.levels(query, key, None, options)
        out = self.pooled.attend(query, key, value, levels, None, options, sinks)
        return out, self.pooled.density(levels)


@dataclasses.dataclass(frozen=True)
class OfDegree(SAS):
    """SAS with a polynomial of another degree, a least-squares fit on [0, 1) as the paper's is.

    Only ``implementation="xla"`` has it: kernels have the cubic.

    Attributes:
      degree: 1 to 5.
    """

    degree: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.base != "e":
            raise ValueError(f"{self.base=} must be 'e'")
        if self.degree not in range(1, 6):
            raise ValueError(f"{self.degree=} must be 1 to 5")

    @property
    def coefficients(self) -> tuple[float, ...]:
        return exponential_fit(self.degree)

    def __call__(self, x: jax.Array) -> jax.Array:
        """See `SAS.__call__`, of floating-point `x`."""
        wide = x.astype(jnp.float32)
        y = jnp.minimum(jnp.maximum(-wide, 0), math.floor(-self.threshold) + 1)
        whole = jnp.floor(y)
        fraction, value = y - whole, jnp.zeros_like(y)
        for coefficient in reversed(self.coefficients):
            value = value * fraction + coefficient
        value = value * jnp.exp(-whole)
        return jnp.where(wide < self.threshold, 0, value).astype(x.dtype)


@functools.cache
def exponential_fit(degree: int) -> tuple[float, ...]:
    """Least-squares polynomial of ``exp(-f)`` on [0, 1), constant term first.

    By Gauss-Legendre quadrature: the integral of the squared error, not a sum over some points.
    """
    nodes, weights = np.polynomial.legendre.leggauss(32)
    f, weights = (nodes + 1) / 2, np.sqrt(weights / 2)
    powers = f[:, None] ** np.arange(degree + 1)
    fit, *_ = np.linalg.lstsq(powers * weights[:, None], np.exp(-f) * weights, rcond=None)
    return tuple(float(c) for c in fit)


@dataclasses.dataclass(frozen=True)
class PolarRounding:
    """The codec of turbo4 and its relatives, with its rotation or without.

    With it, what `turbojax.polar` encodes and decodes, up to rounding; without, coordinates go to
    the centroids as they are, which were made for rotated ones.

    Attributes:
      bits: 2, 3 or 4.
      rotates: whether coordinates are rotated before they are rounded.
    """

    bits: int
    rotates: bool

    def __call__(self, x: jax.Array) -> jax.Array:
        """Rounds vectors ``[..., H]``; a zero vector stays, NaN stays NaN."""
        # A product with the matrix, where the codec has butterflies: it compiles ten times as fast.
        wide, precise = x.astype(jnp.float32), jax.lax.Precision.HIGHEST
        rotation = polar.rotation(x.shape[-1]).matrix() if self.rotates else None
        if rotation is not None:
            wide = jnp.matmul(wide, rotation.T, precision=precise)
        table = polar.centroids(self.bits, x.shape[-1])
        edges = jnp.asarray(0.5 * (table[1:] + table[:-1])).reshape((1,) * x.ndim + (-1,))
        norm = jnp.sqrt(jnp.sum(wide * wide, axis=-1, keepdims=True))
        unit = wide / jnp.where(norm == 0, 1, norm)
        chosen = jnp.asarray(table)[jnp.sum(unit[..., None] >= edges, axis=-1)]
        length = jnp.sqrt(jnp.sum(chosen * chosen, axis=-1, keepdims=True))
        # As in the codec, the norm that is stored gives back the vector's length.
        stored = (norm / length).astype(jnp.float16).astype(jnp.float32)
        rounded = chosen * stored
        if rotation is not None:
            rounded = jnp.matmul(rounded, rotation, precision=precise)
        return rounded.astype(x.dtype)
