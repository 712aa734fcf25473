"""Segments, offsets, sinks and float32 parts of `pooled_attention`, against the float64 oracle.

Through the definition and Triton's kernels, interpreted, forward and gradients. What they compute
on a GPU is checked in `test_gpu_pooled.py`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pooled_helpers import (
    Case,
    api_options,
    assert_as_good_as_plain,
    f64,
    operands,
    options,
    oracle,
    oracle_gradient,
    plain,
    plain_gradient,
)

import turbojax as tj
from turbojax._device import interpret_kernels

CASES = {
    "segments": Case(150, 150, heads=4, kv_heads=2, is_causal=True, segments=4),
    "segments that come again, both lengths": Case(
        130,
        133,
        batch=3,
        segments=9,
        sorted_ids=False,
        query_lengths=(130, 67, 12),
        key_lengths=(133, 61, 0),
    ),
    "offsets": Case(
        70, 133, batch=3, is_causal=True, query_offsets=(63, 5, 0), key_offsets=(0, 30, 70)
    ),
    "segments, offsets": Case(
        130, 130, block_q=64, is_causal=True, segments=5, query_offsets=(11, 40), key_offsets=(0, 45)
    ),
    "sinks": Case(70, 90, heads=4, is_causal=True, with_sinks=True, query_lengths=(70, 33)),
    "sinks, segments, offsets, lengths": Case(
        130,
        100,
        heads=4,
        kv_heads=2,
        is_causal=True,
        segments=4,
        with_sinks=True,
        query_offsets=(3, 0),
        query_lengths=(130, 77),
        key_lengths=(100, 91),
        shared="heads",
    ),
    "a segment for each token": Case(64, 64, is_causal=True, segments=200),
    "odd blocks": Case(77, 131, block_q=7, block_kv=24, segments=4, with_sinks=True, xla_only=True),
}
HASTE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
GRID = [("xla", name) for name in CASES] + [
    pytest.param("triton", name, marks=() if "lengths" in name else pytest.mark.slow)
    for name, case in CASES.items()
    if not case.xla_only
]


@functools.partial(jax.jit, static_argnums=(0, 1, 2), compiler_options=HASTE)
def _run(implementation, static, output_dtype, given, arrays, cotangents):
    def call(q, k, v, sinks):
        extras = given if sinks is None else {**given, "sinks": sinks}
        chosen = {"implementation": implementation, "return_residual": True}
        chosen["output_dtype"] = output_dtype
        return tj.pooled_attention(q, k, v, arrays[3], **dict(static), **extras, **chosen)

    results, pull = jax.vjp(call, *arrays[:3], given.get("sinks"))
    d_out, d_residual = cotangents
    gradients = pull((d_out.astype(results[0].dtype), d_residual))
    return results, [x for x in gradients if x is not None]


def run(case, arrays, implementation="xla", output_dtype=None, **changed):
    """Output and residual, and the gradients of queries, keys, values and sinks."""
    static, given = api_options(case)
    call = (implementation, static, output_dtype, {**given, **changed}, arrays[:4], arrays[4:])
    if implementation == "triton":
        with interpret_kernels():
            return _run(*call)
    return _run(*call)


def check(case, implementation, dtype=jnp.float32, output_dtype=None):
    arrays, known = operands(case, dtype), options(case)
    results, gradients = run(case, arrays, implementation, output_dtype)
    assert results[0].dtype == (output_dtype or dtype)
    want, of_plain = oracle(*arrays[:4], **known), plain(*arrays[:4], **known)
    assert_as_good_as_plain(results, want, of_plain)
    want, of_plain = oracle_gradient(*arrays, **known), plain_gradient(*arrays, **known)
    assert len(gradients) == len(want) == 3 + case.with_sinks
    assert_as_good_as_plain(gradients, want, of_plain)


@pytest.mark.quick(3)
@pytest.mark.parametrize(("implementation", "name"), GRID)
def test_equals_the_oracle(implementation, name):
    check(CASES[name], implementation)
