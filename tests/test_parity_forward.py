"""Logits of every family, next to those recorded from transformers for the same checkpoint."""

import functools

import hf_helpers as hf
import jax
import jax.numpy as jnp
import numpy as np
import parity_recordings as recordings
import parity_texts as texts
import pytest
from flax import nnx

from turbojax import models

TOLERANCE = texts.TOLERANCE


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """A variant's model; the folder is written once."""
    folders = functools.cache(lambda name: hf.write(name, tmp_path_factory.mktemp(name)))
    return lambda name, **options: models.load(folders(name), **options)


@jax.jit(static_argnums=0)
def program(graph, state, ids, mask):
    """The forward pass as a function of the parameters."""
    return nnx.merge(graph, state)(ids, attention_mask=mask)


@pytest.mark.parametrize("name", hf.VARIANTS)
def test_logits_with_and_without_padding_on_either_side(load, name):
    arrays = recordings.arrays()
    ids, mask = arrays["forward/tokens"].astype(np.int32), arrays["forward/mask"]
    recorded = recordings.logits(name, "forward")
    assert 0.8 < recorded.columns.std() < 3
    graph, state = nnx.split(load(name, max_length=hf.longest(name, texts.LENGTH)))
    # What stands at padding does not matter.
    for padding in (0, 99):
        padded = jnp.asarray(np.where(mask, ids, padding))
        logits = np.asarray(program(graph, state, padded, jnp.asarray(mask)))
        assert recordings.error(logits[mask], recorded) < TOLERANCE


@pytest.mark.parametrize("name", texts.FAMILIES)
def test_logits_of_short_texts_without_a_mask(load, name):
    ids = jnp.asarray(recordings.arrays()["short/tokens"].astype(np.int32))
    graph, state = nnx.split(load(name, max_length=hf.longest(name, texts.SHORT)))
    logits = np.asarray(program(graph, state, ids, None))
    recorded = recordings.logits(name, "short")
    assert recordings.error(logits, recorded) < TOLERANCE
    assert 0.8 < recorded.columns.std() < 3


@pytest.mark.parametrize("name", texts.FAMILIES)
def test_bfloat16_is_as_close_as_that_of_transformers(load, name):
    ids = jnp.asarray(recordings.arrays()["short/tokens"].astype(np.int32))
    options = {"max_length": hf.longest(name, texts.SHORT), "dtype": jnp.bfloat16}
    graph, state = nnx.split(load(name, **options))
    logits = np.asarray(program(graph, state, ids, None))[..., recordings.COLUMNS]
    ours = (logits - recordings.logits(name, "short").columns).std()
    theirs = recordings.facts(name)["bfloat16_error"]
    # Both round after every step; the steps are not the same, so neither are the errors.
    assert ours < 1.25 * theirs
    assert 1e-3 < theirs < 0.5


def test_recordings_tell_variants_of_the_same_weights_apart():
    """Long factors were taken for long texts, and other ones for texts shorter than those."""
    frequencies = recordings.facts("phi3-longrope")["frequencies"]
    theta = 10000.0 ** (-np.arange(6) / 6)
    np.testing.assert_allclose(frequencies, theta / hf.LONG["short_factor"], rtol=1e-6)
