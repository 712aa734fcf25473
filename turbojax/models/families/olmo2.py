"""OLMo 2: norms only after attention and feed-forward layer, and one norm of all heads together."""

from collections.abc import Mapping
from typing import Any

from turbojax.models.families.base import HEAD_NORMS, Family
from turbojax.models.families.keys import COMMON


class Olmo2(Family):
    """Reads the residual stream as it is, and norms what is added to it."""

    def read_mathematics(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family`."""
        return super().read_mathematics(keys) | {
            "qk_norm": True,
            "joint_qk_norm": True,
            "pre_norms": False,
            "post_norms": True,
        }


OLMO2 = Olmo2(
    "olmo2",
    "Olmo2ForCausalLM",
    {
        **COMMON,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
    },
    writes_head_dim=False,
    norms={
        "post_attention_layernorm": ("attention_post_norm",),
        "post_feedforward_layernorm": ("mlp_post_norm",),
        **HEAD_NORMS,
    },
)
