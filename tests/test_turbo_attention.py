"""`turbo_attention` against the float64 oracle, exact attention, and what must never matter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

import turbojax as tj

MODES = ("int8", "int8_fp8", "fp8", "float")
EXACT = "exact"
SAS_E = tj.SAS()
SAS_2 = tj.SAS(base="2")

attend = jax.jit(
    tj.turbo_attention,
    static_argnames=(
        "config",
        "scale",
        "is_causal",
        "local_window_size",
        "logits_soft_cap",
        "implementation",
        "return_residual",
    ),
)


@pytest.fixture(params=MODES)
def mode(request):
    return request.param


def tensors(seed, batch, tokens, size, heads, kv_heads, head_dim, dtype=jnp.float32):
    """Query, key and value; keys with outlier channels, as real ones have."""
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(batch, tokens, heads, head_dim))
    k = rng.normal(size=(batch, size, kv_heads, head_dim))
    v = rng.normal(size=(batch, size, kv_heads, head_dim)) + 0.25
    k = k * np.where(rng.random(head_dim) < 0.05, 3.0, 1.0)
    return tuple(jnp.asarray(x, dtype) for x in (q, k, v))


def oracle_softmax(softmax):
    return softmax if softmax == EXACT else (softmax.threshold, softmax.base)


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


def assert_close(got, want, tolerance):
    """Equal within the tolerance of each element; infinities and NaN where the oracle has them."""
    got = np.asarray(got, np.float64)
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite])
    error = np.abs(np.where(finite, got, 0) - np.where(finite, want, 0))
    excess = (error - np.where(finite, tolerance, 0)).max()
    assert excess <= 0, f"beyond the derived tolerance by {excess}, error {error.max()}"


def assert_matches_oracle(query, key, value, config, residual=True, **options):
    want = oracle_of(query, key, value, config, **options)
    if options.get("key_value_seq_lengths") is not None:
        options["key_value_seq_lengths"] = jnp.asarray(options["key_value_seq_lengths"], jnp.int32)
    out, lse = attend(query, key, value, config=config, return_residual=True, **options)
    assert out.dtype == query.dtype
    assert out.shape == query.shape
    assert lse.dtype == jnp.float32
    own = 0 if query.dtype == jnp.float32 else float(jnp.finfo(query.dtype).eps)
    assert_close(out, want.out, want.out_tolerance + own * np.abs(want.out) + own * 1e-3)
    if residual:
        assert_close(lse, want.residual, want.residual_tolerance)
    # The tolerance is that of rounding, not a licence: typically a few parts in a million.
    finite = np.isfinite(want.out)
    assert np.median(want.out_tolerance[finite]) < 1e-4 * np.abs(np.asarray(value)).max()
    return want


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
# Modes and softmaxes rotate through the cases, so that each pair meets several of them.
PAIRS = [(m, s) for m in MODES for s in (EXACT, SAS_E)] + [("int8", SAS_2), ("float", SAS_2)]
GRID = [
    pytest.param(
        case,
        *PAIRS[(i * 3 + j * 7) % len(PAIRS)],
        id=f"{case}-{'-'.join(map(str, PAIRS[(i * 3 + j * 7) % len(PAIRS)]))}",
    )
    for i, case in enumerate(CASES)
    for j in range(3)
]


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

FLOAT = tj.TurboConfig(mode="float", softmax=EXACT)
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


# Properties --------------------------------------------------------------------------------------

BATCH, TOKENS = 3, 150


def standard(seed=10):
    """One shape for all properties, so that they share what is compiled."""
    return tensors(seed, BATCH, TOKENS, TOKENS, 4, 2, 64)


def attend_standard(q, k, v, mode, lengths=(TOKENS,) * BATCH, softmax=SAS_E):
    """Output and residual of causal attention, as numpy arrays."""
    result = attend(
        q,
        k,
        v,
        config=tj.TurboConfig(mode=mode, softmax=softmax),
        is_causal=True,
        key_value_seq_lengths=jnp.asarray(lengths, jnp.int32),
        return_residual=True,
    )
    return tuple(np.asarray(x) for x in result)


@pytest.mark.parametrize("softmax", [EXACT, SAS_E, SAS_2], ids=["exact", "sas-e", "sas-2"])
def test_constant_values_come_back(softmax):
    """A constant V is returned however long the row."""
    q, k, _ = tensors(9, 1, 4, 4096, 1, 1, 64)
    v = jnp.full(k.shape, 1.5)
    for mode, limit in (("float", 1e-5), ("int8", 5e-3)):
        out = np.asarray(attend(q, k, v, config=tj.TurboConfig(mode=mode, softmax=softmax)))
        # Rounded weights need not sum to the unrounded sum; over 4096 of them they nearly do.
        assert np.abs(out / 1.5 - 1).max() < limit


@pytest.mark.parametrize("softmax", [SAS_E, SAS_2], ids=["sas-e", "sas-2"])
def test_old_blocks_are_not_decayed(softmax):
    """The first of 64 blocks weighs what the last one does when all scores are equal.

    Were old blocks decayed by SAS(0) = 0.9996 at every step, the first would lose 2.5 %.
    """
    q, k = jnp.zeros((1, 1, 1, 64)), jnp.ones((1, 4096, 1, 64))
    for position in (0, 4095):
        v = jnp.zeros(k.shape).at[0, position].set(4096.0)
        out = attend(q, k, v, config=tj.TurboConfig(mode="float", softmax=softmax))
        np.testing.assert_allclose(out, np.ones((1, 1, 1, 64)), rtol=1e-5)


@pytest.mark.parametrize("garbage", [1e4, np.nan, np.inf], ids=str)
def test_padding_never_changes_a_bit(mode, garbage):
    """Tokens past the lengths may hold anything; a length of 0 gives zeros and -inf."""
    q, k, v = standard()
    lengths = (150, 70, 0)
    padding = (jnp.arange(TOKENS)[None] >= jnp.asarray(lengths)[:, None])[:, :, None, None]
    clean = attend_standard(q, *(jnp.where(padding, 0, x) for x in (k, v)), mode, lengths)
    dirty = attend_standard(q, *(jnp.where(padding, garbage, x) for x in (k, v)), mode, lengths)
    for a, b in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(clean[0][2], np.zeros((TOKENS, 4, 64)))
    np.testing.assert_array_equal(clean[1][2], np.full((TOKENS, 4), -np.inf))


def test_lengths_cut_like_slices():
    """A length of 70 is the same as passing 70 tokens."""
    q, k, v = tensors(11, 1, 20, 150, 2, 1, 64)
    cut = attend(q, k, v, key_value_seq_lengths=jnp.asarray([70], jnp.int32))
    np.testing.assert_allclose(cut, attend(q, k[:, :70], v[:, :70]), atol=2e-6)


def test_the_batch_never_changes_a_bit(mode):
    """A sequence alone and the same one in company, wherever it stands, whatever the others do."""
    q, k, v = standard()
    together, _ = attend_standard(q, k, v, mode)
    turned, _ = attend_standard(*(jnp.roll(x, 1, axis=0) for x in (q, k, v)), mode)
    np.testing.assert_array_equal(together, np.roll(turned, -1, axis=0))
    loud, _ = attend_standard(
        q.at[1].multiply(50.0), k.at[1].multiply(50.0), v.at[1].set(jnp.nan), mode
    )
    np.testing.assert_array_equal(loud[[0, 2]], together[[0, 2]])


@pytest.mark.parametrize("mode", ["int8", "float"])
def test_a_batch_of_one(mode):
    """The bits of a sequence do not depend on the size of its batch."""
    q, k, v = standard()
    together, _ = attend_standard(q, k, v, mode)
    config = tj.TurboConfig(mode=mode)
    alone = attend(q[1:2], k[1:2], v[1:2], config=config, is_causal=True)
    np.testing.assert_array_equal(alone[0], together[1])


def test_heads_do_not_mix(mode):
    """Query heads use their group's keys; other heads' data leave them alone."""
    q, k, v = standard()
    whole, _ = attend_standard(q, k, v, mode)
    other, _ = attend_standard(q, k.at[:, :, 1].multiply(3.0), v.at[:, :, 1].add(9.0), mode)
    np.testing.assert_array_equal(other[:, :, :2], whole[:, :, :2])
    assert not np.allclose(other[:, :, 2:], whole[:, :, 2:])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("where", ["key", "value"])
@pytest.mark.parametrize("mode", ["int8", "int8_fp8", "fp8"])
def test_non_finite_tokens_reach_who_sees_them(mode, where, bad):
    """A query that sees the token gets NaN, one that cannot see its block keeps its bits.

    In the e4m3 modes the values of a sequence share one scale, so there every query may turn NaN.
    """
    q, k, v = standard()
    clean, _ = attend_standard(q, k, v, mode)
    spoiled = (k if where == "key" else v).at[1, 100, 0, 11].set(bad)
    got, _ = attend_standard(q, *((spoiled, v) if where == "key" else (k, spoiled)), mode)
    np.testing.assert_array_equal(got[[0, 2]], clean[[0, 2]])
    np.testing.assert_array_equal(got[1, :, 2:], clean[1, :, 2:])
    assert np.isnan(got[1, 100:, :2, 11]).all()
    if where == "key" or mode == "int8":
        np.testing.assert_array_equal(got[1, :64], clean[1, :64])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
def test_non_finite_tokens_in_floating_point(bad):
    """Mode float: what exact attention makes of it, and no finite number for a NaN or a value."""
    q, k, v = standard()
    clean, _ = attend_standard(q, k, v, "float", softmax=EXACT)
    values, _ = attend_standard(q, k, v.at[1, 100, 0, 11].set(bad), "float", softmax=EXACT)
    assert not np.isfinite(values[1, 100:, :2, 11]).any()
    np.testing.assert_array_equal(values[1, :64], clean[1, :64])
    keys, _ = attend_standard(q, k.at[1, 100, 0, 11].set(bad), v, "float", softmax=EXACT)
    np.testing.assert_array_equal(keys[1, :64], clean[1, :64])
    # A score of -inf is a weight of zero, +inf and NaN are not.
    score = np.asarray(q)[1, 100:, :2, 11] * np.float32(bad)
    assert np.isnan(keys[1, 100:, :2])[~np.isneginf(score)].all()


def test_non_finite_tokens_outside_a_window(mode):
    """The window hides a block as the causal mask does."""
    q, k, v = tensors(15, 1, 256, 256, 1, 1, 64)
    out = np.asarray(
        attend(
            q,
            k.at[0, 10].set(jnp.nan),
            v,
            config=tj.TurboConfig(mode=mode),
            is_causal=True,
            local_window_size=(32, 0),
        )
    )
    assert np.isnan(out[0, 10:43]).all()
    assert np.isfinite(out[0, 64 + 32 :]).all()


def test_nan_in_a_query_stays_with_its_block(mode):
    """A query's NaN may reach the queries that share its scale, no others."""
    q, k, v = standard()
    clean, _ = attend_standard(q, k, v, mode)
    got, _ = attend_standard(q.at[0, 70, 1, 3].set(jnp.nan), k, v, mode)
    assert np.isnan(got[0, 70, 1]).all()
    np.testing.assert_array_equal(got[1:], clean[1:])
    np.testing.assert_array_equal(got[0, :, [0, 2, 3]], clean[0, :, [0, 2, 3]])
    np.testing.assert_array_equal(got[0, :64], clean[0, :64])
    np.testing.assert_array_equal(got[0, 128:], clean[0, 128:])


def test_zero_inputs(mode):
    """All-zero blocks divide by a scale of one, not by zero."""
    zeros = [jnp.zeros_like(x) for x in standard()]
    out, lse = attend_standard(*zeros, mode)
    np.testing.assert_array_equal(out, zeros[0])
    want = np.log(np.arange(1, TOKENS + 1))[None, :, None]
    np.testing.assert_allclose(lse, np.broadcast_to(want, lse.shape), atol=5e-4)


def test_extreme_scores(mode):
    """Scores of thousands: the maximum is subtracted before anything is exponentiated."""
    q, k, v = standard()
    out, _ = attend_standard(q * 1000, k, v, mode)
    assert np.isfinite(out).all()
    assert np.abs(out).max() <= float(jnp.abs(v).max()) * 1.05


def test_two_runs_give_the_same_bits(mode):
    for a, b in zip(*(attend_standard(*standard(), mode) for _ in range(2)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_residual_is_the_log_sum_exp():
    q, k, v = tensors(17, 1, 30, 150, 2, 2, 64)
    _, lse = attend(q, k, v, config=FLOAT, return_residual=True)
    scores = np.einsum("btnh,bsnh->btns", np.asarray(q, np.float64), np.asarray(k, np.float64)) / 8
    np.testing.assert_allclose(lse, np.log(np.exp(scores).sum(-1)), atol=3e-6)


@pytest.mark.parametrize(("mode", "limit"), [("int8", 0.02), ("float", 3e-6)])
def test_two_halves_merge_by_their_residuals(mode, limit):
    """Outputs over two halves of the keys, merged by residual, are the whole's."""
    q, k, v = tensors(18, 1, 20, 128, 2, 2, 64)
    config = tj.TurboConfig(mode=mode, softmax=EXACT)
    call = functools.partial(attend, q, config=config, return_residual=True)
    whole, lse = (np.asarray(x, np.float64) for x in call(k, v))
    halves = [call(k[:, s], v[:, s]) for s in (slice(0, 64), slice(64, 128))]
    weights = [np.exp(np.asarray(r, np.float64) - lse)[..., None] for _, r in halves]
    merged = sum(w * np.asarray(o, np.float64) for w, (o, _) in zip(weights, halves, strict=True))
    np.testing.assert_allclose(sum(weights), 1, atol=4e-6)
    np.testing.assert_allclose(merged, whole, atol=limit)


def test_bits_do_not_matter_to_attention():
    """Stage 2 concerns the cache alone: attention uses the stage-1 codes."""
    q, k, v = tensors(19, 1, 20, 70, 2, 2, 64)
    a = attend(q, k, v, config=tj.TurboConfig(key_bits=4, value_bits=4))
    b = attend(q, k, v, config=tj.TurboConfig(key_bits=2, value_bits=3))
    np.testing.assert_array_equal(a, b)


# Transforms, memory, determinism -----------------------------------------------------------------


@pytest.mark.parametrize("mode", ["int8", "fp8"])
def test_eager_equals_jit(mode):
    q, k, v = tensors(20, 1, 20, 70, 2, 1, 64)
    config = tj.TurboConfig(mode=mode)
    np.testing.assert_allclose(
        tj.turbo_attention(q, k, v, config=config, is_causal=True),
        attend(q, k, v, config=config, is_causal=True),
        atol=3e-6,
    )


@pytest.mark.parametrize("mode", ["int8", "float"])
def test_vmap(mode):
    """Mapped over a new axis, keys mapped or shared."""
    q, k, v = tensors(22, 6, 20, 70, 2, 1, 64)
    lengths = jnp.asarray([70, 3, 0, 64, 65, 9], jnp.int32)
    config = tj.TurboConfig(mode=mode)

    def call(q, k, v, n):
        return tj.turbo_attention(q, k, v, config=config, key_value_seq_lengths=n)

    split = [x.reshape(3, 2, *x.shape[1:]) for x in (q, k, v, lengths)]
    got = jax.jit(jax.vmap(call))(*split)
    np.testing.assert_allclose(got.reshape(q.shape), jax.jit(call)(q, k, v, lengths), atol=2e-6)
    shared = jax.jit(jax.vmap(call, in_axes=(0, None, None, None)))(
        split[0], k[:2], v[:2], lengths[:2]
    )
    assert shared.shape == split[0].shape


def test_scan():
    """Inside a scanned layer loop, carrying the output on as the next query."""
    q, k, v = tensors(23, 1, 20, 70, 2, 1, 64)
    config = tj.TurboConfig()

    def layer(x, kv):
        return tj.turbo_attention(x, *kv, config=config), None

    ks, vs = jnp.stack([k, k * 0.5]), jnp.stack([v, v + 1])
    got, _ = jax.jit(lambda x: jax.lax.scan(layer, x, (ks, vs)))(q)
    want = attend(attend(q, ks[0], vs[0], config=config), ks[1], vs[1], config=config)
    np.testing.assert_allclose(got, want, atol=1e-2)


def test_lengths_may_be_traced():
    q, k, v = tensors(24, 2, 10, 70, 2, 1, 64)
    lengths = np.array([3, 70], np.int32)
    got = attend(q, k, v, key_value_seq_lengths=jnp.asarray(lengths))
    want = tj.turbo_attention(q, k, v, key_value_seq_lengths=lengths)
    np.testing.assert_allclose(got, want, atol=3e-6)


def temporary_bytes(tokens, config, batch=1):
    x = jax.ShapeDtypeStruct((batch, tokens, 1, 64), jnp.float32)
    call = functools.partial(tj.turbo_attention, config=config, is_causal=True)
    return jax.jit(call).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("mode", ["int8", "fp8", "float"])
def test_memory_grows_with_tokens_not_with_their_square(mode):
    """Twice the tokens, at most about twice the temporaries; far below one row of T x S."""
    config = tj.TurboConfig(mode=mode)
    small, large = temporary_bytes(4096, config), temporary_bytes(8192, config)
    assert large <= 2.3 * small
    assert large < 8192 * 8192 * 4 / 8


def test_gradients_are_refused():
    """Not differentiable yet: an error that says so, not a wrong gradient."""
    q, k, v = tensors(25, 1, 8, 8, 1, 1, 64)
    with pytest.raises(NotImplementedError, match="gradient"):
        jax.grad(lambda x: tj.turbo_attention(x, k, v).sum())(q)
