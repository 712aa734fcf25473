"""The contract of `prefill`: attention as `turbo_attention` does it, and a cache that continues."""

import dataclasses

import jax
import numpy as np
import pytest

import turbojax as tj
from tests.attention.attention_helpers import SAS_E
from tests.attention.decode_helpers import (
    BASE,
    BATCH,
    HEAD_DIM,
    KV_HEADS,
    STATIC,
    decode,
    empty,
    lengths_of,
    queries,
    random,
)
from tests.caches.cache_helpers import assert_same_bits
from tests.contracts.implementations import interpreted

TOKENS = 128
_prefill = jax.jit(tj.prefill, static_argnames=(*STATIC, "is_causal"))
_attend = jax.jit(
    tj.turbo_attention, static_argnames=("config", "is_causal", "implementation", "return_residual")
)
OPERANDS = (
    queries(TOKENS, 40),
    random(41, BATCH, TOKENS, KV_HEADS, HEAD_DIM),
    random(42, BATCH, TOKENS, KV_HEADS, HEAD_DIM),
)


def prefill(implementation, config=BASE, lengths=(TOKENS,) * BATCH, **options):
    """((output, residual), cache)."""
    cache = empty(config, BATCH, 192, KV_HEADS, HEAD_DIM)
    options |= {"implementation": implementation, "return_residual": True}
    with interpreted(implementation):
        return _prefill(*OPERANDS, cache, key_value_seq_lengths=lengths_of(lengths), **options)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize(
    ("mode", "implementation", "is_causal"),
    [("int8", "xla", True), ("int8", "triton", True), ("int8_fp8", "xla", False)],
)
def test_prefill_attends_as_turbo_attention_does(implementation, mode, is_causal):
    """Residual included: attention sees stage-1 codes, whatever is stored, in the same bits."""
    config = dataclasses.replace(BASE, mode=mode, softmax=SAS_E)
    lengths = (TOKENS, 33, 0)
    results, cache = prefill(implementation, config, lengths, is_causal=is_causal)
    want = _attend(
        *OPERANDS,
        config=config,
        is_causal=is_causal,
        query_seq_lengths=lengths_of(lengths),
        key_value_seq_lengths=lengths_of(lengths),
        implementation="xla",
        return_residual=True,
    )
    tolerances = (1e-6, 1e-6) if implementation == "xla" else (2e-5, 2e-6)
    for a, b, tolerance in zip(results, want, tolerances, strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance)
    np.testing.assert_array_equal(cache.lengths, lengths)
    if implementation != "xla":
        assert_same_bits(cache, prefill("xla", config, lengths, is_causal=is_causal)[1])


@pytest.mark.slow
def test_prefill_is_causal_by_default():
    default, causal = prefill("xla"), prefill("xla", is_causal=True)
    jax.tree.map(np.testing.assert_array_equal, default[0], causal[0])
    jax.tree.map(np.testing.assert_array_equal, default[1], causal[1])


@pytest.mark.slow
def test_decoding_continues_the_prompt():
    """Attention over a prompt's last token, by prefill and by decode: equal up to stage 2.

    With 4 bits the two outputs of one and the same query agree to a few percent of V.
    """
    config = tj.TurboConfig.paper(block_q=32, block_kv=32)
    (out, _), cache = prefill("xla", config)
    error = np.abs(decode(OPERANDS[0][:, -1:], cache, "xla")[0] - np.asarray(out[:, -1:]))
    assert error.mean() < 0.05 * np.abs(OPERANDS[2]).mean()
