"""`turbo_attention` against the float64 oracle and exact attention."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from attention_helpers import (
    EXACT,
    FLOAT,
    MODES,
    SAS_2,
    SAS_E,
    assert_agrees,
    attend,
    oracle_softmax,
    tensors,
)

import turbojax as tj


@pytest.fixture(params=MODES)
def mode(request):
    return request.param


def oracle_of(query, key, value, config, **options):
    return oracles.attention(
        query,
        key,
        value,
        mode=config.mode,
        softmax=oracle_softmax(config.softmax),
        block_q=config.block_q,
        block_kv=config.block_kv,
        **options,
    )


def assert_matches_oracle(query, key, value, config, **options):
    want = oracle_of(query, key, value, config, **options)
    if options.get("key_value_seq_lengths") is not None:
        options["key_value_seq_lengths"] = jnp.asarray(options["key_value_seq_lengths"], jnp.int32)
    out, lse = attend(query, key, value, config=config, return_residual=True, **options)
    assert (out.dtype, out.shape) == (query.dtype, query.shape)
    assert_agrees(out, lse, want, value)


# Every feature meets every mode once; shapes are awkward on purpose.
CASES = {
    "one query": {"shape": (2, 1, 200, 4, 2, 64)},
    "one token": {"shape": (1, 1, 1, 2, 2, 64)},
    "seven, causal": {"shape": (1, 7, 7, 6, 2, 80), "is_causal": True},
    "ragged and causal": {
        "shape": (3, 130, 200, 2, 1, 96),
        "is_causal": True,
        "key_value_seq_lengths": (200, 77, 0),
    },
    "window": {"shape": (1, 130, 130, 2, 2, 128), "local_window_size": (40, 3)},
    "causal window, lengths": {
        "shape": (2, 130, 200, 4, 2, 64),
        "is_causal": True,
        "local_window_size": 50,
        "key_value_seq_lengths": (128, 65),
    },
    "soft cap and scale": {"shape": (2, 70, 100, 2, 2, 256), "logits_soft_cap": 5.0, "scale": 0.2},
}
# Modes and softmaxes rotate through the cases, so that each pair meets one case or two.
PAIRS = [(m, s) for s in (EXACT, SAS_E, SAS_2) for m in MODES]
GRID = [
    pytest.param(case, *pair, id="-".join(map(str, (case, *pair))))
    for i, case in enumerate(CASES)
    for pair in [PAIRS[(3 * i + 5 * j) % len(PAIRS)] for j in range(3)]
]


def test_the_grid_meets_every_mode_and_softmax():
    assert {param.values[1:] for param in GRID} == set(PAIRS)


@pytest.mark.parametrize(("case", "mode", "softmax"), GRID)
def test_equals_the_oracle(case, mode, softmax):
    options = dict(CASES[case])
    q, k, v = tensors(sum(map(ord, case)), *options.pop("shape"))
    assert_matches_oracle(q, k, v, tj.TurboConfig(mode=mode, softmax=softmax), **options)


def test_other_block_sizes(mode):
    """Blocks of 16 queries and 32 keys: scales follow the blocks, in every mode."""
    q, k, v = tensors(1, 1, 50, 90, 2, 1, 64)
    softmax = EXACT if mode in ("int8_fp8", "float") else SAS_E
    config = tj.TurboConfig(mode=mode, softmax=softmax, block_q=16, block_kv=32, buffer_size=32)
    assert_matches_oracle(q, k, v, config, is_causal=True)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("mode", ["int8", "float"])
def test_half_precision_inputs(mode, dtype):
    """Rounded once, at the end, to the query's dtype."""
    q, k, v = tensors(2, 1, 70, 130, 2, 1, 64, dtype)
    assert_matches_oracle(q, k, v, tj.TurboConfig(mode=mode), is_causal=True)


def test_a_threshold_of_its_own():
    q, k, v = tensors(3, 1, 20, 130, 2, 2, 64)
    for threshold in (-2.0, -12.0):
        assert_matches_oracle(q, k, v, tj.TurboConfig(softmax=tj.SAS(threshold=threshold)))


# Against exact attention -------------------------------------------------------------------------

EXACT_CASES = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (30, 5)},
    "symmetric window": {"local_window_size": 20},
    "causal window": {"local_window_size": (30, 0), "is_causal": True},
    "lengths": {"key_value_seq_lengths": (130, 41)},
    "scale": {"scale": 0.05},
}


@pytest.mark.parametrize("case", EXACT_CASES)
def test_float_and_exact_is_attention(case):
    """Mode float with the exact softmax equals jax.nn.dot_product_attention and float64."""
    options = dict(EXACT_CASES[case])
    q, k, v = tensors(5, 2, 90, 130, 6, 2, 64)
    lengths = options.pop("key_value_seq_lengths", None)
    if lengths is not None:
        options["key_value_seq_lengths"] = jnp.asarray(lengths, jnp.int32)
    got = attend(q, k, v, config=FLOAT, **options)
    with jax.default_matmul_precision("highest"):
        theirs = jax.nn.dot_product_attention(q, k, v, **options)
    np.testing.assert_allclose(got, theirs, atol=5e-6)
    mask = oracles.visible(
        np.tile(np.arange(90), (2, 1)),
        np.arange(130),
        is_causal=options.get("is_causal", False),
        window=options.get("local_window_size"),
        lengths=lengths or (130, 130),
    )
    exact = oracles.plain_attention(q, k, v, scale=options.get("scale"), mask=mask)
    np.testing.assert_allclose(got, exact, atol=3e-6)


def test_soft_cap_is_attention():
    q, k, v = tensors(6, 2, 40, 130, 2, 2, 64)
    got = attend(q * 4, k, v, config=FLOAT, logits_soft_cap=7.0)
    np.testing.assert_allclose(
        got, oracles.plain_attention(q * 4, k, v, logits_soft_cap=7.0), atol=1e-5
    )


def rounded(x, block):
    """What stage 1 keeps of x [B, T, N, H]."""
    codes, scales = oracles.quantize_blocks(np.asarray(x), block, "int8")
    return jnp.asarray(codes * scales[..., None], jnp.float32)


@pytest.mark.parametrize("is_causal", [False, True])
def test_int8_errs_by_its_quantizers_alone(is_causal):
    """Exact softmax, float32: int8 is float attention over the rounded operands, up to P.

    A weight is rounded by at most half of 1/119 of the largest of its row and block, so the
    output moves by at most (number of blocks' weights) / 238 times |V| over the row sum.
    """
    q, k, v = tensors(7, 2, 130, 200, 4, 2, 64)
    config = tj.TurboConfig(softmax=EXACT)
    int8 = np.asarray(attend(q, k, v, config=config, is_causal=is_causal), np.float64)
    operands = rounded(q, 64), rounded(k, 64), rounded(v, 64)
    ideal = np.asarray(attend(*operands, config=FLOAT, is_causal=is_causal), np.float64)
    mask = oracles.visible(
        np.tile(np.arange(130), (2, 1)),
        np.arange(200),
        is_causal=is_causal,
        window=None,
        lengths=(200, 200),
    )
    bound = _rounding_of_weights(*operands, mask)
    error = np.abs(int8 - ideal)
    assert (error <= bound + 1e-5).all()
    assert error.mean() < 4e-3

    exact = oracles.plain_attention(q, k, v, mask=mask)
    quantizers_alone = np.abs(ideal - exact).mean()
    assert np.abs(int8 - exact).mean() < 1.5 * quantizers_alone + 1e-6


def _rounding_of_weights(q, k, v, mask, block=64):
    """Largest change of the output when weights are rounded to 1/119 of their row's block."""
    q, k, v = (np.moveaxis(np.asarray(x, np.float64), 2, 1) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = np.where(mask[:, None], q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1]), -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    total = 0
    for j in range(0, k.shape[2], block):
        part = p[..., j : j + block]
        # Rounded under the maximum so far, which is at most the final one: the decay that follows
        # multiplies weight and rounding alike.
        step = part.max(-1, keepdims=True) / 119 / 2
        total = total + np.where(part > 0, step, 0) @ np.abs(v[:, :, j : j + block])
    return np.moveaxis(total / p.sum(-1, keepdims=True), 1, 2)


@pytest.mark.parametrize(("mode", "limit"), [("int8", 0.02), ("int8_fp8", 0.05), ("fp8", 0.08)])
def test_relative_error_of_each_mode(mode, limit):
    """Relative L1 error against exact attention: a guard against a silent loss of accuracy."""
    q, k, v = tensors(8, 1, 128, 256, 2, 2, 128)
    exact = oracles.plain_attention(q, k, v)
    got = np.asarray(attend(q, k, v, config=tj.TurboConfig(mode=mode, softmax=EXACT)), np.float64)
    assert np.abs(got - exact).sum() / np.abs(exact).sum() < limit
