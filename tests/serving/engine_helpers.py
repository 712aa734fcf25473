"""Engines, requests and a model for the engine's tests."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from tests.oracles.paged import FP8, code_bits, fp8_names
from turbojax import models, polar
from turbojax.models import Engine, Request, Sampling, causal_attention

PAGE, NEW, LENGTH = 16, 40, 112
TINY = models.TransformerConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_length=128,
)


def shallow_model() -> models.Decoder:
    """The embedded model's embedding and first layers: real text in, something like it out."""
    whole = models.unstack(models.load(dtype=jnp.float32))
    config = dataclasses.replace(whole.config, num_layers=3)
    return dataclasses.replace(whole, layers=whole.layers[:3], config=config)


def real_prompts() -> list[list[int]]:
    """Beginnings of Python files: two of one file, one of them longer; one of a single token."""
    head = b'"""Tools for text."""\n\nimport os\nimport sys\n\n\ndef main(names):\n    for name in '
    other = b"class Reader:\n    def __init__(self, path):\n        self.path = path\n"
    parts = head[:50], head[:34] + other[:20], other[:37], b"", head[:50] + other[:10]
    return [[0, *part] for part in parts]


def make(model, **options) -> Engine:
    settings = {
        "num_pages": 40,
        "page_size": PAGE,
        "max_sequences": 4,
        "max_length": LENGTH,
        "step_tokens": 24,
    }
    return Engine(model, **{**settings, **options})


def requests_of(prompts, temperature: float) -> list[Request]:
    return [
        Request(prompt, NEW, sampling=Sampling(temperature=temperature, seed=i))
        for i, prompt in enumerate(prompts)
    ]


def held(x: jax.Array, kv_dtype: str, side: int) -> jax.Array:
    """Keys (`side` is 0) or values (1) as pages hold them, written without pages."""
    bits, fp8 = code_bits(kv_dtype)[side], fp8_names(kv_dtype)[side]
    if fp8 is not None:
        return x.astype(FP8[fp8]).astype(x.dtype)
    if bits is None:
        return x
    rotation = polar.rotation(x.shape[-1])
    codes, norms = polar.encode(x, rotation, bits)
    table, half, unit = polar.integer_centroids(bits)
    centroids = (jnp.asarray(table, jnp.float32) - half) * (unit / x.shape[-1] ** 0.5)
    values = centroids[codes] * norms.astype(jnp.float32)[..., None]
    return polar.unrotate(values, rotation)


def logits_without_a_cache(model, texts, length: int, kv_dtype: str = "auto") -> jax.Array:
    """float32 ``[texts, length, V]``, of one pass over whole texts."""

    def attend(query, key, value, cache, options=None):
        return causal_attention(query, held(key, kv_dtype, 0), held(value, kv_dtype, 1), cache)

    tokens = np.zeros((len(texts), length), np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    positions = jnp.broadcast_to(jnp.arange(length)[None], tokens.shape)
    nothing = (None,) * model.config.num_layers
    hidden, _ = model.hidden(jnp.asarray(tokens), positions, attend, nothing)
    return model.logits(hidden)


def greedy_without_a_cache(model, prompts, results, kv_dtype: str) -> list[tuple[int, ...]]:
    """The greedy token at each place of the results, from one pass over all tokens before it.

    By induction over the places, results that equal these are the greedy continuations.
    """

    whole = [[*prompt, *result] for prompt, result in zip(prompts, results, strict=True)]
    logits = logits_without_a_cache(model, whole, LENGTH, kv_dtype)
    following = np.asarray(jnp.argmax(logits, axis=-1))
    return [
        tuple(row[len(prompt) - 1 :][: len(result)].tolist())
        for row, prompt, result in zip(following, prompts, results, strict=True)
    ]


def run_one(made: Engine, request: Request) -> tuple[int, ...]:
    number = made.add(request)
    return made.run()[number].tokens
