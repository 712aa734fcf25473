"""INT4 x FP8 products in plain JAX: the definition (FireQ, Baek et al., 2025, section 3.1).

Operands are 8-bit floats or small integers, which bfloat16 and float32 hold exactly, or tokens
that are not rounded to 8 bits; sums are float32. On a GPU the operands are multiplied as bfloat16,
or in the dtype of unrounded tokens, on a CPU as float32.
"""

import functools

import jax
import jax.numpy as jnp

from turbojax.matmul.int4.layout import scale_rows
from turbojax.matmul.int4.static import Activation
from turbojax.matmul.int4.weight import GATED_ROWS, Int4Weight, integers, scaled_values
from turbojax.numerics.fp8 import Fp8Tokens
from turbojax.sharding import varying_like


@functools.partial(jax.jit, static_argnames=("activation", "is_precise"))
def matmul(
    tokens: Fp8Tokens | jax.Array,
    weight: Int4Weight,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    activation: Activation | None,
    is_precise: bool,
) -> jax.Array:
    """The product with its epilogue: ``[M, result_size]`` in the tokens' dtype.

    With e4m3 scales ``sum_k x[m, k] e4m3(s[n] q[n, k])``, with scales of 16 bits a sum per group,
    of ``x[m, k] (q[n, k] - z[n])`` if there are zeros, times the group's scale; then what
    `epilogue` does. The bias is float32 ``[N]`` in the order of the weight's (padded) rows.
    `is_precise` has no effect: sums are always float32.
    """
    del is_precise
    codes, scale, dtype = tokens, jnp.ones(tokens.shape[:1], jnp.float32), tokens.dtype
    if isinstance(tokens, Fp8Tokens):
        codes, scale, dtype = tokens.codes, tokens.scale, jnp.dtype(jnp.bfloat16)
    sums = jax.lax.platform_dependent(
        codes,
        weight,
        cpu=functools.partial(_sums, dtype=jnp.float32),
        default=functools.partial(_sums, dtype=dtype),
    )
    out = epilogue(sums, scale, weight, bias, residual, activation=activation)
    return out.astype(tokens.dtype)


def epilogue(
    sums: jax.Array,
    scale: jax.Array,
    weight: Int4Weight,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    activation: Activation | None,
) -> jax.Array:
    """``act(sums * scale_m * output_scale_n + bias_n) + residual``, float32 ``[M, result_size]``.

    With an activation of `GATED`, eight rows of the gate alternate with eight of its partner.
    """
    out = sums * scale.astype(jnp.float32)[:, None] * weight.output_scale[None]
    if bias is not None:
        out = out + bias[None]
    out = activate(out, activation)[:, : weight.result_size]
    return out if residual is None else out + residual.astype(jnp.float32)


def activate(x: jax.Array, activation: Activation | None) -> jax.Array:
    """The activation of float32 ``[M, ...]``; a gated one halves `N`."""
    if activation is None:
        return x
    if activation == "silu":
        return jax.nn.silu(x)
    if activation == "gelu":
        return jax.nn.gelu(x, approximate=True)
    parts = x.reshape(x.shape[0], -1, 2, GATED_ROWS)
    gate = activate(parts[:, :, 0], "silu" if activation == "swiglu" else "gelu")
    return (gate * parts[:, :, 1]).reshape(x.shape[0], -1)


def _sums(codes: jax.Array, weight: Int4Weight, *, dtype: jax.typing.DTypeLike) -> jax.Array:
    """float32 ``[M, N]``, without the tokens' scales and `output_scale`."""
    # On a GPU XLA would multiply widened e4m3 operands in an 8-bit unit, which accumulates
    # coarsely. The barrier hides where they come from.
    codes = jax.lax.optimization_barrier(codes.astype(dtype))
    if weight.scale_dtype == "e4m3":
        return dot(codes, scaled_values(weight).astype(dtype)[:, : weight.in_size])
    values = integers(weight).astype(dtype)
    padding = values.shape[1] - weight.in_size
    codes = jnp.pad(codes, ((0, 0), (0, padding)))

    def by_group(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(x.shape[0], -1, weight.group_size), 1, 0)

    def add(
        total: jax.Array, group: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, None]:
        x, q, scale = group
        return total + dot(x, q) * scale.astype(jnp.float32)[None], None

    # Group by group: all sums at once would be K / group_size times the output.
    scales = scale_rows(weight.scales).T
    start = jnp.zeros((codes.shape[0], values.shape[0]), jnp.float32)
    start = varying_like(start, codes, weight)
    return jax.lax.scan(add, start, (by_group(codes), by_group(values), scales))[0]


def dot(x: jax.Array, w: jax.Array) -> jax.Array:
    """``x w^T`` of ``[M, k]`` and ``[N, k]``, summed in float32."""
    return jax.lax.dot_general(
        x,
        w,
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def transposed(tokens: Fp8Tokens, weight: Int4Weight) -> jax.Array:
    """The product with the weight's other axis, that of a gradient, without `output_scale`.

    ``s_m sum_n codes[m, n] W[n, k]``, ``[M, K]`` in the tokens' dtype. The codes ``[M, n]`` are of
    the weight's first `n` rows in stored order; the weight has e4m3 scales.
    """
    sums = jax.lax.platform_dependent(
        tokens.codes,
        weight,
        cpu=functools.partial(_transposed_sums, dtype=jnp.float32),
        default=functools.partial(_transposed_sums, dtype=jnp.bfloat16),
    )
    return (sums * tokens.scale.astype(jnp.float32)[:, None]).astype(tokens.dtype)


def _transposed_sums(
    codes: jax.Array, weight: Int4Weight, *, dtype: jax.typing.DTypeLike
) -> jax.Array:
    codes = jax.lax.optimization_barrier(codes.astype(dtype))
    values = scaled_values(weight).astype(dtype)[: codes.shape[1], : weight.in_size]
    return dot(codes, values.T)
