"""Caches of layers with a window hold what it needs, and attend as if they held all tokens."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from tests import oracles
from tests.contracts.implementations import interpreted, kernel_is_slow
from tests.kernels.kernel_helpers import lower_for_cuda
from turbojax.attention.options import Options
from turbojax.caches import (
    AttentionOptions,
    attend_new_tokens,
    init_layer_cache,
    kind_of,
    rolling_buffer,
)
from turbojax.caches.exact import cache as exact
from turbojax.caches.progressive import append_triton, decode_mosaic
from turbojax.caches.progressive import decode_triton as triton_decode
from turbojax.caches.token_scaled import cache as kv4
from turbojax.caches.token_scaled import triton as triton_kv4

BATCH, HEADS, KV_HEADS, CHANNELS = 3, 4, 2, 16
KINDS = {
    "exact": "exact",
    "kv4": "kv4",
    "k8v4": "k8v4",
    "4bit": tj.TurboConfig(block_q=16, block_kv=16, buffer_size=16),
    # First tokens, which a rolling buffer has none of, are in no block of a cache of all tokens.
    "mixed": tj.TurboConfig(
        num_low_bit_key_heads=1, num_low_bit_value_heads=1, block_q=16, block_kv=16, first_tokens=0
    ),
}
WINDOW = 20
OPTIONS = AttentionOptions(local_window_size=WINDOW)
SIDES = (WINDOW - 1, 0)
ROOM = {"exact": 48, "kv4": 128, "k8v4": 128, "4bit": 48, "mixed": 48}
MAX_LENGTH, PROMPT, NEW = 300, 160, 70
# Longer than every rolling buffer, nearly as long as one, none.
LENGTHS = np.array([160, 45, 0], np.int32)


def tokens(count, seed=0, heads=KV_HEADS):
    x = np.random.default_rng(seed).normal(size=(BATCH, count, heads, CHANNELS))
    return x.astype(np.float32)


def new(kind, max_length=MAX_LENGTH, window=WINDOW):
    sizes = (BATCH, max_length, KV_HEADS, CHANNELS)
    return init_layer_cache(
        *sizes, kind=KINDS.get(kind, kind), dtype=jnp.float32, local_window_size=window
    )


@functools.partial(jax.jit, static_argnames="implementation")
def store(cache, key, value, lengths, implementation="xla"):
    kind = kind_of(cache)
    return kind.store_prompt(cache, key, value, lengths, implementation=implementation)


@functools.partial(jax.jit, static_argnames="implementation")
def append(cache, key, value, lengths=None, implementation="xla"):
    kind = kind_of(cache)
    writer = kind.writer(implementation, key.shape[1])
    return kind.append(cache, key, value, lengths=lengths, implementation=writer)


@functools.partial(jax.jit, static_argnames="implementation")
def step_by_step(cache, query, key, value, implementation="xla"):
    """Token by token: outputs ``[B, T, N, H]`` and the cache."""

    def step(cache, qkv):
        q, k, v = (x[:, None] for x in qkv)
        out, cache = attend_new_tokens(implementation)(q, k, v, cache, OPTIONS)
        return cache, out[:, 0]

    cache, out = jax.lax.scan(step, cache, [jnp.moveaxis(x, 1, 0) for x in (query, key, value)])
    return jnp.moveaxis(out, 0, 1), cache


def prompted(kind, window=WINDOW):
    return store(new(kind, window=window), tokens(PROMPT, 1), tokens(PROMPT, 2), LENGTHS)


def added():
    return tokens(NEW, 3, HEADS), tokens(NEW, 4), tokens(NEW, 5)


def assert_same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


# What is held ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "room"),
    [("exact", 4112), ("kv4", 4224), ("k8v4", 4224), (tj.TurboConfig(), 65 * 64)],
    ids=str,
)
def test_mistrals_layers_hold_their_window_and_not_the_text(kind, room):
    """Of 32k tokens: rows for 4,096 and 15 more, in whole blocks."""
    make = functools.partial(init_layer_cache, 1, 32768, 8, 128, kind=kind)
    whole = jax.eval_shape(make)
    held = jax.eval_shape(functools.partial(make, local_window_size=4096))
    assert (held.room, held.max_length, held.is_rolling) == (room, 32768, True)
    constant = 2 * 128 * 128 * 8 + 512 if isinstance(kind, tj.TurboConfig) else 512
    assert held.nbytes <= whole.nbytes * room / 32768 + constant
    assert not whole.is_rolling


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_no_rolling_buffer_where_that_would_save_nothing(kind):
    cache, whole = new(kind, max_length=WINDOW + 15), new(kind, WINDOW + 15, window=None)
    assert not cache.is_rolling
    assert cache.nbytes == whole.nbytes
    assert new(kind).room == ROOM[kind]


# Attention ---------------------------------------------------------------------------------------


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("kind", KINDS)
def test_it_attends_as_a_cache_that_holds_all_tokens(kind):
    """The bits of plain JAX's, but for exact caches, whose sums run in another order."""
    (out, cache), (want, whole) = (
        step_by_step(prompted(kind, window), *added()) for window in (WINDOW, None)
    )
    if kind == "exact":
        np.testing.assert_allclose(out, want, atol=2e-6)
    else:
        np.testing.assert_array_equal(out, want)
    assert cache.lengths.tolist() == whole.lengths.tolist() == (LENGTHS + NEW).tolist()
    assert cache.nbytes < whole.nbytes / 2
    if kind != "exact":
        cache.validate()


def test_exact_attention_sees_the_last_tokens_of_the_text():
    query, key, value = added()
    out, _ = step_by_step(prompted("exact"), query, key, value)
    for b, length in enumerate(LENGTHS):
        keys, values = (
            np.concatenate([tokens(PROMPT, seed)[b, :length], x[b]])[None].astype(np.float64)
            for seed, x in ((1, key), (2, value))
        )
        q, k = length + np.arange(NEW)[:, None], np.arange(length + NEW)[None]
        mask = (k <= q) & (k > q - WINDOW)
        want = oracles.plain_attention(query[b : b + 1], keys, values, mask=mask[None])
        np.testing.assert_allclose(out[b : b + 1], want, atol=2e-6)


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("kind", ["exact", "kv4", "4bit"])
def test_many_new_tokens_attend_in_parts(kind):
    """More than the rolling buffer has room for beyond the window, in one call of a layer."""
    query, key, value = added()
    attend = jax.jit(attend_new_tokens("xla"), static_argnames="options")
    out, cache = attend(query, key, value, prompted(kind), options=OPTIONS)
    want, after = step_by_step(prompted(kind), query, key, value)
    assert_same(cache, after)
    if kind != "4bit":  # there a token that fills the buffer changes what others beside it see
        np.testing.assert_allclose(out, want, atol=2e-6)


@pytest.mark.quick(slow=1)
@kernel_is_slow
@pytest.mark.parametrize("kind", ["kv4", "k8v4", "4bit", "mixed"])
def test_several_queries_attend_at_once(kind, implementation):
    """As to a cache that holds all tokens, padding among the queries included."""
    query, key, value = (x[:, :8] for x in added())
    decode = tj.decode
    real = np.array([8, 3, 8], np.int32)

    def run(window, name):
        cache = append(prompted(kind, window), key, value, lengths=real)
        with interpreted(name):
            return jax.jit(functools.partial(decode, local_window_size=SIDES, implementation=name))(
                query, cache, query_seq_lengths=real
            )

    want = run(None, "xla")
    if implementation == "xla":
        np.testing.assert_array_equal(run(WINDOW, "xla"), want)
    else:
        np.testing.assert_allclose(run(WINDOW, "triton"), want, atol=2e-2)


def test_what_no_window_reaches_any_more_is_forgotten():
    """A NaN is, too: a rolling buffer's outputs recover from it."""
    key = tokens(PROMPT, 1)
    key[0, 5] = np.nan
    cache = store(new("exact"), key, tokens(PROMPT, 2), LENGTHS)
    out, _ = step_by_step(cache, *added())
    assert np.isfinite(np.asarray(out)).all()


# Writing -----------------------------------------------------------------------------------------


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("kind", KINDS)
def test_how_tokens_are_split_into_calls_does_not_matter(kind):
    """One call with more tokens than there is room for, calls with one, and ragged ones."""
    _, key, value = added()
    at_once = append(prompted(kind), key, value)
    _, one_by_one = step_by_step(prompted(kind), *added())
    assert_same(at_once, one_by_one)
    lengths = np.array([70, 11, 0], np.int32)
    ragged = append(prompted(kind), key, value, lengths=lengths)
    assert ragged.lengths.tolist() == (LENGTHS + lengths).tolist()
    assert_same(kind_of(ragged).take(ragged, 0, 1), kind_of(ragged).take(at_once, 0, 1))


@pytest.mark.parametrize("kind", ["exact", "kv4", "k8v4"])
def test_a_prompt_is_stored_as_if_appended(kind):
    at_once = append(new(kind), tokens(PROMPT, 1), tokens(PROMPT, 2), LENGTHS)
    stored = prompted(kind)
    # What lies past a sequence's length means nothing.
    for name in ("key", "value", "key_codes", "value_codes", "key_scale", "value_scale"):
        if hasattr(stored, name):
            a, b = (np.asarray(getattr(x, name)[0], np.float32) for x in (stored, at_once))
            np.testing.assert_array_equal(a, b)
    assert_same(stored.lengths, at_once.lengths)


@pytest.mark.quick(2, slow=0)
@pytest.mark.parametrize("kind", ["kv4", "4bit", "mixed"])
def test_what_it_holds_is_what_a_cache_of_all_tokens_holds_there(kind):
    dequantize = kv4.dequantize if kind == "kv4" else tj.dequantize
    (_, cache), (_, whole) = (step_by_step(prompted(kind, w), *added()) for w in (WINDOW, None))
    position = np.arange(MAX_LENGTH)[None, :, None, None]
    length = np.asarray(cache.lengths)[:, None, None, None]
    buffered = getattr(cache, "buffer_lengths", np.zeros(BATCH, np.int32))
    oldest = length - np.asarray(buffered)[:, None, None, None] - cache.room
    for got, want in zip(dequantize(cache), dequantize(whole), strict=True):
        np.testing.assert_array_equal(got, np.where(position >= oldest, want, 0))


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("kind", KINDS)
def test_max_length_is_still_the_longest_text(kind):
    cache = append(new(kind, max_length=200), tokens(PROMPT, 1), tokens(PROMPT, 2))
    _, key, value = added()
    with pytest.raises(
        ValueError, match=r"\[230, 230, 230\], which must be at most max_length=200"
    ):
        kind_of(cache).append(cache, key, value)
    after = append(cache, key, value, lengths=np.array([70, 40, 41], np.int32))
    assert after.lengths.tolist() == [200, 200, 200]
    assert after.overflowed.tolist() == [True, False, True]
    fitting = append(cache, key, value, lengths=np.array([40, 40, 40], np.int32))
    assert_same(
        dataclasses.replace(after, overflowed=fitting.overflowed),
        fitting,
    )


# Refusals ----------------------------------------------------------------------------------------

DECODES = {
    "exact": tj.decode,
    "kv4": tj.decode,
    "4bit": tj.decode,
}


@pytest.mark.parametrize("kind", DECODES)
@pytest.mark.parametrize(
    ("window", "queries", "words"),
    [
        (None, 1, "a query sees all tokens, must see at most 20, its own included"),
        (20, 1, "a query sees 21 tokens, must see at most 20, its own included"),
        ((19, 0), 110, "110 query tokens must be at most"),
    ],
)
def test_queries_that_would_see_what_is_gone_are_refused(kind, window, queries, words):
    cache, query = new(kind), jnp.zeros((BATCH, queries, HEADS, CHANNELS))
    with pytest.raises(ValueError, match=words):
        DECODES[kind](query, cache, local_window_size=window)
    if isinstance(window, tuple):
        most = ROOM[kind] - WINDOW + 1
        with pytest.raises(ValueError, match=f"at most {most}: the cache keeps {ROOM[kind]}"):
            DECODES[kind](query, cache, local_window_size=window)


def test_a_smaller_window_is_served():
    query = tokens(1, 7, HEADS)
    got, want = (
        tj.decode(query, prompted("exact", w), local_window_size=(4, 0)) for w in (WINDOW, None)
    )
    # The empty sequence sees nothing, which is the mean of whatever is there.
    np.testing.assert_allclose(got[:2], want[:2], atol=2e-6)


@pytest.mark.parametrize(
    ("init", "arguments"),
    [(tj.init_cache, {}), (exact.init_cache, {}), (kv4.init_cache, {})],
    ids=["progressive", "exact", "kv4"],
)
@pytest.mark.parametrize("window", [-1, (1, 2, 3), "4", True])
def test_windows_that_are_none_are_refused(init, arguments, window):
    with pytest.raises(ValueError, match="local_window_size="):
        init(1, 64, 1, 16, local_window_size=window, **arguments)


def test_a_window_sees_a_token():
    with pytest.raises(ValueError, match="local_window_size=0 must be at least 1"):
        new("exact", window=0)


# Rows --------------------------------------------------------------------------------------------


def test_rows_by_counting():
    """Against one row per token, written one after the other."""
    rows, lengths, accepted = 5, np.array([0, 3, 12]), np.array([4, 7, 0])
    found = np.asarray(
        rolling_buffer.rows_of_new(jnp.asarray(lengths), jnp.asarray(accepted), 8, rows)
    )
    positions = np.asarray(rolling_buffer.positions_of_rows(jnp.asarray(lengths + accepted), rows))
    for b in range(3):
        held = {t % rows: t for t in range(lengths[b] + accepted[b])}
        written = {r: t for t, r in enumerate(found[b]) if r < rows}
        assert len(set(found[b].tolist())) == 8
        assert written == {
            r: t - lengths[b] for r, t in held.items() if t >= lengths[b] and accepted[b]
        }
        for row in range(rows):
            assert positions[b, row] == held.get(row, positions[b, row])
            assert (positions[b, row] < 0) == (row not in held)


# Kernels -----------------------------------------------------------------------------------------


@pytest.mark.fuzz
@pytest.mark.parametrize("op", ["mosaic_gpu", "triton", "store_prompt", "append", "kv4"])
def test_kernels_lower_for_a_gpu(op):
    """With blocks, or tiles of tokens, found modulo the rolling buffer's size."""
    init = kv4.init_cache if op == "kv4" else tj.init_cache
    cache = jax.eval_shape(lambda: init(2, 8192, 2, 128, local_window_size=SIDES))
    query = jax.ShapeDtypeStruct((2, 1, 8, 128), jnp.bfloat16)
    one, prompt = (jax.ShapeDtypeStruct((2, n, 2, 128), jnp.bfloat16) for n in (1, 900))
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
    options = Options(True, SIDES, scale=0.1)
    module, name, *operands = {
        "mosaic_gpu": (decode_mosaic, "decode_hopper", query, lengths),
        "triton": (triton_decode, "decode", query, lengths),
        "store_prompt": (append_triton, "compress", prompt, prompt, lengths),
        "append": (append_triton, "append", one, one, lengths),
        "kv4": (triton_kv4, "kv4_decode", query, lengths),
    }[op]
    if len(operands) == 2:

        def run(cache, query, lengths):
            return module.decode(query, cache, lengths, options=options)
    else:
        run = getattr(module, op)
    assert f"turbojax_{name}" in lower_for_cuda(run, cache, *operands)


@pytest.mark.fuzz
@pytest.mark.parametrize("kind", ["4bit", "mixed"])
def test_interpreted_kernels_store_the_bits_of_plain_jax(kind):
    """A prompt longer than the rolling buffer, and tokens that fill it several times over."""
    key, value = tokens(PROMPT, 1), tokens(PROMPT, 2)
    want = store(new(kind), key, value, LENGTHS)
    with interpreted("triton"):
        got = store(new(kind), key, value, LENGTHS, implementation="triton")
    assert_same(got, want)
    want_out, want = step_by_step(want, *added())
    with interpreted("triton"):
        out, got = step_by_step(got, *added(), implementation="triton")
    assert_same(got, want)
    np.testing.assert_allclose(out, want_out, atol=2e-2)
    assert np.quantile(np.abs(np.asarray(out) - np.asarray(want_out)), 0.99) < 1e-5


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("kind", ["kv4", "k8v4"])
def test_interpreted_kernels_attend_as_plain_jax(kind):
    _, cache = step_by_step(prompted(kind), *added())
    query = tokens(1, 9, HEADS)
    decode = functools.partial(tj.decode, local_window_size=SIDES)
    want = decode(query, cache, implementation="xla")
    with interpreted("triton"):
        got = decode(query, cache, implementation="triton")
    np.testing.assert_allclose(got, want, atol=2e-2)
