"""KV caches and sessions on disk: the same bits, few bytes, and refusals that say why."""

import dataclasses
import json

import cache_helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import save_file

import turbojax as tj
from turbojax import models
from turbojax.baselines import exact, kivi
from turbojax.cache import kv4
from turbojax.cache import storage as files
from turbojax.layer_cache import init_layer_cache, paged
from turbojax.layer_cache.kinds import take_sequences
from turbojax.models.caching import ModelCaches, init_caches
from turbojax.models.storage import load_cache, load_session, save_cache, save_session

MIXED = tj.TurboConfig(
    num_low_bit_key_heads=1,
    num_low_bit_value_heads=2,
    block_q=16,
    block_kv=16,
    buffer_size=32,
    softmax=tj.SAS(-5.0, "2"),
)
KINDS = {
    "exact": "exact",
    "kv4": "kv4",
    "4-bit": tj.TurboConfig(block_q=16, block_kv=16, buffer_size=16, softmax="exact"),
    "mixed": MIXED,
    **{kind: kind for kind in paged.PAGED_KINDS},
}
SOME = {name: KINDS[name] for name in ("exact", "kv4", "mixed", "turbo4")}
HEADS, HEAD_DIM = 4, 16
LENGTHS = (40, 0, 21)


def _tokens(count, seed=0, dtype=jnp.bfloat16, batch=3):
    shape = (batch, count, HEADS, HEAD_DIM)
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.normal(size=shape), dtype) for _ in range(2))


def _append(cache, key, value, lengths=None):
    lengths = None if lengths is None else jnp.asarray(lengths, jnp.int32)
    if isinstance(cache, tj.ProgressiveCache):
        return tj.append(cache, key, value, lengths=lengths)
    module = {exact.ExactCache: exact, kv4.Kv4Cache: kv4, paged.PagedLayer: paged}[type(cache)]
    return module.append(cache, key, value, lengths=lengths)


def _filled(kind, max_length=70, dtype=jnp.bfloat16):
    """A cache of ragged sequences, one of them empty, with a buffer in use."""
    cache = init_layer_cache(len(LENGTHS), max_length, HEADS, HEAD_DIM, kind=kind, dtype=dtype)
    cache = _append(cache, *_tokens(40, 1, dtype), lengths=LENGTHS)
    return _append(cache, *_tokens(3, 2, dtype), lengths=(3, 0, 2))


def _contents(cache):
    """Float32 keys and values [B, S, K, H], read without the code under test."""
    if isinstance(cache, exact.ExactCache):
        return [np.asarray(x, np.float32) for x in (cache.key, cache.value)]
    if isinstance(cache, kv4.Kv4Cache):
        key, value = kv4.dequantize(cache, dtype=jnp.float32)
    elif isinstance(cache, paged.PagedLayer):
        key, value = tj.paged.gather(
            cache.pages, cache.block_tables, cache.lengths, dtype=jnp.float32
        )
    else:
        key, value = tj.dequantize(cache, dtype=jnp.float32)
    return [np.asarray(key), np.asarray(value)]


def _assert_same_contents(one, other):
    np.testing.assert_array_equal(one.lengths, other.lengths)
    np.testing.assert_array_equal(one.overflowed, other.overflowed)
    for left, right in zip(_contents(one), _contents(other), strict=True):
        size = int(np.max(np.asarray(one.lengths)))
        assert np.any(left[:, :size] != 0)
        np.testing.assert_array_equal(left[:, :size], right[:, :size])


def _assert_same_leaves(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert left.dtype == right.dtype
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes()


# What comes back ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_cache_comes_back_and_goes_on_bit_for_bit(tmp_path, kind):
    path, cache = tmp_path / "cache.safetensors", _filled(kind)
    save_cache(path, cache, metadata={"prompt": "é\n"})
    loaded, metadata = load_cache(path)
    assert metadata == {"prompt": "é\n"}
    assert jax.tree.structure(loaded) == jax.tree.structure(cache)
    _assert_same_contents(loaded, cache)
    # 20 more tokens fill buffers and open pages: what is written next depends on all that is held.
    more = _tokens(20, 3)
    _assert_same_contents(_append(loaded, *more), _append(cache, *more))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("kind", [MIXED, "kv4", "turbo4", "paged"], ids=str)
def test_every_dtype_comes_back(tmp_path, kind, dtype):
    cache = _filled(kind, dtype=dtype)
    save_cache(tmp_path / "cache", cache)
    loaded, _ = load_cache(tmp_path / "cache")
    assert jax.tree.structure(loaded) == jax.tree.structure(cache)  # `dtype` and the config are in
    _assert_same_contents(loaded, cache)


@pytest.mark.parametrize("kind", SOME.values(), ids=SOME)
def test_an_empty_cache_comes_back(tmp_path, kind):
    cache = init_layer_cache(2, 70, HEADS, HEAD_DIM, kind=kind)
    save_cache(tmp_path / "cache", cache)
    _assert_same_leaves(load_cache(tmp_path / "cache")[0], cache)


@pytest.mark.parametrize("kind", ["exact", "4-bit", "kv4", "turbo4"])
def test_what_is_not_finite_comes_back(tmp_path, kind):
    key, value = _tokens(40, 4)
    key = key.at[0, 5, 1, 3].set(jnp.nan).at[2, 7, 0, 0].set(jnp.inf)
    cache = init_layer_cache(len(LENGTHS), 70, HEADS, HEAD_DIM, kind=KINDS[kind])
    cache = _append(cache, key, value, LENGTHS)
    save_cache(tmp_path / "cache", cache)
    loaded, _ = load_cache(tmp_path / "cache")
    assert not np.all(np.isfinite(_contents(cache)[0]))
    _assert_same_contents(loaded, cache)


def test_flags_and_universal_scales_come_back(tmp_path):
    cache = tj.init_cache(2, 16, HEADS, HEAD_DIM, config=MIXED, key_scale=jnp.full((2, HEADS), 0.5))
    cache = jax.jit(tj.append)(cache, *_tokens(20, 5, batch=2))  # past max_length
    assert np.all(cache.overflowed)
    save_cache(tmp_path / "cache", cache)
    _assert_same_leaves(load_cache(tmp_path / "cache")[0], cache)


def test_priorities_of_heads_come_back(tmp_path):
    cache = cache_helpers.used()
    assert np.any(np.asarray(cache.key.head_slots) != np.arange(cache_helpers.HEADS))
    save_cache(tmp_path / "cache", cache)
    loaded, _ = load_cache(tmp_path / "cache")
    np.testing.assert_array_equal(loaded.key.head_slots, cache.key.head_slots)
    np.testing.assert_array_equal(loaded.value.head_slots, cache.value.head_slots)
    _assert_same_contents(loaded, cache)


@pytest.mark.parametrize("kind", ["exact", "mixed", "kv4"])
def test_stacked_layers_come_back(tmp_path, kind):
    layers = [_filled(KINDS[kind]), _append(_filled(KINDS[kind]), *_tokens(9, 6))]
    save_cache(tmp_path / "cache", jax.tree.map(lambda *x: jnp.stack(x), *layers))
    loaded, _ = load_cache(tmp_path / "cache")
    for i, layer in enumerate(layers):
        _assert_same_contents(jax.tree.map(lambda x: x[i], loaded), layer)  # noqa: B023


def test_where_pages_lie_is_not_stored(tmp_path):
    layer = _filled("turbo4", 200)
    order = np.random.default_rng(0).permutation(layer.pages.num_pages)
    pages = jax.tree.map(
        lambda x: x if x.ndim == 0 else jnp.zeros_like(x).at[order].set(x), layer.pages
    )
    tables = jnp.asarray(order, jnp.int32)[layer.block_tables]
    # What stands past a sequence's pages may be anything.
    tables = tables.at[1].set(-1).at[0, -1].set(10_000)
    moved = dataclasses.replace(layer, pages=pages, block_tables=tables)
    save_cache(tmp_path / "cache", moved)
    loaded, _ = load_cache(tmp_path / "cache")
    np.testing.assert_array_equal(
        loaded.block_tables, np.arange(layer.pages.num_pages).reshape(layer.block_tables.shape)
    )
    _assert_same_contents(loaded, layer)


def test_part_of_a_layer_is_stored_without_the_rest_of_its_pool(tmp_path):
    layer = _filled("turbo4", 200)
    save_cache(tmp_path / "cache", take_sequences(layer, 2, 1))
    loaded, _ = load_cache(tmp_path / "cache")
    assert loaded.pages.num_pages == layer.block_tables.shape[1]
    for got, want in zip(_contents(loaded), _contents(layer), strict=True):
        np.testing.assert_array_equal(got[0, :23], want[2, :23])


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e5m2", "fp8_e4m3", "turbo4"])
def test_a_pool_comes_back_whole(tmp_path, kv_dtype):
    scales = {"key_scale": 0.5, "value_scale": 2.0} if kv_dtype.startswith("fp8") else {}
    seed = {"seed": 7} if kv_dtype == "turbo4" else {}
    pool = tj.init_paged_cache(6, 16, HEADS, HEAD_DIM, kv_dtype=kv_dtype, **scales, **seed)
    tables = jnp.array([[4, 1], [0, 3]])
    pool = tj.paged.append(pool, *_tokens(20, 7, batch=2), tables, jnp.zeros(2, jnp.int32))
    save_cache(tmp_path / "cache", pool)
    _assert_same_leaves(load_cache(tmp_path / "cache")[0], pool)
    with pytest.raises(ValueError, match="max_length=9 must be None"):
        load_cache(tmp_path / "cache", max_length=9)


# Room --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SOME.values(), ids=SOME)
def test_only_what_is_held_takes_space(tmp_path, kind):
    sizes = []
    for max_length in (64, 4096):
        save_cache(tmp_path / "cache", _filled(kind, max_length))
        sizes.append((tmp_path / "cache").stat().st_size)
    # The descriptions differ by digits.
    assert abs(sizes[0] - sizes[1]) < 32
    held = 4 * HEADS * HEAD_DIM * sum(LENGTHS) + 4 * HEADS * HEAD_DIM * 5  # in bfloat16
    overhead = 8192  # the description and, for small blocks, their scales
    assert sizes[0] < held + overhead


@pytest.mark.parametrize("kind", SOME.values(), ids=SOME)
def test_a_loaded_cache_may_have_more_room(tmp_path, kind):
    save_cache(tmp_path / "cache", _filled(kind, 70))
    loaded, _ = load_cache(tmp_path / "cache", max_length=300)
    assert loaded.max_length == 300
    more = _tokens(150, 8)
    _assert_same_contents(_append(loaded, *more), _append(_filled(kind, 300), *more))


@pytest.mark.parametrize("kind", SOME.values(), ids=SOME)
def test_it_may_have_less_room_but_not_too_little(tmp_path, kind):
    save_cache(tmp_path / "cache", _filled(kind, 300))
    loaded, _ = load_cache(tmp_path / "cache", max_length=43)
    assert loaded.max_length == 43
    _assert_same_contents(loaded, _filled(kind, 300))
    with pytest.raises(ValueError, match=r"lengths=\[43, 0, 23\].*max_length=42"):
        load_cache(tmp_path / "cache", max_length=42)
    with pytest.raises(ValueError, match="max_length=0"):
        load_cache(tmp_path / "cache", max_length=0)


# Refusals ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    path = tmp_path_factory.mktemp("stored") / "cache.safetensors"
    save_cache(path, _filled(MIXED), metadata={"model": "a"})
    return path


def _rewrite(source, target, *, change=lambda content: None, arrays=lambda x: None, **header):
    """A copy of a file with other metadata and arrays, whose fingerprint is right."""
    with safe_open(source, framework="np") as file:
        metadata = {**file.metadata(), **header}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    content = json.loads(metadata["content"])
    arrays(tensors)
    change(content)
    for name, x in tensors.items():
        if name in content["arrays"]:
            content["arrays"][name] = files._summary(x)
    metadata["content"] = json.dumps(content)
    metadata["fingerprint"] = files.hashlib.sha256(metadata["content"].encode()).hexdigest()
    save_file(tensors, target, metadata=metadata)
    return target


def test_a_file_that_is_cut_off_is_refused(stored, tmp_path):
    content = stored.read_bytes()
    path = tmp_path / "cut"
    for size in (0, 4, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match=r"cut is cut off, or no safetensors file"):
            load_cache(path)


def test_every_changed_byte_is_noticed(stored, tmp_path):
    content = bytearray(stored.read_bytes())
    path = tmp_path / "changed"
    rng = np.random.default_rng(0)
    for place in rng.integers(8, len(content), 60):
        changed = bytearray(content)
        changed[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(changed)
        # A name of an array outside of the fingerprinted text may change, too.
        with pytest.raises(ValueError, match="changed"):
            load_cache(path)


def test_something_else_is_refused(stored, tmp_path):
    other = tmp_path / "other"
    save_file({"x": np.zeros(3, np.float32)}, other)
    with pytest.raises(ValueError, match="other is no stored cache: its format is None"):
        load_cache(other)
    other.write_text("text, which is longer than eight bytes")
    with pytest.raises(ValueError, match="other is cut off, or no safetensors file"):
        load_cache(other)
    with pytest.raises(FileNotFoundError, match="missing"):
        load_cache(tmp_path / "missing")
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        load_cache(tmp_path)
    _rewrite(stored, other, version="2")
    with pytest.raises(ValueError, match="other has version '2', this turbojax reads '1'"):
        load_cache(other)


def test_a_rewritten_file_must_be_consistent(stored, tmp_path):
    path = tmp_path / "rewritten"
    assert load_cache(_rewrite(stored, path))[1] == {"model": "a"}

    def refused(match, **changes):
        _rewrite(stored, path, **changes)
        with pytest.raises(ValueError, match=match) as caught:
            load_cache(path)
        assert str(path) in str(caught.value)

    def drop(content):
        del content["arrays"]["lengths"]

    def add(tensors):
        tensors["more"] = np.zeros(2, np.int8)

    def declare(content):
        content["arrays"]["more"] = None

    refused("its metadata and its arrays differ in", change=drop)
    refused("lacks lengths", change=drop, arrays=lambda x: x.pop("lengths"))
    refused("its metadata and its arrays differ in", arrays=add)
    refused(r"holds \['more'\] beyond what it describes", arrays=add, change=declare)

    def replace(name, make):
        return lambda tensors: tensors.update({name: make(tensors[name])})

    refused("lengths is int64", arrays=replace("lengths", lambda x: x.astype(np.int64)))
    refused("key.buffer is int8.* must be", arrays=replace("key.buffer", lambda x: x[:-1]))
    refused("head_slots.*permutations", arrays=replace("key.head_slots", np.zeros_like))
    refused("not be negative", arrays=replace("lengths", lambda x: x - 100))
    refused("lengths=.*max_length=70", arrays=replace("lengths", lambda x: x + 1000))
    refused("buffer_lengths=.*below 32", arrays=replace("buffer_lengths", lambda x: x + 32))

    def describe(**changes):
        return lambda content: content["description"].update(changes)

    refused("describes no cache", change=describe(kind="other"))
    refused("describes no cache", change=describe(batch_size=0))
    refused("describes no cache", change=describe(dtype="int3"))
    refused("describes no cache", change=describe(config={"softmax": "exact", "unknown": 1}))
    refused("must be", change=describe(num_kv_heads=8))


def test_like_must_fit(stored):
    wanted = _filled(MIXED, 200)
    loaded, _ = load_cache(stored, like=wanted)
    assert loaded.max_length == 200
    abstract = jax.eval_shape(lambda: wanted)
    _assert_same_leaves(load_cache(stored, like=abstract)[0], loaded)

    def refused(match, **changes):
        sizes = {"batch_size": 3, "max_length": 70, "num_kv_heads": HEADS, "head_dim": HEAD_DIM}
        like = init_layer_cache(**{**sizes, "kind": MIXED, **changes})
        with pytest.raises(ValueError, match=match) as caught:
            load_cache(stored, like=like)
        assert str(stored) in str(caught.value)

    refused("batch_size=3, not 2", batch_size=2)
    refused("num_kv_heads=4, not 8", num_kv_heads=8)
    refused("head_dim=16, not 32", head_dim=32)
    refused("dtype='bfloat16', not 'float32'", dtype=jnp.float32)
    refused("config=", kind=dataclasses.replace(MIXED, mode="float"))
    refused("'kv4'", kind="kv4")
    refused("max_length=42", max_length=42)
    with pytest.raises(ValueError, match="`like`, which has its own"):
        load_cache(stored, like=wanted, max_length=70)
    with pytest.raises(TypeError, match="cache is a str"):
        load_cache(stored, like="exact")


def test_what_cannot_be_stored_is_refused(tmp_path):
    path = tmp_path / "cache"
    for cache in (None, {"key": jnp.zeros(3)}, kivi):
        with pytest.raises(TypeError, match="must be one of ExactCache"):
            save_cache(path, cache)
    cache = _filled("exact")
    with pytest.raises(ValueError, match="under jit"):
        jax.jit(lambda cache: save_cache(path, cache))(cache)
    for metadata in ("text", {"a": 1}, {1: "a"}):
        with pytest.raises(TypeError, match="metadata"):
            save_cache(path, cache, metadata=metadata)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        save_cache(tmp_path / "nowhere" / "cache", cache)
    stack = jax.tree.map(lambda x: jnp.stack([x, x]), _filled("turbo4"))
    with pytest.raises(ValueError, match="stacked"):
        save_cache(path, stack)
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file(stored, tmp_path, monkeypatch):
    path = tmp_path / "cache"
    save_cache(path, _filled("exact"))
    before = path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o644

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        save_cache(path, _filled("kv4"))
    assert path.read_bytes() == before
    assert [x.name for x in tmp_path.iterdir()] == ["cache"]


def _fingerprint(path):
    with safe_open(path, framework="np") as file:
        return file.metadata()["fingerprint"]


def test_the_same_contents_have_the_same_fingerprint(tmp_path):
    cache = _filled("kv4")
    # Garbage past the lengths is no content.
    past = jnp.arange(cache.key_codes.shape[2])[None, :] >= cache.lengths[:, None]
    noisy = dataclasses.replace(
        cache, key_codes=jnp.where(past[:, None, :, None], jnp.uint8(77), cache.key_codes)
    )
    other = dataclasses.replace(cache, key_codes=cache.key_codes.at[0, 0, 0, 0].add(jnp.uint8(1)))
    for name, x in (("cache", cache), ("noisy", noisy), ("other", other)):
        save_cache(tmp_path / name, x)
    assert _fingerprint(tmp_path / "cache") == _fingerprint(tmp_path / "noisy")
    assert _fingerprint(tmp_path / "cache") != _fingerprint(tmp_path / "other")


# Models ------------------------------------------------------------------------------------------

CONFIG = models.LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_length=256,
)
PROMPTS = np.random.default_rng(3).integers(0, 64, (2, 40))


def _model(config=CONFIG, seed=0, dtype=jnp.float32):
    # Compute in float32: tokens drawn from a random model differ, so that a wrong cache shows.
    return models.random_decoder(config, dtype=dtype, seed=seed)


@pytest.fixture(scope="module")
def model():
    return _model()


def _started(model, kind, max_length=80):
    return models.start(
        model,
        jnp.asarray(PROMPTS),
        max_length=max_length,
        cache=kind,
        lengths=jnp.array([40, 23]),
    )


def _next(session, count=24, **options):
    return np.stack(list(models.stream(session, count, **options)))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_generation_goes_on_from_a_file(tmp_path, model, kind):
    path = tmp_path / "session"
    session = _started(model, kind)
    for token in (5, 9):  # a little way into the answer
        session = session.step(jnp.array([token, token + 1]))
    save_session(path, session, metadata={"prompt": "numbers"})
    loaded, metadata = load_session(path, model)
    assert metadata == {"prompt": "numbers"}
    assert (loaded.longest, loaded.caches.max_length) == (42, 80)
    np.testing.assert_array_equal(loaded.logits, session.logits)
    sampling = models.Sampling(temperature=1.0, top_k=20, seed=7)
    sampled = _next(loaded, sampling=sampling)
    np.testing.assert_array_equal(sampled, _next(session, sampling=sampling))
    assert len(np.unique(sampled)) > 8
    greedy = _next(load_session(path, model)[0])
    session = _started(model, kind)
    for token in (5, 9):
        session = session.step(jnp.array([token, token + 1]))
    np.testing.assert_array_equal(greedy, _next(session))


def test_a_session_may_get_more_room(tmp_path, model):
    save_session(tmp_path / "session", _started(model, "exact", 41))
    session, _ = load_session(tmp_path / "session", model, max_length=80)
    np.testing.assert_array_equal(_next(session), _next(_started(model, "exact", 80)))
    with pytest.raises(ValueError, match="max_length=257 must be at most the model's 256"):
        load_session(tmp_path / "session", model, max_length=257)
    with pytest.raises(ValueError, match="max_length=39"):
        load_session(tmp_path / "session", model, max_length=39)


def test_a_session_takes_the_model_it_was_made_with(tmp_path, model):
    path = tmp_path / "session"
    save_session(path, _started(model, "turbo4"))
    with pytest.raises(ValueError, match=r"session is of a model of this shape with other weights"):
        load_session(path, _model(seed=1))
    with pytest.raises(ValueError, match="dtype=float32, not bfloat16"):
        load_session(path, _model(dtype=jnp.bfloat16))
    for change in ({"num_layers": 3}, {"rope_theta": 5000.0}, {"num_kv_heads": 4}):
        name = next(iter(change))
        with pytest.raises(ValueError, match=f"is of another model: {name}="):
            load_session(path, _model(dataclasses.replace(CONFIG, **change)))
    with pytest.raises(ValueError, match=r"holds a session: tj.models.load_session reads it"):
        load_cache(path)


def test_a_stacked_and_a_quantized_model_have_sessions(tmp_path):
    path = tmp_path / "session"
    llama = models.Llama(CONFIG, rngs=nnx.Rngs(0))
    save_session(path, _started(llama, "kv4"))
    loaded, _ = load_session(path, llama)
    np.testing.assert_array_equal(_next(loaded, 5), _next(_started(llama, "kv4"), 5))
    config = dataclasses.replace(CONFIG, hidden_size=128, intermediate_size=128, head_dim=32)
    quantized = models.random_quantized_decoder(config)
    save_session(path, _started(quantized, "kv4"))
    loaded, _ = load_session(path, quantized)
    np.testing.assert_array_equal(_next(loaded, 5), _next(_started(quantized, "kv4"), 5))
    with pytest.raises(ValueError, match="class=QuantizedDecoder, not Decoder"):
        load_session(path, _model(config))


@pytest.mark.parametrize("kind", ["exact", "mixed", "turbo4"])
def test_caches_of_a_model_come_back(tmp_path, model, kind):
    path = tmp_path / "caches"
    caches = _started(model, KINDS[kind]).caches
    save_cache(path, caches)
    loaded, _ = load_cache(path, like=init_caches(model, 2, 120, KINDS[kind]))
    assert isinstance(loaded, ModelCaches)
    assert loaded.max_length == 120
    for one, other in zip(loaded.layers, caches.layers, strict=True):
        _assert_same_contents(one, other)
    deeper = dataclasses.replace(CONFIG, num_layers=3)
    with pytest.raises(ValueError, match=r"with 2 layers, `like` is one of kind 'model' with 3"):
        load_cache(path, like=init_caches(_model(deeper), 2, 80, KINDS[kind]))
    with pytest.raises(ValueError, match="kind 'model'"):
        load_cache(path, like=caches.layers[0])
    with pytest.raises(ValueError, match="holds no session but a cache"):
        load_session(path, model)


def test_sessions_are_checked(tmp_path, model):
    with pytest.raises(TypeError, match="session is a ModelCaches"):
        save_session(tmp_path / "session", _started(model, "exact").caches)
    save_session(tmp_path / "session", _started(model, "exact"))

    def refused(match, arrays):
        _rewrite(tmp_path / "session", tmp_path / "other", arrays=arrays)
        with pytest.raises(ValueError, match=match):
            load_session(tmp_path / "other", model)

    refused("logits is float32", lambda x: x.update(logits=x["logits"][:, 1:].copy()))
    refused(
        r"lengths=\[41, 23\] must be \[40, 23\]",
        lambda x: x.update(lengths=np.array([41, 23], np.int32)),
    )
