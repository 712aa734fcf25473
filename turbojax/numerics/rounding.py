"""What rounds where: the operands of the two products in each mode (TurboAttention, Alg. 1, 2).

Integer and e4m3 operands are multiplied as float32: a product of int8 codes sums to less than
2**24 over a head or a block, so that float32 holds it exactly.
"""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from turbojax.numerics.config import Mode, TurboConfig
from turbojax.numerics.fp8 import E4M3_MAX, quantize_fp8, round_to_e4m3
from turbojax.numerics.int8 import INT8_RANGE, quantize_int8
from turbojax.numerics.sas import SAS

Exponential = Callable[[jax.Array], jax.Array]


def exponential(config: TurboConfig) -> Exponential:
    """The exponential of the softmax: SAS, or the exact one."""
    return config.softmax if isinstance(config.softmax, SAS) else jnp.exp


def largest_weight(config: TurboConfig) -> float:
    """The exponential at 0: the weight of a row's largest score."""
    with jax.ensure_compile_time_eval():
        return float(exponential(config)(jnp.zeros((), jnp.float32)))


def stored_mode(mode: Mode) -> Literal["int8", "float"]:
    """The numbers that `decode` multiplies: caches store integers, so int8 in every 8-bit mode."""
    return "float" if mode == "float" else "int8"


def values_mode(mode: Mode) -> Mode:
    """A mode that rounds queries and keys to the format that `mode` rounds values to."""
    return "fp8" if mode == "int8_fp8" else mode


def quantize_scores_operand(
    x: jax.Array, mode: Mode, axis: int | tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """Q or K as codes of the mode, and float32 scales of `x`'s shape without `axis`."""
    if mode in ("int8", "int8_fp8"):
        return quantize_int8(x, axis=axis)
    if mode == "fp8":
        return quantize_fp8(x, axis=axis)
    return x, _ones_without(x, axis)


def quantize_values(value: jax.Array, mode: Mode) -> tuple[jax.Array, jax.Array]:
    """V ``[B, K, n, block, H]`` as codes, and float32 scales ``[B, K, n]``.

    Int8 has a scale per block. E4m3 has one per head, so that an 8-bit float accumulator runs over
    all blocks without rescaling.
    """
    if mode == "int8":
        return quantize_int8(value, axis=(3, 4))
    if mode in ("int8_fp8", "fp8"):
        codes, scale = quantize_fp8(value, axis=(2, 3, 4))
        return codes, jnp.broadcast_to(scale[..., None], value.shape[:3])
    return value, _ones_without(value, (3, 4))


def round_probabilities(
    p: jax.Array, largest: jax.Array, mode: Mode
) -> tuple[jax.Array, jax.Array]:
    """P as the second product's operand: float32 codes ``[..., t]`` and scales ``[..., 1]``.

    `p` are the unnormalized weights of a row's keys in one block, `largest` is the exponential of
    the row's largest score there. Codes are integers of the row's own scale ``largest / 119`` in
    mode ``"int8"``, e4m3 values with a static scale in the fp8 modes, `p` otherwise.
    """
    if mode == "int8":
        scale = largest * (1 / INT8_RANGE)
        # So small a weight rounds to 0, and its reciprocal would be infinite.
        scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1, scale)
        return jnp.rint(p * (1 / scale)), scale
    if mode in ("int8_fp8", "fp8"):
        codes = round_to_e4m3(p * E4M3_MAX).astype(jnp.float32)
        return codes, jnp.full_like(largest, 1 / E4M3_MAX)
    return p, jnp.ones_like(largest)


def exact_dot(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """`einsum` in float32 at full precision, exact for 8-bit codes."""
    a, b = _as_float32(a), _as_float32(b)
    return jnp.einsum(subscripts, a, b, precision=jax.lax.Precision.HIGHEST)


def _as_float32(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    # On a GPU XLA would multiply widened e4m3 operands in an 8-bit unit, which accumulates
    # coarsely: log-sum-exps were off by 7e-4. The barrier hides where they come from.
    return jax.lax.optimization_barrier(wide) if x.dtype == jnp.float8_e4m3fn else wide


def cap_logits(scores: jax.Array, logits_soft_cap: float | None) -> jax.Array:
    """Soft cap ``c * tanh(s / c)``, or the scores themselves."""
    if logits_soft_cap is None:
        return scores
    return logits_soft_cap * jnp.tanh(scores / logits_soft_cap)


def finite_maximum(m: jax.Array) -> jax.Array:
    """A running maximum that can be subtracted: 0 in rows where nothing was visible yet."""
    return jnp.where(m == -jnp.inf, 0, m)


def finish(o: jax.Array, m: jax.Array, l: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Normalizes an online softmax: ``o / l`` and the log-sum-exp ``m + log l``.

    `o` are weighted sums of values, float32 ``[..., H]``, `m` row maxima and `l` sums of weights.
    Where nothing was visible the result is 0 and ``-inf``.
    """
    nothing = l == 0
    out = o / jnp.where(nothing, 1, l)[..., None]
    return out, jnp.where(nothing, -jnp.inf, m + jnp.log(jnp.where(nothing, 1, l)))


def _ones_without(x: jax.Array, axis: int | tuple[int, ...]) -> jax.Array:
    axes = {a % x.ndim for a in ((axis,) if isinstance(axis, int) else axis)}
    return jnp.ones([n for i, n in enumerate(x.shape) if i not in axes], jnp.float32)
