"""Prefill's benchmarks: cuDNN in e4m3 beside ours, windows, and what the docs say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import readme, report
from benchmarks.measuring import work
from benchmarks.shapes import Shape
from benchmarks.suites.attention import prefill
from benchmarks.suites.attention.tables import alone
from tests.tools.docs_helpers import docs_text


def test_the_peer_in_e4m3_gets_as_many_heads_and_loses_only_bits():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 8, 2, 16)), jnp.bfloat16)
    codes = prefill.quantized(x, group=3)
    assert (codes.dtype, codes.shape) == (jnp.float8_e4m3fn, (1, 8, 6, 16))
    back = prefill.dequantized(codes)[:, :, ::3].astype(jnp.float32)
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


def test_prose_agrees_with_attention_alone():
    """cuDNN in e4m3, and our kernels without what brings operands into their format."""
    text = docs_text("benchmarks/attention.md")
    _, result = report.newest(readme.RESULTS, ("hopper",))
    rows = {row["name"]: row for row in result["rows"]}
    shapes = ["b2-s8192", "b2-s8192-causal", "b1-s32768", "b1-s32768-causal", "b8-s2048-causal"]
    said = {
        "e4m3-cudnn": "makes {} TFLOP/s at 2 x 8k and {} if causal, {} and {} at 1 x 32k, {} at 8",
        "turbo-int8_fp8-exact-64/mosaic_gpu": "`int8_fp8` {}, {}, {}, {} and {}",
        "turbo-fp8-exact-64/mosaic_gpu": "`fp8` {}, {}, {}, {} and {}",
    }
    for method, sentence in said.items():
        rates = []
        for shape in shapes:
            row = rows[f"prefill/llama3-8b/{shape}/{method}"]
            us = row["us"] if method == "e4m3-cudnn" else alone(row)
            rates.append(f"{row['work'] / us / 1e6:,.0f}")
        assert sentence.format(*rates) in text
