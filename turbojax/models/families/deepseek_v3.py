"""DeepSeek-V3 and R1: latent attention, experts chosen by sigmoids and a correction, by groups."""

from collections.abc import Mapping
from typing import Any

from turbojax.models.families.deepseek_v2 import (
    DEFAULTS,
    EXPERTS,
    IDLE,
    LATENT_LINEARS,
    LATENT_NORMS,
    DeepseekV2,
    read_groups,
)
from turbojax.models.families.experts import ExpertsConfig
from turbojax.models.families.keys import flag


class DeepseekV3(DeepseekV2):
    """Chooses experts without an auxiliary loss: a correction of the scores balances them."""

    def is_interleaved(self, keys: Mapping[str, Any]) -> bool:
        """See `DeepseekV2`."""
        return flag(keys, "rope_interleave")

    def write_mathematics(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family`."""
        keys, latent = super().write_mathematics(fields), fields["latent"]
        return keys if latent is None else {**keys, "rope_interleave": latent.interleaved}

    def _read_choice(self, keys: Mapping[str, Any], count: int) -> dict[str, Any]:
        return {
            "scores": "sigmoid",
            "normalize": flag(keys, "norm_topk_prob"),
            **read_groups(keys, count),
        }

    def _write_choice(self, experts: ExpertsConfig) -> dict[str, Any]:
        return {"norm_topk_prob": experts.normalize}


DEEPSEEK_V3 = DeepseekV3(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    {
        **DEFAULTS,
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
    idle={**IDLE, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    linears=LATENT_LINEARS,
    norms=LATENT_NORMS,
    experts={**EXPERTS, "mlp.gate.e_score_correction_bias": ("mlp", "router", "correction")},
    has_predictors=True,
)
