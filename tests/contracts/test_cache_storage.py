"""KV caches on disk: the same bits, few bytes, and refusals that say why."""

import dataclasses
import os
import stat

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

import turbojax as tj
from tests.caches import cache_helpers
from tests.contracts.storage_helpers import (
    HEAD_DIM,
    HEADS,
    KINDS,
    LENGTHS,
    MIXED,
    SOME,
    append,
    assert_same_contents,
    assert_same_leaves,
    contents,
    filled,
    rewrite,
    tokens,
)
from turbojax.caches import init_layer_cache
from turbojax.caches import stored_file as files
from turbojax.caches.comparison import kivi
from turbojax.caches.kinds import take_sequences
from turbojax.models.generation.saving import load_cache, save_cache

# What comes back ---------------------------------------------------------------------------------


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize(
    "name",
    [
        "exact",
        "kv4",
        "k8v4",
        "mixed",
        "fp8_e5m2",
        "turbo4",
        "paged_k8v4",
        "paged_int8",
        "turbo_k3v2",
    ],
)
def test_a_cache_comes_back_and_goes_on_bit_for_bit(tmp_path, name):
    path, cache = tmp_path / "cache.safetensors", filled(KINDS[name])
    save_cache(path, cache, metadata={"prompt": "é\n"})
    loaded, metadata = load_cache(path)
    assert metadata == {"prompt": "é\n"}
    assert jax.tree.structure(loaded) == jax.tree.structure(cache)
    assert_same_contents(loaded, cache)
    # 20 more tokens fill buffers and open pages: what is written next depends on all that is held.
    more = tokens(20, 3)
    assert_same_contents(append(loaded, *more), append(cache, *more))


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("paged", jnp.float32),
        (MIXED, jnp.float16),
        ("kv4", jnp.float32),
        ("turbo4", jnp.float16),
    ],
    ids=str,
)
def test_other_dtypes_come_back(tmp_path, kind, dtype):
    cache = filled(kind, dtype=dtype)
    save_cache(tmp_path / "cache", cache)
    loaded, _ = load_cache(tmp_path / "cache")
    assert jax.tree.structure(loaded) == jax.tree.structure(cache)  # `dtype` and the config are in
    assert_same_contents(loaded, cache)


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("kind", SOME.values(), ids=SOME)
def test_an_empty_cache_comes_back(tmp_path, kind):
    cache = init_layer_cache(2, 70, HEADS, HEAD_DIM, kind=kind)
    save_cache(tmp_path / "cache", cache)
    assert_same_leaves(load_cache(tmp_path / "cache")[0], cache)


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("kind", ["exact", "mixed", "kv4", "turbo4"])
def test_what_is_not_finite_comes_back(tmp_path, kind):
    key, value = tokens(40, 4)
    key = key.at[0, 5, 1, 3].set(jnp.nan).at[2, 7, 0, 0].set(jnp.inf)
    cache = init_layer_cache(len(LENGTHS), 70, HEADS, HEAD_DIM, kind=KINDS[kind])
    cache = append(cache, key, value, LENGTHS)
    save_cache(tmp_path / "cache", cache)
    loaded, _ = load_cache(tmp_path / "cache")
    assert not np.all(np.isfinite(contents(cache)[0]))
    assert_same_contents(loaded, cache)


@pytest.mark.slow
def test_flags_and_universal_scales_come_back(tmp_path):
    cache = tj.init_cache(2, 16, HEADS, HEAD_DIM, config=MIXED, key_scale=jnp.full((2, HEADS), 0.5))
    cache = jax.jit(tj.append)(cache, *tokens(20, 5, batch=2))  # past max_length
    assert np.all(cache.overflowed)
    save_cache(tmp_path / "cache", cache)
    assert_same_leaves(load_cache(tmp_path / "cache")[0], cache)


def test_priorities_of_heads_come_back(tmp_path):
    cache = cache_helpers.used()
    assert np.any(np.asarray(cache.key.head_slots) != np.arange(cache_helpers.HEADS))
    save_cache(tmp_path / "cache", cache)
    loaded, _ = load_cache(tmp_path / "cache")
    np.testing.assert_array_equal(loaded.key.head_slots, cache.key.head_slots)
    np.testing.assert_array_equal(loaded.value.head_slots, cache.value.head_slots)
    assert_same_contents(loaded, cache)


@pytest.mark.fuzz
@pytest.mark.parametrize("kind", ["exact", "mixed"])
def test_stacked_layers_come_back(tmp_path, kind):
    layers = [filled(KINDS[kind]), append(filled(KINDS[kind]), *tokens(9, 6))]
    save_cache(tmp_path / "cache", jax.tree.map(lambda *x: jnp.stack(x), *layers))
    loaded, _ = load_cache(tmp_path / "cache")
    for i, layer in enumerate(layers):
        assert_same_contents(jax.tree.map(lambda x: x[i], loaded), layer)  # noqa: B023


@pytest.mark.slow
def test_where_pages_lie_is_not_stored(tmp_path):
    layer = filled("turbo4", 300)
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
    assert_same_contents(loaded, layer)


@pytest.mark.slow
def test_part_of_a_layer_is_stored_without_the_rest_of_its_pool(tmp_path):
    layer = filled("turbo4")
    save_cache(tmp_path / "cache", take_sequences(layer, 2, 1))
    loaded, _ = load_cache(tmp_path / "cache")
    assert loaded.pages.num_pages == layer.block_tables.shape[1]
    for got, want in zip(contents(loaded), contents(layer), strict=True):
        np.testing.assert_array_equal(got[0, :23], want[2, :23])


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize(
    "kv_dtype", ["auto", "fp8_e5m2", "fp8_e4m3", "int8", "turbo4", "k8v4", "turbo_k4v2"]
)
def test_a_pool_comes_back_whole(tmp_path, kv_dtype):
    scales = {"key_scale": 0.5, "value_scale": 2.0} if kv_dtype.startswith("fp8") else {}
    scales |= {"key_scale": 0.5} if kv_dtype == "k8v4" else {}
    seed = {} if kv_dtype.startswith(("auto", "fp8", "int8")) else {"seed": 7}
    pool = tj.init_paged_cache(6, 16, HEADS, HEAD_DIM, kv_dtype=kv_dtype, **scales, **seed)
    tables = jnp.array([[4, 1], [0, 3]])
    pool = tj.paged.append(pool, *tokens(20, 7, batch=2), tables, jnp.zeros(2, jnp.int32))
    save_cache(tmp_path / "cache", pool)
    assert_same_leaves(load_cache(tmp_path / "cache")[0], pool)
    with pytest.raises(ValueError, match="max_length=9 must be None"):
        load_cache(tmp_path / "cache", max_length=9)


# Room --------------------------------------------------------------------------------------------


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("kind", SOME.values(), ids=SOME)
def test_only_what_is_held_takes_space(tmp_path, kind):
    sizes = []
    for max_length in (70, 300):
        save_cache(tmp_path / "cache", filled(kind, max_length))
        sizes.append((tmp_path / "cache").stat().st_size)
    # The descriptions differ by digits.
    assert abs(sizes[0] - sizes[1]) < 32
    held = 4 * HEADS * HEAD_DIM * sum(LENGTHS) + 4 * HEADS * HEAD_DIM * 5  # in bfloat16
    overhead = 8192  # the description and, for small blocks, their scales
    assert sizes[0] < held + overhead


@pytest.mark.quick(slow=2)
@pytest.mark.parametrize("kind", ["exact", MIXED, "turbo4"], ids=["exact", "mixed", "turbo4"])
def test_a_loaded_cache_may_have_more_room(tmp_path, kind):
    save_cache(tmp_path / "cache", filled(kind, 70))
    loaded, _ = load_cache(tmp_path / "cache", max_length=300)
    assert loaded.max_length == 300
    more = tokens(150, 8)
    assert_same_contents(append(loaded, *more), append(filled(kind, 300), *more))


@pytest.mark.optimized
@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("kind", SOME.values(), ids=SOME)
def test_it_may_have_less_room_but_not_too_little(tmp_path, kind):
    save_cache(tmp_path / "cache", filled(kind, 300))
    loaded, _ = load_cache(tmp_path / "cache", max_length=43)
    assert loaded.max_length == 43
    assert_same_contents(loaded, filled(kind, 300))
    with pytest.raises(ValueError, match=r"lengths=\[43, 0, 23\].*max_length=42"):
        load_cache(tmp_path / "cache", max_length=42)
    with pytest.raises(ValueError, match="max_length=0"):
        load_cache(tmp_path / "cache", max_length=0)


# Refusals ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    path = tmp_path_factory.mktemp("stored") / "cache.safetensors"
    save_cache(path, filled(MIXED), metadata={"model": "a"})
    return path


@pytest.mark.slow
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
    rewrite(stored, other, version="2")
    with pytest.raises(ValueError, match="other has version '2', this turbojax reads '1'"):
        load_cache(other)


def test_a_rewritten_file_must_be_consistent(stored, tmp_path):
    path = tmp_path / "rewritten"
    assert load_cache(rewrite(stored, path))[1] == {"model": "a"}

    def refused(match, **changes):
        rewrite(stored, path, **changes)
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


@pytest.mark.fuzz
def test_like_must_fit(stored):
    wanted = filled(MIXED, 300)
    loaded, _ = load_cache(stored, like=wanted)
    assert loaded.max_length == 300
    abstract = jax.eval_shape(lambda: wanted)
    assert_same_leaves(load_cache(stored, like=abstract)[0], loaded)

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
    with pytest.raises(ValueError, match="`like` is given, which has its own"):
        load_cache(stored, like=wanted, max_length=70)
    with pytest.raises(TypeError, match="cache is a str"):
        load_cache(stored, like="exact")


def test_what_cannot_be_stored_is_refused(tmp_path):
    path = tmp_path / "cache"
    for cache in (None, {"key": jnp.zeros(3)}, kivi):
        with pytest.raises(TypeError, match="must be one of ExactCache"):
            save_cache(path, cache)
    cache = filled("exact")
    with pytest.raises(ValueError, match="under jit"):
        jax.jit(lambda cache: save_cache(path, cache))(cache)
    for metadata in ("text", {"a": 1}, {1: "a"}):
        with pytest.raises(TypeError, match="metadata"):
            save_cache(path, cache, metadata=metadata)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        save_cache(tmp_path / "nowhere" / "cache", cache)
    stack = jax.tree.map(lambda x: jnp.stack([x, x]), filled("turbo4"))
    with pytest.raises(ValueError, match="stacked"):
        save_cache(path, stack)
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file(stored, tmp_path, monkeypatch):
    path = tmp_path / "cache"
    save_cache(path, filled("exact"))
    before = path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o644

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        save_cache(path, filled("kv4"))
    assert path.read_bytes() == before
    assert [x.name for x in tmp_path.iterdir()] == ["cache"]


def _fingerprint(path):
    with safe_open(path, framework="np") as file:
        return file.metadata()["fingerprint"]


def test_the_same_contents_have_the_same_fingerprint(tmp_path):
    cache = filled("kv4")
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


@pytest.mark.parametrize(("mask", "mode"), [(0o077, 0o600), (0o027, 0o640), (0o022, 0o644)])
def test_permissions_are_those_of_any_new_file(tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        files.write(tmp_path / "new", {}, {"x": np.zeros(3)})
        kept = tmp_path / "kept"
        kept.touch()
        kept.chmod(0o660)
        files.write(kept, {}, {"x": np.zeros(3)})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == mode
    assert stat.S_IMODE(kept.stat().st_mode) == 0o660
