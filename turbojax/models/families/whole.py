"""Checkpoints whose models also read images: which part of them is the text model.

Such a checkpoint has one `config.json` and the tensors of both parts. The text model is one of a
known family. Gemma 3's other part is in `turbojax.models.vision`; Mistral's is not read.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from turbojax._json import shown
from turbojax.models.families.base import Family

TEXT = "text_config"
"""The key of `config.json` that holds the text model's own."""

_TIED = "tie_word_embeddings"
# Prefixes of tensors' names, as published and as in memory, and the prefixes in a text model.
_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "lm_head.": "lm_head.",
}
VISION_PARTS = ("vision_tower", "multi_modal_projector")
"""First words of the names of tensors that read images."""
_IGNORED = tuple(f"{prefix}{name}." for prefix in ("", "model.") for name in VISION_PARTS)

_Stored = TypeVar("_Stored")


@dataclasses.dataclass(frozen=True, eq=False)
class Whole:
    """A kind of checkpoint with a text model and a part for images.

    Attributes:
      name: its `model_type`.
      architecture: its name among `architectures`.
      family: of the text model.
      others: keys of the whole, or of the part for images, that never change how text is computed.
      defaults: keys that published files leave out of the text model's part, and transformers'
        values for them.
    """

    name: str
    architecture: str
    family: Family
    others: tuple[str, ...]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def describes(self, hf: Mapping[str, Any]) -> bool:
        """Whether a `config.json` is that of such a checkpoint."""
        architectures = hf.get("architectures")
        if architectures:
            return bool(architectures == [self.architecture])
        return bool(hf.get("model_type") == self.name)

    def text_config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """The `config.json` of the text model: the object within `hf`, and the keys beside it.

        Raises NotImplementedError if it is of another family, ValueError if there is no such
        object.
        """
        if hf.get("model_type") not in (None, self.name):
            raise NotImplementedError(
                f"model_type={shown(hf['model_type'])} is not supported: must be {self.name!r}, as "
                f"architectures={[self.architecture]}"
            )
        part = hf.get(TEXT)
        if not isinstance(part, Mapping):
            raise ValueError(f"config.json: {TEXT}={shown(part)} must be an object")
        kind = part.get("model_type", self.family.name)
        if kind != self.family.name:
            raise NotImplementedError(
                f"config.json: {TEXT}: model_type={shown(kind)} is not supported: must be "
                f"{self.family.name!r}"
            )
        outside = {key: value for key, value in hf.items() if key not in (*self.others, TEXT)}
        # The outer key counts for both tables, whatever the text model's own says.
        return {
            **self.defaults,
            **outside,
            **part,
            **({_TIED: hf[_TIED]} if hf.get(_TIED) is not None else {}),
            "architectures": [self.family.architecture],
            "model_type": self.family.name,
        }


def text_tensors(tensors: Mapping[str, _Stored]) -> dict[str, _Stored]:
    """The tensors of the text model by their names in its family; those for images are left out.

    Tensors of unknown parts keep their names, and a reader refuses them.
    """
    found = {}
    for name, stored in tensors.items():
        if name.startswith(_IGNORED):
            continue
        prefix = next((x for x in _PREFIXES if name.startswith(x)), "")
        found[_PREFIXES.get(prefix, "") + name.removeprefix(prefix)] = stored
    return found
