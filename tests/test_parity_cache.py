"""Prompts and new tokens through KV caches, next to transformers' passes over the whole text.

In float32, with a cache that holds keys and values as they are. The tolerance is that of
`test_parity_forward.py`.
"""

import contextlib
import functools

import hf_helpers as hf
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from turbojax import models
from turbojax.rotary import LongRopeScaling

TOLERANCE = 1e-4
# Beyond the windows, and for LongRoPE beyond the length the model was made for.
PROMPTS = np.array([36, 1, 17])
NEW = 6
VARIANTS = (
    "llama3.1",
    "llama-biased",
    "mistral",
    "qwen2-window",
    "qwen3-window",
    "phi3-longrope",
    "gemma2",
    "gemma2-odd",
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return functools.cache(lambda name: hf.write(name, tmp_path_factory.mktemp(name)))


def continued(ids: np.ndarray) -> np.ndarray:
    """The tokens after each prompt, `[B, NEW]`."""
    return np.stack([row[n : n + NEW] for row, n in zip(ids, PROMPTS, strict=True)])


def through(kind, model, ids: np.ndarray) -> np.ndarray:
    """Logits after each prompt and after each of the tokens that follow but the last."""
    longest = int(PROMPTS.max())
    # Prompts of LongRoPE's short factors that get beyond: `test_long_rope.py` has more of them.
    crosses = isinstance(model.config.rope_scaling, LongRopeScaling)
    with pytest.warns(UserWarning, match="LongRoPE") if crosses else contextlib.nullcontext():
        session = models.start(
            model,
            jnp.asarray(ids[:, :longest]),
            max_length=longest + NEW,
            lengths=jnp.asarray(PROMPTS),
            cache=kind,
        )
    return np.asarray(models.score(session, jnp.asarray(continued(ids))))


@functools.cache
def expected(name: str) -> np.ndarray:
    """The same by transformers, from one pass over the whole text."""
    whole = hf.logits(hf.reference(name), texts())
    return np.stack([row[n - 1 : n - 1 + NEW] for row, n in zip(whole, PROMPTS, strict=True)])


def texts() -> np.ndarray:
    return hf.tokens(len(PROMPTS), int(PROMPTS.max()) + NEW)


@pytest.mark.parametrize("name", VARIANTS)
def test_prompts_of_different_lengths_and_single_tokens(folders, name):
    model = models.load_decoder(folders(name))
    logits = through("exact", model, texts())
    np.testing.assert_allclose(logits, expected(name), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_pages(folders, name):
    """Windows and caps in the kernels' definition for pages."""
    logits = through("paged", models.load(folders(name)), texts())
    np.testing.assert_allclose(logits, expected(name), rtol=0, atol=TOLERANCE)


def test_the_exact_cache_is_needed_for_this(folders):
    """Rounded to bfloat16, keys and values cost more than the tolerance."""
    logits = through("bfloat16", models.load(folders("mistral")), texts())
    error = np.abs(logits - expected("mistral")).max()
    assert 10 * TOLERANCE < error < 0.3


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_as_transformers_does_with_its_own_cache(folders, name):
    """Its prompt and its steps, left-padded as it wants them; the same prompts without padding."""
    ids, longest = texts(), int(PROMPTS.max())
    mask = hf.padding_mask(PROMPTS, longest, "left")
    prompts = np.zeros_like(mask)
    for row, n in enumerate(PROMPTS):
        prompts[row, longest - n :] = ids[row, :n]
    model, new, steps = hf.reference(name), continued(ids), []
    with torch.no_grad():
        given = {"input_ids": torch.tensor(prompts), "past_key_values": None}
        position = torch.tensor(np.maximum(mask.cumsum(1) - 1, 0))
        for i in range(NEW):
            out = model(
                **given,
                attention_mask=torch.tensor(mask),
                position_ids=position,
                use_cache=True,
            )
            steps.append(out.logits[:, -1].numpy())
            given = {
                "input_ids": torch.tensor(new[:, i : i + 1]),
                "past_key_values": out.past_key_values,
            }
            mask = np.concatenate([mask, np.ones((len(mask), 1), mask.dtype)], 1)
            position = torch.tensor(PROMPTS[:, None] + i)
    logits = through("exact", models.load_decoder(folders(name)), ids)
    np.testing.assert_allclose(logits, np.stack(steps, 1), rtol=0, atol=TOLERANCE)
