"""Head priorities: four measures against float64, masks, and the order they give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import turbojax as tj
from tests import oracles
from turbojax import quantizers

METHODS = ("gap_std", "entropy", "min_max", "variation")


@pytest.fixture(params=METHODS)
def method(request):
    return request.param


def heads(seed=0, batch=3, tokens=50, count=6, head_dim=16, dtype=jnp.float32):
    """Heads of different scales, with outlier channels in some."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(batch, tokens, count, head_dim)) * rng.uniform(
        0.2, 3, (batch, 1, count, 1)
    )
    x = x * np.where(rng.random((batch, 1, count, head_dim)) < 0.1, 8.0, 1.0)
    return jnp.asarray(x, dtype)


@pytest.mark.quick(2, slow=0)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=lambda d: jnp.dtype(d).name)
def test_equals_the_oracle(method, dtype):
    x = heads(dtype=dtype)
    got = tj.head_priority(x, method)
    assert got.dtype == jnp.float32
    assert got.shape == (3, 6)
    want = oracles.head_priority(x, method)
    np.testing.assert_allclose(np.asarray(got), want, rtol=1e-5)
    compiled = jax.jit(tj.head_priority, static_argnames="method")(x, method=method)
    np.testing.assert_allclose(np.asarray(compiled), want, rtol=1e-5)


@pytest.mark.quick(2)
def test_the_default_is_the_papers(method):
    x = heads(seed=1)
    if method == "gap_std":
        np.testing.assert_array_equal(tj.head_priority(x), tj.head_priority(x, method))
        np.testing.assert_allclose(
            tj.head_priority(x),
            tj.head_priority(x, "min_max") * tj.head_priority(x, "variation"),
            rtol=1e-6,
        )
    else:
        assert not np.allclose(tj.head_priority(x), tj.head_priority(x, method))


@pytest.mark.quick(1, slow=0)
def test_a_mask_hides_tokens(method):
    """Hidden tokens, garbage or NaN, count as absent: the bits of the shorter prompt."""
    x = heads(seed=2)
    lengths = np.array([50, 17, 1])
    mask = np.arange(50)[None] < lengths[:, None]
    dirty = jnp.where(jnp.asarray(mask)[:, :, None, None], x, jnp.nan)
    got = np.asarray(tj.head_priority(dirty, method, where=jnp.asarray(mask)))
    np.testing.assert_allclose(got, oracles.head_priority(x, method, mask), rtol=1e-5, atol=1e-6)
    for b, n in enumerate(lengths):
        np.testing.assert_allclose(got[b], tj.head_priority(x[b : b + 1, :n], method)[0], rtol=1e-5)


def test_a_mask_need_not_be_a_prefix(method):
    x = heads(seed=3)
    mask = np.random.default_rng(3).random((3, 50)) < 0.4
    got = tj.head_priority(x, method, where=jnp.asarray(mask))
    np.testing.assert_allclose(np.asarray(got), oracles.head_priority(x, method, mask), rtol=1e-5)


@pytest.mark.quick(slow=1)
def test_sequences_do_not_mix(method):
    x = heads(seed=4)
    alone = jnp.concatenate([tj.head_priority(x[b : b + 1], method) for b in range(3)])
    np.testing.assert_allclose(tj.head_priority(x, method), alone, rtol=3e-7)


@pytest.mark.slow
def test_entropy_by_hand():
    """One value everywhere: 0 bits; two values in equal parts: 1 bit; four: 2 bits."""
    x = np.ones((1, 8, 3, 4), np.float32)
    x[0, ::2, 1] = -1
    x[0, :, 2] = np.array([1, -1, 0.5, -0.5], np.float32)
    np.testing.assert_allclose(tj.head_priority(jnp.asarray(x), "entropy"), [[0, 1, 2]], atol=1e-6)


def test_constant_heads_come_last():
    """A head without spread has priority 0 under every measure."""
    x = np.array(heads(seed=5))
    x[:, :, 2] = 0.0
    for method in METHODS:
        got = np.asarray(tj.head_priority(jnp.asarray(x), method))
        np.testing.assert_array_equal(got[:, 2], 0)
        np.testing.assert_array_equal(quantizers.rank_heads(jnp.asarray(got))[:, 2], 5)


def test_rank_by_hand():
    priority = jnp.asarray([[3.0, 9.0, 1.0, 5.0], [1.0, 1.0, 2.0, 1.0]])
    slots = quantizers.rank_heads(priority)
    assert slots.dtype == jnp.int32
    np.testing.assert_array_equal(slots, [[2, 0, 3, 1], [1, 2, 0, 3]])


@settings(max_examples=40)
@given(st.lists(st.lists(st.integers(0, 4), min_size=7, max_size=7), min_size=2, max_size=2))
def test_rank_is_a_stable_permutation(priority):
    priority = np.array(priority, np.float32)
    slots = np.asarray(quantizers.rank_heads(jnp.asarray(priority)))
    np.testing.assert_array_equal(slots, oracles.rank_heads(priority))
    np.testing.assert_array_equal(np.sort(slots, -1), np.tile(np.arange(7), (2, 1)))


def test_rank_of_nan_is_still_a_permutation():
    """A head that holds NaN may rank anywhere, but no head is lost."""
    slots = quantizers.rank_heads(jnp.asarray([[1.0, np.nan, 3.0, np.nan]]))
    np.testing.assert_array_equal(np.sort(slots, -1), [[0, 1, 2, 3]])


def test_wrong_calls():
    x = heads()
    with pytest.raises(ValueError, match=r"'loudness'.*gap_std"):
        tj.head_priority(x, "loudness")
    with pytest.raises(ValueError, match=r"\(3, 50, 6\).*\[B, S, K, H\]"):
        tj.head_priority(x[..., 0])
    with pytest.raises(TypeError, match="int32"):
        tj.head_priority(x.astype(jnp.int32))
    with pytest.raises(TypeError, match=r"float32.*bool"):
        tj.head_priority(x, where=jnp.ones((3, 50), jnp.float32))
    with pytest.raises(ValueError, match=r"\(3, 49\).*\(3, 50\)"):
        tj.head_priority(x, where=jnp.ones((3, 49), bool))


@pytest.mark.quick(2, slow=0)
@pytest.mark.parametrize("method", ["gap_std", "entropy", "min_max", "variation"])
@pytest.mark.parametrize("bad", [np.nan, -np.inf], ids=str)
def test_one_bad_value_anywhere_is_not_lost(method, bad):
    """NaN for its head alone, wherever it stands, and that head ranks first; masked, it is gone."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(8, 64, 4, 64)).astype(np.float32)
    clean = np.asarray(tj.head_priority(jnp.asarray(x), method))
    where = np.ones((8, 64), bool)
    for b, (token, channel) in enumerate(rng.integers(64, size=(8, 2))):
        x[b, token, 2, channel] = bad
        where[b, token] = False
    got = np.asarray(tj.head_priority(jnp.asarray(x), method))
    assert np.isnan(got[:, 2]).all()
    np.testing.assert_array_equal(got[:, [0, 1, 3]], clean[:, [0, 1, 3]])
    assert (np.asarray(quantizers.rank_heads(jnp.asarray(got)))[:, 2] == 0).all()
    masked = tj.head_priority(jnp.asarray(x), method, jnp.asarray(where))
    assert np.isfinite(masked).all()
