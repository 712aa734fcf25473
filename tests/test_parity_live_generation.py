"""Greedy texts of every family, token by token those of transformers' `generate`."""

import functools

import hf_helpers as hf
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from turbojax import models
from turbojax.models import Engine, Request

NEW = 10
PROMPTS = (40, 33, 35)
VARIANTS = (
    "llama3.1",
    "mistral",
    "qwen2-window",
    "qwen2.5-yarn",
    "qwen3",
    "phi3-longrope",
    "gemma2",
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return functools.cache(lambda name: hf.write(name, tmp_path_factory.mktemp(name)))


def batch(side: str) -> tuple[np.ndarray, np.ndarray]:
    """Prompts of three lengths, padded with zeros, and their mask."""
    longest = max(PROMPTS)
    mask = hf.padding_mask(PROMPTS, longest, side)
    ids = np.zeros_like(mask)
    for row, (text, n) in enumerate(zip(hf.tokens(len(PROMPTS), longest), PROMPTS, strict=True)):
        ids[row, mask[row].astype(bool)] = text[:n]
    return ids, mask


@functools.cache
def expected(name: str) -> np.ndarray:
    ids, mask = batch("left")
    with torch.no_grad():
        out = hf.reference(name).generate(
            torch.tensor(ids),
            attention_mask=torch.tensor(mask),
            do_sample=False,
            max_new_tokens=NEW,
            eos_token_id=None,
        )
    return out[:, ids.shape[1] :].numpy()


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_texts(folders, name):
    model = models.load_decoder(folders(name))
    for side in ("left", "right"):
        ids, mask = batch(side)
        tokens = models.generate(model, jnp.asarray(ids), attention_mask=mask, max_new_tokens=NEW)
        np.testing.assert_array_equal(tokens, expected(name))
    assert len({tuple(row) for row in expected(name)}) == len(PROMPTS)


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_greedy_texts_from_pages(folders, name):
    ids, mask = batch("left")
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
    prompts = hf.tokens(len(PROMPTS), max(PROMPTS))
    numbers = [
        engine.add(Request([int(x) for x in text[:n]], NEW))
        for text, n in zip(prompts, PROMPTS, strict=True)
    ]
    results = engine.run()
    for number, text in zip(numbers, expected(name), strict=True):
        assert list(results[number].tokens) == text.tolist()
