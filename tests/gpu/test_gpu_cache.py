"""The kernels that write a cache, compiled: the bits of plain JAX at real sizes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from tests.caches.cache_helpers import assert_same_bits
from tests.gpu.gpu_helpers import KERNELS
from turbojax import _device, caches
from turbojax.caches.progressive import append_mosaic, append_triton
from turbojax.caches.progressive.update import store_prompt
from turbojax.numerics.rounding import quantize_scores_operand, quantize_values

pytestmark = pytest.mark.gpu
MODULES = {"triton": append_triton, "mosaic_gpu": append_mosaic}

FOUR_BITS = tj.TurboConfig()
THREE_BITS = tj.TurboConfig(key_bits=3, value_bits=3)
TWO_BITS = tj.TurboConfig(key_bits=2, value_bits=2, block_kv=128, buffer_size=128)
MIXED = tj.TurboConfig(num_low_bit_key_heads=4, num_low_bit_value_heads=2, buffer_size=128)
SMALL_BLOCKS = tj.TurboConfig(block_kv=16, buffer_size=64, key_bits=3)

# Configuration, heads, head dim, dtype, prompt, lengths.
CASES = {
    "Llama-3-8B": (FOUR_BITS, 8, 128, jnp.bfloat16, 4096, (4096, 4000, 1, 0)),
    "float16": (FOUR_BITS, 8, 64, jnp.float16, 1000, (1000, 63)),
    "head dim 256": (FOUR_BITS, 4, 256, jnp.bfloat16, 777, (777, 64)),
    "head dim 96": (THREE_BITS, 32, 96, jnp.bfloat16, 1500, (1500, 1472)),
    "head dim 8": (THREE_BITS, 3, 8, jnp.float32, 300, (300, 191)),
    "2 bits": (TWO_BITS, 8, 128, jnp.float32, 1024, (1024, 1023)),
    "mixed": (MIXED, 8, 128, jnp.bfloat16, 2048, (2048, 2047, 63)),
    "blocks of 16": (SMALL_BLOCKS, 2, 80, jnp.bfloat16, 999, (999, 17)),
    "128k tokens": (FOUR_BITS, 2, 128, jnp.bfloat16, 2**17, (2**17,)),
}


def tokens(case, count, seed):
    _, heads, channels, dtype, _, lengths = case
    keys = jax.random.split(jax.random.key(seed), 3)
    shape = (len(lengths), count, heads, channels)
    loud = jnp.where(jax.random.bernoulli(keys[2], 0.15, (1, 1, heads, channels)), 4.0, 1.0)
    return [(jax.random.normal(k, shape) * loud).astype(dtype) for k in keys[:2]]


def new(case, max_length):
    config, heads, channels, dtype, _, lengths = case
    return tj.init_cache(len(lengths), max_length, heads, channels, config=config, dtype=dtype)


@functools.cache
def jitted(function, implementation, donate=False):
    run = functools.partial(function, implementation=implementation)
    return jax.jit(run, donate_argnums=0 if donate else ())


def append_all(cache, key, value, implementation):
    """Token by token, into the same memory."""
    run = jitted(tj.append, implementation, donate=True)
    cache = jax.tree.map(jnp.copy, cache)
    for t in range(key.shape[1]):
        cache = run(cache, key[:, t : t + 1], value[:, t : t + 1])
    return cache


@pytest.mark.quick(3)
@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("name", CASES)
def test_a_prompt_and_then_tokens(name, implementation):
    case = CASES[name]
    config, *_, size, lengths = case
    cache, lengths = new(case, size + 200), jnp.array(lengths, jnp.int32)
    key, value = tokens(case, size, 0)
    expected = jitted(store_prompt, "xla")(cache, key, value, lengths)
    for _ in range(2):  # and the same again
        got = jitted(store_prompt, implementation)(cache, key, value, lengths)
        assert_same_bits(got, expected)
    more = tokens(case, config.buffer_size + 2, 1)
    assert_same_bits(append_all(got, *more, implementation), append_all(expected, *more, "xla"))


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("window", [None, (64, 0)], ids=["whole", "rolling"])
def test_one_sequence_past_its_end(window, implementation):
    """Steps with no token, with one and with one too many; in a loop, and under `vmap` too."""
    steps, room = 480, 350
    key, value = tokens((None, 2, 64, jnp.float32, None, (1,)), steps, 6)
    asked = jnp.arange(steps) % 5 > 0
    empty = tj.init_cache(1, room, 2, 64, dtype=jnp.float32, local_window_size=window)

    def all_steps(cache, scale, implementation):
        def step(cache, t):
            k, v = (jax.lax.dynamic_slice_in_dim(x, t, 1, 1) * scale for x in (key, value))
            lengths = asked[t][None].astype(jnp.int32)
            new = tj.append(cache, k, v, lengths=lengths, implementation=implementation)
            return new, (new.lengths, new.overflowed)

        return jax.lax.scan(step, cache, jnp.arange(steps))

    expected = jax.jit(functools.partial(all_steps, implementation="xla"))(empty, 1.0)
    run = functools.partial(all_steps, implementation=implementation)
    assert_same_bits(jax.jit(run)(empty, 1.0), expected)
    several = jax.jit(jax.vmap(run, (None, 0)))(empty, jnp.float32([0.5, 1.0]))
    assert_same_bits(jax.tree.map(lambda x: x[1], several), expected)
    assert (expected[0].lengths.tolist(), expected[0].overflowed.tolist()) == ([room], [True])


@pytest.mark.parametrize("tokens", [1, 4, 200])
@pytest.mark.parametrize("kind", [tj.TurboConfig(), "kv4", "exact", "turbo4", "fp8_e4m3"], ids=str)
def test_a_scan_over_layers_updates_their_caches(kind, tokens):
    """Slices of stacked caches go in, slices come out: what kernels write must be in the latter."""
    layers, batch, heads, channels = 3, 2, 2, 64
    new = functools.partial(caches.init_layer_cache, kind=kind, dtype=jnp.bfloat16)
    stack = jax.tree.map(lambda x: jnp.stack([x] * layers), new(batch, 512, heads, channels))
    steps = [
        jax.random.normal(jax.random.key(i), (layers, batch, n, heads, channels), jnp.bfloat16)
        for i, n in enumerate((tokens, 1, 1))
    ]

    def layer(cache, x):
        if x.shape[1] > 4:
            return tj.prefill(x, x, x, cache)[::-1]
        return tj.append_and_decode(x, x, x, cache)[::-1]

    one_by_one = jax.jit(layer)
    scanned = jax.jit(lambda *x: jax.lax.scan(lambda _, of: (None, layer(*of)), None, x)[1])
    every = [jax.tree.map(lambda a, i=i: a[i], stack) for i in range(layers)]
    for x in steps:
        found = [one_by_one(cache, x[i]) for i, cache in enumerate(every)]
        every = [cache for cache, _ in found]
        stack, out = scanned(stack, x)
        want = jax.tree.map(lambda *a: jnp.stack(a), *every)
        assert_same_bits(*(jax.tree.map(lambda a: a.astype(jnp.float32), c) for c in (stack, want)))
        np.testing.assert_array_equal(out, jnp.stack([out for _, out in found]))


@pytest.mark.quick(3)
@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("name", CASES)
def test_stage_1_operands(name, implementation):
    config, *rest = CASES[name]
    # First tokens are in no block of the cache, so that its codes are not attention's.
    config = dataclasses.replace(config, first_tokens=0)
    case = config, *rest
    *_, dtype, size, lengths = case
    cache, lengths = new(case, size), jnp.array(lengths, jnp.int32)
    arguments = tokens(case, size, 2)
    store = MODULES[implementation].store_prompt_with_operands
    got, operands = jax.jit(store)(cache, *arguments, lengths)
    assert_same_bits(got, jitted(store_prompt, "xla")(cache, *arguments, lengths))
    valid = (jnp.arange(size)[None] < lengths[:, None])[..., None, None]
    of_keys = functools.partial(quantize_scores_operand, mode=config.mode, axis=(3, 4))
    of_values = functools.partial(quantize_values, mode=config.mode)
    pairs = zip(operands[::2], operands[1::2], strict=True)
    for x, (codes, scale), quantize in zip(arguments, pairs, (of_keys, of_values), strict=True):
        x = jnp.where(valid, x, jnp.zeros((), dtype))
        x = jnp.pad(x, ((0, 0), (0, -size % config.block_kv), (0, 0), (0, 0))).swapaxes(1, 2)
        blocks = x.reshape(*x.shape[:2], -1, config.block_kv, x.shape[3])
        want, want_scale = jax.jit(quantize)(blocks)
        want = want.reshape(x.shape)
        np.testing.assert_array_equal(codes, want if x.shape == codes.shape else want.mT)
        np.testing.assert_array_equal(scale, want_scale)


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf], ids=str)
def test_values_that_are_not_finite(bad, implementation):
    case = CASES["Llama-3-8B"]
    lengths = jnp.array([300, 290, 1, 0], jnp.int32)
    key, value = tokens(case, 300, 3)
    key = key.at[0, 3, 0, 5].set(bad).at[0, 299, 1, 0].set(bad).at[1, 290:].set(bad)
    value = value.at[0, 77, 2, 127].set(bad)
    arguments = new(case, 500), key, value, lengths
    expected = jitted(store_prompt, "xla")(*arguments)
    got = jitted(store_prompt, implementation)(*arguments)
    assert_same_bits(got, expected)
    key, value = tokens(case, 70, 4)
    key = key.at[1, 2, 3, 1].set(bad).at[3, 0, 0].set(bad)
    assert_same_bits(
        append_all(got, key, value, implementation), append_all(expected, key, value, "xla")
    )


def test_the_gpu_chooses_the_kernels():
    case = CASES["Llama-3-8B"]
    key, value = tokens(case, 1, 5)
    text = str(jax.make_jaxpr(tj.append)(new(case, 100), key, value))
    is_hopper = _device.needs_hopper() is None
    assert ("turbojax_append_hopper" if is_hopper else "turbojax_append") in text
