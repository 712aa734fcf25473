"""Images to pixels: resized, rescaled and normalized, as `preprocessor_config.json` says."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from turbojax import _extras
from turbojax._json import shown
from turbojax._pytrees import static
from turbojax.models.checkpoint import folder as _folder

NAMES = ("preprocessor_config.json", "processor_config.json")
"""Where settings are found; in the second one under ``"image_processor"``."""
_BILINEAR = 2
# Steps that are always taken; null is what the processor's own default says: yes.
_STEPS = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")


@static
@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """Pixels of an image: ``(x * rescale_factor - mean) / std`` for each of three colours.

    Attributes:
      mean: of each colour.
      std: of each colour, not 0.
      rescale_factor: of the bytes.
    """

    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    rescale_factor: float = 1 / 255

    def pixels(self, image: Any, size: int) -> np.ndarray:
        """An image of any size as float32 ``[size, size, 3]``.

        Args:
          image: a uint8 array ``[H, W, 3]`` or an image of Pillow, which is converted to RGB. Sides
            are stretched to `size` by Pillow's bilinear filter, each by itself.
          size: height and width.
        """
        if not isinstance(image, np.ndarray) and hasattr(image, "convert"):
            image = image.convert("RGB")
            if image.size != (size, size):
                image = _resized(image, size)
        array = np.asarray(image)
        if array.dtype != np.uint8:
            raise TypeError(
                f"an image of dtype {array.dtype} must be uint8 [H, W, 3], or an image of Pillow"
            )
        if array.ndim != 3 or array.shape[2] != 3 or 0 in array.shape:
            raise ValueError(f"an image of shape {array.shape} must be [H, W, 3], no side empty")
        if array.shape[:2] != (size, size):
            array = np.asarray(_resized(_pillow().fromarray(array), size))
        scaled = array.astype(np.float32) * np.float32(self.rescale_factor)
        mean, std = (np.asarray(x, np.float32) for x in (self.mean, self.std))
        return (scaled - mean) / std


def read_preprocessing(folder: Path, image_size: int) -> Preprocessing:
    """The settings of a checkpoint's folder; Gemma 3's own where it has no such file."""
    for name in NAMES:
        path = _folder.find(folder, name)
        if path.is_file():
            found: Any = _folder.read_json(path)
            found = found.get("image_processor", {}) if name == NAMES[1] else found
            if not isinstance(found, Mapping):
                raise ValueError(f"{path}: image_processor={shown(found)} must be an object")
            return _read(found, image_size, path)
    return Preprocessing()


def _read(keys: Mapping[str, Any], image_size: int, path: Path) -> Preprocessing:
    wanted: dict[str, Any] = dict.fromkeys(_STEPS, True)
    wanted |= {"do_pan_and_scan": False, "resample": _BILINEAR}
    for key, value in wanted.items():
        if keys.get(key) not in (None, value):
            raise NotImplementedError(
                f"{path}: {key}={shown(keys[key])} is not supported: must be {value}"
            )
    size = keys.get("size")
    if size not in (None, {"height": image_size, "width": image_size}):
        raise ValueError(f"{path}: size={shown(size)} must be the tower's image_size={image_size}")
    factor = keys.get("rescale_factor")
    fields = {"mean": _colours(keys, "image_mean", path), "std": _colours(keys, "image_std", path)}
    if factor is not None:
        if not isinstance(factor, int | float) or isinstance(factor, bool) or not factor > 0:
            raise ValueError(f"{path}: rescale_factor={shown(factor)} must be positive")
        fields["rescale_factor"] = float(factor)
    if 0 in (fields["std"] or ()):
        raise ValueError(f"{path}: image_std={shown(keys['image_std'])} must not hold 0")
    return Preprocessing(**{name: value for name, value in fields.items() if value is not None})


def _colours(keys: Mapping[str, Any], key: str, path: Path) -> Any:
    """Three finite numbers, or None where there are none."""
    value = keys.get(key)
    if value is None:
        return None
    is_list = isinstance(value, list) and len(value) == 3
    if not is_list or not all(type(x) in (int, float) and np.isfinite(x) for x in value):
        raise ValueError(f"{path}: {key}={shown(value)} must be three numbers")
    return tuple(float(x) for x in value)


def _resized(image: Any, size: int) -> Any:
    return image.resize((size, size), resample=_pillow().Resampling.BILINEAR)


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            f"an image must be resized, which needs the package pillow: {_extras.install('images')}"
        ) from error
    return Image
