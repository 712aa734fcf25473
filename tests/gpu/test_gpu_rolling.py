"""Caches that hold what a window needs, compiled on a GPU: written and read by every kernel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from tests.caches.cache_helpers import assert_same_bits
from tests.gpu.gpu_helpers import KERNELS, assert_equal, assert_near, normal, on_hopper
from turbojax.attention.options import Options
from turbojax.caches.progressive import decode_mosaic
from turbojax.caches.progressive.update import store_prompt
from turbojax.caches.token_scaled import cache as kv4

pytestmark = pytest.mark.gpu

BATCH, KV_HEADS, HEADS, CHANNELS, MAX_LENGTH = 3, 8, 32, 128, 8192
SIDES = (999, 0)
# Prompts several times as long as the rolling buffer, a little longer, and short.
LENGTHS = jnp.array([5000, 1700, 100], jnp.int32)
# Rolling buffers keep no first tokens, and are compared with caches that keep all in blocks.
CONFIGS = {
    "4 bits": tj.TurboConfig(first_tokens=0),
    "mixed": tj.TurboConfig(num_low_bit_key_heads=4, num_low_bit_value_heads=3, buffer_size=64),
    "all of two blocks": tj.TurboConfig(flush="all", key_bits=2),
}


def tokens(count, seed):
    return [normal(seed + i, (BATCH, count, KV_HEADS, CHANNELS)) for i in range(2)]


def new(config, window=SIDES):
    sizes = (BATCH, MAX_LENGTH, KV_HEADS, CHANNELS)
    return tj.init_cache(*sizes, config=config, local_window_size=window)


@functools.partial(jax.jit, static_argnames="implementation")
def append_all(cache, key, value, implementation):
    def step(cache, kv):
        key, value = (x[:, None] for x in kv)
        return tj.append(cache, key, value, implementation=implementation), None

    return jax.lax.scan(step, cache, [jnp.moveaxis(x, 1, 0) for x in (key, value)])[0]


@functools.lru_cache(maxsize=4)
def filled(name, window=SIDES, implementation="xla"):
    store = jax.jit(functools.partial(store_prompt, implementation=implementation))
    cache = store(new(CONFIGS[name], window), *tokens(5000, 1), LENGTHS)
    return append_all(cache, *tokens(150, 3), implementation)


@pytest.mark.quick(4)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", CONFIGS)
def test_kernels_store_the_bits_of_plain_jax(name, kernel):
    cache = filled(name, implementation=kernel)
    assert cache.is_rolling
    cache.validate()
    assert_same_bits(cache, filled(name))


@pytest.mark.quick(3)
@pytest.mark.parametrize("queries", [1, 8])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", CONFIGS)
def test_kernels_attend_as_to_a_cache_that_holds_all_tokens(name, kernel, queries):
    query = normal(9, (BATCH, queries, HEADS, CHANNELS))

    def run(window, implementation):
        decode = functools.partial(
            tj.decode,
            local_window_size=SIDES,
            implementation=implementation,
            return_residual=True,
        )
        return jax.jit(decode)(query, filled(name, window))

    want = run(None, "xla")
    assert_equal(run(SIDES, "xla"), want)
    got = run(SIDES, kernel)
    assert_near(got[0], want[0], jnp.bfloat16, 1e-4)
    assert_near(got[1], want[1], jnp.float32, 1e-5)


@on_hopper
def test_where_blocks_lie_changes_no_bit():
    """The same launch on a rolling buffer, and on a cache that holds all blocks."""
    options = Options(True, SIDES, scale=0.1)
    launch = decode_mosaic.Launch(splits=4, warpgroups=1, stages=2)
    query, one = normal(9, (BATCH, 1, HEADS, CHANNELS)), jnp.ones(BATCH, jnp.int32)
    rolling, whole = (
        decode_mosaic.decode(query, filled("4 bits", w), one, options=options, launch=launch)
        for w in (SIDES, None)
    )
    assert_equal(rolling, whole)


@pytest.mark.parametrize("init", [kv4.init_cache, kv4.init_k8v4_cache], ids=["kv4", "k8v4"])
def test_codes_with_scales(init):
    query = normal(9, (BATCH, 1, HEADS, CHANNELS))

    def run(window, implementation):
        cache = init(BATCH, MAX_LENGTH, KV_HEADS, CHANNELS, local_window_size=window)
        cache = jax.jit(kv4.store_prompt)(cache, *tokens(5000, 1), LENGTHS)
        cache = jax.jit(kv4.append)(cache, *tokens(150, 3))
        decode = functools.partial(
            tj.decode, local_window_size=SIDES, implementation=implementation
        )
        return jax.jit(decode)(query, cache)

    want = run(None, "xla")
    np.testing.assert_array_equal(run(SIDES, "xla").astype(jnp.float32), want.astype(jnp.float32))
    assert_near(run(SIDES, "triton"), want, jnp.bfloat16, 3e-3)
