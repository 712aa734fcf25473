"""Prompts and new tokens through KV caches, next to what is recorded from transformers.

In float32, with a cache that holds keys and values as they are: logits of prompts and of tokens
after them, and greedy texts, token by token those of transformers' `generate`.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.recordings import parity_recordings as recordings
from tests.recordings import parity_texts as texts
from turbojax import models
from turbojax.models import Engine, Request

TOLERANCE = texts.TOLERANCE
# One or two of each family.
SOME = (
    "llama3.1",
    "mistral",
    "qwen2.5-yarn",
    "qwen3-window",
    "phi3-longrope",
    "gemma2-odd",
    "gemma3",
    "gemma3-odd",
    "olmo2",
    "smollm3-window",
    "granite",
    "cohere2-odd",
    "glm4",
    "gpt-oss",
    "deepseek-v3",
)


def through(kind, model) -> np.ndarray:
    """Logits after each prompt and after each of the tokens that follow but the last."""
    ids = recordings.arrays()["cache/tokens"].astype(np.int32)
    longest = int(texts.PROMPTS.max())
    with texts.border(model.config):
        session = models.start(
            model,
            jnp.asarray(ids[:, :longest]),
            max_length=longest + texts.NEW,
            lengths=jnp.asarray(texts.PROMPTS),
            cache=kind,
        )
    return np.asarray(models.score(session, jnp.asarray(texts.continued(ids))))


def error(kind, model, name: str) -> float:
    return recordings.error(through(kind, model), recordings.logits(name, "cache"))


def continues(kind, model, name: str, side: str) -> None:
    """Fails unless greedy texts are the recorded ones, which differ."""
    ids, mask = texts.greedy(side)
    expected = recordings.facts(name)["greedy"]
    assert len({tuple(row) for row in expected}) == len(texts.GREEDY_PROMPTS)
    options = {"attention_mask": mask, "max_new_tokens": texts.NEW, "cache": kind}
    tokens = models.generate(model, jnp.asarray(ids), **options)
    np.testing.assert_array_equal(tokens, expected)


# Logits and texts in one test: the programs that compute them are the same.
@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("name", SOME)
def test_prompts_of_different_lengths_and_new_tokens(decoder, name):
    model = decoder(name)
    assert error("exact", model, name) < TOLERANCE
    continues("exact", model, name, "left")
    continues("exact", model, name, "right")


@pytest.mark.fuzz
@pytest.mark.parametrize("name", ["gemma2", "gemma3-odd", "cohere2", "olmo2", "gpt-oss"])
def test_pages(decoder, name):
    """Windows and caps in the kernels' definition for pages."""
    model = decoder(name)
    assert error("paged", model, name) < TOLERANCE
    continues("paged", model, name, "left")


@pytest.mark.slow
def test_the_exact_cache_is_needed_for_this(decoder):
    """Rounded to bfloat16, keys and values cost more than the tolerance."""
    assert 10 * TOLERANCE < error("bfloat16", decoder("mistral"), "mistral") < 0.3


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize(
    "name",
    [
        *("mistral", "gemma2", "gemma3-odd", "gpt-oss", "deepseek-v2"),
        *("cohere2", "smollm3-window"),
    ],
)
def test_greedy_texts_of_an_engine(decoder, name):
    """Prompts in pieces, between other requests' tokens."""
    engine = Engine(
        decoder(name),
        num_pages=32,
        page_size=16,
        max_sequences=2,
        step_tokens=16,
        max_length=64,
    )
    prompts, mask = texts.greedy("right")
    numbers = [
        engine.add(Request([int(x) for x in text[row.astype(bool)]], texts.NEW))
        for text, row in zip(prompts, mask, strict=True)
    ]
    results = engine.run()
    for number, text in zip(numbers, recordings.facts(name)["greedy"], strict=True):
        assert list(results[number].tokens) == text


def test_prompts_are_those_of_the_recording():
    arrays = recordings.arrays()
    np.testing.assert_array_equal(texts.greedy("left")[0], arrays["greedy/tokens"])
    np.testing.assert_array_equal(texts.cached(), arrays["cache/tokens"])
