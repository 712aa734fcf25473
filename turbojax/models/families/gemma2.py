"""Gemma 2: soft caps, a window in every other layer, scaled embeddings, norms after sublayers."""

from collections.abc import Mapping
from typing import Any

from turbojax.models.families.base import HEAD_NORMS, Alternating
from turbojax.models.families.keys import COMMON, number


class Gemma2(Alternating):
    """Scales embeddings by the root of their width, and stores the scales of norms minus one."""

    def read_mathematics(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family`."""

        def cap(key: str) -> Any:
            return None if keys.get(key) is None else number(keys, key)

        return super().read_mathematics(keys) | {
            "attention_soft_cap": cap("attn_logit_softcapping"),
            "final_soft_cap": cap("final_logit_softcapping"),
            "attention_scale": number(keys, "query_pre_attn_scalar") ** -0.5,
            "embedding_scale": keys["hidden_size"] ** 0.5,
            "norm_offset": 1.0,
            "post_norms": True,
        }

    def write_mathematics(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family`."""
        scale = fields["attention_scale"]
        scalar = fields["head_dim"] if scale is None else scale**-2
        # An integer if possible, as transformers asks for one.
        whole = round(scalar)
        return super().write_mathematics(fields) | {
            "query_pre_attn_scalar": whole if whole and whole**-0.5 == scale else scalar,
            "final_logit_softcapping": fields["final_soft_cap"],
            "attn_logit_softcapping": fields["attention_soft_cap"],
        }


DEFAULTS = {
    **{key: value for key, value in COMMON.items() if key != "hidden_act"},
    "max_position_embeddings": 8192,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
"""Defaults of Gemma 2, and most of Gemma 3's."""

# With four norms, `post_attention_layernorm` means another norm than with two.
NORMS = {
    "input_layernorm": ("attention_norm",),
    "post_attention_layernorm": ("attention_post_norm",),
    "pre_feedforward_layernorm": ("mlp_norm",),
    "post_feedforward_layernorm": ("mlp_post_norm",),
    **HEAD_NORMS,
}
"""Like `base.NORMS`, for Gemma 2 and 3."""

GEMMA2 = Gemma2(
    "gemma2",
    "Gemma2ForCausalLM",
    DEFAULTS,
    idle={"hidden_act": "gelu_pytorch_tanh"},
    activation_key="hidden_activation",
    chooses_layers=True,
    overflows_float16=True,
    norms=NORMS,
)
