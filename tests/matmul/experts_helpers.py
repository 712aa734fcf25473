"""What the tests of grouped products share: operands, and the oracle's answer, expert by expert."""

import jax.numpy as jnp
import numpy as np

import turbojax as tj
from tests.matmul.int4_helpers import assert_equals_oracle, random_tokens, random_weight
from turbojax.quantizers import Fp8Tokens


def random_experts(rng, count, out_size, in_size, scale_dtype="e4m3", *, gated=False):
    """Weights of experts, stacked."""
    one = [random_weight(rng, out_size, in_size, scale_dtype, gated=gated) for _ in range(count)]
    return tj.fireq.stack_experts(one)


def operands(rows, sizes, out_size, in_size, *, scale_dtype="e4m3", gated=False, dtype=None):
    """Tokens, weights, sizes and biases."""
    rng = np.random.default_rng(rows)
    weight = random_experts(rng, len(sizes), out_size, in_size, scale_dtype, gated=gated)
    tokens = random_tokens(rng, rows, in_size, dtype or jnp.bfloat16)
    bias = jnp.asarray(rng.normal(size=(len(sizes), weight.out_size)), jnp.float32)
    return tokens, weight, jnp.asarray(sizes, jnp.int32), bias


def some(tokens, rows):
    """Some of the tokens."""
    return Fp8Tokens(tokens.codes[rows], tokens.scale[rows], tokens.dtype)


def assert_equals_experts(got, tokens, weight, sizes, bias, activation, depth=None):
    """Each expert's rows as the oracle computes them alone, and zeros behind the last."""
    assert got.shape == (tokens.shape[0], weight.result_size)
    assert got.dtype == tokens.dtype
    first = 0
    for expert, size in enumerate(np.asarray(sizes)):
        rows = slice(first, first + size)
        first += size
        if size:
            one = tj.fireq.expert_of(weight, expert)
            own = None if bias is None else bias[expert]
            mine = some(tokens, rows)
            assert_equals_oracle(got[rows], mine, one, own, None, activation, depth)
    assert not np.asarray(got[first:].astype(jnp.float32)).any()
