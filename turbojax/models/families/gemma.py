"""Gemma 2: soft caps, a window in every other layer, scaled embeddings, norms after sublayers.

Gemma 3: a RoPE of its own for layers with a window, normed heads, no cap on the scores.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from turbojax._json import shown
from turbojax.models.families import rope
from turbojax.models.families.base import HEAD_NORMS, Alternating, Whole, layer_types
from turbojax.models.families.keys import COMMON, FULL, SLIDING, integer, number


class Gemma2(Alternating):
    """Scales embeddings by the root of their width, and stores the scales of norms minus one."""

    def _read_mathematics(self, keys: Mapping[str, Any]) -> dict[str, Any]:

        def cap(key: str) -> Any:
            return None if keys.get(key) is None else number(keys, key)

        return super()._read_mathematics(keys) | {
            "attention_soft_cap": cap("attn_logit_softcapping"),
            "final_soft_cap": cap("final_logit_softcapping"),
            "attention_scale": number(keys, "query_pre_attn_scalar") ** -0.5,
            "embedding_scale": keys["hidden_size"] ** 0.5,
        }

    def _write_mathematics(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        scale = fields["attention_scale"]
        scalar = fields["head_dim"] if scale is None else scale**-2
        # An integer if possible, as transformers asks for one.
        whole = round(scalar)
        return super()._write_mathematics(fields) | {
            "query_pre_attn_scalar": whole if whole and whole**-0.5 == scale else scalar,
            "final_logit_softcapping": fields["final_soft_cap"],
            "attn_logit_softcapping": fields["attention_soft_cap"],
        }


_DEFAULTS = {
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
_NORMS = {
    "input_layernorm": ("attention_norm",),
    "post_attention_layernorm": ("attention_post_norm",),
    "pre_feedforward_layernorm": ("mlp_norm",),
    "post_feedforward_layernorm": ("mlp_post_norm",),
    **HEAD_NORMS,
}
"""Like `base.NORMS`, for Gemma 2 and 3."""

_FIELDS = {"norm_offset": 1.0, "post_norms": True}

GEMMA2 = Gemma2(
    "gemma2",
    "Gemma2ForCausalLM",
    _DEFAULTS,
    idle={"hidden_act": "gelu_pytorch_tanh"},
    activation_key="hidden_activation",
    chooses_layers=True,
    overflows_float16=True,
    norms=_NORMS,
    fields=_FIELDS,
)

_PATTERN, _LOCAL_THETA = "sliding_window_pattern", "rope_local_base_freq"
_SCORE_CAP = "attn_logit_softcapping"
# Where the keys are missing: every sixth layer has no window.
_USUAL_PATTERN, _LOCAL_BASE = 6, 10_000.0


class Gemma3(Gemma2):
    """Layers without a window have scaled RoPE; those with one have a base of their own."""

    def _read_rope(self, hf: Mapping[str, Any], head_dim: int, max_length: int) -> dict[str, Any]:
        # transformers 5 has one object per kind of layer in `rope_parameters`.
        kinds = _by_kind(hf.get("rope_parameters"))
        outside = {key: hf[key] for key in rope.KEYS if key in hf}
        found = rope.parse(
            rope.merged({**outside, "rope_parameters": kinds.get(FULL)}),
            max_length,
            theta=self.rope_theta,
        )
        self._require_whole(found)
        if hf.get(_LOCAL_THETA) is not None:
            number(hf, _LOCAL_THETA)
        local = rope.merged(
            {rope.THETA: hf.get(_LOCAL_THETA), "rope_parameters": kinds.get(SLIDING)}
        )
        kind = local.get("rope_type", "default")
        if kind != "default":
            raise NotImplementedError(
                f"rope_type={shown(kind)} is not supported for {SLIDING!r}: must be 'default'"
            )
        local_found = rope.parse(local, max_length, theta=_LOCAL_BASE)
        self._require_whole(local_found)
        return {
            "rope_theta": found.theta,
            "rope_scaling": found.scaling,
            "rotary_dim": None,
            "local_rope_theta": local_found.theta,
        }

    def _write_rope(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        keys, theta = super()._write_rope(fields), fields["local_rope_theta"]
        theta = fields["rope_theta"] if theta is None else theta
        local = {"rope_type": "default", rope.THETA: theta}
        return keys | {
            _LOCAL_THETA: theta,
            "rope_parameters": {FULL: keys["rope_parameters"], SLIDING: local},
        }

    def _write_mathematics(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        keys = super()._write_mathematics(fields)
        del keys[_SCORE_CAP]
        return keys

    def _usual_layers(self, keys: Mapping[str, Any], window: int | None) -> list[str]:
        return _pattern(integer(keys, _PATTERN), keys["num_hidden_layers"])

    def _write_windows(
        self, windows: Sequence[int | None], fields: Mapping[str, Any]
    ) -> dict[str, Any]:
        keys, count = super()._write_windows(windows, fields), fields["num_layers"]
        types = layer_types(windows, count)
        # The first versions of transformers with this family read this, not `layer_types`.
        pattern = types.index(FULL) + 1 if FULL in types else count + 1
        return {**keys, _PATTERN: pattern} if types == _pattern(pattern, count) else keys


def _pattern(pattern: int, count: int) -> list[str]:
    return [SLIDING if i % pattern else FULL for i in range(1, count + 1)]


def _by_kind(parameters: Any) -> Mapping[str, Any]:
    """The object for each kind of layer; NotImplementedError or ValueError for anything else."""
    if parameters is not None and not isinstance(parameters, Mapping):
        raise ValueError(f"rope_parameters={shown(parameters)} must be an object")
    for key in parameters or {}:
        if key not in (FULL, SLIDING):
            raise NotImplementedError(
                f"rope_parameters={shown(parameters)} is not supported: must have objects for "
                f"{FULL!r} and {SLIDING!r}, and nothing else"
            )
    return parameters or {}


GEMMA3 = Gemma3(
    "gemma3_text",
    "Gemma3ForCausalLM",
    {
        **{key: value for key, value in _DEFAULTS.items() if key != _SCORE_CAP},
        "max_position_embeddings": 131072,
        "final_logit_softcapping": None,
        _PATTERN: _USUAL_PATTERN,
        _LOCAL_THETA: _LOCAL_BASE,
    },
    # transformers reads a cap of the scores and does not apply it.
    idle={"hidden_act": "gelu_pytorch_tanh", _SCORE_CAP: None},
    activation_key="hidden_activation",
    chooses_layers=True,
    overflows_float16=True,
    norms=_NORMS,
    fields={**_FIELDS, "qk_norm": True},
    rope_theta=1_000_000.0,
)

GEMMA3_WITH_IMAGES = Whole(
    "gemma3",
    "Gemma3ForConditionalGeneration",
    GEMMA3,
    others=(
        *("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index"),
        *("image_token_index", "boi_token_id", "eoi_token_id", "image_token_id"),
    ),
    defaults={"vocab_size": 262208, "num_attention_heads": 8},
)
"""The checkpoints that also read images, see `turbojax.models.vision`."""
