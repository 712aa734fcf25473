"""SmolLM3: layers without positions, by default every fourth one."""

from collections.abc import Mapping, Sequence
from typing import Any

from turbojax._json import shown
from turbojax.models.families import rope
from turbojax.models.families.base import Family, first_window, layer_types
from turbojax.models.families.keys import COMMON, FULL, SLIDING, integer

_LAYERS, _INTERVAL = "no_rope_layers", "no_rope_layer_interval"
_BASE = 2_000_000.0


class SmolLM3(Family):
    """Has a 1 for each layer that rotates, under a key that sounds like the opposite."""

    def read_rope(self, hf: Mapping[str, Any], head_dim: int, max_length: int) -> dict[str, Any]:
        """See `Family`."""
        del head_dim
        found = rope.parse(rope.merged(hf), max_length, theta=_BASE)
        self._require_whole(found)
        return {"rope_theta": found.theta, "rope_scaling": found.scaling, "rotary_dim": None}

    def read_mathematics(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family`."""
        without = tuple(i for i, rotates in enumerate(_rotates(keys)) if not rotates)
        return super().read_mathematics(keys) | {"nope_layers": without}

    def write_mathematics(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family`."""
        without = fields["nope_layers"]
        rotates = [int(i not in without) for i in range(fields["num_layers"])]
        return super().write_mathematics(fields) | {_LAYERS: rotates}

    def usual_layers(self, keys: Mapping[str, Any], window: int | None) -> list[str]:
        """See `Family`: if there is a window, exactly the layers without positions have it."""
        return [FULL if rotates or window is None else SLIDING for rotates in _rotates(keys)]

    def write_windows(
        self, windows: Sequence[int | None], fields: Mapping[str, Any]
    ) -> dict[str, Any]:
        """See `Family`."""
        window = first_window(windows)
        return {
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "layer_types": layer_types(windows, fields["num_layers"]),
        }


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
)
