"""Prefill's benchmarks: cuDNN in e4m3 beside ours, windows, and what the docs say of an H200."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from docs_helpers import docs_text

from benchmarks import readme, report
from benchmarks.measuring import work
from benchmarks.shapes import Shape
from benchmarks.suites.attention import cudnn_fp8, prefill


def test_the_peer_in_e4m3_gets_as_many_heads_and_loses_only_bits():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 8, 2, 16)), jnp.bfloat16)
    codes = cudnn_fp8.quantized(x, group=3)
    assert (codes.dtype, codes.shape) == (jnp.float8_e4m3fn, (1, 8, 6, 16))
    back = cudnn_fp8.dequantized(codes)[:, :, ::3].astype(jnp.float32)
    np.testing.assert_allclose(back, x.astype(jnp.float32), rtol=2**-4 + 2**-8, atol=2**-9 / 64)


def test_a_window_is_part_of_a_shape():
    """Of its name, its facts and its work: queries that see one key more each, then all as many."""
    plain, narrow = Shape("tiny", 2, 100, is_causal=True), Shape("tiny", 2, 100, True, window=9)
    assert narrow.label == f"{plain.label}-w9"
    assert "window" not in plain.facts
    assert narrow.facts["window"] == 9
    seen = sum(min(t + 1, 10) for t in range(100))
    every = work.attention_operations(Shape("tiny", 2, 100))
    assert work.attention_operations(narrow) == pytest.approx(every * seen / 100**2)


@pytest.mark.slow
def test_errors_of_a_window_are_those_of_what_it_shows():
    shape = Shape("tiny", 1, 64, is_causal=True, window=9)
    inputs = prefill.Inputs(shape)
    call = prefill._exact(inputs, "xla")
    assert call.error(jax.jit(call.function)(*call.arguments))["relative_l1"] < 0.02


def test_prose_agrees_with_what_was_measured_on_an_h200():
    text = docs_text("benchmarks/attention.md")
    _, fifth = report.newest(readme.RESULTS, ("prefill_h200",))
    [final] = [run for run in fifth["runs"] if run["run"] == 6]
    shapes = [(2, 8192, False), (2, 8192, True), (8, 2048, True), (1, 32768, True)]
    rates = {
        (row["name"], row["batch"], row["tokens"], row["is_causal"], row["query_heads"]): row
        for row in final["rows"]
        if "window" not in row and "logits_soft_cap" not in row
    }
    for name in ("fp8-exact-64", "int8_fp8-exact-64", "cudnn-fp8"):
        for shape in shapes:
            row = rates[name, *shape, 16 if shape[0] == 1 else 32]
            assert f"{row['tflops_per_second']:,.0f}" in text
