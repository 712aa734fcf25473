"""Mistral Small 3.1 and later: the text model of a checkpoint that also reads pictures.

Such a checkpoint has one `config.json` and the tensors of both models. Only the text model, which
is a Mistral, is read; the part for pictures is neither read nor written again.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from turbojax._json import shown
from turbojax.models.families.mistral import MISTRAL

NAME, ARCHITECTURE = "mistral3", "Mistral3ForConditionalGeneration"
"""Model type and architecture of the whole."""

_PART = "text_config"
_TIED = "tie_word_embeddings"
# Keys of the whole, or of the part for pictures, that never change how text is computed.
_OTHERS = (
    *("vision_config", "image_token_index", "image_token_id", "projector_hidden_act"),
    *("vision_feature_layer", "multimodal_projector_bias", "spatial_merge_size"),
)
# Prefixes of tensors' names, as published and as in memory, and the prefixes in a Mistral.
_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "lm_head.": "lm_head.",
}
_IGNORED = tuple(
    f"{prefix}{name}."
    for prefix in ("", "model.")
    for name in ("vision_tower", "multi_modal_projector")
)

_Stored = TypeVar("_Stored")


def is_whole(hf: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is that of a model that reads text and pictures."""
    architectures = hf.get("architectures")
    if architectures:
        return bool(architectures == [ARCHITECTURE])
    return bool(hf.get("model_type") == NAME)


def text_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The `config.json` of the text model: the object within `hf`, and the keys beside it.

    Raises NotImplementedError if it is no Mistral, ValueError if there is no such object.
    """
    if hf.get("model_type") not in (None, NAME):
        raise NotImplementedError(
            f"model_type={shown(hf['model_type'])} is not supported: must be {NAME!r}, as "
            f"architectures={[ARCHITECTURE]}"
        )
    part = hf.get(_PART)
    if not isinstance(part, Mapping):
        raise ValueError(f"config.json: {_PART}={shown(part)} must be an object")
    kind = part.get("model_type", MISTRAL.name)
    if kind != MISTRAL.name:
        raise NotImplementedError(
            f"config.json: {_PART}: model_type={shown(kind)} is not supported: must be "
            f"{MISTRAL.name!r}"
        )
    outside = {key: value for key, value in hf.items() if key not in (*_OTHERS, _PART)}
    # The outer key counts for both tables, whatever the text model's own says.
    return {
        **outside,
        **part,
        **({_TIED: hf[_TIED]} if hf.get(_TIED) is not None else {}),
        "architectures": [MISTRAL.architecture],
        "model_type": MISTRAL.name,
    }


def text_tensors(tensors: Mapping[str, _Stored]) -> dict[str, _Stored]:
    """The tensors of the text model by their names in a Mistral; those for pictures are left out.

    Tensors of unknown parts keep their names, and a reader refuses them.
    """
    found = {}
    for name, stored in tensors.items():
        if name.startswith(_IGNORED):
            continue
        prefix = next((x for x in _PREFIXES if name.startswith(x)), "")
        found[_PREFIXES.get(prefix, "") + name.removeprefix(prefix)] = stored
    return found
