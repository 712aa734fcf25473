"""Models whose layers have windows hold what these need: bytes, texts, files, Flax's module."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import turbojax as tj
from tests.contracts.storage_helpers import assert_same_leaves, rewrite
from tests.models.family_helpers import least
from turbojax import models
from turbojax.app import startup
from turbojax.caches import init_layer_cache, kind_of
from turbojax.flax import AttentionOptions, TurboAttention
from turbojax.models.generation import caching
from turbojax.models.generation.saving import load_cache, load_session, save_cache, save_session
from turbojax.models.shapes import SHAPES

WINDOW, ROOM, MAX_LENGTH, BATCH = 20, 48, 192, 2
FOUR_BITS = tj.TurboConfig(block_q=16, block_kv=16, buffer_size=16)
KINDS = {"exact": "exact", "kv4": "kv4", "4bit": FOUR_BITS}
FAMILIES = {
    "mistral": (least("mistral", sliding_window=WINDOW, head_dim=16), (True, True)),
    "gemma2": (least("gemma2", sliding_window=WINDOW, head_dim=16), (True, False)),
    "gemma3": (
        least("gemma3_text", sliding_window=WINDOW, sliding_window_pattern=2, head_dim=16),
        (True, False),
    ),
}


@functools.cache
def model(family):
    config = models.TransformerConfig.from_hf(FAMILIES[family][0])
    return models.random_decoder(config, dtype=jnp.float32, seed=3)


def prompts(size=60):
    return np.random.default_rng(3).integers(0, 100, (BATCH, size)), np.array([size, 23])


def started(family, kind="exact", max_length=MAX_LENGTH):
    tokens, lengths = prompts()
    return models.start(
        model(family), tokens, max_length=max_length, cache=KINDS[kind], lengths=lengths
    )


@pytest.fixture
def whole(monkeypatch):
    """Makes caches that hold all tokens of every layer, from when it is called."""

    def hold_all():
        monkeypatch.setattr(caching, "windows_of_layers", lambda _, kinds: (None,) * len(kinds))

    return hold_all


# What is held ------------------------------------------------------------------------------------


@pytest.mark.quick(4, slow=0)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_layers_with_windows_hold_what_these_need(family, kind):
    """To the byte: a window of 20 tokens and 15 more, in units of 16 (kv4: 128)."""
    make = functools.partial(caching.init_caches, model(family), BATCH, 4096, KINDS[kind])
    caches = jax.eval_shape(make)
    sizes = (BATCH, 4096, 2, 16)
    layer = functools.partial(init_layer_cache, *sizes, kind=KINDS[kind], dtype=jnp.float32)
    held, full = jax.eval_shape(lambda: layer(local_window_size=WINDOW)), jax.eval_shape(layer)
    windowed = FAMILIES[family][1]
    assert [x.is_rolling for x in caches.layers] == list(windowed)
    assert caches.nbytes == sum(held.nbytes if x else full.nbytes for x in windowed)
    assert caches.max_length == 4096
    per_token = {"exact": 2 * 16 * 4, "kv4": 2 * (8 + 2), "4bit": 2 * (8 + 2 + 0.25)}[kind]
    constant = BATCH * (9 if kind == "4bit" else 5)  # lengths, overflow
    if kind == "4bit":  # slots, buffers and their scales
        constant += BATCH * 2 * 2 * (4 + 16 * 16 + 4)
    room = 128 if kind == "kv4" else ROOM
    assert held.nbytes == BATCH * 2 * room * per_token + constant
    assert caches.nbytes == startup.cache_bytes(
        model(family).config, np.dtype(np.float32), BATCH, 4096, KINDS[kind]
    )


@pytest.mark.parametrize(
    ("name", "kind", "share"),
    [
        ("mistral-7b", "exact", 4112 / 32768),
        # Blocks, and a buffer of two in 8 bits.
        ("mistral-7b", tj.TurboConfig(), (65 + 2 * 8 / 4.25) / (512 + 2 * 8 / 4.25)),
        ("gemma-2-9b", "exact", (1 + 4112 / 32768) / 2),
        ("gemma-3-4b", "exact", (5 + 29 * 1040 / 32768) / 34),
    ],
    ids=str,
)
def test_published_models_hold_a_fraction_of_32k_tokens(name, kind, share):
    config = dataclasses.replace(SHAPES[name], max_length=32768)
    sizes = (1, 32768, config.num_kv_heads, config.head_dim)
    windows = caching.windows_of_layers(config, (kind,) * config.num_layers)

    def nbytes(window):
        layer = functools.partial(init_layer_cache, *sizes, kind=kind, local_window_size=window)
        return jax.eval_shape(layer).nbytes

    held = sum(nbytes(w) for w in windows)
    assert held / (nbytes(None) * len(windows)) == pytest.approx(share, rel=0.03)


# What is computed --------------------------------------------------------------------------------


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize(
    ("family", "kind"),
    [("gemma2", "exact"), ("mistral", "4bit"), ("gemma3", "kv4"), ("mistral", "exact")],
)
def test_texts_and_logits_are_those_of_caches_that_hold_all(family, kind, whole):
    """Far past the rolling buffer's end; the 4-bit and kv4 kinds to the bit in plain JAX."""

    def run():
        session, logits, tokens = started(family, kind), [], []
        nbytes = session.caches.nbytes
        for _ in range(100):
            logits.append(session.logits)
            tokens.append(jnp.argmax(session.logits, axis=-1))
            session = session.step(tokens[-1])
        return np.stack(logits), np.stack(tokens), nbytes, session

    got, texts, nbytes, session = run()
    whole()
    want, expected, all_bytes, _ = run()
    assert nbytes < all_bytes
    assert session.lengths.tolist() == [160, 123]
    np.testing.assert_array_equal(texts, expected)
    if kind == "exact":
        np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max())
    else:
        np.testing.assert_array_equal(got, want)


@pytest.mark.slow
def test_generate_and_stream_go_through_rolling_buffers():
    tokens, lengths = prompts()
    found = models.generate(model("mistral"), tokens, max_new_tokens=60, lengths=lengths)
    streamed = np.stack(list(models.stream(started("mistral"), 60)), axis=1)
    np.testing.assert_array_equal(found, streamed)


# Files -------------------------------------------------------------------------------------------


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("kind", ["exact", "4bit", "kv4"])
def test_a_session_goes_on_from_a_file(tmp_path, kind):
    session = started("gemma2", kind)
    save_session(tmp_path / "session", session)
    loaded, _ = load_session(tmp_path / "session", model("gemma2"))
    assert jax.tree.structure(loaded.caches) == jax.tree.structure(session.caches)
    longer, _ = load_session(tmp_path / "session", model("gemma2"), max_length=300)
    assert longer.caches.layers[0].nbytes == loaded.caches.layers[0].nbytes
    texts = [np.stack(list(models.stream(x, 60))) for x in (session, loaded, longer)]
    np.testing.assert_array_equal(texts[1], texts[0])
    np.testing.assert_array_equal(texts[2], texts[0])


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("kind", ["exact", "4bit"])
def test_a_short_text_may_get_room_for_a_long_one_and_back(tmp_path, kind):
    """What is no rolling buffer yet becomes one, and the other way round."""
    layer = functools.partial(
        init_layer_cache, 1, num_kv_heads=2, head_dim=16, kind=KINDS[kind], dtype=jnp.float32
    )
    key = np.random.default_rng(0).normal(size=(1, 30, 2, 16)).astype(np.float32)
    short, long = (layer(max_length=x, local_window_size=WINDOW) for x in (32, 400))
    short, long = (kind_of(x).append(x, key, 2 * key) for x in (short, long))
    assert (short.is_rolling, long.is_rolling) == (False, True)
    for cache, other in ((short, long), (long, short)):
        save_cache(tmp_path / "cache", cache)
        found, _ = load_cache(tmp_path / "cache", max_length=other.max_length)
        assert_same_leaves(found, other)
        found, _ = load_cache(tmp_path / "cache", like=jax.eval_shape(lambda x=other: x))
        assert_same_leaves(found, other)
    with pytest.raises(ValueError, match="must be at most max_length=29"):
        load_cache(tmp_path / "cache", max_length=29)


def test_files_from_before_there_were_rolling_buffers_load(tmp_path):
    """They hold all tokens and say nothing of a window; so do new ones without one."""
    whole = init_layer_cache(1, 64, 2, 16, kind="exact", dtype=jnp.float32)
    save_cache(tmp_path / "cache", whole)

    def says_nothing(content):
        assert "local_window_size" not in str(content)

    rewrite(tmp_path / "cache", tmp_path / "same", change=says_nothing)
    found, _ = load_cache(tmp_path / "same")
    assert (found.is_rolling, found.window) == (False, None)
    wanted = init_layer_cache(1, 64, 2, 16, kind="exact", dtype=jnp.float32, local_window_size=20)
    with pytest.raises(ValueError, match="has local_window_size=None, not 20"):
        load_cache(tmp_path / "cache", like=wanted)


@pytest.mark.parametrize("window", [0, -3, 2**40, "20", None, 1.5, True, [20]])
def test_hostile_windows_in_files_are_refused(tmp_path, window):
    cache = init_layer_cache(1, 400, 2, 16, kind="exact", dtype=jnp.float32, local_window_size=20)
    save_cache(tmp_path / "cache", cache)

    def change(content):
        found = [x for x in (content, *content.values()) if isinstance(x, dict)]
        for x in found:
            if "local_window_size" in x:
                x["local_window_size"] = window

    rewrite(tmp_path / "cache", tmp_path / "hostile", change=change)
    with pytest.raises(ValueError, match="hostile"):
        load_cache(tmp_path / "hostile")


# Flax's module -----------------------------------------------------------------------------------


@pytest.mark.fuzz
@pytest.mark.parametrize("kind", ["exact", "4bit"])
def test_the_module_holds_its_window_and_takes_any_number_of_tokens(kind):
    attention = TurboAttention(
        32,
        num_heads=4,
        num_kv_heads=2,
        cache=KINDS[kind],
        options=AttentionOptions(local_window_size=WINDOW),
        rngs=nnx.Rngs(0),
    )
    attention.init_cache(batch_size=1, max_length=400)
    assert attention.cache.is_rolling
    assert attention.cache.room == ROOM
    x = jax.random.normal(jax.random.key(0), (1, 150, 32))
    out = [attention.prefill(x[:, :100]), attention.decode(x[:, 100:101])]
    out.append(attention.decode(x[:, 101:]))
    got, want = jnp.concatenate(out, axis=1), attention(x)
    if kind == "exact":
        np.testing.assert_allclose(got, want, atol=1e-5)
    else:
        assert jnp.linalg.norm(got - want) < 0.2 * jnp.linalg.norm(want)
    assert attention.cache.lengths.tolist() == [150]
