"""What the tests of the cache share: tokens, small configurations, and what "the same" means."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles

import turbojax as tj

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
    "all low": tj.TurboConfig(
        num_low_bit_key_heads=4, num_low_bit_value_heads=4, block_q=16, block_kv=16, buffer_size=16
    ),
}
MIXED = CONFIGS["mixed"]

append_jit = jax.jit(tj.append)
prefill_jit = jax.jit(tj.prefill, static_argnames=("is_causal", "return_residual"))
dequantize_jit = jax.jit(tj.dequantize, static_argnames="dtype")


def tokens(count, seed=0, dtype=jnp.float32, batch=BATCH, spread=1.0):
    """Keys and values [B, count, K, H] whose heads differ clearly, with loud channels."""
    rng = np.random.default_rng(seed)
    shape = (batch, count, HEADS, HEAD_DIM)
    loud = np.where(rng.random((batch, 1, HEADS, HEAD_DIM)) < 0.15, 4.0, 1.0)
    heads = rng.permutation(np.array([0.4, 0.8, 1.6, 3.0]))[:, None]
    return tuple(
        jnp.asarray(rng.normal(size=shape) * loud * heads * spread, dtype) for _ in range(2)
    )


def new(config, max_length=100, dtype=jnp.float32, batch=BATCH, **scales):
    return tj.init_cache(batch, max_length, HEADS, HEAD_DIM, config=config, dtype=dtype, **scales)


def used():
    """A cache with blocks and buffered tokens, of other lengths in each sequence."""
    return append(prefill(new(MIXED), *tokens(40, seed=70), (40, 20, 5)), *tokens(20, seed=71))


def prefill(cache, key, value, lengths=None, jit=True):
    """Stores a prompt; the queries do not matter here."""
    if lengths is not None:
        lengths = jnp.asarray(lengths, jnp.int32)
    call = prefill_jit if jit else tj.prefill
    return call(key, key, value, cache, key_value_seq_lengths=lengths)[1]


def append(cache, key, value, lengths=None, jit=True):
    if lengths is not None:
        lengths = jnp.asarray(lengths, jnp.int32)
    return (append_jit if jit else tj.append)(cache, key, value, lengths=lengths)


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
        if oracle.slots[b] is not None and 0 < oracle.num_low < HEADS:
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
