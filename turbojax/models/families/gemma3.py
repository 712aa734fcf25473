"""Gemma 3: a RoPE of its own for layers with a window, normed heads, no cap on the scores."""

from collections.abc import Mapping, Sequence
from typing import Any

from turbojax._json import shown
from turbojax.models.families import rope
from turbojax.models.families.base import layer_types
from turbojax.models.families.gemma2 import DEFAULTS, NORMS, Gemma2
from turbojax.models.families.keys import FULL, SLIDING, integer, number
from turbojax.models.families.whole import Whole

_PATTERN, _LOCAL_THETA = "sliding_window_pattern", "rope_local_base_freq"
_SCORE_CAP = "attn_logit_softcapping"
# Where the keys are missing: every sixth layer has no window.
_USUAL_PATTERN, _GLOBAL_BASE, _LOCAL_BASE = 6, 1_000_000.0, 10_000.0


class Gemma3(Gemma2):
    """Layers without a window have scaled RoPE; those with one have a base of their own."""

    def read_rope(self, hf: Mapping[str, Any], head_dim: int, max_length: int) -> dict[str, Any]:
        """See `Family`; transformers 5 has one object per kind of layer in `rope_parameters`."""
        del head_dim
        kinds = _by_kind(hf.get("rope_parameters"))
        outside = {key: hf[key] for key in rope.KEYS if key in hf}
        found = rope.parse(
            rope.merged({**outside, "rope_parameters": kinds.get(FULL)}),
            max_length,
            theta=_GLOBAL_BASE,
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

    def write_rope(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family`."""
        keys, theta = super().write_rope(fields), fields["local_rope_theta"]
        theta = fields["rope_theta"] if theta is None else theta
        local = {"rope_type": "default", rope.THETA: theta}
        return keys | {
            _LOCAL_THETA: theta,
            "rope_parameters": {FULL: keys["rope_parameters"], SLIDING: local},
        }

    def read_mathematics(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family`."""
        return super().read_mathematics(keys) | {"qk_norm": True}

    def write_mathematics(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family`."""
        keys = super().write_mathematics(fields)
        del keys[_SCORE_CAP]
        return keys

    def usual_layers(self, keys: Mapping[str, Any], window: int | None) -> list[str]:
        """See `Family`."""
        del window
        return _pattern(integer(keys, _PATTERN), keys["num_hidden_layers"])

    def write_windows(
        self, windows: Sequence[int | None], fields: Mapping[str, Any]
    ) -> dict[str, Any]:
        """See `Family`."""
        keys, count = super().write_windows(windows, fields), fields["num_layers"]
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
        **{key: value for key, value in DEFAULTS.items() if key != _SCORE_CAP},
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
    norms=NORMS,
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
