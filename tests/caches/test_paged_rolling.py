"""Layers of pages with a window hold what it needs; pages copied and moved."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from tests.caches.cache_helpers import assert_same_bits
from tests.contracts.storage_helpers import assert_same_leaves
from tests.models.family_helpers import least
from turbojax import models, paged
from turbojax.app import startup
from turbojax.caches import AttentionOptions, init_layer_cache, kind_of
from turbojax.caches.paged import kind as layers
from turbojax.caches.paged import layer as paged_layer
from turbojax.caches.paged.pool import page_arrays
from turbojax.models.generation import caching
from turbojax.models.generation.saving import load_cache, load_session, save_cache, save_session
from turbojax.models.shapes import SHAPES

BATCH, HEADS, KV_HEADS, CHANNELS, PAGE = 3, 4, 2, 16, 16
WINDOW, MAX_LENGTH = 20, 400
OPTIONS = AttentionOptions(local_window_size=WINDOW)
# Longer than the rolling buffer of 176 tokens, shorter, none.
LENGTHS = np.array([300, 150, 0], np.int32)


def tokens(count, seed, heads=KV_HEADS, channels=CHANNELS, dtype=jnp.float32):
    x = np.random.default_rng(seed).normal(size=(BATCH, count, heads, channels))
    return jnp.asarray(x, dtype)


def new(kind, window=WINDOW, channels=CHANNELS, dtype=jnp.float32):
    sizes = (BATCH, MAX_LENGTH, KV_HEADS, channels)
    given = {"page_size": PAGE, "local_window_size": window}
    return layers.init_layer(*sizes, kind=kind, dtype=dtype, **given)


@functools.partial(jax.jit, static_argnames="options")
def prompt(layer, query, key, value, lengths, options=OPTIONS):
    given = {"key_value_seq_lengths": lengths, **options.arguments()}
    return tj.prefill(query, key, value, layer, **given)


@jax.jit
def steps(layer, query, key, value):
    """Token by token."""

    def step(layer, qkv):
        q, k, v = (x[:, None] for x in qkv)
        layer = layers.append(layer, k, v)
        return layer, tj.decode(q, layer, **OPTIONS.arguments())[:, 0]

    layer, out = jax.lax.scan(step, layer, [jnp.moveaxis(x, 1, 0) for x in (query, key, value)])
    return jnp.moveaxis(out, 0, 1), layer


def inputs(count, seed, *form):
    return (
        tokens(count, seed, HEADS, *form),
        tokens(count, seed + 1, KV_HEADS, *form),
        tokens(count, seed + 2, KV_HEADS, *form),
    )


def prompted(kind, window=WINDOW, *form):
    return prompt(new(kind, window, *form), *inputs(300, 0, *form), LENGTHS)


# What is held ------------------------------------------------------------------------------------


def test_mistrals_layers_hold_their_window_and_not_the_text():
    """Of 32k tokens: 4,096, a piece of a prompt, and a page that begins anew."""
    make = functools.partial(init_layer_cache, 2, 32768, 8, 128, kind="turbo4")
    whole = jax.eval_shape(make)
    held = jax.eval_shape(functools.partial(make, local_window_size=4096))
    assert (held.is_rolling, held.max_length, held.room) == (True, 32768, 66 * 64 + 1)
    assert (held.pages.num_pages, whole.pages.num_pages) == (2 * 67, 2 * 512)
    page = 2 * 8 * 64 * (64 + 2)
    assert whole.nbytes - held.nbytes == 2 * (512 - 67) * page
    assert not whole.is_rolling
    shorter = jax.eval_shape(
        lambda: init_layer_cache(2, 4096, 8, 128, kind="turbo4", local_window_size=4096)
    )
    assert (shorter.is_rolling, shorter.pages.num_pages) == (False, 2 * 64)


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("mistral-7b", 67 / 512),
        ("gemma-2-9b", (1 + 67 / 512) / 2),
        ("gemma-3-4b", (5 + 29 * 19 / 512) / 34),
    ],
)
def test_published_models_hold_a_fraction_of_32k_tokens(name, share):
    config = dataclasses.replace(SHAPES[name], max_length=32768)
    kinds = ("turbo4",) * config.num_layers
    sizes = (1, 32768, config.num_kv_heads, config.head_dim)

    def nbytes(window):
        layer = functools.partial(init_layer_cache, *sizes, kind="turbo4")
        return jax.eval_shape(functools.partial(layer, local_window_size=window)).nbytes

    held = sum(nbytes(window) for window in caching.windows_of_layers(config, kinds))
    assert held / (nbytes(None) * len(kinds)) == pytest.approx(share, rel=0.001)


# What is computed --------------------------------------------------------------------------------


@pytest.mark.fuzz
@pytest.mark.optimized
@pytest.mark.parametrize("kind", ["turbo4", "paged"])
def test_it_attends_as_a_layer_that_holds_all_tokens(kind):
    check_attention(kind)


@pytest.mark.quick(1)
@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["turbo4", "fp8_e4m3", "paged"])
def test_it_attends_on_a_gpu_as_a_layer_that_holds_all_tokens(kind):
    check_attention(kind, 128, jnp.bfloat16)


def check_attention(kind, *form):
    """Prompts in parts and single tokens after them, far past the buffer's end: the same bits."""
    found, held = prompted(kind, WINDOW, *form)
    want, whole = prompted(kind, None, *form)
    assert (held.is_rolling, held.rolling_pages, held.pages.num_pages) == (True, 11, 33)
    for b, length in enumerate(LENGTHS):
        same(found[b, :length], want[b, :length])
    assert held.lengths.tolist() == LENGTHS.tolist()
    got, after = steps(held, *inputs(70, 3, *form))
    want, _ = steps(whole, *inputs(70, 3, *form))
    same(got, want)
    assert after.lengths.tolist() == (LENGTHS + 70).tolist()
    assert int(after.pages.dropped_tokens) == 0
    # Several at once, as a speculative step has.
    real = np.array([9, 4, 9], np.int32)
    out, _ = prompt(held, *inputs(9, 6, *form), real)
    want, _ = prompt(whole, *inputs(9, 6, *form), real)
    same(out, want)


def same(a, b):
    np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def test_more_tokens_than_there_is_room_for_leave_the_newest():
    """As where something else attends to prompts: the cache is that of tokens one by one."""
    key, value = tokens(300, 1), tokens(300, 2)
    lengths = np.array([300, 180, 7], np.int32)
    at_once = jax.jit(layers.append)(new("paged"), key, value, lengths=lengths)
    eager = layers.append(new("paged"), key, value, lengths=lengths)
    assert_same_leaves(at_once, eager)
    for b, length in enumerate(lengths):
        first = max(length - 176, 0)
        position = np.arange(first, length)
        page = np.asarray(at_once.block_tables)[b, position // PAGE]
        got = np.asarray(at_once.pages.key)[page, :, position % PAGE]
        np.testing.assert_array_equal(got, key[b, first:length])
    assert int(at_once.pages.dropped_tokens) == 0


def test_what_no_window_reaches_any_more_is_forgotten():
    key = tokens(300, 1).at[0, 5].set(jnp.nan)
    _, held = prompt(new("paged"), tokens(300, 0, HEADS), key, tokens(300, 2), LENGTHS)
    out, _ = steps(held, *inputs(3, 3))
    assert np.isfinite(out).all()


def test_queries_that_would_see_what_is_gone_are_refused():
    _, held = prompted("paged")
    query = tokens(1, 3, HEADS)
    with pytest.raises(ValueError, match="a query sees all tokens, must see at most 20"):
        tj.decode(query, held)
    with pytest.raises(ValueError, match="a query sees 21 tokens, must see at most 20"):
        tj.decode(query, held, local_window_size=(20, 0))
    with pytest.raises(ValueError, match="150 query tokens must be at most 142"):
        tj.decode(tokens(150, 3, HEADS), held, **OPTIONS.arguments())
    with pytest.raises(ValueError, match="local_window_size=0 must be at least 1"):
        new("paged", 0)
    with pytest.raises(ValueError, match=r"lengths \[501, 351, 201\].*at most max_length=400"):
        prompt.__wrapped__(
            held, tokens(201, 0, HEADS), tokens(201, 1), tokens(201, 2), jnp.full(BATCH, 201)
        )


def test_windows_of_any_size_keep_what_new_tokens_see():
    """The first of `NEW_TOKENS` sees its window, wherever the newest page begins."""
    for window in (1, 2, 15, 16, 17, 100):
        for page_size in (16, 64):
            pages = paged_layer.rolling_pages(10**6, window, page_size)
            for length in range(1000, 1000 + page_size):
                oldest = (length - 1) // page_size - pages + 1
                assert length - paged_layer.NEW_TOKENS - window + 1 >= oldest * page_size


# Models ------------------------------------------------------------------------------------------

FAMILIES = {
    "mistral": least("mistral", sliding_window=WINDOW, head_dim=16),
    "gemma2": least("gemma2", sliding_window=WINDOW, head_dim=16),
}


@functools.cache
def model(family):
    config = dataclasses.replace(
        models.TransformerConfig.from_hf(FAMILIES[family]), max_length=1024
    )
    return models.random_decoder(config, dtype=jnp.float32, seed=3)


def started(family, kind):
    ids = np.random.default_rng(3).integers(0, 100, (2, 270))
    return models.start(
        model(family), ids, max_length=MAX_LENGTH, cache=kind, lengths=np.array([270, 40])
    )


@pytest.mark.fuzz
@pytest.mark.parametrize(("family", "kind"), [("gemma2", "turbo4"), ("mistral", "paged")])
def test_texts_are_those_of_caches_that_hold_all(family, kind, monkeypatch, tmp_path):
    """Of whole models, also from a file; and the caches hold what windows need, to the byte."""
    session = started(family, kind)
    windowed = [i % 2 == 0 or family == "mistral" for i in range(len(session.caches.layers))]
    assert [layer.is_rolling for layer in session.caches.layers] == windowed
    page = session.caches.layers[0].pages.page_bytes
    small = 2 * (4 * page + 4 * 7 + 5) + 4  # pages, table, length and overflow; dropped tokens
    large = 2 * (7 * page + 4 * 7 + 5) + 4
    assert session.caches.nbytes == sum(small if x else large for x in windowed)
    config = model(family).config
    assert session.caches.nbytes == startup.cache_bytes(
        config, np.dtype(np.float32), 2, MAX_LENGTH, kind
    )
    save_session(tmp_path / "session", session)
    loaded, _ = load_session(tmp_path / "session", model(family))
    assert jax.tree.structure(loaded.caches) == jax.tree.structure(session.caches)
    longer, _ = load_session(tmp_path / "session", model(family), max_length=500)
    texts = [np.stack(list(models.stream(x, 60))) for x in (session, loaded, longer)]
    monkeypatch.setattr(caching, "windows_of_layers", lambda _, kinds: (None,) * len(kinds))
    whole = started(family, kind)
    assert not any(layer.is_rolling for layer in whole.caches.layers)
    want = np.stack(list(models.stream(whole, 60)))
    for text in texts:
        np.testing.assert_array_equal(text, want)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("kind", ["turbo4", "fp8_e4m3"])
def test_a_layer_comes_back_from_a_file(tmp_path, kind):
    """Also where its pages do not lie in order, and as a rolling buffer that was none before."""
    sizes = {"num_kv_heads": 2, "head_dim": 16, "dtype": jnp.float32, "local_window_size": WINDOW}
    layer = functools.partial(init_layer_cache, 2, kind=kind, **sizes)
    key = tokens(230, 1)[:2]
    short, long = layer(max_length=240), layer(max_length=1000)
    assert (short.is_rolling, long.is_rolling) == (False, True)
    short, long = (kind_of(x).append(x, key, 2 * key) for x in (short, long))
    for cache, other in ((short, long), (long, short)):
        save_cache(tmp_path / "cache", cache)
        found, _ = load_cache(tmp_path / "cache", max_length=other.max_length)
        assert_same_leaves(found, other)
    long = kind_of(long).append(long, key, 3 * key)
    save_cache(tmp_path / "cache", long)
    found, _ = load_cache(tmp_path / "cache")
    assert_same_leaves(found, long)
    order = np.random.default_rng(0).permutation(long.pages.num_pages)
    pages = paged.write_pages(long.pages, order, paged.read_pages(long.pages, np.arange(8)))
    moved = dataclasses.replace(long, pages=pages, block_tables=order[long.block_tables])
    save_cache(tmp_path / "cache", moved)
    found, _ = load_cache(tmp_path / "cache")
    assert_same_leaves(found, long)


PAGES, SIZE, POOL_HEADS, HEAD_DIM = 8, 16, 2, 16
KV_DTYPES = ("auto", "fp8_e4m3", "fp8_e5m2", "int8", "turbo4", "k8v4", "turbo_k3v2")

copy = jax.jit(paged.copy_pages)
read = jax.jit(paged.read_pages)
write = jax.jit(paged.write_pages)


@functools.cache
def filled(kind):
    """A pool with random bits, without NaN: XLA for CPUs may drop its sign and payload."""
    cache = paged.init_cache(PAGES, SIZE, POOL_HEADS, HEAD_DIM, kv_dtype=kind, dtype=jnp.bfloat16)
    rng = np.random.default_rng(1)
    content = {}
    for name, x in page_arrays(cache).items():
        raw = rng.integers(0, 256, (*x.shape[:-1], x.shape[-1] * x.dtype.itemsize), np.uint8)
        numbers = raw.view(x.dtype)
        is_nan = np.isnan(numbers.astype(np.float32))
        content[name] = np.where(is_nan, np.ones((), x.dtype), numbers)
    return paged.write_pages(cache, np.arange(PAGES), content)


def bits(x):
    x = np.ascontiguousarray(np.asarray(x))
    return x.view({1: np.uint8, 2: np.uint16}[x.dtype.itemsize])


def arrays(cache):
    return {name: np.array(bits(x)) for name, x in page_arrays(cache).items()}


def assert_pages(cache, want):
    for name, x in arrays(cache).items():
        np.testing.assert_array_equal(x, want[name])


@pytest.mark.quick(2, slow=0)
@pytest.mark.parametrize("call", [copy, paged.copy_pages], ids=["jit", "eager"])
@pytest.mark.parametrize("kind", KV_DTYPES)
def test_copies_read_before_they_write(kind, call):
    """A chain 1 -> 2 -> 3 and a swap; padding on either side does nothing."""
    cache = filled(kind)
    want = {name: x.copy() for name, x in arrays(cache).items()}
    for x in want.values():
        x[[2, 3, 6, 5]] = x[[1, 2, 5, 6]]
    got = call(cache, np.array([1, 2, -1, 5, 6, 4, -1]), np.array([2, 3, 0, 6, 5, -1, 3]))
    assert_pages(got, want)
    assert int(got.dropped_tokens) == 0


@pytest.mark.quick(2, slow=0)
@pytest.mark.parametrize("kind", KV_DTYPES)
def test_content_is_moved_through_the_host(kind):
    """Out of one pool into another, as numpy arrays, in a fixed number with padding."""
    cache = filled(kind)
    pages = np.array([6, 0, 3, -1])
    content = jax.tree.map(np.asarray, read(cache, pages))
    for name, x in content.items():
        np.testing.assert_array_equal(bits(x)[:3], arrays(cache)[name][pages[:3]])
        is_integer = np.issubdtype(x.dtype, np.integer)
        assert not x[3].any() if is_integer else np.isnan(x[3].astype(np.float32)).all()
    empty = paged.init_cache(PAGES, SIZE, POOL_HEADS, HEAD_DIM, kv_dtype=kind, dtype=jnp.bfloat16)
    want = arrays(empty)
    for name, x in want.items():
        x[[1, 7, 2]] = arrays(cache)[name][[6, 0, 3]]
    for call in (write, paged.write_pages):
        got = call(empty, np.array([1, 7, 2, -1]), content)
        assert_pages(got, want)
        assert int(got.dropped_tokens) == 0


def test_a_number_outside_the_pool_under_jit():
    """Nothing of another page is read or written; tokens not stored are counted."""
    cache = filled("turbo4")
    got = copy(cache, np.array([PAGES, -2, 1, 2]), np.array([3, 4, PAGES, -3]))
    assert_pages(got, arrays(cache))
    assert int(got.dropped_tokens) == 4 * SIZE
    content = read(cache, np.array([PAGES, -2, -1, 2]))
    assert np.isnan(np.asarray(content["key_norm"][:3])).all()
    np.testing.assert_array_equal(content["value"][:3], 0)
    np.testing.assert_array_equal(bits(content["value"][3]), arrays(cache)["value"][2])
    got = write(cache, np.array([PAGES, -2, -1, 2]), content)
    assert_pages(got, arrays(cache))
    assert int(got.dropped_tokens) == 2 * SIZE


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["auto", "turbo4"])
def test_a_donated_pool_is_reused(kind):
    cache = paged.init_cache(2048, SIZE, POOL_HEADS, HEAD_DIM, kv_dtype=kind, dtype=jnp.float32)
    pages = jnp.arange(3)
    donate = functools.partial(jax.jit, donate_argnums=0)
    for lowered in (
        donate(paged.copy_pages).lower(cache, pages, pages + 3),
        donate(paged.write_pages).lower(cache, pages, paged.read_pages(cache, pages)),
    ):
        memory = lowered.compile().memory_analysis()
        assert memory.alias_size_in_bytes >= cache.nbytes - 16
        assert memory.temp_size_in_bytes < cache.nbytes // 16


PAIR = np.array([1, 2])
WRONG = {
    "source": (
        ValueError,
        lambda c: paged.copy_pages(c, PAIR + 6, PAIR),
        r"sources=\[7, 8\]",
    ),
    "wide source": (
        ValueError,
        lambda c: paged.copy_pages(c, PAIR + 2**32, PAIR),
        "sources holds 4294967297, must be within -2147483648..2147483647",
    ),
    "wide pages": (ValueError, lambda c: paged.read_pages(c, PAIR - 2**40), "pages holds -1099511"),
    "destination": (ValueError, lambda c: paged.copy_pages(c, PAIR, PAIR - 3), r"\[-2, -1\] must"),
    "twice": (ValueError, lambda c: paged.copy_pages(c, PAIR, PAIR * 0), "page 0 more than once"),
    "count": (ValueError, lambda c: paged.copy_pages(c, PAIR, PAIR[:1]), r"\(1,\) must be \[2\]"),
    "rank": (ValueError, lambda c: paged.read_pages(c, PAIR[None]), r"\(1, 2\) must be \[n\]"),
    "dtype": (TypeError, lambda c: paged.read_pages(c, PAIR * 1.0), "pages.dtype=float32"),
    "read": (ValueError, lambda c: paged.read_pages(c, PAIR + 7), r"pages=\[8, 9\] must be within"),
    "cache": (TypeError, lambda c: paged.read_pages(PAIR, PAIR), "must be a PagedCache"),
    "written twice": (
        ValueError,
        lambda c: paged.write_pages(c, PAIR * 0, paged.read_pages(c, PAIR)),
        "pages names page 0 more than once",
    ),
    "content": (
        ValueError,
        lambda c: paged.write_pages(c, PAIR, {"key": c.key[:2]}),
        r"content has \['key'\], must have \['key', 'key_norm', 'value', 'value_norm'\]",
    ),
    "shape": (
        ValueError,
        lambda c: paged.write_pages(c, PAIR, paged.read_pages(c, PAIR[:1])),
        r"content\['key'\].shape=\(1, 2, 16, 8\) must be \(2, 2, 16, 8\)",
    ),
    "content's dtype": (
        TypeError,
        lambda c: paged.write_pages(
            c, PAIR, {**paged.read_pages(c, PAIR), "key": np.zeros((2, 2, 16, 8), np.int8)}
        ),
        r"content\['key'\].dtype=int8 must be uint8",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_says_what_is_wrong(name):
    error, call, message = WRONG[name]
    with pytest.raises(error, match=message):
        call(filled("turbo4"))


def test_the_facade():
    assert paged.init_cache is paged.init_paged_cache
    assert paged.attention is paged.paged_attention
    cache = paged.init_cache(2, 16, 1, 32)
    content = paged.read_pages(cache, np.arange(2))
    assert_same_bits(paged.write_pages(cache, np.arange(2), content), cache)
