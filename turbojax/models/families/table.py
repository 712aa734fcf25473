"""The families there are. A new one is an object in a file beside this one, and a name here."""

from collections.abc import Mapping
from typing import Any

from turbojax.models.families.base import Family, Whole
from turbojax.models.families.cohere2 import COHERE2
from turbojax.models.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from turbojax.models.families.gemma import GEMMA2, GEMMA3, GEMMA3_WITH_IMAGES
from turbojax.models.families.glm import GLM, GLM4
from turbojax.models.families.gpt_oss import GPT_OSS
from turbojax.models.families.llama import (
    GRANITE,
    LLAMA,
    MISTRAL,
    MISTRAL3,
    MIXTRAL,
    OLMO2,
    SMOLLM3,
)
from turbojax.models.families.phi3 import PHI3
from turbojax.models.families.qwen import QWEN2, QWEN3, QWEN3_MOE

FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        *(LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE, PHI3, GEMMA2, GEMMA3, OLMO2),
        *(SMOLLM3, GRANITE, COHERE2, GLM, GLM4, GPT_OSS, DEEPSEEK_V2, DEEPSEEK_V3),
    )
}
"""By `model_type`, in the order in which errors list them."""

WHOLES: tuple[Whole, ...] = (MISTRAL3, GEMMA3_WITH_IMAGES)
"""Checkpoints that have a part for images beside a text model of one of these families."""


def whole_of(hf: Mapping[str, Any]) -> Whole | None:
    """Which of `WHOLES` a `config.json` is that of; None for a text model's."""
    return next((whole for whole in WHOLES if whole.describes(hf)), None)
