"""GLM-4: RoPE of neighbouring channels in half of a head, fused gate and up."""

from collections.abc import Mapping
from typing import Any

from turbojax.models.families import rope
from turbojax.models.families.base import LINEARS, Family
from turbojax.models.families.keys import COMMON

_USUAL_PART = 0.5
_FIELDS = {"output_bias": False, "rope_interleaved": True}


class Glm(Family):
    """Has biases for queries, keys and values, but none for the output."""

    def _rope_keys(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        given = super()._rope_keys(hf)
        # transformers takes a key that is null to mean the whole head, not the usual part.
        given.setdefault(rope.PARTIAL, 1.0 if rope.PARTIAL in hf else _USUAL_PART)
        return given


_SHARED: dict[str, Any] = {
    "defaults": {
        **COMMON,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-7,
        "attention_bias": True,
    },
    "linears": {
        **{name: paths for name, paths in LINEARS.items() if name.startswith("self_attn")},
        "mlp.gate_up_proj": (("mlp", "gate_proj"), ("mlp", "up_proj")),
        "mlp.down_proj": LINEARS["mlp.down_proj"],
    },
    "rope_kinds": ("default", "linear", "llama3", "yarn"),
    "rotates_parts": True,
}

GLM = Glm("glm", "GlmForCausalLM", fields=_FIELDS, **_SHARED)

GLM4 = Glm(
    "glm4",
    "Glm4ForCausalLM",
    norms={
        "input_layernorm": ("attention_norm",),
        "post_self_attn_layernorm": ("attention_post_norm",),
        "post_attention_layernorm": ("mlp_norm",),
        "post_mlp_layernorm": ("mlp_post_norm",),
    },
    fields={**_FIELDS, "post_norms": True},
    **_SHARED,
)
"""The models since April 2025, with norms before and after attention and feed-forward layer."""
