"""Copies by lanes, as GPUs before Hopper need them, run on Hopper: the same bits as bulk copies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from tests.gpu.gpu_helpers import decode, filled, normal, on_hopper
from turbojax import fireq
from turbojax.caches.paged import mosaic_gpu as paged
from turbojax.caches.progressive import decode_mosaic
from turbojax.caches.token_scaled import mosaic_gpu as kv4

pytestmark = [pytest.mark.gpu, on_hopper]


@pytest.fixture
def twice(monkeypatch):
    """Runs a call by bulk copies, then, compiled anew, by lanes; asserts equal bits."""

    def run(call):
        with_bulk_copies = jax.block_until_ready(call())
        jax.clear_caches()
        for module in (kv4, paged, decode_mosaic):
            monkeypatch.setattr(module, "has_bulk_copies", lambda: False)
        for got, want in zip(call(), with_bulk_copies, strict=True):
            assert np.isfinite(np.asarray(want, np.float32)).any()
            np.testing.assert_array_equal(np.asarray(got), np.asarray(want))

    yield run
    jax.clear_caches()


CONFIGS = {
    "4 bits": tj.TurboConfig(),
    "mixed": tj.TurboConfig(num_low_bit_key_heads=2, num_low_bit_value_heads=1),
    "3 bits, long blocks": tj.TurboConfig(key_bits=3, value_bits=3, block_kv=128, buffer_size=128),
}


@pytest.mark.quick(4)
@pytest.mark.parametrize("tokens", [1, 4, 8])
@pytest.mark.parametrize("name", CONFIGS)
def test_decode(twice, name, tokens):
    # Long enough that programs do not merge within a cluster.
    cache = filled(4, 128, CONFIGS[name], (5000, 64, 3331), appended=1)
    query = normal(9, (3, tokens, 16, 128))
    options = {"implementation": "mosaic_gpu", "return_residual": True}
    twice(lambda: decode(query, cache, **options))


@pytest.mark.quick(7)
@pytest.mark.parametrize("kv_dtype", ["turbo4", "k8v4", "int8", "turbo_k3v4", "fp8_e4m3", "auto"])
@pytest.mark.parametrize("page_size", [16, 128])
def test_pages(twice, kv_dtype, page_size):
    lengths = jnp.array([2000, 0, 131, 1])
    pages = -(-2048 // page_size)
    tables = jnp.asarray(
        np.random.default_rng(0).permutation(4 * pages).reshape(4, pages), jnp.int32
    )
    cache = tj.init_paged_cache(4 * pages, page_size, 4, 128, kv_dtype=kv_dtype)
    key, value = (normal(i, (4, 2048, 4, 128)) for i in (1, 2))
    cache = tj.paged.append(cache, key, value, tables, jnp.zeros(4, jnp.int32), new_lengths=lengths)
    cache = cache[0] if isinstance(cache, tuple) else cache
    query = normal(3, (4, 1, 16, 128))
    options = {"implementation": "mosaic_gpu", "return_residual": True}
    twice(lambda: tj.paged_attention(query, cache, tables, lengths, **options))


def test_kv4(twice):
    cache = fireq.init_cache(2, 3000, 4, 128)
    cache = fireq.append(cache, *(normal(i, (2, 2900, 4, 128)) for i in (1, 2)))
    query = normal(3, (2, 1, 16, 128))
    options = {"implementation": "mosaic_gpu", "return_residual": True}
    twice(lambda: fireq.decode(query, cache, **options))
