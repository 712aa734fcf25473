"""The gradient of `matmul`: exact, or with cotangents in e4m3, for speed."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from turbojax._registry import ImplementationName
from turbojax.matmul.fp8_tokens import quantize_activation, scale_quantize
from turbojax.matmul.int4 import reference
from turbojax.matmul.int4.layout import stored_rows
from turbojax.matmul.int4.static import Activation
from turbojax.matmul.int4.weight import Int4Weight, scaled_values
from turbojax.numerics.fp8 import Fp8Tokens


@functools.partial(jax.jit, static_argnames="activation")
def exact(
    x: jax.Array,
    weight: Int4Weight,
    bias: jax.Array | None,
    d_out: jax.Array,
    *,
    activation: Activation | None,
) -> tuple[jax.Array, jax.Array]:
    """Straight through the rounding of activations: the vjp of ``act(x W^T + bias)``.

    `W` is the dequantized weight. Products take operands in bfloat16 where `x` has that dtype,
    otherwise in float32, and always sum in float32. The bias and its gradient are float32, in the
    order of the weight's rows.
    """
    dtype = jnp.bfloat16 if x.dtype == jnp.bfloat16 else jnp.float32
    values = scaled_values(weight).astype(dtype)[:, : weight.in_size]
    if activation is None:
        d_sums = _padded_columns(d_out.astype(jnp.float32), values.shape[0])
    else:
        sums = reference.dot(x.astype(dtype), values) * weight.output_scale[None]
        sums = sums if bias is None else sums + bias[None]
        d_sums = _through_activation(sums, d_out, weight, activation)
    d_x = reference.dot((d_sums * weight.output_scale[None]).astype(dtype), values.T)
    return d_x.astype(x.dtype), jnp.sum(d_sums, axis=0)


def rounded(
    x: jax.Array,
    weight: Int4Weight,
    bias: jax.Array | None,
    d_out: jax.Array,
    *,
    activation: Activation | None,
    quantize: Callable[[jax.Array], Fp8Tokens | jax.Array],
    run: Callable[..., jax.Array],
    transposed: Callable[[Fp8Tokens, Int4Weight], jax.Array],
    quantizer: ImplementationName | None,
) -> tuple[jax.Array, jax.Array]:
    """The same with products of e4m3 operands, of weights whose values are e4m3.

    ``d_x = s_m sum_n e4m3(d_m[n] / s_m) W[n, k]`` with ``d_m = d_sums * output_scale``, rounded to
    bfloat16 if `x` has 16 bits, then to e4m3 with a scale `s_m` per token, as activations are. An
    activation's derivative is taken at the sums of the forward product, rounded likewise:
    `quantize` and `run` are that product's. `quantizer` names what rounds cotangents.
    """
    # The range of float16 is too small for cotangents and for factors of outputs.
    dtype = jnp.float32 if x.dtype == jnp.float32 else jnp.bfloat16
    if activation is None:
        d_sums = d_out.astype(jnp.float32)
        if d_out.dtype == dtype:
            scale = weight.output_scale[: d_out.shape[1]]
            tokens = scale_quantize(d_out, scale, implementation=quantizer)
        else:
            scaled = _rounded(d_sums * weight.output_scale[None, : d_out.shape[1]], dtype)
            tokens = quantize_activation(scaled, implementation=quantizer)
        d_sums = _padded_columns(d_sums, weight.output_scale.size)
    else:
        # All rows in stored order, before the activation joins those of a gate and its partner.
        rows = stored_rows(weight.out_size, weight.gated)
        plain = dataclasses.replace(weight, out_size=rows, gated=False)
        sums = run(_in_dtype(quantize(x), dtype), plain, bias)
        d_sums = _through_activation(sums.astype(jnp.float32), d_out, weight, activation)
        scaled = _rounded(d_sums * weight.output_scale[None], dtype)
        tokens = quantize_activation(scaled, implementation=quantizer)
    tokens = Fp8Tokens(tokens.codes, tokens.scale, np.dtype(x.dtype))
    return transposed(tokens, weight), jnp.sum(d_sums, axis=0)


def _through_activation(
    sums: jax.Array, d_out: jax.Array, weight: Int4Weight, activation: Activation
) -> jax.Array:
    """Cotangents float32 ``[M, N]`` of the sums, in the order of the weight's rows."""

    def finish(sums: jax.Array) -> jax.Array:
        return reference.activate(sums, activation)[:, : weight.result_size]

    (d_sums,) = jax.vjp(finish, sums)[1](d_out.astype(jnp.float32))
    return d_sums


def _in_dtype(tokens: Fp8Tokens | jax.Array, dtype: jax.typing.DTypeLike) -> Fp8Tokens | jax.Array:
    """Changes the dtype of the product of these tokens, not the codes."""
    if isinstance(tokens, Fp8Tokens):
        return dataclasses.replace(tokens, dtype=np.dtype(dtype))
    return tokens.astype(dtype)


def _rounded(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """`x` in another dtype, rounded even where XLA would keep more digits of what it fuses."""
    info = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, info.nexp, info.nmant).astype(dtype)


def _padded_columns(x: jax.Array, columns: int) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, columns - x.shape[1])))
