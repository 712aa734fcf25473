"""`turbo_attention`: what must never matter, bad values, transforms and memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_helpers import (
    EXACT,
    FLOAT,
    MODES,
    SAS_2,
    SAS_E,
    TOKENS,
    attend,
    attend_standard,
    standard,
    tensors,
)

import turbojax as tj


@pytest.fixture(params=MODES)
def mode(request):
    return request.param


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
