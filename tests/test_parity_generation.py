"""Greedy texts of every family, token by token those recorded from transformers' `generate`."""

import functools

import hf_helpers as hf
import jax.numpy as jnp
import numpy as np
import parity_recordings as recordings
import parity_texts as texts
import pytest

from turbojax import models
from turbojax.models import Engine, Request

NEW = texts.GREEDY_NEW


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return functools.cache(lambda name: hf.write(name, tmp_path_factory.mktemp(name)))


def expected(name: str) -> list[list[int]]:
    return recordings.facts(name)["greedy"]


def test_the_prompts_are_those_of_the_recording():
    ids, _ = texts.greedy("left")
    np.testing.assert_array_equal(ids, recordings.arrays()["greedy/tokens"])


@pytest.mark.parametrize("name", texts.GREEDY)
def test_greedy_texts(folders, name):
    model = models.load_decoder(folders(name))
    for side in ("left", "right"):
        ids, mask = texts.greedy(side)
        tokens = models.generate(model, jnp.asarray(ids), attention_mask=mask, max_new_tokens=NEW)
        np.testing.assert_array_equal(tokens, expected(name))
    assert len({tuple(row) for row in expected(name)}) == len(texts.GREEDY_PROMPTS)


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_greedy_texts_from_pages(folders, name):
    ids, mask = texts.greedy("left")
    tokens = models.generate(
        models.load_decoder(folders(name)),
        jnp.asarray(ids),
        attention_mask=mask,
        max_new_tokens=NEW,
        cache="paged",
    )
    np.testing.assert_array_equal(tokens, expected(name))


@pytest.mark.parametrize("name", ["mistral", "gemma2", "phi3-longrope"])
def test_greedy_texts_of_an_engine(folders, name):
    """Prompts in pieces, between other requests' tokens."""
    engine = Engine(
        models.load_decoder(folders(name)),
        num_pages=32,
        page_size=16,
        max_sequences=2,
        prefill_chunk=16,
        max_length=64,
    )
    prompts, mask = texts.greedy("right")
    numbers = [
        engine.add(Request([int(x) for x in text[row.astype(bool)]], NEW))
        for text, row in zip(prompts, mask, strict=True)
    ]
    results = engine.run()
    for number, text in zip(numbers, expected(name), strict=True):
        assert list(results[number].tokens) == text
