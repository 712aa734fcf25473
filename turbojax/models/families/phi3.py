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

    def _rope_keys(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        given = super()._rope_keys(hf)
        if given.get("rope_type") in _OLD_NAMES:
            given["rope_type"] = "longrope"
        return given

    def _write_rope(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        keys = super()._write_rope(fields)
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
    rope_kinds=("default", "longrope"),
    rope_original=4096,
    rotates_parts=True,
)
