"""What the tests of `decode` share: stored caches, the call, and comparison with the oracle.

Everything outside the call under test is numpy, and the calls are jitted once: a test compiles
only what no other test has compiled. What is stored does not depend on mode and softmax, so one
cache serves all of them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import turbojax as tj
from tests import oracles
from tests.attention.attention_helpers import EXACT, SAS_2, SAS_E, assert_agrees, oracle_softmax
from tests.contracts.implementations import interpreted
from turbojax.caches.progressive.update import store_prompt

SOFTMAXES = {"exact": EXACT, "sas-e": SAS_E, "sas-2": SAS_2}
BATCH, HEADS, KV_HEADS, HEAD_DIM = 3, 4, 2, 64
BASE = tj.TurboConfig(num_low_bit_key_heads=1, block_q=32, block_kv=32, buffer_size=64)

STATIC = ("scale", "local_window_size", "logits_soft_cap", "implementation", "return_residual")
_decode = jax.jit(tj.decode, static_argnames=STATIC)
_store = jax.jit(functools.partial(store_prompt, implementation="xla"))
_append = jax.jit(functools.partial(tj.append, implementation="xla"))
_dequantize = jax.jit(tj.dequantize, static_argnames="dtype")


def random(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def queries(count, seed=6, batch=BATCH, heads=HEADS, head_dim=HEAD_DIM, dtype=jnp.float32):
    return random(1000 + seed, batch, count, heads, head_dim).astype(dtype)


def tokens(seed, batch, count, heads, head_dim):
    """Keys or values [B, count, K, H] with a few loud channels and heads of different size."""
    rng = np.random.default_rng(seed)
    loud = np.where(rng.random((heads, head_dim)) < 0.05, 3.0, 1.0)
    size = 0.6 + 0.3 * rng.permutation(heads)[:, None]
    x = rng.normal(size=(batch, count, heads, head_dim)) * loud * size + 0.2
    return x.astype(np.float32)


def on_host(tree):
    """The same in numpy, whose slices and copies compile nothing."""
    return jax.tree.map(np.asarray, tree)


def lengths_of(lengths):
    return np.asarray(lengths, np.int32)


@functools.cache
def empty(config, batch, max_length, heads, head_dim, dtype=jnp.float32):
    new = functools.partial(tj.init_cache, batch, max_length, heads, head_dim)
    return on_host(jax.jit(functools.partial(new, config=config, dtype=dtype))())


def store(cache, key, value, lengths=None):
    lengths = [key.shape[1]] * key.shape[0] if lengths is None else lengths
    return on_host(_store(cache, key, value, lengths_of(lengths)))


def append(cache, key, value, lengths=None):
    lengths = [key.shape[1]] * key.shape[0] if lengths is None else lengths
    return on_host(_append(cache, key, value, lengths=lengths_of(lengths)))


@functools.cache
def filled(fields, prompt, added, heads, head_dim, max_length=None, dtype=jnp.float32, seed=0):
    """A cache of which `prompt` [B] tokens came at once and `added` [B] were appended."""
    batch = len(added)
    max_length = max_length or int(max(np.add(prompt, added))) + 5
    config = tj.TurboConfig(mode="float", softmax=EXACT, **dict(fields))
    cache = empty(config, batch, max_length, heads, head_dim, dtype)

    def draw(i, count):
        return tokens(4 * seed + i, batch, count, heads, head_dim).astype(dtype)

    if max(prompt):
        cache = store(cache, draw(0, max(prompt)), draw(1, max(prompt)), prompt)
    if max(added):
        cache = append(cache, draw(2, max(added)), draw(3, max(added)), added)
    cache.validate()
    return cache


_BASE_FIELDS = tuple(
    (name, getattr(BASE, name))
    for name in (
        "num_low_bit_key_heads",
        "block_q",
        "block_kv",
        "buffer_size",
    )
)


def under(cache, mode="int8", softmax=SAS_E):
    """The cache read with other numerics."""
    config = dataclasses.replace(cache.config, mode=mode, softmax=softmax)
    return dataclasses.replace(cache, config=config)


def stored(mode="int8", softmax=SAS_E, dtype=jnp.float32):
    """The common cache: blocks alone, blocks and a buffer, and a buffer alone."""
    cache = filled(
        _BASE_FIELDS, (150, 64, 5), (20, 0, 9), KV_HEADS, HEAD_DIM, max_length=256, dtype=dtype
    )
    return under(cache, mode, softmax)


def decode(query, cache, implementation="xla", **options):
    """Output and residual, as numpy arrays."""
    options |= {"implementation": implementation, "return_residual": True}
    with interpreted(implementation):
        return tuple(np.asarray(x) for x in _decode(query, cache, **options))


def splits(cache):
    """Tokens of the blocks of each sequence and of its buffer, from its lengths alone."""
    block, first = cache.config.block_kv, cache.config.num_first_tokens
    result = []
    for length, buffered in zip(cache.lengths.tolist(), cache.buffer_lengths.tolist(), strict=True):
        order = np.arange(length)
        held = np.concatenate([order[:first], order[length - buffered + first :]])
        in_blocks = order[first : length - buffered + first]
        result.append(
            [
                x[i : i + block]
                for x in (in_blocks, held[:buffered])
                for i in range(0, len(x), block)
            ]
        )
    return result


def dequantized(cache):
    return tuple(np.asarray(x) for x in _dequantize(cache, dtype=jnp.float32))


def oracle_of(query, cache, key, value, **options):
    return oracles.decode(
        query,
        key,
        value,
        splits(cache),
        lengths=cache.lengths.tolist(),
        mode=cache.config.mode,
        softmax=oracle_softmax(cache.config.softmax),
        **options,
    )


def assert_matches_oracle(query, cache, implementation, **options):
    """Attention over what `dequantize` reads, with the same numerics."""
    key, value = dequantized(cache)
    want = oracle_of(query, cache, key, value, **options)
    out, residual = decode(query, cache, implementation, **options)
    assert (out.dtype, out.shape) == (query.dtype, query.shape)
    assert_agrees(out, residual, want, value)


def assert_matches_reference(query, cache, **options):
    """The kernel's is plain JAX's, nearly everywhere to a few roundings of the largest result.

    A code that falls to the other side of a tie costs 1/119 of a weight.
    """
    pairs = zip(
        decode(query, cache, "triton", **options),
        decode(query, cache, "xla", **options),
        strict=True,
    )
    for got, want in pairs:
        finite = np.isfinite(want)
        np.testing.assert_array_equal(got[~finite], want[~finite])
        error = np.abs(got[finite].astype(np.float64) - want[finite])
        largest = np.abs(want[finite]).max(initial=0)
        assert np.quantile(error, 0.99) <= 8 * np.finfo(np.float32).eps * largest
        assert error.max() <= 2e-2 * largest
