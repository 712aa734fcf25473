"""Qwen 3: norms of queries and keys, and no biases unless a key says so."""

from collections.abc import Mapping
from typing import Any

from turbojax.models.families.keys import COMMON
from turbojax.models.families.qwen2 import WINDOWS, Qwen


class Qwen3(Qwen):
    """Norms the heads of queries and keys."""

    def read_mathematics(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family`."""
        return super().read_mathematics(keys) | {"qk_norm": True}


QWEN3 = Qwen3(
    "qwen3",
    "Qwen3ForCausalLM",
    {
        **COMMON,
        **WINDOWS,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "attention_bias": False,
    },
    chooses_layers=True,
)
