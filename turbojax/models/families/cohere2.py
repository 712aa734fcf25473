"""Cohere 2: parallel layers, LayerNorm, and positions only in the layers with a window."""

from collections.abc import Mapping
from typing import Any

from turbojax.models.families.base import Alternating
from turbojax.models.families.keys import COMMON, FULL, SLIDING, even_share, integer, number

_PATTERN, _LOGITS, _EPS = "sliding_window_pattern", "logit_scale", "layer_norm_eps"


class Cohere2(Alternating):
    """One LayerNorm without a bias serves attention and feed-forward layer, which are parallel."""

    def read(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family`."""
        fields = super().read(hf)
        share = even_share(fields["hidden_size"], fields["num_heads"])
        if fields["head_dim"] != share:
            raise NotImplementedError(
                f"head_dim={fields['head_dim']} is not supported for {self.name!r}: must be "
                f"{share}, the share of each head"
            )
        windows = fields["local_windows"] or (None,) * fields["num_layers"]
        without = tuple(i for i, window in enumerate(windows) if window is None)
        return fields | {"nope_layers": without}

    def _read_mathematics(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        factor = number(keys, _LOGITS)
        return super()._read_mathematics(keys) | {
            "logit_scale": None if factor == 1 else factor,
        }

    def _write_mathematics(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        factor = fields["logit_scale"]
        return super()._write_mathematics(fields) | {_LOGITS: 1.0 if factor is None else factor}

    def _usual_layers(self, keys: Mapping[str, Any], window: int | None) -> list[str]:
        pattern = integer(keys, _PATTERN)
        count = keys["num_hidden_layers"]
        return [FULL if (i + 1) % pattern == 0 else SLIDING for i in range(count)]


COHERE2 = Cohere2(
    "cohere2",
    "Cohere2ForCausalLM",
    {
        **{key: value for key, value in COMMON.items() if key != "rms_norm_eps"},
        _EPS: 1e-5,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "sliding_window": 4096,
        _LOGITS: 0.0625,
        _PATTERN: 4,
    },
    # Keys that only the first files have; no code reads them.
    idle={
        "layer_switch": 4,
        "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj",
        "rotary_pct": 1.0,
        "use_embedding_sharing": True,
        "use_gated_activation": True,
        "use_parallel_block": True,
    },
    norm_eps_key=_EPS,
    writes_head_dim=False,
    chooses_layers=True,
    norms={"input_layernorm": ("attention_norm",)},
    fields={"layer_norm": True, "parallel": True, "rope_interleaved": True},
)
