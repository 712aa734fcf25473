"""Mixtral: Mistral with experts in every layer, chosen first and weighted among themselves."""

from collections.abc import Mapping
from typing import Any

from turbojax.models.families import rope
from turbojax.models.families.base import Family
from turbojax.models.families.experts import ExpertsConfig, read_count, read_per_token
from turbojax.models.families.keys import COMMON

_EXPERTS = 8
_THETA = 1e6


class Mixtral(Family):
    """Has experts in all layers, of the width that others have their one layer in."""

    def read_mathematics(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family`."""
        count = read_count(keys, "num_local_experts", "num_experts", default=_EXPERTS)
        if count < 1:
            raise ValueError(f"config.json: num_local_experts={count} must be at least 1")
        experts = ExpertsConfig(
            count, read_per_token(keys, count), keys["intermediate_size"], softmax="after"
        )
        return super().read_mathematics(keys) | {"experts": experts}

    def write_mathematics(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family`."""
        experts: ExpertsConfig | None = fields["experts"]
        keys = super().write_mathematics(fields)
        if experts is None:
            return keys
        return {
            **keys,
            "num_local_experts": experts.count,
            "num_experts_per_tok": experts.per_token,
        }

    def read_rope(self, hf: Mapping[str, Any], head_dim: int, max_length: int) -> dict[str, Any]:
        """See `Family`."""
        found = rope.parse(rope.merged(hf), max_length, theta=_THETA)
        self._require_whole(found)
        return {"rope_theta": found.theta, "rope_scaling": found.scaling, "rotary_dim": None}


MIXTRAL = Mixtral(
    "mixtral",
    "MixtralForCausalLM",
    {
        **COMMON,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": None,
        "num_local_experts": None,
        "num_experts": None,
        "num_experts_per_tok": 2,
    },
    writes_head_dim=False,
    experts={
        "block_sparse_moe.gate": ("mlp", "router"),
        "block_sparse_moe.experts.{}.w1": ("mlp", "gate_proj"),
        "block_sparse_moe.experts.{}.w3": ("mlp", "up_proj"),
        "block_sparse_moe.experts.{}.w2": ("mlp", "down_proj"),
    },
)
