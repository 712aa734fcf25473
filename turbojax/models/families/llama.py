"""Llama 2, 3, 3.1, 3.2, and models of the same architecture."""

from turbojax.models.families.base import Family
from turbojax.models.families.keys import COMMON

LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    {**COMMON, "max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False},
)
