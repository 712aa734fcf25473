"""Qwen 2 and 2.5: biases of queries, keys and values; windows that must be switched on."""

from collections.abc import Mapping, Sequence
from typing import Any

from turbojax.models.families.base import Family, first_window, layer_types
from turbojax.models.families.keys import COMMON, FULL, SLIDING, integer


class Qwen(Family):
    """Has windows in all layers after the first `max_window_layers`."""

    def usual_layers(self, keys: Mapping[str, Any], window: int | None) -> list[str]:
        """See `Family`."""
        first = integer(keys, "max_window_layers", 0)
        count = keys["num_hidden_layers"]
        return [FULL if window is None or i < first else SLIDING for i in range(count)]

    def write_windows(
        self, windows: Sequence[int | None], fields: Mapping[str, Any]
    ) -> dict[str, Any]:
        """See `Family`."""
        window, count = first_window(windows), fields["num_layers"]
        types = layer_types(windows, count)
        return {
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "max_window_layers": types.index(SLIDING) if window else count,
            "layer_types": types,
        }


class Qwen2(Qwen):
    """Has biases for queries, keys and values, without a key that says so."""

    def read_mathematics(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family`."""
        return super().read_mathematics(keys) | {"qkv_bias": True}


WINDOWS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
"""Keys of windows, and what they are where they are missing."""

QWEN2 = Qwen2(
    "qwen2",
    "Qwen2ForCausalLM",
    {**COMMON, **WINDOWS, "max_position_embeddings": 32768, "num_key_value_heads": 32},
    writes_head_dim=False,
    chooses_layers=True,
)
