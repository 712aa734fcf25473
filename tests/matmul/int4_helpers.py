"""What the tests of INT4 products share: operands, and the oracle's answer to them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import turbojax as tj
from tests.oracles import int4 as oracle
from turbojax.matmul.int4 import weight as int4
from turbojax.matmul.int4.layout import scale_rows, scale_tiles
from turbojax.quantizers import Fp8Tokens, Int4Weight, quantize_tokens


def random_weight(rng, out_size, in_size, scale_dtype, *, gated=False):
    """A weight with factors of its outputs; with a group of zeros in it, and large rows."""

    def one():
        w = rng.normal(size=(out_size, in_size)) * np.exp(rng.normal(size=(out_size, 1)))
        w[0, :128] = 0
        factor = 2.0 ** rng.integers(-3, 2, out_size)
        w = jnp.asarray(w * in_size**-0.5, jnp.float32)
        factor = jnp.asarray(factor, jnp.float32)
        return tj.fireq.quantize_weight(w, scale_dtype=scale_dtype, output_scale=factor)

    return tj.fireq.gate_and_up(one(), one()) if gated else one()


def random_tokens(rng, count, in_size, dtype=jnp.bfloat16):
    """Tokens of very different sizes, the last of several zero, with outliers."""
    x = rng.normal(size=(count, in_size)) * np.exp(2 * rng.normal(size=(count, 1)))
    x[:, rng.integers(in_size)] *= 30
    if count > 1:
        x[-1] = 0
    return quantize_tokens(jnp.asarray(x, jnp.float32).astype(dtype))


def random_floats(rng, count, in_size, dtype=jnp.bfloat16):
    """Tokens that are multiplied as they are: of different sizes, with outliers."""
    x = rng.normal(size=(count, in_size)) * np.exp(rng.normal(size=(count, 1)))
    x[:, rng.integers(in_size)] *= 30
    return jnp.asarray(x, jnp.float32).astype(dtype)


def with_zeros(weight, seed=0):
    """The same codes about other zeros; padding's stay 0."""
    zeros = np.random.default_rng(seed).integers(-8, 9, scale_rows(weight.scales).shape)
    zeros[weight.out_size :] = 0
    return dataclasses.replace(weight, zeros=scale_tiles(jnp.asarray(zeros, jnp.int8)))


def weight_of(rng, out_size, in_size, kind, *, gated=False):
    """`random_weight` with scales of this dtype, or float16 ones and ``"zeros"``."""
    if kind != "zeros":
        return random_weight(rng, out_size, in_size, kind, gated=gated)
    return with_zeros(random_weight(rng, out_size, in_size, "f16", gated=gated))


def random_epilogue(rng, count, weight, dtype):
    """Bias ``[out]`` and residual ``[M, result]``."""
    bias = jnp.asarray(rng.normal(size=weight.out_size), jnp.float32)
    residual = jnp.asarray(rng.normal(size=(count, weight.result_size)), jnp.float32)
    return bias, residual.astype(dtype)


def stored_bias(bias, weight):
    return None if bias is None else int4.pad_rows(bias, weight)


def abstract_weight(
    outputs, inputs, scales="e4m3", *, gated=False, group_size=128, experts=(), has_zeros=False
):
    """A weight, or a stack of them, that is shapes alone."""
    of = jax.ShapeDtypeStruct
    rows, size = int4.stored_rows(outputs, gated), int4.stored_inputs(inputs, group_size)
    by_group = (*experts, rows // 64, size // group_size, 64)
    kinds = {"e4m3": jnp.float8_e4m3fn, "bf16": jnp.bfloat16, "f16": jnp.float16}
    return Int4Weight(
        of((*experts, rows // 64, size // 128, 64, 64), jnp.uint8),
        of(by_group, kinds[scales]),
        of((*experts, rows), jnp.float32),
        out_size=outputs,
        in_size=inputs,
        group_size=group_size,
        gated=gated,
        zeros=of(by_group, jnp.int8) if has_zeros else None,
    )


def specification(rows, outputs, inputs, scales="e4m3", *, dtype=jnp.bfloat16, **weight):
    """Tokens in e4m3 and a weight that are shapes alone."""
    of = jax.ShapeDtypeStruct
    codes, scale = of((rows, inputs), jnp.float8_e4m3fn), of((rows,), jnp.bfloat16)
    tokens = Fp8Tokens(codes, scale, np.dtype(dtype))
    return tokens, abstract_weight(outputs, inputs, scales, **weight)


def wide(x):
    return np.asarray(x.astype(jnp.float32), np.float64)


def assert_equals_oracle(got, tokens, weight, bias, residual, activation, depth=None):
    """Within what sums and the result's dtype may lose, NaN where they are; returns the oracle's.

    Tokens are quantized, or floats that are multiplied as they are. Sums are float32, but for those
    of `depth` inputs, if given, which are the matrix unit's.
    """
    options = {
        "activation": activation,
        "depth": depth,
        "bias": 0.0 if bias is None else wide(bias),
        "residual": 0.0 if residual is None else wide(residual),
    }
    values = wide(tj.fireq.dequantize(weight))
    if isinstance(tokens, Fp8Tokens):
        codes, scale = wide(tokens.codes), wide(tokens.scale)
    else:
        codes, scale = wide(tokens), np.ones(tokens.shape[0])
    with np.errstate(over="ignore"):  # of exponentials that become infinite
        want, bound = oracle.matmul(codes, scale, values, **options)
    assert got.shape == want.shape
    assert got.dtype == tokens.dtype
    info = jnp.finfo(tokens.dtype)
    bound = bound + float(info.eps) * np.abs(want) + float(info.smallest_subnormal) / 2
    missing = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(wide(got)), missing)
    # Beyond the largest number of the dtype is infinity.
    rounded = np.where(np.abs(want) > float(info.max), np.copysign(np.inf, want), want)
    kept = ~missing & (wide(got) != rounded)
    error, allowed = np.abs(wide(got) - want)[kept], bound[kept]
    assert (error <= allowed).all(), (error / allowed).max()
    return want
