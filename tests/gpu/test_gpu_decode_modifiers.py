"""Sinks, float32 outputs and offsets of decoding, compiled on a GPU, against plain JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.attention.test_decode_modifiers import (
    HEAD_DIM,
    HEADS,
    KINDS,
    LENGTHS,
    SINKS,
    decode,
    filled,
)
from tests.gpu.gpu_helpers import KERNELS, on_hopper

pytestmark = pytest.mark.gpu
# Queries of a sequence, and options.
CASES = {
    "sinks": (1, {"sinks": SINKS}),
    "float32": (1, {"output_dtype": jnp.float32}),
    "several": (3, {"sinks": SINKS, "output_dtype": jnp.float32, "local_window_size": (40, 0)}),
    "offset": (1, {"sinks": SINKS, "query_offset": 80, "key_offset": 10}),
}
PROMPTS = {"parts": 40, "whole": 600}


def query_of(tokens):
    shape = (len(LENGTHS), tokens, HEADS, HEAD_DIM)
    return jnp.asarray(np.random.default_rng(9).standard_normal(shape), jnp.bfloat16)


def check(kind, tokens, kernel, **options):
    query, cache = query_of(tokens), filled(kind, dtype=jnp.bfloat16)
    out, lse = jax.jit(functools.partial(decode, kind, implementation=kernel, **options))(
        query, cache
    )
    want, want_lse = decode(kind, query, cache, **options)
    assert out.dtype == want.dtype
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))
    seen = np.isfinite(want_lse)
    # Long prompts multiply e4m3 pages by queries and weights in e4m3, whose step is 2**-4.
    is_e4m3 = kind == "fp8_e4m3" and tokens in PROMPTS.values()
    atol, share = (8e-2, 2**-4) if is_e4m3 else (2e-2, 1e-2)
    np.testing.assert_allclose(np.asarray(lse)[seen], np.asarray(want_lse)[seen], atol=atol)
    x, y = (np.asarray(a, np.float64) for a in (out, want))
    assert np.abs(x - y).sum() <= share * np.abs(y).sum()


@pytest.mark.quick(8)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", KINDS)
def test_decoding(kind, kernel, case):
    if kernel == "triton" and kind == "exact":
        kernel = None  # it has no kernel by Triton
    tokens, options = CASES[case]
    if kind == "4bit" and case == "offset":
        kernel = None  # its kernels take no offset
    check(kind, tokens, kernel, **options)


@pytest.mark.quick(4)
@on_hopper
@pytest.mark.parametrize("window", [None, (70, 0)])
@pytest.mark.parametrize("tokens", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("kind", ["auto", "turbo4", "fp8_e4m3"])
def test_prompts_to_pages_with_sinks(kind, tokens, window):
    check(kind, tokens, "mosaic_gpu", sinks=SINKS, local_window_size=window)
