"""The contract of `turbo_attention`, first part: the float64 oracle and exact attention.

Every implementation that a CPU can run is held to it. `test_turbo_attention_properties.py` is the
second part: what must not matter, bad values and transforms.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from tests import oracles
from tests.attention.attention_helpers import (
    EXACT,
    FLOAT,
    MODES,
    SAS_2,
    SAS_E,
    TOKENS,
    assert_agrees,
    attend,
    attend_standard,
    oracle_softmax,
    standard,
    tensors,
)
from tests.contracts.implementations import interpreted, kernel_is_slow


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


def run(query, key, value, config, implementation, **options):
    """Output and residual, as numpy arrays."""
    if options.get("key_value_seq_lengths") is not None:
        lengths = np.asarray(options["key_value_seq_lengths"], np.int32)
        options["key_value_seq_lengths"] = lengths
    options |= {"implementation": implementation, "return_residual": True}
    with interpreted(implementation):
        return tuple(np.asarray(x) for x in attend(query, key, value, config=config, **options))


def assert_matches_oracle(query, key, value, config, implementation, **options):
    want = oracle_of(query, key, value, config, **options)
    out, lse = run(query, key, value, config, implementation, **options)
    assert (out.dtype, out.shape) == (query.dtype, query.shape)
    assert_agrees(out, lse, want, value)


LENGTHS = (150, 77, 0)


@functools.cache
def standard_oracle(mode, softmax):
    """It takes as long as the op itself: both implementations are compared with one."""
    config = tj.TurboConfig(mode=mode, softmax=softmax)
    return oracle_of(*standard(), config, is_causal=True, key_value_seq_lengths=LENGTHS)


# Every mode and softmax first, by plain JAX and by the kernel; then further pairs.
FIRST = [("int8", SAS_E, "xla"), ("int8_fp8", EXACT, "xla"), ("fp8", SAS_2, "xla")]
FIRST += [("float", EXACT, "xla"), ("int8", SAS_E, "triton"), ("fp8", SAS_2, "triton")]
FURTHER = [("int8_fp8", SAS_E, "triton"), ("float", SAS_2, "triton"), ("fp8", EXACT, "xla")]


@pytest.mark.quick(2, slow=0)
@pytest.mark.parametrize(("mode", "softmax", "implementation"), [*FIRST, *FURTHER])
def test_equals_the_oracle(implementation, mode, softmax):
    """Ragged and causal."""
    q, k, v = standard()
    out, lse = attend_standard(q, k, v, mode, implementation, LENGTHS, softmax)
    assert (out.dtype, out.shape) == (q.dtype, q.shape)
    assert_agrees(out, lse, standard_oracle(mode, softmax), v)


# Options and awkward shapes.
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
PAIRS = [(m, s) for s in (EXACT, SAS_E, SAS_2) for m in MODES]
# In the fast tier one query and the options; the rest is more of them, most of it on the kernel.
FAST = [("one query", "triton"), ("window", "xla"), ("seven, causal", "xla")]
FAST += [("soft cap and scale", "triton")]
MORE = [("ragged and causal", "triton"), ("causal window, lengths", "triton")]
MORE += [("one token", "triton")]
GRID = [(*names, *PAIRS[5 * i % len(PAIRS)]) for i, names in enumerate([*FAST, *MORE])]


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize(("case", "implementation", "mode", "softmax"), GRID)
def test_shapes_and_options_equal_the_oracle(case, implementation, mode, softmax):
    options = dict(CASES[case])
    q, k, v = tensors(sum(map(ord, case)), *options.pop("shape"))
    config = tj.TurboConfig(mode=mode, softmax=softmax)
    assert_matches_oracle(q, k, v, config, implementation, **options)


BLOCKS = [
    ("xla", "int8", SAS_E, 16, 32),
    ("triton", "fp8", SAS_E, 128, 128),
    ("triton", "float", SAS_E, 8, 16),
]


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize(("implementation", "mode", "softmax", "block_q", "block_kv"), BLOCKS)
def test_other_block_sizes(implementation, mode, softmax, block_q, block_kv):
    """Scales follow the blocks; a program's tile of queries may hold several, or part of one."""
    q, k, v = tensors(1, 1, 150, 150, 2, 1, 64)
    config = tj.TurboConfig(
        mode=mode, softmax=softmax, block_q=block_q, block_kv=block_kv, buffer_size=block_kv
    )
    assert_matches_oracle(q, k, v, config, implementation, is_causal=True)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("implementation", "dtype", "mode"),
    [("xla", jnp.bfloat16, "int8"), ("triton", jnp.float16, "float")],
)
def test_half_precision_inputs(implementation, dtype, mode):
    """Rounded once, at the end, to the query's dtype."""
    q, k, v = tensors(2, 1, 70, 130, 2, 1, 64, dtype)
    config = tj.TurboConfig.paper(mode=mode)
    assert_matches_oracle(q, k, v, config, implementation, is_causal=True)


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize(
    ("implementation", "scale"), [("xla", -0.2), ("triton", -0.2), ("triton", 0.0)]
)
def test_scales_that_are_not_positive(implementation, scale):
    """A negative factor turns maxima around; zero makes all scores equal."""
    q, k, v = tensors(3, 1, 20, 90, 2, 1, 64)
    assert_matches_oracle(q, k, v, tj.TurboConfig.paper(softmax=EXACT), implementation, scale=scale)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize(
    ("threshold", "implementation"),
    [(-2.0, "xla"), (-12.0, "triton")],
)
def test_a_threshold_of_its_own(threshold, implementation):
    q, k, v = tensors(3, 1, 20, 130, 2, 2, 64)
    config = tj.TurboConfig.paper(softmax=tj.SAS(threshold=threshold))
    assert_matches_oracle(q, k, v, config, implementation)


# Against exact attention -------------------------------------------------------------------------

EXACT_CASES = {
    "window": {"local_window_size": (30, 5)},
    "symmetric window": {"local_window_size": 20},
    "causal window": {"local_window_size": (30, 0), "is_causal": True},
    "lengths": {"key_value_seq_lengths": (130, 41)},
    "scale": {"scale": 0.05},
}


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize(
    ("case", "implementation"),
    # The next test has all of them by plain JAX.
    [
        ("scale", "xla"),
        ("window", "triton"),
        ("causal window", "triton"),
        ("lengths", "triton"),
    ],
)
def test_float_and_exact_is_attention(case, implementation):
    """Mode float with the exact softmax equals attention in float64."""
    options = dict(EXACT_CASES[case])
    q, k, v = tensors(5, 2, 90, 130, 6, 2, 64)
    got, _ = run(q, k, v, FLOAT, implementation, **options)
    mask = oracles.visible(
        np.tile(np.arange(90), (2, 1)),
        np.arange(130),
        is_causal=options.get("is_causal", False),
        window=options.get("local_window_size"),
        lengths=options.get("key_value_seq_lengths", (130, 130)),
    )
    exact = oracles.plain_attention(q, k, v, scale=options.get("scale"), mask=mask)
    np.testing.assert_allclose(got, exact, atol=3e-6)


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("case", ["causal window", *sorted(set(EXACT_CASES) - {"causal window"})])
def test_options_mean_what_they_mean_to_jax(case):
    """Equal to `jax.nn.dot_product_attention`: the same conventions."""
    options = dict(EXACT_CASES[case])
    q, k, v = tensors(5, 2, 90, 130, 6, 2, 64)
    got, _ = run(q, k, v, FLOAT, "xla", **options)
    if "key_value_seq_lengths" in options:
        lengths = jnp.asarray(options["key_value_seq_lengths"], jnp.int32)
        options["key_value_seq_lengths"] = lengths
    with jax.default_matmul_precision("highest"):
        theirs = jax.nn.dot_product_attention(q, k, v, **options)
    np.testing.assert_allclose(got, theirs, atol=5e-6)


@kernel_is_slow
def test_soft_cap_is_attention(implementation):
    q, k, v = tensors(6, 2, 90, 130, 6, 2, 64)
    q = np.asarray(q) * 4
    got, _ = run(q, k, v, FLOAT, implementation, logits_soft_cap=7.0)
    want = oracles.plain_attention(q, k, v, logits_soft_cap=7.0)
    np.testing.assert_allclose(got, want, atol=1e-5)


def rounded(x, block):
    """What stage 1 keeps of x [B, T, N, H]."""
    codes, scales = oracles.quantize_blocks(np.asarray(x), block, "int8")
    return np.asarray(codes * scales[..., None], np.float32)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("is_causal", "implementation"),
    [(True, "xla"), (False, "triton")],
)
def test_int8_errs_by_its_quantizers_alone(is_causal, implementation):
    """Exact softmax, float32: int8 is float attention over the rounded operands, up to P.

    A weight is rounded by at most half of 1/119 of the largest of its row and block, so the
    output moves by at most (number of blocks' weights) / 238 times |V| over the row sum.
    """
    q, k, v = tensors(7, 2, 130, 200, 4, 2, 64)
    config = tj.TurboConfig.paper(softmax=EXACT)
    int8 = run(q, k, v, config, implementation, is_causal=is_causal)[0].astype(np.float64)
    operands = rounded(q, 64), rounded(k, 64), rounded(v, 64)
    ideal = run(*operands, FLOAT, implementation, is_causal=is_causal)[0].astype(np.float64)
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


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize(
    ("mode", "limit", "implementation"),
    [("int8", 0.02, "xla"), ("int8_fp8", 0.05, "triton"), ("fp8", 0.08, "xla")],
)
def test_relative_error_of_each_mode(implementation, mode, limit):
    """Relative L1 error against exact attention: a guard against a silent loss of accuracy."""
    q, k, v = standard()
    causal = np.tril(np.ones((TOKENS, TOKENS), bool))
    exact = oracles.plain_attention(q, k, v, mask=np.tile(causal, (len(q), 1, 1)))
    got = attend_standard(q, k, v, mode, implementation, softmax=EXACT)[0].astype(np.float64)
    assert np.abs(got - exact).sum() / np.abs(exact).sum() < limit
