"""DeepSeek-V2, Lite and Coder: latent attention, shared experts, experts chosen by softmax.

DeepSeek-V3 and R1: experts chosen by sigmoids and a correction, by groups.
"""

from collections.abc import Mapping
from typing import Any

from turbojax._json import shown
from turbojax.models.families import rope
from turbojax.models.families.base import HEAD_NORMS, LINEARS, NORMS, Family
from turbojax.models.families.keys import COMMON, flag, integer, number
from turbojax.models.families.layers import (
    ExpertsConfig,
    LatentConfig,
    read_count,
    read_per_token,
)
from turbojax.rotary import YarnScaling

_GREEDY, _GROUPS = "greedy", "group_limited_greedy"


class DeepseekV2(Family):
    """Makes keys and values from a latent, whose width and parts the file gives.

    `num_key_value_heads` has no meaning here: all heads share the latent.
    """

    def read(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family`."""
        given = dict(hf)
        # If there is a `head_dim`, it is the width of what rotates.
        rotated, joined = given.pop("head_dim", None), given.pop("qk_head_dim", None)
        # Any `head_dim` will do here: the width of the latent's parts replaces it.
        fields = super().read({**given, "head_dim": 1, "num_key_value_heads": None})
        latent: LatentConfig = fields["latent"]
        for key, value, wanted in (
            ("head_dim", rotated, latent.rope_dim),
            ("qk_head_dim", joined, latent.key_dim),
        ):
            if value not in (None, wanted):
                raise ValueError(f"config.json: {key}={shown(value)} must be {wanted}, or left out")
        return fields

    def _read_mathematics(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        latent = self._read_latent(keys)
        return super()._read_mathematics(keys) | {
            "head_dim": latent.key_dim,
            "latent": latent,
            "experts": self._read_experts(keys),
        }

    def _write_mathematics(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        keys = super()._write_mathematics(fields)
        latent: LatentConfig | None = fields["latent"]
        experts: ExpertsConfig | None = fields["experts"]
        if latent is not None:
            keys |= {
                "head_dim": latent.rope_dim,
                "kv_lora_rank": latent.rank,
                "q_lora_rank": latent.query_rank,
                "qk_nope_head_dim": latent.nope_dim,
                "qk_rope_head_dim": latent.rope_dim,
                "v_head_dim": latent.value_dim,
            }
        if experts is None:
            # transformers builds experts in all layers after these, even if their number is 0.
            return {
                **keys,
                "n_routed_experts": 0,
                "n_shared_experts": 0,
                "first_k_dense_replace": fields["num_layers"],
            }
        width = experts.intermediate_size
        return {
            **keys,
            "n_routed_experts": experts.count,
            "n_shared_experts": (experts.shared_size or 0) // width,
            "num_experts_per_tok": experts.per_token,
            "moe_intermediate_size": width,
            "routed_scaling_factor": experts.scaling,
            "first_k_dense_replace": len(experts.dense_layers),
            "n_group": experts.groups,
            "topk_group": experts.top_groups,
            **self._write_choice(experts),
        }

    def _write_rope(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        # If YaRN's two scales are equal, they are written as in published files.
        keys, latent, scaling = (
            super()._write_rope(fields),
            fields["latent"],
            fields["rope_scaling"],
        )
        if latent is None or not latent.yarn_mscale or not isinstance(scaling, YarnScaling):
            return keys
        for place in (keys["rope_parameters"], keys["rope_scaling"]):
            place["mscale_all_dim"] = latent.yarn_mscale
            if scaling.attention_factor == 1:
                del place["attention_factor"]
                place["mscale"] = latent.yarn_mscale
        return keys

    def _is_interleaved(self, keys: Mapping[str, Any]) -> bool:
        """Whether channels that rotate together lie side by side."""
        return True

    def _read_latent(self, keys: Mapping[str, Any]) -> LatentConfig:
        return LatentConfig(
            rank=integer(keys, "kv_lora_rank"),
            nope_dim=integer(keys, "qk_nope_head_dim"),
            rope_dim=integer(keys, "qk_rope_head_dim"),
            value_dim=integer(keys, "v_head_dim"),
            query_rank=None if keys["q_lora_rank"] is None else integer(keys, "q_lora_rank"),
            interleaved=self._is_interleaved(keys),
            yarn_mscale=_all_dim(keys),
        )

    def _read_experts(self, keys: Mapping[str, Any]) -> ExpertsConfig | None:
        """The experts that a file describes; None if no layer has any."""
        names = ("n_routed_experts", "num_local_experts", "num_experts")
        count = read_count(keys, *names, default=0)
        dense = min(integer(keys, "first_k_dense_replace", 0), keys["num_hidden_layers"])
        if count == 0 or dense == keys["num_hidden_layers"]:
            return None
        if flag(keys, "mlp_bias"):
            raise NotImplementedError(
                f"mlp_bias=True is not supported for {self.name!r} with experts: must be false"
            )
        width = integer(keys, "moe_intermediate_size")
        shared = 0
        if keys["n_shared_experts"] is not None:
            shared = integer(keys, "n_shared_experts", 0)
        return ExpertsConfig(
            count,
            read_per_token(keys, count),
            width,
            dense_layers=tuple(range(dense)),
            scaling=float(number(keys, "routed_scaling_factor")),
            shared_size=shared * width or None,
            **self._read_choice(keys, count),
        )

    def _read_choice(self, keys: Mapping[str, Any], count: int) -> dict[str, Any]:
        """The fields that say how experts are chosen and weighted."""
        if flag(keys, "norm_topk_prob"):
            raise NotImplementedError(
                f"norm_topk_prob=True is not supported for {self.name!r}: must be false, for "
                "transformers does not obey it"
            )
        method = keys["topk_method"]
        if method not in (_GREEDY, _GROUPS):
            raise NotImplementedError(
                f"topk_method={shown(method)} is not supported for {self.name!r}: must be "
                f"{_GREEDY!r} or {_GROUPS!r}"
            )
        return {} if method == _GREEDY else _read_groups(keys, count)

    def _write_choice(self, experts: ExpertsConfig) -> dict[str, Any]:
        """The keys that `_read_choice` reads, except for the groups."""
        return {
            "topk_method": _GROUPS if experts.groups > 1 else _GREEDY,
            "norm_topk_prob": experts.normalize,
        }


def _read_groups(keys: Mapping[str, Any], count: int) -> dict[str, Any]:
    """The fields for groups of experts."""
    groups, top = integer(keys, "n_group"), integer(keys, "topk_group")
    if count % groups or top > groups or top * (count // groups) < keys["num_experts_per_tok"]:
        raise ValueError(
            f"config.json: n_group={groups} must share {count} experts evenly, and topk_group={top}"
            f" of them must hold num_experts_per_tok={keys['num_experts_per_tok']}"
        )
    return {"groups": groups, "top_groups": top}


def _all_dim(keys: Mapping[str, Any]) -> float:
    """YaRN's scale of the scores, 0 for none; `rope.parse` reads the scale of queries and keys."""
    given = rope.merged(keys)
    if given.get("rope_type", "default") == "default":
        return 0.0
    return float(given.get("mscale_all_dim") or 0.0)


_LINEARS = {
    **{
        f"self_attn.{name}": (("attention", name),)
        for name in ("q_proj", "q_a_proj", "q_b_proj", "kv_b_proj", "o_proj")
    },
    "self_attn.kv_a_proj_with_mqa": (("attention", "kv_a_proj"),),
    **{name: paths for name, paths in LINEARS.items() if name.startswith("mlp.")},
}
"""Like `base.LINEARS`, for latent attention; a layer has some of these."""

_NORMS = {
    **{name: path for name, path in NORMS.items() if name not in HEAD_NORMS},
    "self_attn.q_a_layernorm": ("attention", "q_a_norm"),
    "self_attn.kv_a_layernorm": ("attention", "kv_a_norm"),
}
"""Like `base.NORMS`, for latent attention."""

_EXPERTS = {
    "mlp.gate": ("mlp", "router"),
    **{
        f"mlp.{where}.{name}": ("mlp", *path, name)
        for where, path in (("experts.{}", ()), ("shared_experts", ("shared",)))
        for name in ("gate_proj", "up_proj", "down_proj")
    },
}
"""See `Family.experts`."""

_DEFAULTS = {
    **COMMON,
    "attention_bias": False,
    "qk_head_dim": None,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_experts": None,
    "num_local_experts": None,
    "num_experts_per_tok": None,
}
"""Defaults of all versions."""

_IDLE = {"moe_layer_freq": 1, "ep_size": 1}
"""Keys of the authors' own code, which came before transformers'."""

DEEPSEEK_V2 = DeepseekV2(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    {
        **_DEFAULTS,
        "max_position_embeddings": 2048,
        "mlp_bias": False,
        "moe_intermediate_size": 1407,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "n_group": None,
        "topk_group": None,
        "topk_method": _GREEDY,
        # Keys of training.
        "aux_loss_alpha": None,
        "seq_aux": None,
    },
    idle={**_IDLE, "scoring_func": "softmax"},
    linears=_LINEARS,
    norms=_NORMS,
    experts=_EXPERTS,
)


class DeepseekV3(DeepseekV2):
    """Chooses experts without an auxiliary loss: a correction of the scores balances them."""

    def _is_interleaved(self, keys: Mapping[str, Any]) -> bool:
        return flag(keys, "rope_interleave")

    def _write_mathematics(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        keys, latent = super()._write_mathematics(fields), fields["latent"]
        return keys if latent is None else {**keys, "rope_interleave": latent.interleaved}

    def _read_choice(self, keys: Mapping[str, Any], count: int) -> dict[str, Any]:
        return {
            "scores": "sigmoid",
            "normalize": flag(keys, "norm_topk_prob"),
            **_read_groups(keys, count),
        }

    def _write_choice(self, experts: ExpertsConfig) -> dict[str, Any]:
        return {"norm_topk_prob": experts.normalize}


DEEPSEEK_V3 = DeepseekV3(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    {
        **_DEFAULTS,
        "max_position_embeddings": 4096,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "n_group": 8,
        "topk_group": 4,
        "rope_interleave": True,
        # Keys of training, and of layers that predict further tokens, which are not read.
        "aux_loss_alpha": None,
        "seq_aux": None,
        "num_nextn_predict_layers": None,
        "num_mtp_layers": None,
    },
    idle={**_IDLE, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    linears=_LINEARS,
    norms=_NORMS,
    experts={**_EXPERTS, "mlp.gate.e_score_correction_bias": ("mlp", "router", "correction")},
    has_predictors=True,
)
