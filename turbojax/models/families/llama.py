"""Llama and its nearest relatives: Mistral, Mixtral, OLMo 2, Granite 3, SmolLM3."""

from collections.abc import Mapping
from typing import Any

from turbojax._json import shown
from turbojax.models.families.base import HEAD_NORMS, Family, Whole
from turbojax.models.families.keys import COMMON, FULL, SLIDING, integer, number
from turbojax.models.families.layers import ExpertsConfig, experts_of_all_layers

LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    {**COMMON, "max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False},
)

MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    {
        **COMMON,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
)

MISTRAL3 = Whole(
    "mistral3",
    "Mistral3ForConditionalGeneration",
    MISTRAL,
    others=(
        *("vision_config", "image_token_index", "image_token_id", "projector_hidden_act"),
        *("vision_feature_layer", "multimodal_projector_bias", "spatial_merge_size"),
    ),
)
"""Mistral Small 3.1 and later, whose checkpoints also read images."""


class Mixtral(Family):
    """Mistral with experts in all layers, of the width that others have their one layer in."""

    def _read_mathematics(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        return super()._read_mathematics(keys) | experts_of_all_layers(keys, 8)

    def _write_mathematics(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        experts: ExpertsConfig | None = fields["experts"]
        keys = super()._write_mathematics(fields)
        if experts is None:
            return keys
        return {
            **keys,
            "num_local_experts": experts.count,
            "num_experts_per_tok": experts.per_token,
        }


MIXTRAL = Mixtral(
    "mixtral",
    "MixtralForCausalLM",
    {
        **COMMON,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": None,
        "num_local_experts": None,
        "num_experts": None,
        "num_experts_per_tok": 2,
    },
    writes_head_dim=False,
    experts={
        "block_sparse_moe.gate": ("mlp", "router"),
        "block_sparse_moe.experts.{}.w1": ("mlp", "gate_proj"),
        "block_sparse_moe.experts.{}.w3": ("mlp", "up_proj"),
        "block_sparse_moe.experts.{}.w2": ("mlp", "down_proj"),
    },
    rope_theta=1e6,
)

OLMO2 = Family(
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
    # Norms only after attention and feed-forward layer, and one of all heads together.
    fields={"qk_norm": True, "joint_qk_norm": True, "pre_norms": False, "post_norms": True},
)

_EMBEDDING, _ATTENTION = "embedding_multiplier", "attention_multiplier"
_RESIDUAL, _LOGITS = "residual_multiplier", "logits_scaling"


class Granite(Family):
    """Divides logits by the last of its factors, and multiplies by the others."""

    def _read_mathematics(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        def factor(key: str) -> float | None:
            value = number(keys, key)
            return None if value == 1 else value

        divisor = factor(_LOGITS)
        return super()._read_mathematics(keys) | {
            "embedding_scale": factor(_EMBEDDING),
            "attention_scale": number(keys, _ATTENTION),
            "residual_scale": factor(_RESIDUAL),
            "logit_scale": None if divisor is None else 1 / divisor,
        }

    def _write_mathematics(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        scores, logits = fields["attention_scale"], fields["logit_scale"]
        return super()._write_mathematics(fields) | {
            _EMBEDDING: 1.0 if fields["embedding_scale"] is None else fields["embedding_scale"],
            _ATTENTION: fields["head_dim"] ** -0.5 if scores is None else scores,
            _RESIDUAL: 1.0 if fields["residual_scale"] is None else fields["residual_scale"],
            _LOGITS: 1.0 if logits is None else _divisor(logits),
        }


def _divisor(factor: float) -> float:
    """The divisor for this factor: a whole number if its reciprocal is exactly the factor."""
    whole = round(1 / factor)
    return float(whole) if whole and 1 / whole == factor else 1 / factor


GRANITE = Granite(
    "granite",
    "GraniteForCausalLM",
    {
        **COMMON,
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "mlp_bias": False,
        **dict.fromkeys((_EMBEDDING, _ATTENTION, _RESIDUAL, _LOGITS), 1.0),
    },
    writes_head_dim=False,
)

_LAYERS, _INTERVAL = "no_rope_layers", "no_rope_layer_interval"


class SmolLM3(Family):
    """Has a 1 for each layer that rotates, under a key that sounds like the opposite."""

    def _read_mathematics(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        without = tuple(i for i, rotates in enumerate(_rotates(keys)) if not rotates)
        return super()._read_mathematics(keys) | {"nope_layers": without}

    def _write_mathematics(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        without = fields["nope_layers"]
        rotates = [int(i not in without) for i in range(fields["num_layers"])]
        return super()._write_mathematics(fields) | {_LAYERS: rotates}

    def _usual_layers(self, keys: Mapping[str, Any], window: int | None) -> list[str]:
        """If there is a window, exactly the layers without positions have it."""
        return [FULL if rotates or window is None else SLIDING for rotates in _rotates(keys)]


def _rotates(keys: Mapping[str, Any]) -> list[bool]:
    """Whether each layer has positions; ValueError if the file's list is not one of 0 and 1."""
    given, count = keys[_LAYERS], keys["num_hidden_layers"]
    if given is None:
        interval = integer(keys, _INTERVAL)
        return [(i + 1) % interval != 0 for i in range(count)]
    if (
        not isinstance(given, list | tuple)
        or len(given) < count
        or any(type(x) not in (int, bool) or x not in (0, 1) for x in given)
    ):
        raise ValueError(
            f"config.json: {_LAYERS}={shown(given)} must be a list of 0 or 1 for each of {count} "
            "layers"
        )
    return [bool(x) for x in given[:count]]


SMOLLM3 = SmolLM3(
    "smollm3",
    "SmolLM3ForCausalLM",
    {
        **COMMON,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        # Left over from Qwen's files: nothing reads it.
        "max_window_layers": None,
        _LAYERS: None,
        _INTERVAL: 4,
    },
    writes_head_dim=False,
    chooses_layers=True,
    rope_theta=2e6,
)
