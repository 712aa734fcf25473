"""GLM-4, its first models: RoPE of neighbouring channels in half of a head, fused gate and up."""

from collections.abc import Mapping
from typing import Any

from turbojax.models.families import rope
from turbojax.models.families.base import LINEARS, Family
from turbojax.models.families.keys import COMMON

_USUAL_PART = 0.5


class Glm(Family):
    """Has biases for queries, keys and values, but none for the output."""

    def read_rope(self, hf: Mapping[str, Any], head_dim: int, max_length: int) -> dict[str, Any]:
        """See `Family`."""
        given = rope.merged(hf)
        # transformers takes a key that is null to mean the whole head, not the usual part.
        given.setdefault(rope.PARTIAL, 1.0 if rope.PARTIAL in hf else _USUAL_PART)
        found = rope.parse(given, max_length, ("default", "linear", "llama3", "yarn"))
        return {
            "rope_theta": found.theta,
            "rope_scaling": found.scaling,
            "rotary_dim": None if found.partial == 1 else int(head_dim * found.partial),
            "rope_interleaved": True,
        }

    def write_rope(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family`."""
        keys, turned = super().write_rope(fields), fields["rotary_dim"]
        partial = 1.0 if turned is None else turned / fields["head_dim"]
        keys[rope.PARTIAL] = keys["rope_parameters"][rope.PARTIAL] = partial
        return keys

    def read_mathematics(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family`."""
        return super().read_mathematics(keys) | {"output_bias": False}


DEFAULTS = {
    **COMMON,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
}
"""Defaults of both kinds of GLM-4."""

FUSED = {
    **{name: paths for name, paths in LINEARS.items() if name.startswith("self_attn")},
    "mlp.gate_up_proj": (("mlp", "gate_proj"), ("mlp", "up_proj")),
    "mlp.down_proj": LINEARS["mlp.down_proj"],
}
"""Like `base.LINEARS`, for both kinds."""

GLM = Glm("glm", "GlmForCausalLM", DEFAULTS, linears=FUSED)
