"""Prompts and new tokens through KV caches, next to transformers' passes over the whole text, and
next to its own cache.
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from tests.models import hf_helpers as hf
from tests.recordings import parity_texts as texts
from turbojax import models

pytestmark = pytest.mark.slow

PROMPTS = texts.PROMPTS


@pytest.fixture(scope="module")
def theirs():
    """What transformers computes: imported here, because it may not be installed."""
    from tests.models import torch_helpers

    return torch_helpers


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """Logits after each prompt and after each of the tokens that follow but the last."""

    @functools.cache
    def compute(name: str) -> np.ndarray:
        ids, longest = texts.cached(), int(PROMPTS.max())
        model = models.load_decoder(hf.write(name, tmp_path_factory.mktemp(name)))
        with texts.border(model.config):
            session = models.start(
                model,
                jnp.asarray(ids[:, :longest]),
                max_length=longest + texts.NEW,
                lengths=jnp.asarray(PROMPTS),
                cache="exact",
            )
        return np.asarray(models.score(session, jnp.asarray(texts.continued(ids))))

    return compute


# `test_parity_cache.py` has the others, against what is recorded.
@pytest.mark.fuzz
@pytest.mark.parametrize("name", ["llama3.1", "qwen2-window", "gemma2", "gemma3"])
def test_as_one_pass_over_the_whole_text(ours, theirs, name):
    expected = texts.after_prompts(theirs.logits(theirs.reference(name), texts.cached()))
    np.testing.assert_allclose(ours(name), expected, rtol=0, atol=texts.TOLERANCE)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3", "gemma3-odd"])
def test_as_transformers_does_with_its_own_cache(ours, theirs, name):
    """Its prompt and its steps, left-padded as it wants them; the same prompts without padding."""
    ids, longest = texts.cached(), int(PROMPTS.max())
    mask = hf.padding_mask(PROMPTS, longest, "left")
    prompts = np.zeros_like(mask)
    for row, n in enumerate(PROMPTS):
        prompts[row, longest - n :] = ids[row, :n]
    steps = theirs.steps(theirs.reference(name), prompts, mask, texts.continued(ids))
    np.testing.assert_allclose(ours(name), steps, rtol=0, atol=texts.TOLERANCE)
