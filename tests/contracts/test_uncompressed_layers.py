"""First and last layers that are not compressed: kinds, bytes, texts, files, the engine."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import turbojax as tj
from tests.serving.engine_helpers import held, make, real_prompts, requests_of, shallow_model
from turbojax import models
from turbojax.app import startup
from turbojax.app.main import app
from turbojax.app.serve import run as serving
from turbojax.app.serve.requests import TextRequest
from turbojax.app.serve.settings import Models, Settings
from turbojax.models import UncompressedEdges, causal_attention
from turbojax.models.engine import pools
from turbojax.models.generation.caching import init_caches

TEXT = b'"""Tools for text."""\n\nimport os\nimport sys\n\n\ndef main(names):\n    for name in sys'


@pytest.fixture(scope="module")
def decoder():
    """The embedded model's first three layers: one of them stands between the edges."""
    return shallow_model()


def tokens(length):
    return np.array([[0, *TEXT[:length]]], np.int32)


KINDS = {
    "k8v4": ("k8v4", "exact"),
    "4bit": (tj.TurboConfig(), "exact"),
    "turbo4": ("turbo4", "paged"),
    "fp8_e4m3": ("fp8_e4m3", "paged"),
}


@pytest.mark.parametrize("name", KINDS)
def test_every_layer_has_its_kind_and_bytes_are_their_sum(decoder, name):
    kind, edge = KINDS[name]
    mixed, plain, whole = (
        jax.eval_shape(lambda cache=cache: init_caches(decoder, 2, 200, cache))
        for cache in (UncompressedEdges(kind, 1), edge, kind)
    )
    sources = (plain, whole, plain)
    assert len(mixed.layers) == 3
    for i, source in enumerate(sources):
        assert jax.tree.structure(mixed.layers[i]) == jax.tree.structure(source.layers[i])
    parts = [source.layers[i].nbytes for i, source in enumerate(sources)]
    assert mixed.nbytes == sum(parts)
    assert whole.nbytes < mixed.nbytes < plain.nbytes
    config = decoder.config
    in_bfloat16 = 4 * 3 * 2 * 200 * config.num_kv_heads * config.head_dim
    assert mixed.compression_ratio == in_bfloat16 / mixed.nbytes
    assert whole.compression_ratio == whole.layers[0].compression_ratio
    assert mixed.max_length == 200


def test_edges_of_a_dtype_that_is_asked_for(decoder):
    caches = init_caches(decoder, 1, 64, UncompressedEdges("kv4", 1, edges="bfloat16"))
    assert [layer.key.dtype.name for layer in (caches.layers[0], caches.layers[2])] == [
        "bfloat16"
    ] * 2
    # Of float32, the decoder's, without being asked.
    caches = init_caches(decoder, 1, 64, UncompressedEdges("kv4", 1))
    assert caches.layers[0].key.dtype == jnp.float32


WRONG = {
    "too many": (
        ValueError,
        lambda d: init_caches(d, 1, 8, UncompressedEdges("kv4", 2)),
        "2 layer",
    ),
    "none": (ValueError, lambda d: UncompressedEdges("kv4", 0), "layers=0 must be at least 1"),
    "number": (TypeError, lambda d: UncompressedEdges("kv4", 1.0), "layers=1.0.*integer"),
    "plain": (ValueError, lambda d: UncompressedEdges("exact"), "kind='exact' must be one that is"),
    "unknown": (ValueError, lambda d: UncompressedEdges("4bit"), "cache='4bit' must be 'exact'"),
    "edges": (ValueError, lambda d: UncompressedEdges("kv4", edges="kv4"), "edges='kv4' must be"),
    "twice": (
        TypeError,
        lambda d: UncompressedEdges(UncompressedEdges("kv4")),
        "must be a cache of one layer",
    ),
    "kind": (
        ValueError,
        lambda d: init_caches(d, 1, 8, UncompressedEdges("kv5", 1)),
        "cache='kv5' must be",
    ),
    "engine, too many": (
        ValueError,
        lambda d: make(d, kv_dtype="turbo4", uncompressed_layers=2),
        "2 layers at either end, uncompressed, must leave some of the model's 3 layers",
    ),
    "engine, negative": (
        ValueError,
        lambda d: make(d, kv_dtype="turbo4", uncompressed_layers=-1),
        "uncompressed_layers=-1 must be at least 0",
    ),
    "engine, nothing compressed": (
        ValueError,
        lambda d: make(d, uncompressed_layers=1),
        "uncompressed_layers=1 has no use with kv_dtype='auto'",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_choice_says_what_is_wrong(decoder, name):
    error, call, message = WRONG[name]
    with pytest.raises(error, match=message):
        call(decoder)


@pytest.mark.fuzz
@pytest.mark.parametrize("command", ["generate", "demo", "serve"])
def test_commands_leave_layers_uncompressed(tmp_path, command):
    """The embedded model of eight layers, two of them at either end."""
    requests = tmp_path / "requests"
    requests.write_text('{"prompt": "import os", "max_new_tokens": 2}')
    options = {
        "generate": ["import os", "--cache", "k8v4", "--max-new-tokens", "2"],
        "demo": ["--cache", "exact,k8v4", "--prompt-bytes", "120", "--new-bytes", "2"],
        "serve": [str(requests), "--kv-dtype", "turbo4", "--out", str(tmp_path / "out")],
    }
    more = ["--generate-bytes", "2"] if command == "demo" else []
    found = []
    for layers in ("0", "2"):
        arguments = [command, *options[command], *more, "--json", "--uncompressed-layers", layers]
        if command == "serve" and layers == "2":
            arguments.append("--overwrite")
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.stderr
        report = json.loads(result.stdout)
        if command != "generate":
            report = report["results"][1] if command == "demo" else report["statistics"]
        found.append(report["compression_ratio"])
    # Of a bfloat16 cache of the same size, or a float32 one.
    assert found[1] < found[0]


def test_bytes_are_counted_layer_by_layer_before_there_are_any(decoder):
    for kind in ("k8v4", "turbo4"):
        cache = UncompressedEdges(kind, 1)
        made = init_caches(decoder, 3, 100, cache)
        found = startup.cache_bytes(decoder.config, decoder.dtype, 3, 100, cache)
        assert found == made.nbytes
    requests = [TextRequest(1, 1, models.Request([1] * 20, 12), ())]
    stored = {"kv_dtype": "turbo4", "uncompressed_layers": 1}
    sizes = {"page_size": 16, "max_sequences": 4, **stored}
    shapes = Models(decoder.config, decoder.dtype)
    pool = serving.plan_for(requests, shapes, Settings(**sizes), None)
    made = make(decoder, num_pages=pool.num_pages, **stored)
    # Beside pages a pool holds a counter.
    assert pool.nbytes == sum(x.page_bytes * x.num_pages for x in made._device.caches)
    fits = Settings(**sizes, pool_bytes=5 * pool.nbytes // pool.num_pages + 1)
    assert serving.plan_for(requests, shapes, fits, None).num_pages == 5


# The engine --------------------------------------------------------------------------------------


def greedy_without_a_cache(model, prompts, results, kv_dtype):
    """As `engine_helpers.greedy_without_a_cache`, with the first and last layer as they are."""

    def attend(query, key, value, cache, options=None):
        if cache is None:
            key, value = held(key, kv_dtype, 0), held(value, kv_dtype, 1)
        out, _ = causal_attention(query, key, value, None)
        return out, cache

    rows = np.zeros((len(prompts), 112), np.int32)
    for row, prompt, result in zip(rows, prompts, results, strict=True):
        row[: len(prompt) + len(result)] = [*prompt, *result]
    positions = jnp.broadcast_to(jnp.arange(112)[None], rows.shape)
    # Another structure is another trace of the layer.
    hidden, _ = model.hidden(jnp.asarray(rows), positions, attend, ((), None, ()))
    following = np.asarray(jnp.argmax(model.logits(hidden), axis=-1))
    return [
        tuple(row[len(prompt) - 1 :][: len(result)].tolist())
        for row, prompt, result in zip(following, prompts, results, strict=True)
    ]


@pytest.mark.fuzz
def test_an_engine_of_mixed_pools_swaps_and_reuses(decoder):
    """Real prompts, so few pages that requests leave the pool, and a prefix that two share.

    fp8 pages, whose values an oracle knows exactly.
    """
    options = {"kv_dtype": "fp8_e4m3", "uncompressed_layers": 1}
    prompts = real_prompts()
    made = make(decoder, num_pages=11, **options)
    numbers = [made.add(request) for request in requests_of(prompts, 0.0)]
    results = made.run()
    texts = [results[number].tokens for number in numbers]
    assert texts == greedy_without_a_cache(decoder, prompts, texts, "fp8_e4m3")
    assert made.statistics().preemptions > 0
    again = made.add(requests_of(prompts, 0.0)[0])
    results = made.run()
    assert results[again].tokens == texts[0]
    assert results[again].reused_tokens > 0

    held_now = made.statistics()
    heads, dim = decoder.config.num_kv_heads, decoder.config.head_dim
    # Float32 in two layers, a byte in the one between.
    assert held_now.token_bytes == 2 * heads * dim * (4 + 1 + 4)
    assert held_now.compression_ratio == 3 * 2 / (4 + 1 + 4)
    page = pools.page_bytes(decoder.config, decoder.dtype, 16, **options)
    assert page == 16 * held_now.token_bytes
    assert held_now.pool_bytes - 11 * page < 100


def test_scales_and_seeds_are_for_the_compressed_pools(decoder):
    made = make(decoder, kv_dtype="fp8_e4m3", uncompressed_layers=1, key_scale=0.5)
    assert [cache.kv_dtype for cache in made._device.caches] == ["auto", "fp8_e4m3", "auto"]
    assert float(made._device.caches[1].key_scale) == 0.5
    made = make(decoder, kv_dtype="turbo4", uncompressed_layers=1, seed=3)
    assert [cache.seed for cache in made._device.caches] == [0, 3, 0]


def test_pools_as_before_without_uncompressed_layers(decoder):
    made = make(decoder, kv_dtype="turbo4")
    one = made._device.caches[0]
    assert made.statistics().token_bytes == 3 * one.token_bytes
    assert made.statistics().compression_ratio == one.compression_ratio
    assert dataclasses.asdict(made.statistics())["pool_bytes"] == 3 * one.nbytes
