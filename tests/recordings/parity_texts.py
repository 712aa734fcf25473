"""The texts of which transformers' logits are recorded, and which variants are asked what."""

import contextlib

import numpy as np
import pytest

from tests.models import hf_helpers as hf
from turbojax.models import TransformerConfig
from turbojax.rotary import LongRopeScaling

# What is seen is below 5e-5, float32's rounding through three layers of peaked attention, on logits
# whose standard deviation is about 1.5 and whose largest is 4 to 8.
TOLERANCE = 1e-4

# One variant of each family is enough where it is not the mathematics that is in question.
FAMILIES = (
    "llama3.1",
    "mistral",
    "qwen2.5-yarn",
    "qwen3-window",
    "phi3-longrope",
    "gemma2",
    "gemma3",
    "mixtral",
    "qwen3-moe",
    "olmo2",
    "smollm3",
    "granite",
    "cohere2",
    "glm",
    "glm4",
    "gpt-oss",
    "deepseek-v2-lite",
    "deepseek-v3",
)
LENGTH = 60
SHORT = 20
# Real tokens of each row, and the side of its padding.
ROWS = (
    *((LENGTH, "right"), (LENGTH, "right")),
    *((length, side) for side in ("left", "right") for length in (40, 23, 1)),
)


def forward() -> tuple[np.ndarray, np.ndarray]:
    """Texts with and without padding on either side, and their mask."""
    masks = [hf.padding_mask([length], LENGTH, side) for length, side in ROWS]
    return hf.tokens(len(ROWS), LENGTH), np.concatenate(masks)


def short() -> np.ndarray:
    """Texts shorter than what LongRoPE was made for."""
    return hf.tokens(3, SHORT)


# Beyond the windows, and for LongRoPE beyond the length the model was made for. Prompts of both
# kinds below are as long, so that programs are compiled once for the two.
PROMPTS = np.array([40, 1, 17])
GREEDY_PROMPTS = np.array([40, 33, 35])
NEW = 10
CONTINUED = (
    "llama3.1",
    "llama-biased",
    "mistral",
    "qwen2-window",
    "qwen2.5-yarn",
    "qwen3",
    "qwen3-window",
    "phi3-longrope",
    "gemma2",
    "gemma2-odd",
    "gemma3",
    "gemma3-odd",
    "mixtral",
    "qwen3-moe",
    "olmo2",
    "smollm3-window",
    "granite",
    "cohere2",
    "cohere2-odd",
    "glm",
    "glm4",
    "gpt-oss",
    "deepseek-v2-lite",
    "deepseek-v2",
    "deepseek-v3",
)


def border(config: TransformerConfig) -> contextlib.AbstractContextManager[object]:
    """Expects what is said where short prompts may grow beyond LongRoPE's border."""
    if isinstance(config.rope_scaling, LongRopeScaling):
        return pytest.warns(UserWarning, match="LongRoPE")
    return contextlib.nullcontext()


def cached() -> np.ndarray:
    """Prompts, each followed by its new tokens."""
    return hf.tokens(len(PROMPTS), int(PROMPTS.max()) + NEW)


def continued(ids: np.ndarray) -> np.ndarray:
    """The tokens after each prompt, `[B, NEW]`."""
    return np.stack([row[n : n + NEW] for row, n in zip(ids, PROMPTS, strict=True)])


def after_prompts(logits: np.ndarray) -> np.ndarray:
    """Of logits of the whole texts, those after each prompt and each new token but the last."""
    return np.stack([row[n - 1 : n - 1 + NEW] for row, n in zip(logits, PROMPTS, strict=True)])


def greedy(side: str) -> tuple[np.ndarray, np.ndarray]:
    """Prompts of three lengths, padded with zeros, and their mask."""
    longest = int(GREEDY_PROMPTS.max())
    mask = hf.padding_mask(GREEDY_PROMPTS, longest, side)
    ids = np.zeros_like(mask)
    rows = zip(hf.tokens(len(GREEDY_PROMPTS), longest), GREEDY_PROMPTS, strict=True)
    for row, (text, n) in enumerate(rows):
        ids[row, mask[row].astype(bool)] = text[:n]
    return ids, mask
