"""`ProgressiveCache` and `decode` through jit, vmap, scan, donation, and round trips."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from tests.attention.decode_helpers import (
    decode,
    queries,
    stored,
)
from tests.caches.cache_helpers import MIXED, append, assert_same_bits, new, prefill, tokens, used
from tests.contracts.implementations import interpreted, kernel_is_slow


def test_jax_tree_round_trip():
    cache = used()
    leaves, structure = jax.tree.flatten(cache)
    again = jax.tree.unflatten(structure, leaves)
    assert (again.config, again.max_length, again.dtype) == (
        cache.config,
        cache.max_length,
        cache.dtype,
    )
    assert_same_bits(cache, again)
    assert hash(structure) == hash(jax.tree.structure(used()))


@pytest.mark.slow
def test_donated():
    """The old arrays are given up and reused, without a complaint, and the result is the same."""
    want = append(used(), *tokens(7, seed=72))
    cache = jax.tree.map(jnp.asarray, used())
    donating = jax.jit(tj.append, donate_argnums=0)
    got = donating(cache, *tokens(7, seed=72))
    assert_same_bits(got, want)
    assert all(x.is_deleted() for x in cache.key.codes)


@pytest.mark.slow
def test_vmap():
    """Several caches at once, each with its own tokens."""
    caches = [used(), prefill(new(MIXED), *tokens(33, seed=73)), new(MIXED)]
    news = [tokens(20, seed=80 + i) for i in range(3)]
    stack = functools.partial(jax.tree.map, lambda *x: jnp.stack(x))
    got = jax.jit(jax.vmap(tj.append))(stack(*caches), *stack(*news))
    for i in range(3):
        assert_same_bits(jax.tree.map(lambda x, i=i: x[i], got), append(caches[i], *news[i]))


@pytest.mark.slow
def test_scan():
    """One token per step, the cache carried along."""
    key, value = tokens(40, seed=74)

    def step(cache, kv):
        return tj.append(cache, *(x[:, None] for x in kv)), cache.lengths

    xs = tuple(jnp.moveaxis(x, 1, 0) for x in (key, value))
    got, lengths = jax.jit(lambda c: jax.lax.scan(step, c, xs))(used())
    assert_same_bits(got, append(used(), key, value))
    np.testing.assert_array_equal(lengths[:, 0], np.arange(60, 100))


@pytest.mark.slow
def test_orbax_round_trip(tmp_path):
    """Saved and restored into an empty cache's shapes, bit for bit."""
    ocp = pytest.importorskip("orbax.checkpoint")
    cache, empty = (jax.tree.map(jnp.asarray, x) for x in (used(), new(MIXED)))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "cache", cache)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(
            tmp_path / "cache", jax.tree.map(ocp.utils.to_shape_dtype_struct, empty)
        )
    assert_same_bits(cache, restored)
    restored.validate()
    assert_same_bits(append(cache, *tokens(5)), append(restored, *tokens(5)))


@pytest.mark.optimized
def test_eager_equals_jit():
    query = queries(1, 26)
    eager = tj.decode(query, jax.tree.map(jnp.asarray, stored()), implementation="xla")
    np.testing.assert_allclose(eager, decode(query, stored(), "xla")[0], atol=2e-6)


@pytest.mark.slow
@kernel_is_slow
def test_decode_under_vmap(implementation):
    """Queries of several kinds against caches stacked on a new axis; and scanned over them.

    The kernel is scanned in `test_generation_under_scan`.
    """
    caches = jax.tree.map(lambda x: np.stack([x, np.roll(x, 1, 0)]), stored())
    query = np.stack([queries(1, 30), queries(1, 31)])
    one = functools.partial(tj.decode, implementation=implementation)

    def scan(query, caches):
        return jax.lax.scan(lambda c, x: (c, one(*x)), None, (query, caches))[1]

    with interpreted(implementation):
        found = [np.asarray(jax.jit(jax.vmap(one))(query, caches))]
    if implementation == "xla":
        found.append(np.asarray(jax.jit(scan)(query, caches)))
    for i in range(2):
        cache = jax.tree.map(lambda x, i=i: x[i], caches)
        want = decode(query[i], cache, implementation)[0]
        for got in found:
            np.testing.assert_allclose(got[i], want, atol=2e-6 if implementation == "xla" else 1e-6)


def test_gradients_are_refused():
    with pytest.raises(NotImplementedError, match="gradient"):
        jax.grad(lambda q: tj.decode(q, stored()).sum())(queries(1))


def test_memory_does_not_grow_with_the_cache():
    """Blocks are read a chunk at a time: the cache is never dequantized as a whole."""

    def temporary_bytes(max_length):
        cache = jax.eval_shape(lambda: tj.init_cache(1, max_length, 2, 64, dtype=jnp.float32))
        query = jax.ShapeDtypeStruct((1, 1, 4, 64), jnp.float32)
        return jax.jit(tj.decode).lower(query, cache).compile().memory_analysis().temp_size_in_bytes

    short, long = temporary_bytes(4096), temporary_bytes(16384)
    assert long <= 1.1 * short
    assert long < 2 * 4 * 16384 * 2 * 64 / 3
