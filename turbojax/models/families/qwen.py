"""Qwen 2, 2.5 and 3: windows that must be switched on; 3 with experts in all layers or some."""

from collections.abc import Mapping, Sequence
from typing import Any

from turbojax._json import shown
from turbojax.models.families.base import Family
from turbojax.models.families.keys import COMMON, FULL, SLIDING, flag, integer
from turbojax.models.families.layers import ExpertsConfig, read_count, read_per_token


class Qwen(Family):
    """Has windows in all layers after the first `max_window_layers`."""

    def _usual_layers(self, keys: Mapping[str, Any], window: int | None) -> list[str]:
        first = integer(keys, "max_window_layers", 0)
        count = keys["num_hidden_layers"]
        return [FULL if window is None or i < first else SLIDING for i in range(count)]

    def _write_windows(
        self, windows: Sequence[int | None], fields: Mapping[str, Any]
    ) -> dict[str, Any]:
        keys = super()._write_windows(windows, fields)
        types = keys["layer_types"]
        first = types.index(SLIDING) if keys["use_sliding_window"] else len(types)
        return keys | {"max_window_layers": first}


_WINDOWS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}

QWEN2 = Qwen(
    "qwen2",
    "Qwen2ForCausalLM",
    {**COMMON, **_WINDOWS, "max_position_embeddings": 32768, "num_key_value_heads": 32},
    writes_head_dim=False,
    chooses_layers=True,
    fields={"qkv_bias": True},
)

QWEN3 = Qwen(
    "qwen3",
    "Qwen3ForCausalLM",
    {
        **COMMON,
        **_WINDOWS,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "attention_bias": False,
    },
    chooses_layers=True,
    fields={"qk_norm": True},
)


class Qwen3Moe(Family):
    """Has layers of experts; a window is one of all layers."""

    def _read_mathematics(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        return super()._read_mathematics(keys) | {"experts": _read_experts(keys)}

    def _write_mathematics(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        experts: ExpertsConfig | None = fields["experts"]
        keys = super()._write_mathematics(fields)
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


def _read_experts(keys: Mapping[str, Any]) -> ExpertsConfig | None:
    """The experts that a file describes; None if no layer has any."""
    count = read_count(keys, "num_experts", "num_local_experts", default=128)
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
    fields={"qk_norm": True},
)
