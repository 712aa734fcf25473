"""What FireQ's suite multiplies, and whether a product is right.

Weights and activations are normal numbers, sampled in float32. Every number format gets the same
ones, so that methods differ in nothing else.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import timing
from benchmarks.measuring.calls import compared_rows
from benchmarks.measuring.work import Needs
from turbojax import fireq
from turbojax.fireq import Fp8Tokens, Int4Weight


@functools.partial(jax.jit, static_argnums=1)
def _normal(seed: int, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def activations(tokens: int, size: int) -> jax.Array:
    """bfloat16 ``[tokens, size]``."""
    return _normal(0, (tokens, size)).astype(jnp.bfloat16)


def tokens_of(tokens: int, size: int) -> Fp8Tokens:
    """The activations in e4m3."""
    return fireq.quantize_activation(activations(tokens, size), implementation="xla")


def dense(outputs: int, inputs: int, seed: int = 1) -> jax.Array:
    """A weight in bfloat16, ``[outputs, inputs]``, of standard deviation ``inputs**-0.5``."""
    return (_normal(seed, (outputs, inputs)) * inputs**-0.5).astype(jnp.bfloat16)


def dense_fp8(outputs: int, inputs: int) -> jax.Array:
    """The weight in e4m3, times the root of its inputs."""
    return _normal(1, (outputs, inputs)).astype(jnp.float8_e4m3fn)


def int4(outputs: int, inputs: int, scale_dtype: str = "e4m3", seed: int = 1) -> Int4Weight:
    """The weight in 4 bits, its standard deviation as a factor of the outputs."""
    w = _normal(seed, (outputs, inputs))
    return fireq.quantize_weight(w, scale_dtype=scale_dtype, output_scale=inputs**-0.5)


def gate_and_up(inner: int, size: int) -> Int4Weight:
    """Both weights of a gated product in 4 bits."""
    return fireq.gate_and_up(int4(inner, size, seed=1), int4(inner, size, seed=2))


def dense_gate_and_up(inner: int, size: int) -> jax.Array:
    """The same in bfloat16, ``[2 inner, size]``, the gate first."""
    return jnp.concatenate([dense(inner, size, 1), dense(inner, size, 2)])


def values(x: jax.Array | Fp8Tokens | Int4Weight) -> jax.Array:
    """What an operand stands for, in float32."""
    if isinstance(x, Fp8Tokens):
        return x.codes.astype(jnp.float32) * x.scale.astype(jnp.float32)[..., None]
    if isinstance(x, Int4Weight):
        return fireq.dequantize(x)
    return x.astype(jnp.float32)


def product_needs(sizes: tuple[int, int, int], operands: Any, unit: str) -> Needs:
    """Of a product of ``(inputs, outputs, tokens)``, whose result is in bfloat16."""
    size, outputs, tokens = sizes
    moved = timing.nbytes(operands) + tokens * outputs * 2
    return Needs(moved, 2.0 * tokens * outputs * size, unit)


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    """``x w^T`` in float32 of a few rows.

    A sum and no matrix product: XLA need not search for the fastest way, and nothing is rounded.
    """
    return jnp.sum(x[:, None] * w[None], axis=-1)


def check_product(
    out: jax.Array, x: jax.Array | Fp8Tokens, w: jax.Array | Int4Weight
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compares a product in any format with that of its own operands in float32."""
    rows = compared_rows(out.shape[0])
    some = jax.tree.map(lambda leaf: leaf[rows], x)
    return out[rows], product(values(some), values(w)), jnp.all(jnp.isfinite(out))
