"""Qwen 3 with experts, in all layers or in some; windows of all layers, if they are switched on."""

from collections.abc import Mapping, Sequence
from typing import Any

from turbojax._json import shown
from turbojax.models.families.base import Family, first_window
from turbojax.models.families.experts import ExpertsConfig, read_count, read_per_token
from turbojax.models.families.keys import COMMON, flag, integer

_EXPERTS = 128


class Qwen3Moe(Family):
    """Norms the heads of queries and keys, and has layers of experts."""

    def read_mathematics(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family`."""
        return super().read_mathematics(keys) | {"qk_norm": True, "experts": _read(keys)}

    def write_mathematics(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family`."""
        experts: ExpertsConfig | None = fields["experts"]
        keys = super().write_mathematics(fields)
        if experts is None:
            return {**keys, "num_experts": 0}
        return {
            **keys,
            "num_experts": experts.count,
            "num_experts_per_tok": experts.per_token,
            "moe_intermediate_size": experts.intermediate_size,
            "norm_topk_prob": experts.normalize,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(experts.dense_layers),
        }

    def write_windows(
        self, windows: Sequence[int | None], fields: Mapping[str, Any]
    ) -> dict[str, Any]:
        """See `Family`."""
        window = first_window(windows)
        return {"use_sliding_window": window is not None, "sliding_window": window}


def _read(keys: Mapping[str, Any]) -> ExpertsConfig | None:
    """The experts that a file describes; None if no layer has any."""
    count = read_count(keys, "num_experts", "num_local_experts", default=_EXPERTS)
    step, layers = integer(keys, "decoder_sparse_step"), range(keys["num_hidden_layers"])
    without = keys["mlp_only_layers"]
    without = [] if without is None else without
    if not isinstance(without, list | tuple) or any(type(x) is not int for x in without):
        raise ValueError(
            f"config.json: mlp_only_layers={shown(without)} must be a list of numbers of layers"
        )
    alone = set(without)
    dense = tuple(i for i in layers if i in alone or (i + 1) % step)
    if count == 0 or len(dense) == len(layers):
        return None
    return ExpertsConfig(
        count,
        read_per_token(keys, count),
        integer(keys, "moe_intermediate_size"),
        normalize=flag(keys, "norm_topk_prob"),
        dense_layers=dense,
    )


QWEN3_MOE = Qwen3Moe(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    {
        **COMMON,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        # Has no meaning in this family.
        "max_window_layers": None,
        "num_experts": None,
        "num_local_experts": None,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
    },
    experts={
        "mlp.gate": ("mlp", "router"),
        "mlp.experts.{}.gate_proj": ("mlp", "gate_proj"),
        "mlp.experts.{}.up_proj": ("mlp", "up_proj"),
        "mlp.experts.{}.down_proj": ("mlp", "down_proj"),
    },
)
