"""What the tests of `gradient_rows` share: inputs, and what it has to return."""

import jax
import jax.numpy as jnp
import numpy as np

from turbojax.attention.turbo.operands import blocks
from turbojax.numerics import rounding as numerics

# Batch, tokens, heads, head dim; block, rows of the results, dtype.
CASES = {
    "head dim 64": ((2, 70, 2, 64), 64, 128, jnp.float32),
    "head dim 80": ((3, 45, 3, 80), 16, 48, jnp.bfloat16),
    "more rows": ((2, 40, 2, 64), 64, 256, jnp.float16),
    "head dim 128": ((2, 130, 2, 128), 128, 136, jnp.bfloat16),
    "head dim 256": ((1, 65, 2, 256), 64, 128, jnp.float16),
}


def tensors(case, seed=0):
    """Loud heads, ragged lengths, and rows that see nothing, with NaN in their cotangents."""
    (batch, tokens, heads, dim), _, _, dtype = CASES[case]
    rng = np.random.default_rng(seed)
    loud = np.exp(rng.normal(size=(heads, 1)))
    query, d_out, out = (
        (rng.normal(size=(batch, tokens, heads, dim)) * loud).astype(dtype) for _ in range(3)
    )
    residual, d_residual = (
        (rng.normal(size=(batch, tokens, heads)) * 3).astype(np.float32) for _ in range(2)
    )
    lengths = np.linspace(tokens, 0 if batch > 2 else tokens // 2, batch).astype(np.int32)
    blind = rng.random(residual.shape) < 0.1
    blind[0, 3, 1] = True
    blind |= np.arange(tokens)[None, :, None] >= lengths[:, None, None]
    residual[blind] = -np.inf
    d_out[blind] = np.nan
    return query, d_out, out, residual, d_residual, lengths


def expected(case, arrays, query_dtype, gradient_dtype):
    """Codes and scales by the definition; sums in float64, and of their terms' magnitudes."""
    _, block, tokens, _ = CASES[case]
    query, d_out, out, residual, d_residual, lengths = arrays
    size = query.shape[1]
    sees = np.asarray(residual) != -np.inf
    d_out = np.where(sees[..., None], d_out, np.zeros((), d_out.dtype))

    @jax.jit
    def codes_of(x, length):
        def codes(dtype):
            mode = "int8" if dtype == jnp.int8 else "fp8"
            x_blocks = blocks(x, length, block)
            found, scale = numerics.quantize_scores_operand(x_blocks, mode, axis=(-2, -1))
            return found.reshape(*found.shape[:2], -1, found.shape[-1]), scale

        return codes(jnp.int8), codes(jnp.float8_e4m3fn)

    def codes(x, dtype):
        return codes_of(x, lengths)[0 if dtype == jnp.int8 else 1]

    d8, weighed = (None, None), d_out.astype(np.float64)
    if gradient_dtype is not None:
        d8 = codes(d_out, gradient_dtype)
        numbers, scale = (np.asarray(x.astype(jnp.float32), np.float64) for x in d8)
        weighed = numbers * np.repeat(scale, block, axis=2)[..., None]
        weighed = np.swapaxes(weighed, 1, 2)[:, :size]
    with np.errstate(invalid="ignore"):
        terms = weighed * out.astype(np.float64)
    delta = np.where(sees, terms.sum(-1) - d_residual, 0)
    magnitude = np.where(sees, np.abs(terms).sum(-1) + np.abs(d_residual), 0)
    lse = np.where(sees, residual * np.float32(np.log2(np.e)), np.inf)

    def rows(x, value):
        padding = ((0, 0), (0, 0), (0, tokens - size))
        return np.pad(np.swapaxes(x, 1, 2), padding, constant_values=value)

    sums = rows(lse, np.inf), rows(delta, 0), rows(magnitude, 0)
    return (*codes(query, query_dtype), *d8, *sums)


def check(got, want):
    """Equal bits; of the sums, what float32 loses with as many terms added in any order."""
    *codes, lse, delta, magnitude = want
    for name, a, b in zip(got._fields[:4], got[:4], codes, strict=True):
        assert (a is None) == (b is None), name
        if a is not None:
            assert (a.dtype, a.shape) == (b.dtype, b.shape), name
            a, b = (np.asarray(x.astype(jnp.float32)) for x in (a, b))
            np.testing.assert_array_equal(a, b, err_msg=name)
    for x in (got.lse, got.delta):
        assert (x.dtype, x.shape) == (jnp.float32, lse.shape)
    np.testing.assert_allclose(got.lse, lse, rtol=2**-22)
    x, is_finite = np.asarray(got.delta, np.float64), np.isfinite(delta)
    np.testing.assert_array_equal(np.isfinite(x), is_finite)
    channels = got.q8.shape[-1]
    bound = 2**-24 * (channels + 3) * magnitude
    assert (np.abs(x[is_finite] - delta[is_finite]) <= bound[is_finite]).all()
