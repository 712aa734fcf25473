"""What `config.json` and tensors of each family of Hugging Face checkpoints mean."""

from collections.abc import Mapping
from typing import Any

from turbojax._json import shown
from turbojax.models.families.base import Family as Family
from turbojax.models.families.keys import LARGEST_SIZE as LARGEST_SIZE
from turbojax.models.families.keys import MOST_LAYERS as MOST_LAYERS
from turbojax.models.families.keys import Activation as Activation
from turbojax.models.families.keys import strings
from turbojax.models.families.layers import ExpertsConfig as ExpertsConfig
from turbojax.models.families.layers import LatentConfig as LatentConfig
from turbojax.models.families.table import FAMILIES as FAMILIES
from turbojax.models.families.table import WHOLES, whole_of


def read(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the `TransformerConfig` that a `config.json` describes."""
    hf = text_part(hf)
    return _family(hf).read(hf)


def text_part(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's `config.json` in that of a model that also reads images, or else `hf`."""
    whole = whole_of(hf)
    return hf if whole is None else whole.text_config(hf)


def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A `config.json` for a `TransformerConfig`'s fields, as far as its family can express them."""
    return FAMILIES[fields["family"]].write(fields)


def _family(hf: Mapping[str, Any]) -> Family:
    """The family that `architectures` and `model_type` name, one of which must be there."""
    architectures, model_type = hf.get("architectures"), hf.get("model_type")
    if architectures is not None:
        strings("architectures", architectures)
    supported = {family.architecture: name for name, family in FAMILIES.items()}
    known = ", ".join((*supported, *(whole.architecture for whole in WHOLES)))
    if not architectures and model_type is None:
        raise NotImplementedError(
            f"config.json names no architecture, which is not supported: must be one of {known}"
        )
    if architectures and (len(architectures) > 1 or architectures[0] not in supported):
        raise NotImplementedError(
            f"architectures={shown(architectures)} is not supported: must be one of {known}"
        )
    name = supported[architectures[0]] if architectures else model_type
    # It may be anything, such as a list, which cannot be looked up in a dictionary.
    if model_type not in (None, name) or name not in tuple(FAMILIES):
        names = ", ".join((*FAMILIES, *(whole.name for whole in WHOLES)))
        expected = f"{name!r}, as {architectures=}" if architectures else names
        raise NotImplementedError(
            f"model_type={shown(model_type)} is not supported: must be {expected}"
        )
    return FAMILIES[name]
