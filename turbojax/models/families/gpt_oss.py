"""gpt-oss: sinks, a window in every other layer, biases, experts with a clamped SwiGLU."""

from collections.abc import Mapping
from typing import Any

from turbojax._json import shown
from turbojax.models.families import rope
from turbojax.models.families.base import Alternating
from turbojax.models.families.keys import COMMON, number
from turbojax.models.families.layers import ExpertsConfig, experts_of_all_layers

# For a file without any key of rotary embeddings.
_USUAL_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    rope.ORIGINAL: 4096,
}


class GptOss(Alternating):
    """Has experts in all layers; a tensor holds all of them, gate and partner in turns."""

    def _read_mathematics(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        experts = experts_of_all_layers(
            _agreeing(keys),
            128,
            has_biases=True,
            swiglu_limit=float(number(keys, "swiglu_limit")),
            swiglu_alpha=float(number(keys, "swiglu_alpha")),
        )
        return super()._read_mathematics(keys) | experts

    def _write_mathematics(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        experts: ExpertsConfig | None = fields["experts"]
        keys = super()._write_mathematics(fields)
        if experts is None:
            return keys
        return {
            **keys,
            "num_local_experts": experts.count,
            "num_experts_per_tok": experts.per_token,
            "swiglu_limit": experts.swiglu_limit,
            "swiglu_alpha": experts.swiglu_alpha,
        }

    def _rope_keys(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        given = super()._rope_keys(hf)
        # As in transformers, an empty `rope_scaling` counts as missing; empty `rope_parameters`
        # do not.
        if hf.get("rope_parameters") is None and not hf.get("rope_scaling"):
            given = {**_USUAL_ROPE, **given}
        return given


def _agreeing(keys: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys, after a check that the number of experts per token, given twice, is the same."""
    chosen, again = keys["num_experts_per_tok"], keys["experts_per_token"]
    if again not in (None, chosen):
        raise ValueError(
            f"config.json: experts_per_token={shown(again)} must be num_experts_per_tok="
            f"{shown(chosen)}"
        )
    return keys


GPT_OSS = GptOss(
    "gpt_oss",
    "GptOssForCausalLM",
    {
        **COMMON,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "attention_bias": True,
        "sliding_window": 128,
        "num_local_experts": None,
        "num_experts": None,
        "num_experts_per_tok": 4,
        # What published files say a second time: about experts here, about YaRN below.
        "experts_per_token": None,
        "initial_context_length": None,
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702,
    },
    chooses_layers=True,
    experts={
        "mlp.router": ("mlp", "router"),
        "mlp.experts.gate_up_proj": ("mlp", "gate_proj"),
        "mlp.experts.down_proj": ("mlp", "down_proj"),
    },
    experts_in_one=True,
    fields={"attention_sinks": True},
    rope_theta=150_000.0,
)
