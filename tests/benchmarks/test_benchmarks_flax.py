"""The suites of Flax's modules, of families of models and of loading: that they run, and tables."""

import concurrent.futures
import dataclasses
import functools
import gc
import mmap
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks import loading_worker
from benchmarks.measuring import steps
from benchmarks.suites import families, flax, loading
from turbojax import models
from turbojax.caches import init_layer_cache
from turbojax.models.generation import session as generation

SUITES = {"flax": flax.SUITE, "families": families.SUITE, "loading": loading.SUITE}
TINY_LAYER = flax.Layer(4, 2, 16, 2, 128)
TINY = families.Group("tiny", 2, 192)


def _names(suite):
    return [group.name(case) for group, case in suite.rows()]


def test_rows_are_named_once_and_come_with_what_they_are_compared_with():
    names = _names(families.SUITE)
    assert names[:2] == [f"model-decode/llama-3.1-8b/b16-s8192/{x}" for x in ("exact", "paged")]
    assert "model-decode/gemma-2-9b/b16-s8192/4bit" in names
    # Its context is no longer.
    assert "model-decode/phi-3-mini/b16-s4096/turbo4" in names
    names = _names(flax.SUITE)
    assert "flax-decode/h32-kv8-d128/b16-s8192/nnx" in names
    assert "flax-training/h16-kv16-d128/b2-s8192/pooled" in names
    names = _names(loading.SUITE)
    assert names[1] == "loading/llama-3-8b/memory/load_decoder"
    assert names[-1] == "loading/llama-3-8b/disk/load_decoder"
    assert set(families.Group.cases) == set(families.CACHES)
    methods = {method for _, method in flax.SUITE.rows()}
    assert methods == set(flax.METHODS) == {"nnx", *flax._SHORT}
    for suite in SUITES.values():
        assert suite.one_line({"status": "failed", "name": "x", "reason": "y"}) == "x: failed: y"


# Parameters in billions, as the models' cards give them.
BILLIONS = {
    "llama-2-7b": 6.74,
    "llama-3-8b": 8.03,
    "llama-3.1-8b": 8.03,
    "mistral-7b": 7.24,
    "qwen-2.5-7b": 7.62,
    "qwen-3-8b": 8.19,
    "qwen-3-30b-a3b": 30.53,
    "mixtral-8x7b": 46.70,
    "phi-3-mini": 3.82,
    "gemma-2-9b": 9.24,
    # Without what reads pictures, which has 0.42 more.
    "gemma-3-4b": 3.88,
    "gpt-oss-20b": 20.91,
    "deepseek-v2-lite": 15.71,
}


def test_shapes_are_those_of_published_models():
    assert set(models.SHAPES) == {*BILLIONS, "tiny"}
    for name, billions in BILLIONS.items():
        config = models.SHAPES[name]
        assert round(config.num_parameters / 1e9, 2) == billions
        assert models.TransformerConfig.from_hf(config.to_hf()) == config


@pytest.mark.fuzz
def test_every_step_of_a_real_size_can_be_traced():
    """No array is made: shapes, windows and kinds of caches fit each other."""
    rows = families.SUITE.rows("gemma.*(exact|4bit)|phi.*turbo4|llama.*paged")
    assert len(rows) == 6
    for group, cache in rows:
        lowered = families._lower(group, cache)
        logits, (caches, lengths) = lowered.out_info
        assert logits.shape == (16, group.config.vocab_size)
        assert len(caches.layers) == group.config.num_layers
        assert lengths.shape == (16,)


# Steps and caches ---------------------------------------------------------------------------------


def _filled(kind, tokens=100, seed=3):
    cache = init_layer_cache(2, 128, 2, 16, kind=kind, dtype=jnp.bfloat16)
    sizes = {"tokens": tokens, "kv_heads": 2, "head_dim": 16, "dtype": jnp.dtype(jnp.bfloat16)}
    for first in range(2):
        cache = steps.fill(cache, np.uint32(seed), np.int32(first), count=1, **sizes)
    return cache


def test_caches_are_filled_with_the_same_random_tokens():
    cache = _filled("exact")
    assert cache.lengths.tolist() == [100, 100]
    key, value = (np.asarray(x, np.float32) for x in (cache.key, cache.value))
    assert not np.any(key[:, 100:])
    assert not np.array_equal(key[0], key[1])
    assert key[:, :100].std() == pytest.approx(1, abs=0.05)
    # Of each channel 200 numbers: their mean is known to 0.07, and channels' means are spread by 1.
    means = value[:, :100].mean(axis=(0, 1))
    np.testing.assert_allclose(value[0, :100].mean(axis=0), means, atol=0.5)
    assert means.std() > 0.5
    pages = _filled("paged").pages
    tokens = np.asarray(pages.key, np.float32)
    assert sorted(tokens[tokens != 0].tolist()) == sorted(key[key != 0].tolist())


@pytest.mark.slow
def test_a_step_is_that_of_generation():
    compiled = families._lower(TINY, "exact").compile()
    fill = {None: families._lower_fill(TINY, "exact", None).compile()}
    inputs = families.Inputs(TINY)
    lengths = jnp.full(2, TINY.held, jnp.int32)
    make = functools.partial(inputs.caches, "exact", fill)
    call = steps.Steps(compiled, inputs.model, (make(), lengths), families._tokens(TINY))
    caches, tokens = make(), families._tokens(TINY)
    for i in range(2):
        caches, logits, lengths = generation.decode_step(
            inputs.model, caches, tokens, lengths, implementation=None
        )
        np.testing.assert_array_equal(call(), logits)
        assert call.state[1].tolist() == [TINY.held + 1 + i] * 2
    # All steps fit into the cache.
    assert TINY.held + families._STEPS + families._OTHER_STEPS <= TINY.tokens


@pytest.mark.fuzz
def test_layers_go_on_from_full_caches():
    """Of flax's; the quick run below compares ours with it."""
    layer, method = TINY_LAYER, "nnx"
    graph, arguments = flax._decode_arguments(layer, method)
    [held] = {layer.tokens - flax._STEPS}
    params, cache, x = arguments
    module = nnx.merge(graph, params, jax.tree.map(jnp.copy, cache))
    with flax._relaxed(method):
        want = module(x, decode=True)
    assert module.cache_index.get_value() == held + 1
    assert np.any(module.cached_key.get_value()[:, held - 1])
    compiled = flax._lower(flax.Group(flax.DECODE, layer), method).compile()
    call = steps.Steps(compiled, params, cache, x)
    # XLA fuses what runs at once: the rounding of bfloat16, no more.
    assert steps.difference(call(), want) < 2**-7


def test_needed_bytes():
    """Windows show a part of a cache; an embedding that is no output is hardly read."""
    config = dataclasses.replace(models.SHAPES["tiny"], local_windows=(64, None))
    model = jax.eval_shape(lambda: models.random_decoder(config))
    caches = jax.eval_shape(lambda: models.init_caches(model, 2, 256, "exact"))
    table = 512 * 64 * 2
    rolling, whole = caches.layers
    held = rolling.nbytes * 64 / rolling.room + whole.nbytes
    needed = families._needed_bytes(model, caches)
    assert needed == model.nbytes - table + held
    config = dataclasses.replace(config, tie_embeddings=True)
    tied = jax.eval_shape(lambda: models.random_decoder(config))
    assert families._needed_bytes(tied, caches) == tied.nbytes + held


def test_groups_compile_their_first_function_first():
    order = []

    class Lowered:
        def __init__(self, name):
            self.name = name

        def compile(self):
            time.sleep(0.05 if self.name.endswith("0") else 0)
            order.append(self.name)
            return self.name

    def broken():
        raise NotImplementedError("cannot be lowered")

    names = [[f"{g}{i}" for i in range(3)] for g in "ab"]
    groups = [[functools.partial(Lowered, name) for name in group] for group in names]
    groups[1].append(broken)
    found = steps.compile_groups(groups)
    assert [[f.result() for f in group[:3]] for group in found] == names
    for group in names:
        assert order.index(group[0]) == min(order.index(name) for name in group)
    assert isinstance(found[1][3], concurrent.futures.Future)
    with pytest.raises(NotImplementedError, match="cannot be lowered"):
        found[1][3].result()


def test_wrong_outputs():
    x = jnp.ones((2, 3), jnp.bfloat16)
    expected = {}
    row = flax._error((x, x), expected, "nnx")
    assert row == {"against": "nnx", "relative_l2": 0.0, "gradient_relative_l2": 0.0}
    assert flax._error((1.25 * x, x), expected, "turbo-int8")["relative_l2"] == 0.25
    for wrong in ((-x, x), (x, -x)):
        with pytest.raises(ArithmeticError, match="wrong: relative L2 2.000 from nnx"):
            flax._error(wrong, expected, "turbo-int8")
        # Which attends to means of blocks.
        flax._error(wrong, expected, "pooled")
        with pytest.raises(ArithmeticError, match="not finite"):
            flax._error(jax.tree.map(lambda x: x.at[1, 2].set(jnp.nan), wrong), expected, "pooled")


@pytest.mark.fuzz
def test_wrong_logits_are_a_failed_row(monkeypatch):
    """Other tokens than those of the exact cache."""
    make = families.Inputs.caches

    def other(self, kind, fill):
        if kind == "exact":
            return make(self, kind, fill)

        def wrong(f):
            return lambda layer, number, first: f(layer, number + 9, first)

        return make(self, kind, {window: wrong(f) for window, f in fill.items()})

    monkeypatch.setattr(families.Inputs, "caches", other)
    found = []
    families.SUITE.run(
        families.SUITE.rows("exact|fp8", quick=True), {}, found.append, repetitions=2
    )
    assert [row["status"] for row in found] == ["ok", "failed"]
    assert "the logits are wrong" in found[1]["reason"]


# Whole runs ---------------------------------------------------------------------------------------


@pytest.mark.fuzz
def test_what_is_written_is_a_checkpoint(tmp_path):
    loading.write(loading.Group("tiny", 3), tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    model = models.load_decoder(tmp_path)
    assert model.config == models.SHAPES["tiny"]
    assert model.dtype == jnp.bfloat16
    numbers = loading_worker.weights().view(jnp.dtype(jnp.bfloat16)).astype(np.float32)
    assert numbers.std() == pytest.approx(0.02, rel=0.02)
    begin = loading_worker.begin_of("model.embed_tokens.weight")
    want = numbers[(begin + np.arange(512 * 64)) % numbers.size].reshape(512, 64)
    np.testing.assert_array_equal(model.embedding.astype(jnp.float32), want)
    for method, load in (("load_decoder", models.load_decoder), ("naive", loading_worker._naive)):
        loading_worker._check(method, tmp_path, load(tmp_path))
    # The naive way makes what `load` makes.
    arrays, state = loading_worker._naive(tmp_path), nnx.state(models.load(tmp_path))
    for path, variable in nnx.to_flat_state(state):
        np.testing.assert_array_equal(
            arrays[path].astype(jnp.float32), variable.get_value().astype(jnp.float32)
        )
    assert len(arrays) == len(nnx.to_flat_state(state))


def test_other_weights_are_noticed(tmp_path):
    loading.write(loading.Group("tiny", 1), tmp_path)
    model = models.load_decoder(tmp_path)
    kernel = model.layers[-1]["mlp"]["down_proj"]["kernel"]
    kernel = kernel.at[5, 0].add(1)
    model.layers[-1]["mlp"]["down_proj"]["kernel"] = kernel
    with pytest.raises(ArithmeticError, match=r"layers\.1\.mlp\.down_proj.*not what was written"):
        loading_worker._check("load_decoder", tmp_path, model)


@pytest.mark.fuzz
def test_a_process_that_fails_is_a_failed_row(monkeypatch, tmp_path):
    def truncated(group, folder):
        (folder / "model.safetensors").write_bytes(b"short")
        return folder

    monkeypatch.setattr(loading, "write", truncated)
    found = []
    loading.run(loading.SUITE.rows("memory/load_decoder", quick=True), {}, found.append)
    [row] = found
    assert row["status"] == "failed"
    assert "config.json" in row["reason"]
    monkeypatch.delattr(loading.os, "posix_fadvise")
    with pytest.raises(NotImplementedError, match="needs posix_fadvise"):
        loading._to_disk([tmp_path])


@pytest.mark.fuzz
def test_host_memory():
    before = loading_worker._own_bytes()
    if before is None:  # a system without /proc
        assert loading_worker.HostMemory().peak is None
        return
    gc.collect()  # What is freed later would hide the block.
    memory = loading_worker.HostMemory()
    with memory:
        # Not from the allocator, which may have as much at hand: that is in memory already.
        block = np.frombuffer(mmap.mmap(-1, 1 << 26), np.uint8)
        block[:] = 1
        # On a busy machine the sampling thread may have to wait for its turn.
        end = time.monotonic() + 20
        while memory.peak < 0.9 * block.size and time.monotonic() < end:
            time.sleep(loading_worker._SAMPLED_SECONDS)
        del block
    assert 0.9 < memory.peak / (1 << 26) < 2
