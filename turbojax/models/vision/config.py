"""The shape of a vision tower and its projector, from a Hugging Face `config.json`."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from turbojax._json import shown, shown_name
from turbojax._pytrees import static
from turbojax.models.families.base import TEXT
from turbojax.models.families.gemma import GEMMA3, GEMMA3_WITH_IMAGES
from turbojax.models.families.keys import HARMLESS, integer, number
from turbojax.models.families.table import whole_of

VISION = "vision_config"
"""The key of `config.json` that holds the tower's own."""
_TOWER = "siglip_vision_model"
_TEXT_WIDTH = 2304
# What transformers takes where a key is missing.
_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
    "layer_norm_eps": 1e-6,
}
_FIXED = {"model_type": _TOWER, "hidden_act": "gelu_pytorch_tanh", "num_channels": 3}
_TOKENS = {"boi_token": 255999, "eoi_token": 256000, "image_token": 262144}


@static
@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """Sizes and constants of a `VisionModel`.

    Attributes:
      hidden_size: width W of the tower's residual stream.
      intermediate_size: width of its feed-forward layers.
      num_layers: number of its layers.
      num_heads: attention heads, of ``W / num_heads`` channels.
      image_size: height and width of the images it reads, in pixels.
      patch_size: the same of a patch.
      norm_eps: epsilon of all norms.
      tokens_per_image: soft tokens M that an image becomes, a square number.
      text_size: width D of the text model.
      image_token_id: the token in whose places soft tokens stand.
      begin_token_id: the token before those of an image.
      end_token_id: the token after them.

    Raises:
      ValueError: if sizes do not divide each other as they must.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    image_size: int
    patch_size: int
    norm_eps: float
    tokens_per_image: int
    text_size: int
    image_token_id: int
    begin_token_id: int
    end_token_id: int

    def __post_init__(self) -> None:
        for name, by in (("hidden_size", "num_heads"), ("image_size", "patch_size")):
            if getattr(self, name) % getattr(self, by):
                raise ValueError(
                    f"{name}={getattr(self, name)} must be a multiple of {by}={getattr(self, by)}"
                )
        side, patches = math.isqrt(self.tokens_per_image), self.patches_per_side
        if side * side != self.tokens_per_image or patches % side:
            raise ValueError(
                f"mm_tokens_per_image={self.tokens_per_image} must be a square number whose root "
                f"divides the {patches} patches of a side"
            )

    @property
    def patches_per_side(self) -> int:
        """How many patches an image has along each side."""
        return self.image_size // self.patch_size

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> "VisionConfig":
        """Reads the content of the `config.json` of a `Gemma3ForConditionalGeneration`.

        Raises:
          NotImplementedError: naming it, if the architecture or a key's value is not supported.
          ValueError: if there is no `vision_config`, or a value is out of range.
        """
        if whole_of(hf) is not GEMMA3_WITH_IMAGES:
            raise NotImplementedError(
                f"architectures={shown(hf.get('architectures'))} has no images here: must be "
                f"{GEMMA3_WITH_IMAGES.architecture!r}"
            )
        part, text = hf.get(VISION), hf.get(TEXT)
        for key, value in ((VISION, part), (TEXT, text)):
            if not isinstance(value, Mapping):
                raise ValueError(f"config.json: {key}={shown(value)} must be an object")
        assert isinstance(part, Mapping)
        assert isinstance(text, Mapping)
        _require_known(part)
        keys = {**_DEFAULTS, **part}
        tokens = {name: _token(hf, name) for name in _TOKENS}
        return cls(
            **{name: integer(keys, name) for name in ("hidden_size", "intermediate_size")},
            num_layers=integer(keys, "num_hidden_layers"),
            num_heads=integer(keys, "num_attention_heads"),
            **{name: integer(keys, name) for name in ("image_size", "patch_size")},
            norm_eps=number(keys, "layer_norm_eps"),
            tokens_per_image=integer({"mm_tokens_per_image": 256, **hf}, "mm_tokens_per_image"),
            text_size=integer({"hidden_size": _TEXT_WIDTH, **text}, "hidden_size"),
            image_token_id=tokens["image_token"],
            begin_token_id=tokens["boi_token"],
            end_token_id=tokens["eoi_token"],
        )

    def to_hf(self) -> dict[str, Any]:
        """The content of a `config.json` that `from_hf` reads back; its text model has a width."""
        return {
            "architectures": [GEMMA3_WITH_IMAGES.architecture],
            "model_type": GEMMA3_WITH_IMAGES.name,
            TEXT: {"model_type": GEMMA3.name, "hidden_size": self.text_size},
            VISION: {
                **_FIXED,
                "hidden_size": self.hidden_size,
                "intermediate_size": self.intermediate_size,
                "num_hidden_layers": self.num_layers,
                "num_attention_heads": self.num_heads,
                "image_size": self.image_size,
                "patch_size": self.patch_size,
                "layer_norm_eps": self.norm_eps,
                "vision_use_head": False,
            },
            "mm_tokens_per_image": self.tokens_per_image,
            "image_token_index": self.image_token_id,
            "boi_token_index": self.begin_token_id,
            "eoi_token_index": self.end_token_id,
        }


def _token(hf: Mapping[str, Any], name: str) -> int:
    """A token's number, under either of the names that files give it."""
    key = next((x for x in (f"{name}_index", f"{name}_id") if hf.get(x) is not None), name)
    return integer({name: _TOKENS[name], **hf}, key, least=0)


def _require_known(part: Mapping[str, Any]) -> None:
    """Raises NotImplementedError for keys that may change what a tower computes."""
    for given in sorted(part):
        value, key = part[given], shown_name(given)
        if given in _FIXED and value not in (None, _FIXED[given]):
            raise NotImplementedError(
                f"config.json: {VISION}: {key}={shown(value)} is not supported: must be "
                f"{_FIXED[given]!r}"
            )
        known = given in {*_FIXED, *_DEFAULTS, "vision_use_head"} | HARMLESS
        if not known and value and not given.startswith("_"):
            raise NotImplementedError(
                f"config.json: {VISION}: {key}={shown(value)} is not supported: must be left out"
            )
