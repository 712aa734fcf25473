"""Granite 3: factors of the embeddings, the scores, what layers add, and the logits."""

from collections.abc import Mapping
from typing import Any

from turbojax.models.families.base import Family
from turbojax.models.families.keys import COMMON, number

_EMBEDDING, _ATTENTION = "embedding_multiplier", "attention_multiplier"
_RESIDUAL, _LOGITS = "residual_multiplier", "logits_scaling"


class Granite(Family):
    """Divides logits by the last of its factors, and multiplies by the others."""

    def read_mathematics(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family`."""

        def factor(key: str) -> float | None:
            value = number(keys, key)
            return None if value == 1 else value

        divisor = factor(_LOGITS)
        return super().read_mathematics(keys) | {
            "embedding_scale": factor(_EMBEDDING),
            "attention_scale": number(keys, _ATTENTION),
            "residual_scale": factor(_RESIDUAL),
            "logit_scale": None if divisor is None else 1 / divisor,
        }

    def write_mathematics(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family`."""
        scores, logits = fields["attention_scale"], fields["logit_scale"]
        return super().write_mathematics(fields) | {
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
