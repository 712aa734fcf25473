"""GLM-4 since April 2025: norms of what attention and feed-forward layer add, too."""

from collections.abc import Mapping
from typing import Any

from turbojax.models.families.glm import DEFAULTS, FUSED, Glm


class Glm4(Glm):
    """Has norms before and after attention and feed-forward layer."""

    def read_mathematics(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family`."""
        return super().read_mathematics(keys) | {"post_norms": True}


GLM4 = Glm4(
    "glm4",
    "Glm4ForCausalLM",
    DEFAULTS,
    linears=FUSED,
    norms={
        "input_layernorm": ("attention_norm",),
        "post_self_attn_layernorm": ("attention_post_norm",),
        "post_attention_layernorm": ("mlp_norm",),
        "post_mlp_layernorm": ("mlp_post_norm",),
    },
)
