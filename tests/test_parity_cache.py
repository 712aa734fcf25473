"""Prompts and new tokens through KV caches, next to logits recorded from transformers.

In float32, with a cache that holds keys and values as they are.
"""

import functools

import hf_helpers as hf
import jax.numpy as jnp
import numpy as np
import parity_recordings as recordings
import parity_texts as texts
import pytest

from turbojax import models

TOLERANCE = texts.TOLERANCE
PROMPTS = texts.PROMPTS


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return functools.cache(lambda name: hf.write(name, tmp_path_factory.mktemp(name)))


def through(kind, model) -> np.ndarray:
    """Logits after each prompt and after each of the tokens that follow but the last."""
    ids = recordings.arrays()["cache/tokens"].astype(np.int32)
    longest = int(PROMPTS.max())
    session = models.start(
        model,
        jnp.asarray(ids[:, :longest]),
        max_length=longest + texts.NEW,
        lengths=jnp.asarray(PROMPTS),
        cache=kind,
    )
    return np.asarray(models.score(session, jnp.asarray(texts.continued(ids))))


@pytest.mark.parametrize("name", texts.CACHED)
def test_prompts_of_different_lengths_and_single_tokens(folders, name):
    logits = through("exact", models.load_decoder(folders(name)))
    assert recordings.error(logits, recordings.logits(name, "cache")) < TOLERANCE


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_pages(folders, name):
    """Windows and caps in the kernels' definition for pages."""
    logits = through("paged", models.load(folders(name)))
    assert recordings.error(logits, recordings.logits(name, "cache")) < TOLERANCE


def test_the_exact_cache_is_needed_for_this(folders):
    """Rounded to bfloat16, keys and values cost more than the tolerance."""
    logits = through("bfloat16", models.load(folders("mistral")))
    error = recordings.error(logits, recordings.logits("mistral", "cache"))
    assert 10 * TOLERANCE < error < 0.3
