"""`decode` over a cache against the oracle over what `dequantize` shows; and prefill's part."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

import turbojax as tj

MODES = ("int8", "int8_fp8", "fp8", "float")
BATCH, HEADS, KV_HEADS, HEAD_DIM = 3, 4, 2, 64
BASE = tj.TurboConfig(
    num_low_bit_key_heads=1, num_low_bit_value_heads=1, block_q=32, block_kv=32, buffer_size=64
)

STATIC = ("scale", "local_window_size", "logits_soft_cap", "implementation", "return_residual")
decode = jax.jit(tj.decode, static_argnames=STATIC)
prefill = jax.jit(tj.prefill, static_argnames=(*STATIC, "is_causal"))
append = jax.jit(tj.append)


@pytest.fixture(params=MODES)
def mode(request):
    return request.param


def tokens(count, seed, heads=KV_HEADS, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    scales = np.linspace(0.5, 1.5, heads)[:, None]
    shape = (BATCH, count, heads, HEAD_DIM)
    return jnp.asarray(rng.normal(size=shape) * scales, dtype)


@functools.cache
def stored(dtype=jnp.float32):
    """A cache of ragged lengths: blocks alone and with a buffer, a buffer alone."""
    key, value = tokens(160, 1, dtype=dtype), tokens(160, 2, dtype=dtype)
    cache = tj.init_cache(BATCH, 256, KV_HEADS, HEAD_DIM, config=BASE, dtype=dtype)
    lengths = jnp.asarray([150, 64, 5], jnp.int32)
    _, cache = prefill(
        tokens(160, 3, HEADS, dtype), key, value, cache, key_value_seq_lengths=lengths
    )
    more = jnp.asarray([20, 0, 9], jnp.int32)
    return append(cache, tokens(20, 4, dtype=dtype), tokens(20, 5, dtype=dtype), lengths=more)


def configured(config, dtype=jnp.float32):
    """The stored cache under other numerics: bits and blocks stay, softmax and mode change."""
    return dataclasses.replace(stored(dtype), config=config)


def with_mode(cache, mode):
    """Another mode from here on; what is stored does not depend on it."""
    return dataclasses.replace(cache, config=dataclasses.replace(cache.config, mode=mode))


def splits_of(cache):
    """The (start, stop) of each block and of the buffer."""
    block = cache.config.block_kv
    result = []
    for length, buffered in zip(
        np.asarray(cache.lengths), np.asarray(cache.buffer_lengths), strict=True
    ):
        stop = int(length - buffered)
        parts = [(start, start + block) for start in range(0, stop, block)]
        result.append(parts + ([(stop, int(length))] if buffered else []))
    return result


def oracle_of(query, cache, **options):
    key, value = (np.asarray(x) for x in tj.dequantize(cache, jnp.float32))
    softmax = cache.config.softmax
    softmax = softmax if softmax == "exact" else (softmax.threshold, softmax.base)
    return oracles.decode(
        query,
        key,
        value,
        splits_of(cache),
        lengths=np.asarray(cache.lengths),
        mode=cache.config.mode,
        softmax=softmax,
        **options,
    )


def assert_close(got, want, tolerance):
    got = np.asarray(got, np.float64)
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite])
    excess = np.abs(np.where(finite, got, 0) - np.where(finite, want, 0)) - np.where(
        finite, tolerance, 0
    )
    assert excess.max() <= 0, f"beyond the derived tolerance by {excess.max()}"


def assert_matches_oracle(query, cache, **options):
    want = oracle_of(query, cache, **options)
    out, lse = decode(query, cache, return_residual=True, **options)
    assert (out.dtype, out.shape) == (query.dtype, query.shape)
    assert lse.dtype == jnp.float32
    own = 0 if query.dtype == jnp.float32 else float(jnp.finfo(query.dtype).eps)
    assert_close(out, want.out, want.out_tolerance + own * np.abs(want.out) + own * 1e-3)
    assert_close(lse, want.residual, want.residual_tolerance)
    assert np.median(want.out_tolerance) < 1e-4 * np.abs(want.out).max()


@pytest.mark.parametrize(
    "softmax", ["exact", tj.SAS(), tj.SAS(base="2")], ids=["exact", "sas-e", "sas-2"]
)
@pytest.mark.parametrize("count", [1, 5])
def test_equals_the_oracle(mode, softmax, count):
    """Blocks, buffer, or both; one query or the last few, causal among themselves."""
    if count == 5 and softmax == tj.SAS(base="2"):
        count = 2
    cache = configured(dataclasses.replace(BASE, mode=mode, softmax=softmax))
    assert_matches_oracle(tokens(count, 6, HEADS), cache)


OPTIONS = {
    "scale": {"scale": 0.3},
    "soft cap": {"logits_soft_cap": 3.0},
    "window": {"local_window_size": (40, 0)},
    "narrow window": {"local_window_size": 3},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    assert_matches_oracle(tokens(3, 7, HEADS), stored(), **OPTIONS[name])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "f16"])
def test_half_precision(dtype):
    assert_matches_oracle(tokens(2, 8, HEADS, dtype), stored(dtype))


def test_queries_before_the_beginning():
    """More queries than tokens: those that come before the first token see nothing."""
    out, lse = decode(tokens(20, 9, HEADS), stored(), return_residual=True)
    assert_matches_oracle(tokens(20, 9, HEADS), stored())
    np.testing.assert_array_equal(np.asarray(out)[2, :6], 0)
    assert np.isneginf(np.asarray(lse)[2, :6]).all()
    assert np.isfinite(np.asarray(lse)[2, 6:]).all()


def test_an_empty_cache(mode):
    cache = tj.init_cache(
        BATCH,
        256,
        KV_HEADS,
        HEAD_DIM,
        dtype=jnp.float32,
        config=dataclasses.replace(BASE, mode=mode),
    )
    out, lse = decode(tokens(1, 10, HEADS), cache, return_residual=True)
    np.testing.assert_array_equal(out, np.zeros(out.shape))
    np.testing.assert_array_equal(lse, np.full(lse.shape, -np.inf))


def test_float_and_exact_is_attention_over_what_is_stored():
    """Nothing rounded but what the cache rounded: jax's attention over `dequantize`."""
    cache = configured(dataclasses.replace(BASE, mode="float", softmax="exact"))
    query = tokens(1, 11, HEADS)
    key, value = tj.dequantize(cache)
    with jax.default_matmul_precision("highest"):
        want = jax.nn.dot_product_attention(query, key, value, key_value_seq_lengths=cache.lengths)
    np.testing.assert_allclose(decode(query, cache), want, atol=3e-6)


def test_int8_rounds_the_query_and_the_weights_alone():
    """Exact softmax: int8 differs from float by the rounding of Q and P, nothing else."""
    query = tokens(1, 12, HEADS)
    exact = decode(query, configured(dataclasses.replace(BASE, mode="float", softmax="exact")))
    got = decode(query, configured(dataclasses.replace(BASE, mode="int8", softmax="exact")))
    value = np.asarray(tj.dequantize(stored())[1])
    # Half of 1/119 of the largest weight per token; the query's scores move by under one percent.
    assert np.abs(np.asarray(got) - np.asarray(exact)).mean() < 0.01 * np.abs(value).max()


def test_several_queries_equal_one_at_a_time(mode):
    """Decoding T tokens at once equals decoding after each of T appends.

    At a state of the cache in which all of them are buffered, so that nothing is compressed
    between: then the queries differ in their masks alone.
    """
    cache = stored()
    key, value, query = tokens(4, 13), tokens(4, 14), tokens(4, 15, HEADS)
    steps = []
    for t in range(4):
        cache = append(cache, key[:, t : t + 1], value[:, t : t + 1])
        steps.append(decode(query[:, t : t + 1], with_mode(cache, mode)))
    together = decode(query, with_mode(cache, mode))
    np.testing.assert_allclose(together, jnp.concatenate(steps, axis=1), atol=2e-6)


def test_the_order_of_appends_does_not_matter(mode):
    """The same tokens in any split give the same output, bit for bit."""
    key, value, query = tokens(70, 16), tokens(70, 17), tokens(1, 18, HEADS)
    start = stored()
    want = decode(query, with_mode(append(start, key, value), mode))
    cache, t = start, 0
    for n in (1, 20, 49):
        cache = append(cache, key[:, t : t + n], value[:, t : t + n])
        t += n
    np.testing.assert_array_equal(decode(query, with_mode(cache, mode)), want)


def test_the_batch_never_changes_a_bit(mode):
    """Each sequence by itself, and with its neighbours exchanged."""
    cache = configured(dataclasses.replace(BASE, mode=mode))
    query = tokens(1, 19, HEADS)
    together = np.asarray(decode(query, cache))
    turned = decode(jnp.roll(query, 1, 0), jax.tree.map(lambda x: jnp.roll(x, 1, 0), cache))
    np.testing.assert_array_equal(np.roll(np.asarray(turned), -1, 0), together)
    alone = decode(query[1:2], jax.tree.map(lambda x: x[1:2], cache))
    np.testing.assert_array_equal(np.asarray(alone)[0], together[1])


def test_what_lies_past_the_lengths_never_changes_a_bit(mode):
    """Unused blocks and buffer slots may hold anything."""
    cache = configured(dataclasses.replace(BASE, mode=mode))

    def dirty(side):
        blocks = (cache.lengths - cache.buffer_lengths) // BASE.block_kv
        used = jnp.arange(side.block_scale.shape[2])[None] < blocks[:, None]
        slots = jnp.arange(BASE.buffer_size)[None] < cache.buffer_lengths[:, None]
        return dataclasses.replace(
            side,
            block_scale=jnp.where(used[:, None], side.block_scale, jnp.nan),
            codes=tuple(
                jnp.where(used[:, None, :, None, None], x, jnp.uint8(255)) for x in side.codes
            ),
            buffer=jnp.where(slots[:, None, :, None], side.buffer, jnp.int8(101)),
        )

    spoiled = dataclasses.replace(cache, key=dirty(cache.key), value=dirty(cache.value))
    query = tokens(1, 20, HEADS)
    for a, b in zip(
        decode(query, cache, return_residual=True),
        decode(query, spoiled, return_residual=True),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("side", ["key", "value"])
def test_non_finite_tokens_are_not_hidden(mode, side):
    """A NaN in the cache, block or buffer, reaches the queries of its heads, and no others."""
    config = dataclasses.replace(BASE, mode=mode)
    clean = np.asarray(decode(tokens(1, 21, HEADS), configured(config)))
    key, value = tokens(1, 22), tokens(1, 23)
    spoiled = [
        x.at[0, 0, 0, 3].set(jnp.nan) if name == side else x
        for name, x in (("key", key), ("value", value))
    ]
    taken = jnp.asarray([1, 0, 0], jnp.int32)
    cache = with_mode(append(stored(), *spoiled, lengths=taken), mode)
    got = np.asarray(decode(tokens(1, 21, HEADS), cache))
    assert np.isnan(got[0, 0, :2]).all()
    assert np.isfinite(got[0, 0, 2:]).all()
    np.testing.assert_array_equal(got[1:], clean[1:])


def test_a_nan_block_outside_the_window_stays_there():
    cache = stored()
    spoiled = dataclasses.replace(
        cache,
        value=dataclasses.replace(
            cache.value, block_scale=cache.value.block_scale.at[0, :, 0].set(jnp.nan)
        ),
    )
    query = tokens(1, 24, HEADS)
    assert np.isnan(np.asarray(decode(query, spoiled))[0]).all()
    window = functools.partial(decode, query, local_window_size=(40, 0))
    np.testing.assert_array_equal(window(spoiled), window(cache))


def test_two_runs_give_the_same_bits(mode):
    cache = configured(dataclasses.replace(BASE, mode=mode))
    for a, b in zip(
        *(decode(tokens(1, 25, HEADS), cache, return_residual=True) for _ in range(2)), strict=True
    ):
        np.testing.assert_array_equal(a, b)


# Transforms --------------------------------------------------------------------------------------


def test_eager_equals_jit():
    query = tokens(1, 26, HEADS)
    np.testing.assert_allclose(tj.decode(query, stored()), decode(query, stored()), atol=2e-6)


def test_generation_under_scan():
    """Append and decode in a scanned loop, the cache carried and donated, across a flush."""
    steps = 40
    key, value = tokens(steps, 27), tokens(steps, 28)
    query = tokens(steps, 29, HEADS)

    def step(cache, qkv):
        q, k, v = (x[:, None] for x in qkv)
        cache = tj.append(cache, k, v)
        return cache, tj.decode(q, cache)[:, 0]

    xs = tuple(jnp.moveaxis(x, 1, 0) for x in (query, key, value))
    loop = jax.jit(lambda c, xs: jax.lax.scan(step, c, xs), donate_argnums=0)
    final, out = loop(jax.tree.map(jnp.copy, stored()), xs)
    assert out.shape == (steps, BATCH, HEADS, HEAD_DIM)
    cache = stored()
    for t in range(steps):
        cache = append(cache, key[:, t : t + 1], value[:, t : t + 1])
        if t in (0, 30, steps - 1):
            want = decode(query[:, t : t + 1], cache)[:, 0]
            np.testing.assert_allclose(out[t], want, atol=2e-6)
    for a, b in zip(jax.tree.leaves(final), jax.tree.leaves(cache), strict=True):
        np.testing.assert_array_equal(a, b)


def test_vmap():
    """Queries of several kinds against caches stacked on a new axis."""
    caches = jax.tree.map(lambda x: jnp.stack([x, jnp.roll(x, 1, 0)]), stored())
    query = jnp.stack([tokens(1, 30, HEADS), tokens(1, 31, HEADS)])
    got = jax.jit(jax.vmap(tj.decode))(query, caches)
    for i in range(2):
        want = decode(query[i], jax.tree.map(lambda x, i=i: x[i], caches))
        np.testing.assert_allclose(got[i], want, atol=2e-6)


def test_memory_does_not_hold_the_whole_cache_dequantized():
    """Temporaries stay far below the dequantized keys and values."""
    cache = jax.eval_shape(lambda: tj.init_cache(1, 32768, 2, 128, dtype=jnp.float32))
    query = jax.ShapeDtypeStruct((1, 1, 2, 128), jnp.float32)
    compiled = jax.jit(tj.decode).lower(query, cache).compile()
    dequantized = 2 * 4 * 32768 * 2 * 128
    assert compiled.memory_analysis().temp_size_in_bytes < dequantized / 3


# Prefill -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [True, False])
def test_prefill_attends_as_turbo_attention_does(is_causal):
    """The same bits, residual included: attention sees stage-1 codes, whatever is stored."""
    query, key, value = tokens(70, 40, HEADS), tokens(70, 41), tokens(70, 42)
    lengths = jnp.asarray([70, 33, 0], jnp.int32)
    empty = tj.init_cache(BATCH, 128, KV_HEADS, HEAD_DIM, config=BASE, dtype=jnp.float32)
    (out, lse), cache = prefill(
        query,
        key,
        value,
        empty,
        is_causal=is_causal,
        key_value_seq_lengths=lengths,
        return_residual=True,
    )
    attend = jax.jit(tj.turbo_attention, static_argnames=("config", "is_causal", "return_residual"))
    want = attend(
        query,
        key,
        value,
        config=BASE,
        is_causal=is_causal,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        return_residual=True,
    )
    for a, b in zip((out, lse), want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    np.testing.assert_array_equal(cache.lengths, lengths)


def test_prefill_is_causal_by_default():
    query, key, value = tokens(40, 43, HEADS), tokens(40, 44), tokens(40, 45)
    empty = tj.init_cache(BATCH, 64, KV_HEADS, HEAD_DIM, config=BASE, dtype=jnp.float32)
    default, _ = tj.prefill(query, key, value, empty)
    causal, _ = tj.prefill(query, key, value, empty, is_causal=True)
    np.testing.assert_array_equal(default, causal)


def test_decoding_continues_the_prompt():
    """Attention over a prompt's last token, by prefill and by decode: equal up to stage 2.

    With 4 bits the two outputs of one and the same query agree to a few percent of V.
    """
    query, key, value = tokens(128, 46, HEADS), tokens(128, 47), tokens(128, 48)
    config = tj.TurboConfig(block_q=32, block_kv=32)
    empty = tj.init_cache(BATCH, 192, KV_HEADS, HEAD_DIM, config=config, dtype=jnp.float32)
    out, cache = prefill(query, key, value, empty)
    error = np.abs(np.asarray(decode(query[:, -1:], cache)) - np.asarray(out[:, -1:]))
    assert error.mean() < 0.05 * np.abs(np.asarray(value)).mean()
