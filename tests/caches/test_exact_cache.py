"""The uncompressed baseline cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracles
from turbojax.caches import exact as exact_attention
from turbojax.caches.exact import cache as exact
from turbojax.caches.token_scaled import cache as kv4


def _tensors(batch: int, length: int, heads: int, seed: int = 0) -> jax.Array:
    x = np.random.default_rng(seed).normal(size=(batch, length, heads, 16))
    return jnp.asarray(x, jnp.float32)


@pytest.mark.slow
def test_decode_equals_attention_over_the_ragged_history():
    key, value, query = _tensors(2, 9, 2), _tensors(2, 9, 2, 1), _tensors(2, 3, 4, 2)
    cache = exact.init_cache(2, 12, 2, 16, dtype=jnp.float32)
    cache = exact.append(cache, key, value, lengths=jnp.array([9, 5]))
    out = exact_attention.decode(query, cache)
    # The last query stands at the last token.
    positions = np.array([9, 5])[:, None] - 3 + np.arange(3)
    mask = np.arange(9) <= positions[..., None]
    expected = oracles.plain_attention(query, key, value, mask=mask)
    np.testing.assert_allclose(out, expected, atol=2e-6)


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_compiled_in_half_precision(dtype):
    """Where jax's own function asks for float16 products that CPUs do not have."""
    key, value, query = (_tensors(1, 9, n, n).astype(dtype) for n in (2, 2, 4))
    expected = oracles.plain_attention(
        *(np.asarray(x, np.float64) for x in (query, key, value)), mask=np.tri(9, dtype=bool)[None]
    )
    cache = exact.append(exact.init_cache(1, 9, 2, 16, dtype=dtype), key, value)
    outs = (
        jax.jit(exact_attention.attention)(query, key, value),
        jax.jit(exact_attention.decode)(query, cache),
    )
    for out in outs:
        assert out.dtype == dtype
        error = np.abs(np.asarray(out, np.float64) - expected).max()
        assert error < 4 * float(jnp.finfo(dtype).eps)


def test_appending_in_pieces_equals_appending_at_once():
    key, value = _tensors(2, 7, 2), _tensors(2, 7, 2, 1)
    empty = exact.init_cache(2, 8, 2, 16)
    at_once = exact.append(empty, key, value)
    pieces = empty
    for t in range(7):
        pieces = exact.append(pieces, key[:, t : t + 1], value[:, t : t + 1])
    for a, b in zip(jax.tree.leaves(at_once), jax.tree.leaves(pieces), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_sequence_may_get_no_token():
    key, value = _tensors(2, 3, 2), _tensors(2, 3, 2, 1)
    cache = exact.append(exact.init_cache(2, 8, 2, 16), key, value, lengths=jnp.array([2, 0]))
    after = exact.append(cache, key, value, lengths=jnp.array([0, 3]))
    assert cache.lengths.tolist() == [2, 0]
    assert after.lengths.tolist() == [2, 3]
    np.testing.assert_array_equal(after.key[0, :2], key[0, :2].astype(jnp.bfloat16))
    np.testing.assert_array_equal(after.value[1, :3], value[1].astype(jnp.bfloat16))


def test_overflow_is_an_error_and_under_jit_a_status():
    key = _tensors(2, 5, 2)
    cache = exact.append(exact.init_cache(2, 6, 2, 16), key, key)
    with pytest.raises(ValueError, match=r"lengths \[10, 10\].*max_length=6"):
        exact.append(cache, key, key)
    after = jax.jit(exact.append)(cache, key, key, lengths=jnp.array([5, 1]))
    assert after.overflowed.tolist() == [True, False]
    assert after.lengths.tolist() == [6, 6]
    np.testing.assert_array_equal(after.key[:, :5], cache.key[:, :5])
    np.testing.assert_array_equal(after.key[:, 5], key[:, 0].astype(jnp.bfloat16))


def test_bad_calls_say_what_is_wrong():
    cache = exact.init_cache(1, 6, 2, 16)
    with pytest.raises(ValueError, match="must be positive"):
        exact.init_cache(1, 0, 2, 16)
    with pytest.raises(TypeError, match="int8 must be bfloat16"):
        exact.init_cache(1, 4, 2, 16, dtype=jnp.int8)
    with pytest.raises(ValueError, match="must fit"):
        exact.append(cache, _tensors(1, 1, 3), _tensors(1, 1, 3))
    with pytest.raises(ValueError, match="3 query heads must be a multiple of 2"):
        exact_attention.decode(_tensors(1, 1, 3), cache)
    for query in (_tensors(2, 1, 2), _tensors(1, 1, 2)[..., :8]):
        with pytest.raises(ValueError, match=r"must be \[1, T, N, 16\], as the cache was made for"):
            exact_attention.decode(query, cache)
    other = kv4.init_cache(1, 6, 2, 16)
    with pytest.raises(TypeError, match="cache is a Kv4Cache, must be a ExactCache"):
        exact_attention.decode(_tensors(1, 1, 2), other)
    with pytest.raises(TypeError, match="cache is a Kv4Cache, must be a ExactCache"):
        exact.append(other, _tensors(1, 1, 2), _tensors(1, 1, 2))
