"""Phi-3, 3.5 and Phi-4-mini: fused projections, LongRoPE, rotation of a part of each head."""

from collections.abc import Mapping
from typing import Any

from turbojax.models.families import rope
from turbojax.models.families.base import LINEARS, Family
from turbojax.models.families.keys import COMMON

# Names that early checkpoints have for LongRoPE.
_OLD_NAMES = ("su", "yarn")


class Phi3(Family):
    """Has RoPE's original length outside of the object that describes the rest of RoPE."""

    def read_rope(self, hf: Mapping[str, Any], head_dim: int, max_length: int) -> dict[str, Any]:
        """See `Family`."""
        given = rope.merged(hf)
        if given.get("rope_type") in _OLD_NAMES:
            given["rope_type"] = "longrope"
        found = rope.parse(given, max_length, ("default", "longrope"), original=4096)
        return {
            "rope_theta": found.theta,
            "rope_scaling": found.scaling,
            "rotary_dim": None if found.partial == 1 else int(head_dim * found.partial),
        }

    def write_rope(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family`."""
        keys, turned = super().write_rope(fields), fields["rotary_dim"]
        partial = 1.0 if turned is None else turned / fields["head_dim"]
        keys[rope.PARTIAL] = keys["rope_parameters"][rope.PARTIAL] = partial
        scaled = keys.get("rope_scaling")
        if scaled:
            # transformers 4 expects exactly these keys here, and the length outside.
            keys[rope.ORIGINAL] = scaled.pop(rope.ORIGINAL)
            scaled["type"] = scaled.pop("rope_type")
        return keys


PHI3 = Phi3(
    "phi3",
    "Phi3ForCausalLM",
    {**COMMON, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "sliding_window": None},
    idle={"full_attn_mod": 1, "interpolate_factor": 1},
    writes_head_dim=False,
    linears={
        "self_attn.qkv_proj": tuple(("attention", f"{name}_proj") for name in "qkv"),
        "mlp.gate_up_proj": (("mlp", "gate_proj"), ("mlp", "up_proj")),
        **{name: LINEARS[name] for name in ("self_attn.o_proj", "mlp.down_proj")},
    },
)
