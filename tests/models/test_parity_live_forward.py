"""Logits of every family, next to what transformers computes of the same folder on a CPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models import hf_helpers as hf
from tests.recordings import parity_texts as texts
from turbojax import models

pytestmark = pytest.mark.slow

TOLERANCE = texts.TOLERANCE
FAMILIES = texts.FAMILIES
# The shortest text, and one for which LongRoPE has other factors.
SHORTER = [("gemma2", 1), ("phi3-longrope", 20)]
BATCH = 3


@pytest.fixture(scope="module")
def theirs():
    """What transformers computes: imported here, because it may not be installed."""
    from tests.models import torch_helpers

    return torch_helpers


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folder of a variant."""
    return functools.cache(lambda name: hf.write(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="module")
def load(folders):
    return functools.cache(lambda name, **options: models.load(folders(name), **options))


def program(graph):
    """The forward pass as a function of the parameters, quick to compile."""

    def run(state, ids, mask):
        return nnx.merge(graph, state)(ids, attention_mask=mask)

    return jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})


def forward(model: models.Transformer, ids) -> np.ndarray:
    graph, state = nnx.split(model)
    return np.asarray(program(graph)(state, jnp.asarray(ids), None))


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize(("name", "length"), [*((name, 60) for name in hf.VARIANTS), *SHORTER])
def test_logits(load, theirs, name, length):
    model = load(name)
    ids = hf.tokens(BATCH, length)
    expected = theirs.logits(theirs.reference(name), ids)
    assert 0.8 < expected.std() < 3
    np.testing.assert_allclose(forward(model, ids), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("name", FAMILIES)
def test_padding_on_either_side(load, theirs, name):
    length = 40
    model = load(name)
    ids = hf.tokens(BATCH, length)
    masks = [hf.padding_mask((40, 23, 1), length, side) for side in ("left", "right")]
    graph, state = nnx.split(model)
    run = program(graph)
    for mask in masks:
        real = mask.astype(bool)
        expected = theirs.logits(theirs.reference(name), ids, mask)[real]
        for padding in (0, 99):
            padded = jnp.asarray(np.where(real, ids, padding))
            logits = np.asarray(run(state, padded, jnp.asarray(mask)))
            np.testing.assert_allclose(logits[real], expected, rtol=0, atol=TOLERANCE)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("name", hf.VARIANTS)
def test_transformers_reads_what_is_saved(load, theirs, tmp_path, name):
    model = load(name)
    models.save(model, tmp_path)
    assert models.load(tmp_path).config == model.config
    again, ids = theirs.load(tmp_path), hf.tokens(2, 50)
    np.testing.assert_array_equal(
        theirs.logits(again, ids), theirs.logits(theirs.reference(name), ids)
    )


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("name", FAMILIES[::2])
def test_bfloat16_is_as_close_as_that_of_transformers(folders, load, theirs, name):
    import torch

    ids = hf.tokens(4, 40)
    exact = theirs.logits(theirs.reference(name), ids)
    rounded = theirs.load(folders(name), torch.bfloat16)
    error = theirs.logits(rounded, ids, dtype=torch.bfloat16) - exact
    model = load(name, dtype=jnp.bfloat16)
    ours = forward(model, ids) - exact
    # Both round after every step; the steps are not the same, so neither are the errors.
    assert ours.std() < 1.25 * error.std()
    assert 1e-3 < error.std() < 0.5
