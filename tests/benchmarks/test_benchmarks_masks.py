"""The comparison of masks and biases: cuDNN gets the same mask, and the table's ratios."""

import numpy as np
import pytest

from benchmarks import masks

TOKENS = 512


def seen(name, i, j):
    """Whether query `i` sees key `j`, where what is causal is left to the call."""
    if "packed" in name:
        return i // (TOKENS // 8) == j // (TOKENS // 8) and (j <= i or "ids" in name)
    if "prefix" in name:
        return j <= i or j < TOKENS // 8
    if "images" in name:  # the first 256 tokens are one
        return j <= i or max(i, j) < 256
    return True


@pytest.mark.fuzz
def test_cudnn_is_given_the_same_mask():
    for name, is_causal, given in masks.masks(TOKENS, 2):
        bias = masks.as_bias(given, TOKENS)
        if "bias" in given:
            assert bias is given["bias"]
            continue
        want = [[seen(name, i, j) for j in range(TOKENS)] for i in range(TOKENS)]
        if bias is None:
            assert np.all(want), name
            continue
        assert bias.shape == (masks.BATCH, 1, TOKENS, TOKENS)
        got = np.asarray(bias, np.float32)
        hidden_by_call = is_causal & np.triu(np.ones((TOKENS, TOKENS), bool), 1)
        same = (got == 0) == np.asarray(want)
        assert np.all(same | hidden_by_call), name


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
    found = list(masks.rows(128, 600.0))
    assert len(found) == 9 * len(masks.METHODS)
    ours = [row for row in found if row["method"] in ("default", "xla")]
    assert all(isinstance(row["both_us"], float) for row in ours)
