"""Logits of every family, next to those recorded from transformers for the same checkpoint."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models import hf_helpers as hf
from tests.recordings import parity_recordings as recordings
from tests.recordings import parity_texts as texts
from turbojax import models
from turbojax.rotary import LongRopeScaling, YarnScaling

TOLERANCE = texts.TOLERANCE


@pytest.fixture(scope="module")
def load(folder):
    """A variant's model."""
    return lambda name, **options: models.load(folder(name), **options)


@jax.jit(static_argnums=0)
def program(graph, state, ids, mask):
    """The forward pass as a function of the parameters."""
    return nnx.merge(graph, state)(ids, attention_mask=mask)


# `test_parity_live_forward.py` has the other variants.
@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("name", ["llama2", "llama-biased", *texts.FAMILIES, "gemma3-odd"])
def test_logits_with_and_without_padding_on_either_side(load, name):
    arrays = recordings.arrays()
    ids, mask = arrays["forward/tokens"].astype(np.int32), arrays["forward/mask"]
    recorded = recordings.logits(name, "forward")
    assert 0.8 < recorded.columns.std() < 3
    graph, state = nnx.split(load(name))
    # What stands at padding does not matter.
    for padding in (0, 99):
        padded = jnp.asarray(np.where(mask, ids, padding))
        logits = np.asarray(program(graph, state, padded, jnp.asarray(mask)))
        assert recordings.error(logits[mask], recorded) < TOLERANCE


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("name", ["llama3.1", "phi3-longrope", "gemma2", "gemma3"])
def test_logits_of_short_texts_without_a_mask(load, name):
    ids = jnp.asarray(recordings.arrays()["short/tokens"].astype(np.int32))
    graph, state = nnx.split(load(name))
    logits = np.asarray(program(graph, state, ids, None))
    recorded = recordings.logits(name, "short")
    assert recordings.error(logits, recorded) < TOLERANCE
    assert 0.8 < recorded.columns.std() < 3


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("name", ["llama3.1", "gemma2", "gemma3"])
def test_bfloat16_is_as_close_as_that_of_transformers(load, name):
    ids = jnp.asarray(recordings.arrays()["short/tokens"].astype(np.int32))
    options = {"dtype": jnp.bfloat16}
    graph, state = nnx.split(load(name, **options))
    logits = np.asarray(program(graph, state, ids, None))[..., recordings.COLUMNS]
    ours = (logits - recordings.logits(name, "short").columns).std()
    theirs = recordings.facts(name)["bfloat16_error"]
    # Both round after every step; the steps are not the same, so neither are the errors.
    assert ours < 1.25 * theirs
    assert 1e-3 < theirs < 0.5


SHORT = tuple(hf.LONG["short_factor"])
LONG = tuple(hf.LONG["long_factor"])
AMPLITUDE = math.sqrt(1 + math.log(256 / 32) / math.log(32))


@pytest.mark.quick(slow=2)
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama3.1", {"rope_scaling": None}),
        ("mistral", {"local_windows": (8, 8, 8)}),
        ("qwen2-window", {"local_windows": (None, None, 6)}),
        ("qwen2.5-yarn", {"rope_scaling": None}),
        ("phi3-longrope", {"rope_scaling": LongRopeScaling(SHORT, SHORT, 32, AMPLITUDE)}),
        ("phi3-longrope", {"rope_scaling": LongRopeScaling(SHORT, LONG, 32, 1.0)}),
        ("gemma2", {"attention_soft_cap": None}),
        ("gemma2", {"final_soft_cap": None}),
        ("gemma2", {"local_windows": (None, 8, None, 8)}),
        ("gemma2", {"attention_scale": None}),
        ("gemma3", {"local_rope_theta": None}),
        ("gemma3", {"rope_scaling": None}),
        ("gemma3", {"rope_theta": 100.0}),
        ("gemma3", {"local_windows": (8, 8, 8, 8)}),
        ("gemma3-odd", {"local_rope_theta": 100.0}),
        ("gemma3-odd", {"rope_scaling": YarnScaling(4.0, 24, attention_factor=1.0)}),
    ],
)
def test_what_a_configuration_says_is_seen(load, name, change):
    """So that the tests above would see it if it were not read, or not obeyed."""
    model = load(name)
    ids, mask = (jnp.asarray(x) for x in texts.forward())
    config = dataclasses.replace(model.config, **change)
    changed = nnx.eval_shape(lambda: models.Transformer(config, rngs=nnx.Rngs(0)))
    nnx.update(changed, nnx.state(model))
    logits = np.asarray(program(*nnx.split(changed), ids, mask))[np.asarray(mask, bool)]
    error = np.abs(logits[..., recordings.COLUMNS] - recordings.logits(name, "forward").columns)
    assert error.max() > 100 * TOLERANCE


def test_texts_are_those_of_the_recording():
    arrays = recordings.arrays()
    for found, kind in ((texts.forward()[0], "forward"), (texts.short(), "short")):
        np.testing.assert_array_equal(found, arrays[f"{kind}/tokens"])
    np.testing.assert_array_equal(texts.forward()[1], arrays["forward/mask"])
