"""Models with latent attention: absorbed over caches of latents as expanded, and in the engine."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from tests.models import tiny
from turbojax import models
from turbojax.models import Engine, Request
from turbojax.models.config import LatentConfig

CONFIG = tiny.config(
    vocab_size=61,
    num_layers=3,
    num_kv_heads=4,
    head_dim=24,
    max_length=96,
    latent=LatentConfig(rank=64, nope_dim=16, rope_dim=8, value_dim=12),
)
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6] * 4, [2, 7, 1], [8])
NEW = 12


@functools.cache
def model():
    return models.random_decoder(CONFIG, dtype=jnp.float32, seed=3)


@functools.cache
def texts(cache):
    return [
        tuple(
            np.asarray(models.generate(model(), jnp.asarray([p]), max_new_tokens=NEW, cache=cache))[
                0
            ]
        )
        for p in PROMPTS
    ]


@pytest.mark.slow
def test_absorbed_over_latents_is_expanded_over_keys_and_values():
    assert texts("latent") == texts("exact")


@pytest.mark.fuzz
@pytest.mark.parametrize("kv_dtype", ["auto", "turbo4"])
def test_the_engine_gives_the_texts_of_single_sequences(kv_dtype):
    """Pages that are shared, kept and swapped; `generate` stores the same latents."""
    engine = Engine(
        model(),
        num_pages=7,
        page_size=16,
        kv_dtype=kv_dtype,
        max_sequences=2,
        max_length=64,
        step_tokens=16,
    )
    for prompt in (*PROMPTS, PROMPTS[0]):
        engine.add(Request(prompt, NEW))
    results = engine.run()
    want = texts({"auto": "latent", "turbo4": "latent_turbo4"}[kv_dtype])
    got = [tuple(result.tokens) for result in results.values()]
    assert got == [*want, want[0]]
    found = engine.statistics()
    assert found.reused_tokens > 0
    assert found.token_bytes == 3 * ({"auto": 4 * 64, "turbo4": 36}[kv_dtype] + 4 * 8)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["latent_fp8_e4m3", "latent_turbo4"])
def test_layers_at_either_end_keep_latents_as_they_are(kind):
    """And not keys and values, which would take more than all else."""
    caches = {
        name: models.init_caches(model(), 2, 64, cache)
        for name, cache in (
            ("edges", models.UncompressedEdges(kind, 1)),
            ("all", kind),
            ("none", "latent"),
        )
    }
    found = [layer.kv_dtype for layer in caches["edges"].layers]
    assert found == ["bfloat16", kind.removeprefix("latent_"), "bfloat16"]
    assert caches["all"].nbytes < caches["edges"].nbytes < caches["none"].nbytes
    with pytest.raises(ValueError, match="kind='latent' must be one that is compressed"):
        models.UncompressedEdges("latent", 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_dtype": "k8v4"}, "kv_dtype='k8v4' must be one of auto, fp8_e4m3, turbo4"),
        (
            {"kv_dtype": "bfloat16", "uncompressed_layers": 1},
            "kv_dtype='bfloat16' must be one of auto, fp8_e4m3, turbo4",
        ),
        ({"key_scale": 2.0, "kv_dtype": "fp8_e4m3"}, "key_scale=2.0 has no use with latents"),
        ({"implementation": "triton"}, "has no implementation='triton'"),
    ],
)
def test_what_the_engine_refuses(options, words):
    with pytest.raises((ValueError, NotImplementedError), match=words):
        Engine(model(), num_pages=4, max_length=64, **options)


def test_a_model_without_latents_has_no_cache_of_them():
    plain = tiny.config(vocab_size=61, num_heads=2, max_length=32)
    decoder = models.random_decoder(plain, dtype=jnp.float32)
    with pytest.raises(ValueError, match="the model has no latents"):
        models.generate(decoder, jnp.asarray([[1]]), max_new_tokens=2, cache="latent_turbo4")
