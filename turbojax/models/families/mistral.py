"""Mistral: one window for all layers, or none."""

from turbojax.models.families.base import Family
from turbojax.models.families.keys import COMMON

MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    {
        **COMMON,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
)
