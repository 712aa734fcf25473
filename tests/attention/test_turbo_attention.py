"""The contract of `turbo_attention`: the float64 oracle, exact attention, what never matters.

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
    changed,
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


def modes(cases):
    return pytest.mark.parametrize(("implementation", "mode"), cases)


# Plain JAX in every mode, the kernel in two: programs that most tests share.
every_mode = modes(
    [
        *(("xla", mode) for mode in MODES),
        ("triton", "int8"),
        pytest.param("triton", "fp8", marks=pytest.mark.slow),
    ]
)
# For tests of bits, whose programs are compiled with all optimizations.
bits = modes(
    [
        ("xla", "int8"),
        ("triton", "int8"),
        pytest.param("xla", "fp8", marks=pytest.mark.slow),
    ]
)


def attend_to(q, k, v, config, implementation, **options):
    """Output and residual, as numpy arrays."""
    options |= {"implementation": implementation, "return_residual": True}
    with interpreted(implementation):
        return tuple(np.asarray(x) for x in attend(q, k, v, config=config, **options))


LONG = [(SAS_E, "int8"), (SAS_E, "float"), (EXACT, "float"), (SAS_2, "int8")]


@pytest.mark.quick(first=2)
@pytest.mark.parametrize(("softmax", "mode"), LONG)
def test_constant_values_come_back(softmax, mode):
    """A constant V is returned however long the row."""
    q, k, _ = (np.asarray(x) for x in tensors(9, 1, 4, 4096, 1, 1, 64))
    v = np.full(k.shape, 1.5, np.float32)
    out, _ = attend_to(q, k, v, tj.TurboConfig(mode=mode, softmax=softmax), "xla")
    # Rounded weights need not sum to the unrounded sum; over 4096 of them they nearly do.
    assert np.abs(out / 1.5 - 1).max() < {"float": 1e-5, "int8": 5e-3}[mode]


@pytest.mark.quick(1)
@pytest.mark.parametrize("softmax", [SAS_E, SAS_2])
def test_old_blocks_are_not_decayed(softmax):
    """The first of 64 blocks weighs what the last one does when all scores are equal.

    Were old blocks decayed by SAS(0) = 0.9996 at every step, the first would lose 2.5 %.
    """
    q, k = np.zeros((1, 4, 1, 64), np.float32), np.ones((1, 4096, 1, 64), np.float32)
    for position in (0, 4095):
        v = changed(np.zeros_like(k), (0, position), 4096.0)
        out, _ = attend_to(q, k, v, tj.TurboConfig(mode="float", softmax=softmax), "xla")
        np.testing.assert_allclose(out, np.ones((1, 4, 1, 64)), rtol=1e-5)


@pytest.mark.quick(5, slow=2)
@pytest.mark.optimized
@pytest.mark.parametrize("garbage", [1e4, np.nan, np.inf], ids=str)
@bits
def test_padding_never_changes_a_bit(implementation, mode, garbage):
    """Tokens past the lengths may hold anything; a length of 0 gives zeros and -inf."""
    q, k, v = standard()
    lengths = (150, 70, 0)
    padding = (np.arange(TOKENS)[None] >= np.asarray(lengths)[:, None])[:, :, None, None]

    def filled(fill):
        k_and_v = (np.where(padding, np.float32(fill), x) for x in (k, v))
        return attend_standard(q, *k_and_v, mode, implementation, lengths)

    clean, dirty = filled(0), filled(garbage)
    for a, b in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(clean[0][2], np.zeros((TOKENS, 4, 64)))
    np.testing.assert_array_equal(clean[1][2], np.full((TOKENS, 4), -np.inf))


@pytest.mark.quick(1)
def test_lengths_cut_like_slices(implementation):
    """A length of 70 is the same as passing 70 tokens."""
    q, k, v = standard()
    cut, _ = attend_standard(q, k, v, "int8", implementation, (70, 70, 70))
    sliced, _ = attend_standard(q, k[:, :70], v[:, :70], "int8", implementation, (70, 70, 70))
    np.testing.assert_allclose(cut, sliced, atol=2e-6)


@pytest.mark.optimized
@bits
def test_the_batch_never_changes_a_bit(implementation, mode):
    """A sequence alone and the same one in company, wherever it stands, whatever the others do."""
    q, k, v = standard()
    together, _ = attend_standard(q, k, v, mode, implementation)
    rolled = (np.roll(x, 1, axis=0) for x in (q, k, v))
    moved, _ = attend_standard(*rolled, mode, implementation)
    np.testing.assert_array_equal(together, np.roll(moved, -1, axis=0))
    loud = changed(q, 1, 50 * q[1]), changed(k, 1, 50 * k[1]), changed(v, 1, np.nan)
    loud, _ = attend_standard(*loud, mode, implementation)
    np.testing.assert_array_equal(loud[[0, 2]], together[[0, 2]])


@pytest.mark.slow
@pytest.mark.optimized
def test_a_batch_of_one():
    """The bits of a sequence do not depend on the size of its batch."""
    q, k, v = standard()
    together, _ = attend_standard(q, k, v, "int8", "xla")
    one = (x[1:2] for x in (q, k, v))
    alone, _ = attend_standard(*one, "int8", "xla", (TOKENS,))
    np.testing.assert_array_equal(alone[0], together[1])


@pytest.mark.quick(4, slow=1)
@every_mode
def test_heads_do_not_mix(implementation, mode):
    """Query heads use their group's keys; other heads' data leave them alone."""
    q, k, v = standard()
    second = (slice(None), slice(None), 1)
    whole, _ = attend_standard(q, k, v, mode, implementation)
    k, v = changed(k, second, 3 * k[second]), changed(v, second, v[second] + 9)
    other, _ = attend_standard(q, k, v, mode, implementation)
    np.testing.assert_array_equal(other[:, :, :2], whole[:, :, :2])
    assert not np.allclose(other[:, :, 2:], whole[:, :, 2:])


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("implementation", "mode", "where", "bad"),
    [
        ("xla", "int8", "key", np.nan),
        ("xla", "fp8", "value", np.inf),
        ("triton", "fp8", "key", -np.inf),
        ("triton", "int8", "value", np.nan),
    ],
)
def test_non_finite_tokens_reach_who_sees_them(implementation, mode, where, bad):
    """A query that sees the token gets NaN, one that cannot see its block keeps its bits.

    In the e4m3 modes the values of a sequence share one scale, so there every query may turn NaN.
    """
    q, k, v = standard()
    clean, _ = attend_standard(q, k, v, mode, implementation)
    spoiled = changed(k if where == "key" else v, (1, 100, 0, 11), bad)
    k, v = (spoiled, v) if where == "key" else (k, spoiled)
    got, _ = attend_standard(q, k, v, mode, implementation)
    np.testing.assert_array_equal(got[[0, 2]], clean[[0, 2]])
    np.testing.assert_array_equal(got[1, :, 2:], clean[1, :, 2:])
    assert np.isnan(got[1, 100:, :2, 11]).all()
    if where == "key" or mode == "int8":
        np.testing.assert_array_equal(got[1, :64], clean[1, :64])


@pytest.mark.quick(2, slow=0)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
def test_non_finite_tokens_in_floating_point(implementation, bad):
    """Mode float: what exact attention makes of it, and no finite number for a NaN or a value."""
    q, k, v = standard()

    def of(k, v):
        return attend_standard(q, k, v, "float", implementation, softmax=EXACT)[0]

    clean, values = of(k, v), of(k, changed(v, (1, 100, 0, 11), bad))
    assert not np.isfinite(values[1, 100:, :2, 11]).any()
    np.testing.assert_array_equal(values[1, :64], clean[1, :64])
    keys = of(changed(k, (1, 100, 0, 11), bad), v)
    np.testing.assert_array_equal(keys[1, :64], clean[1, :64])
    # A score of -inf is a weight of zero, +inf and NaN are not.
    score = q[1, 100:, :2, 11] * np.float32(bad)
    assert np.isnan(keys[1, 100:, :2])[~np.isneginf(score)].all()


@pytest.mark.quick(1)
@pytest.mark.parametrize(("mode", "implementation"), [("int8", "xla"), ("fp8", "triton")])
def test_non_finite_tokens_outside_a_window(implementation, mode):
    """The window hides a block as the causal mask does."""
    q, k, v = standard()
    k = changed(k, (slice(None), 10), np.nan)
    out, _ = attend_standard(q, k, v, mode, implementation, local_window_size=(32, 0))
    assert np.isnan(out[:, 10:43]).all()
    assert np.isfinite(out[:, 64 + 32 :]).all()


@pytest.mark.quick(1, slow=2)
@every_mode
def test_nan_in_a_query_stays_with_its_block(implementation, mode):
    """A query's NaN may reach the queries that share its scale, no others."""
    q, k, v = standard()
    clean, _ = attend_standard(q, k, v, mode, implementation)
    got, _ = attend_standard(changed(q, (0, 70, 1, 3), np.nan), k, v, mode, implementation)
    assert np.isnan(got[0, 70, 1]).all()
    np.testing.assert_array_equal(got[1:], clean[1:])
    np.testing.assert_array_equal(got[0, :, [0, 2, 3]], clean[0, :, [0, 2, 3]])
    np.testing.assert_array_equal(got[0, :64], clean[0, :64])
    np.testing.assert_array_equal(got[0, 128:], clean[0, 128:])


@every_mode
def test_zero_inputs(implementation, mode):
    """All-zero blocks divide by a scale of one, not by zero."""
    zeros = [np.zeros_like(x) for x in standard()]
    out, lse = attend_standard(*zeros, mode, implementation)
    np.testing.assert_array_equal(out, zeros[0])
    want = np.log(np.arange(1, TOKENS + 1))[None, :, None]
    np.testing.assert_allclose(lse, np.broadcast_to(want, lse.shape), atol=5e-4)


@every_mode
def test_extreme_scores(implementation, mode):
    """Scores of thousands: the maximum is subtracted before anything is exponentiated."""
    q, k, v = standard()
    out, _ = attend_standard(q * 1000, k, v, mode, implementation)
    assert np.isfinite(out).all()
    assert np.abs(out).max() <= np.abs(v).max() * 1.05


@every_mode
def test_two_runs_give_the_same_bits(implementation, mode):
    first, second = (attend_standard(*standard(), mode, implementation) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


def test_residual_is_the_log_sum_exp(implementation):
    q, k, v = standard()
    _, lse = attend_standard(q, k, v, "float", implementation, softmax=EXACT)
    q, k = q.astype(np.float64), np.repeat(k, 2, axis=2).astype(np.float64)
    scores = np.einsum("btnh,bsnh->btns", q, k) / 8
    seen = np.tril(np.ones((TOKENS, TOKENS), bool))[None, :, None]
    want = np.log(np.where(seen, np.exp(scores), 0).sum(-1))
    np.testing.assert_allclose(lse, want, atol=3e-6)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("mode", "limit", "implementation"),
    [("int8", 0.02, "xla"), ("float", 3e-6, "triton")],
)
def test_two_halves_merge_by_their_residuals(implementation, mode, limit):
    """Outputs over two halves of the keys, merged by residual, are the whole's."""
    q, k, v = (np.asarray(x) for x in tensors(18, 1, 20, 128, 2, 2, 64))
    config = tj.TurboConfig(mode=mode, softmax=EXACT)
    whole, lse = (x.astype(np.float64) for x in attend_to(q, k, v, config, implementation))
    halves = [
        attend_to(q, k[:, s], v[:, s], config, implementation)
        for s in (slice(0, 64), slice(64, 128))
    ]
    weights = [np.exp(r.astype(np.float64) - lse)[..., None] for _, r in halves]
    merged = sum(w * o.astype(np.float64) for w, (o, _) in zip(weights, halves, strict=True))
    np.testing.assert_allclose(sum(weights), 1, atol=4e-6)
    np.testing.assert_allclose(merged, whole, atol=limit)


def test_bits_do_not_matter_to_attention():
    """Stage 2 concerns the cache alone: attention uses the stage-1 codes."""
    q, k, v = tensors(19, 1, 20, 70, 2, 1, 64)
    a = attend_to(q, k, v, tj.TurboConfig.paper(key_bits=4, value_bits=4), "xla")
    b = attend_to(q, k, v, tj.TurboConfig.paper(key_bits=2, value_bits=3), "xla")
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x, y)


# Transforms --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.optimized
def test_eager_equals_jit():
    """Lengths included, which `jit` does not know beforehand."""
    q, k, v = tensors(20, 1, 20, 70, 2, 1, 64)
    config = tj.TurboConfig.paper()
    options = {"is_causal": True, "key_value_seq_lengths": np.asarray([33], np.int32)}
    eager = tj.turbo_attention(q, k, v, config=config, implementation="xla", **options)
    jitted, _ = attend_to(q, k, v, config, "xla", **options)
    np.testing.assert_allclose(eager, jitted, atol=3e-6)


@pytest.mark.slow
def test_vmap_and_scan():
    """Mapped over a new axis, keys mapped or shared; and scanned over it."""
    q, k, v = (np.asarray(x) for x in tensors(22, 6, 20, 70, 2, 1, 64))
    lengths = np.asarray([70, 3, 0, 64, 65, 9], np.int32)

    def call(q, k, v, n):
        return tj.turbo_attention(
            q, k, v, config=tj.TurboConfig.paper(), key_value_seq_lengths=n, implementation="xla"
        )

    split = [x.reshape(3, 2, *x.shape[1:]) for x in (q, k, v, lengths)]
    got = np.asarray(jax.jit(jax.vmap(call))(*split))
    want = np.asarray(jax.jit(call)(q, k, v, lengths))
    scan = jax.jit(lambda *xs: jax.lax.scan(lambda c, x: (c, call(*x)), None, xs)[1])
    scanned = np.asarray(scan(*split))
    over_queries = jax.jit(jax.vmap(call, in_axes=(0, None, None, None)))
    shared = np.asarray(over_queries(split[0], k[:2], v[:2], lengths[:2]))
    np.testing.assert_allclose(got.reshape(q.shape), want, atol=2e-6)
    np.testing.assert_allclose(scanned, got, atol=2e-6)
    assert shared.shape == split[0].shape
    np.testing.assert_allclose(shared[0], got[0], atol=2e-6)


def test_scan_over_layers():
    """Inside a scanned layer loop, carrying the output on as the next query."""
    q, k, v = (np.asarray(x) for x in tensors(20, 1, 20, 70, 2, 1, 64))
    config = tj.TurboConfig.paper()

    def layer(x, kv):
        return tj.turbo_attention(x, *kv, config=config), None

    ks, vs = np.stack([k, k * 0.5]), np.stack([v, v + 1])
    got, _ = jax.jit(lambda x: jax.lax.scan(layer, x, (ks, vs)))(q)
    first, _ = attend_to(q, ks[0], vs[0], config, "xla")
    want, _ = attend_to(first, ks[1], vs[1], config, "xla")
    np.testing.assert_allclose(got, want, atol=1e-2)
