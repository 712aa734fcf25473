"""The comparison of masks and biases: cuDNN gets the same mask, and the table's ratios."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import masks

TOKENS = 128


def test_cudnn_is_given_the_same_mask():
    """Plain attention with the bias that cuDNN gets is ours with the mask."""
    keys = jax.random.split(jax.random.key(1), 3)
    q, k, v = (jax.random.normal(key, (masks.BATCH, TOKENS, 2, 64), jnp.float32) for key in keys)
    for name, is_causal, given in masks.masks(TOKENS, 2):
        attend, arrays = masks.call_of("xla", is_causal, given, TOKENS)
        got = attend(q, k, v, arrays)
        bias = masks.as_bias(given, TOKENS)
        bias = None if bias is None else bias.astype(jnp.float32)
        want = jax.nn.dot_product_attention(q, k, v, bias=bias, is_causal=is_causal)
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        assert error < 0.06, (name, error)


def test_the_table_has_ratios_and_says_what_failed():
    rows = [
        {"mask": "none", "method": "default", "forward_us": 500.0, "both_us": 2000.0},
        {"mask": "none", "method": "triton", "forward_us": "ValueError: no"},
        {"mask": "none", "method": "cudnn", "forward_us": 750.0, "both_us": 2000.0},
    ]
    rows[0]["bias_gradient_us"] = 4000.0
    result = {"rows": rows, "device": "a GPU", "jax": "0", "date": "2026-01-01"}
    text = masks.masks_table("masks.json", result)
    assert "| none | 0.50 | 1.50x | - | - | 2.00 | 1.00x |" in text
    assert "| with the bias's gradient |  |  |  |  | 4.00 | - |" in text


@pytest.mark.fuzz
def test_every_row_runs():
    found = list(masks.rows(TOKENS, 600.0))
    assert len(found) == 9 * len(masks.METHODS)
    ours = [row for row in found if row["method"] in ("default", "xla")]
    assert all(isinstance(row["both_us"], float) for row in ours)
