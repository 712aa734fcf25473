"""What the tests of the cache share: tokens, small configurations, and what "the same" means."""

import jax
import jax.numpy as jnp
import numpy as np

import turbojax as tj
from tests import oracles
from tests.contracts.implementations import interpreted
from turbojax.caches.progressive.update import store_prompt

BATCH, HEADS, HEAD_DIM = 3, 4, 16
CONFIGS = {
    "4-bit": tj.TurboConfig(block_q=16, block_kv=16, buffer_size=16),
    "3-bit": tj.TurboConfig(key_bits=3, value_bits=3, block_q=16, block_kv=16, buffer_size=16),
    "mixed": tj.TurboConfig(
        num_low_bit_key_heads=2, num_low_bit_value_heads=1, block_q=16, block_kv=16, buffer_size=32
    ),
    "4/3 and 2": tj.TurboConfig(
        num_low_bit_key_heads=1,
        low_bits=3,
        value_bits=2,
        block_q=16,
        block_kv=8,
        buffer_size=16,
        head_priority="variation",
    ),
    "flush all": tj.TurboConfig(block_q=16, block_kv=16, buffer_size=32, flush="all"),
    "3 first": tj.TurboConfig(block_q=16, block_kv=8, buffer_size=24, first_tokens=3),
    "all low": tj.TurboConfig(
        num_low_bit_key_heads=4, num_low_bit_value_heads=4, block_q=16, block_kv=16, buffer_size=16
    ),
}
MIXED = CONFIGS["mixed"]
# Named, not chosen: inside a context in which kernels are interpreted, they would be the choice.
_DEFAULT = "xla" if jax.default_backend() == "cpu" else None

append_jit = jax.jit(tj.append, static_argnames="implementation")
dequantize_jit = jax.jit(tj.dequantize, static_argnames="dtype")
_store_jit = jax.jit(store_prompt, static_argnames="implementation")
_new_jit = jax.jit(tj.init_cache, static_argnums=(0, 1, 2, 3), static_argnames=("config", "dtype"))
# Runs of tokens are padded to a multiple of this, so that few shapes are compiled.
_WHOLE = 40


def tokens(count, seed=0, dtype=jnp.float32, batch=BATCH, spread=1.0):
    """Keys and values [B, count, K, H] in numpy: heads differ clearly, some channels are loud."""
    rng = np.random.default_rng(seed)
    shape = (batch, count, HEADS, HEAD_DIM)
    loud = np.where(rng.random((batch, 1, HEADS, HEAD_DIM)) < 0.15, 4.0, 1.0)
    heads = rng.permutation(np.array([0.4, 0.8, 1.6, 3.0]))[:, None]
    draw = (rng.normal(size=shape) * loud * heads * spread for _ in range(2))
    return tuple(x.astype(np.float32).astype(dtype) for x in draw)


def changed(x, index, value):
    """A copy of a numpy array with another value somewhere."""
    x = x.copy()
    x[index] = value
    return x


def new(config, max_length=100, dtype=jnp.float32, batch=BATCH, **scales):
    options = {"config": config, "dtype": dtype, **scales}
    return on_host(_new_jit(batch, max_length, HEADS, HEAD_DIM, **options))


def on_host(tree):
    """The same in numpy, whose slices and copies compile nothing."""
    return jax.tree.map(np.asarray, tree)


def used():
    """A cache with blocks and buffered tokens, of other lengths in each sequence."""
    return append(prefill(new(MIXED), *tokens(40, seed=70), (40, 20, 5)), *tokens(20, seed=71))


def padded(x):
    return np.pad(x, ((0, 0), (0, -x.shape[1] % _WHOLE), (0, 0), (0, 0)))


def lengths_of(key, lengths):
    return np.asarray([key.shape[1]] * len(key) if lengths is None else lengths, np.int32)


def prefill(cache, key, value, lengths=None, implementation=None):
    """Stores a prompt, as `tj.prefill` does after it has attended."""
    lengths = lengths_of(key, lengths)
    key, value = (padded(np.asarray(x)) for x in (key, value))
    with interpreted(implementation or "xla"):
        implementation = implementation or _DEFAULT
        return on_host(_store_jit(cache, key, value, lengths, implementation=implementation))


def append(cache, key, value, lengths=None, implementation=None):
    """Appends; token by token where the implementation takes one at a time."""
    lengths = lengths_of(key, lengths)
    key, value = (padded(np.asarray(x)) for x in (key, value))
    if implementation != "triton":
        return on_host(append_jit(cache, key, value, lengths=lengths, implementation=_DEFAULT))
    with interpreted(implementation):
        return on_host(_one_by_one(cache, key, value, lengths))


@jax.jit
def _one_by_one(cache, key, value, lengths):
    def step(cache, xs):
        t, k, v = xs
        given = (t < lengths).astype(jnp.int32)
        cache = tj.append(cache, k[:, None], v[:, None], lengths=given, implementation="triton")
        return cache, None

    key, value = (jnp.moveaxis(x, 1, 0) for x in (key, value))
    return jax.lax.scan(step, cache, (jnp.arange(len(key)), key, value))[0]


def oracle_for(cache, key_scale=None, value_scale=None):
    """The empty oracle of a cache's shapes and configuration."""
    c = cache.config
    return oracles.Cache(
        cache.lengths.shape[0],
        cache.max_length,
        cache.num_kv_heads,
        cache.head_dim,
        block=c.block_kv,
        buffer_size=c.buffer_size,
        flush=c.flush,
        first_tokens=c.num_first_tokens,
        key_bits=c.key_bits,
        value_bits=c.value_bits,
        num_low_key=c.num_low_bit_key_heads,
        num_low_value=c.num_low_bit_value_heads,
        low_bits=c.low_bits,
        priority=c.head_priority,
        key_scale=key_scale,
        value_scale=value_scale,
    )


def stored(side, b, h, block):
    """Unpacked codes [tokens, channels] of one block, and their width, read from the layout."""
    slot = int(side.head_slots[b, h])
    for codes, bits in zip(side.codes, side.bits, strict=True):
        if slot < codes.shape[1]:
            packed = np.asarray(codes[b, slot, block])
            unpacked = oracles.unpack(packed, bits, -1)
            return (unpacked.T if side.tokens_last else unpacked), bits
        slot -= codes.shape[1]
    raise AssertionError("a slot beyond the codes")


def assert_side(side, oracle):
    for b in range(oracle.spec.batch):
        if oracle.scale[b] is not None:
            np.testing.assert_array_equal(side.buffer_scale[b], oracle.scale[b])
        if oracle.slots[b] is not None and 0 < oracle.num_low < oracle.spec.heads:
            np.testing.assert_array_equal(side.head_slots[b], oracle.slots[b])
        for t, codes in enumerate(oracle.buffer[b]):
            np.testing.assert_array_equal(side.buffer[b, :, t], codes)
        for j, heads in enumerate(oracle.blocks[b]):
            for h, block in enumerate(heads):
                codes, bits = stored(side, b, h, j)
                assert bits == block["bits"]
                np.testing.assert_array_equal(codes, block["q2"])
                np.testing.assert_array_equal(side.channel_scale[b, h, j], block["channel_scale"])
                np.testing.assert_array_equal(side.channel_zero[b, h, j], block["channel_zero"])
                np.testing.assert_array_equal(side.block_scale[b, h, j], block["scale"])


def assert_holds(cache, oracle, deeply=True):
    """The cache holds what the oracle holds, bit for bit."""
    cache.validate()
    np.testing.assert_array_equal(cache.lengths, oracle.lengths)
    np.testing.assert_array_equal(cache.buffer_lengths, oracle.buffer_lengths)
    np.testing.assert_array_equal(cache.overflowed, oracle.overflowed)
    for got, want in zip(
        dequantize_jit(cache, dtype=jnp.float32), oracle.dequantize(), strict=True
    ):
        assert got.dtype == jnp.float32
        np.testing.assert_array_equal(np.asarray(got), want)
    if deeply:
        cache = jax.tree.map(np.asarray, cache)
        assert_side(cache.key, oracle.key)
        assert_side(cache.value, oracle.value)


def assert_same_bits(a, b):
    """Two caches hold the same in every array."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y, err_msg=jax.tree_util.keystr(path))
