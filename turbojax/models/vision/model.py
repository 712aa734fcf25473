"""Images to pixels, SigLIP's vision tower, and soft tokens made of its output (Gemma 3)."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _extras, _json
from turbojax._json import shown
from turbojax._pytrees import nbytes, pytree, static
from turbojax.attention.turbo import turbo_attention
from turbojax.flax.norms import rms_norm
from turbojax.models.checkpoint import folder as _folder
from turbojax.models.vision.config import VisionConfig
from turbojax.models.vision.soft_tokens import Images
from turbojax.numerics.config import TurboConfig

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
            found: Any = _json.read_object(path)
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


Arrays = Mapping[str, jax.Array]
_EXACT = TurboConfig(mode="float", softmax="exact")


@pytree
@dataclasses.dataclass(frozen=True)
class VisionModel:
    """Images to soft tokens: a vision transformer (Zhai et al., 2023), pooling and a projection.

    Made by `load_vision`. A pytree whose leaves are all weights, so that `jax.grad` by it trains
    the tower; whoever does not differentiate by it keeps it frozen.

    Attributes:
      embedding: `kernel` ``[P * P * 3, W]`` and `bias` ``[W]`` of a patch of ``P x P`` pixels,
        `positions` ``[patches, W]``.
      layers: of all layers, with a leading axis of these: `kernel` and `bias` of ``"q_proj"``,
        ``"k_proj"``, ``"v_proj"``, ``"out_proj"``, ``"fc1"`` and ``"fc2"``, such as
        ``layers["fc1"]["kernel"]`` ``[L, W, F]``, `scale` and `bias` of ``"norm1"`` and
        ``"norm2"``.
      norm: `scale` and `bias` ``[W]`` of the LayerNorm after the last layer.
      projector: `scale` ``[W]`` of the RMSNorm before the projection, less one, and its `kernel`
        ``[W, D]``.
      config: the shape.
      dtype: compute dtype; norms are computed in float32.
      preprocessing: how pixels are made of images.
    """

    embedding: Arrays
    layers: Mapping[str, Arrays]
    norm: Arrays
    projector: Arrays
    config: VisionConfig = dataclasses.field(metadata={"static": True})
    dtype: np.dtype = dataclasses.field(metadata={"static": True})
    preprocessing: Preprocessing = dataclasses.field(metadata={"static": True})

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return nbytes(self)

    def __call__(self, pixels: jax.Array) -> jax.Array:
        """Soft tokens of images.

        Args:
          pixels: float ``[n, S, S, 3]``, normalized, `S` the config's `image_size`.

        Returns:
          ``[n, M, D]`` in `dtype`.

        Raises:
          ValueError: if the shape is another.
        """
        return project(self, self.encode(pixels))

    def encode(self, pixels: jax.Array) -> jax.Array:
        """The tower's output after its last norm, ``[n, patches, W]``; arguments as of a call."""
        size = self.config.image_size
        if pixels.ndim != 4 or pixels.shape[1:] != (size, size, 3):
            raise ValueError(f"{pixels.shape=} must be [n, {size}, {size}, 3]")
        hidden = _linear(_patches(pixels.astype(self.dtype), self.config), self.embedding)
        hidden = hidden + self.embedding["positions"][None].astype(self.dtype)

        def step(hidden: jax.Array, layer: Mapping[str, Arrays]) -> tuple[jax.Array, None]:
            return _layer(hidden, layer, self.config), None

        hidden, _ = jax.lax.scan(step, hidden, self.layers)
        return _layer_norm(hidden, self.norm, self.config.norm_eps)

    def images(self, images: Sequence[Any]) -> Images:
        """Images as prompts take them: ``generate(model, tokens, images=vision.images([...]))``.

        One image runs at a time, so that any number of them shares one program.

        Args:
          images: in the order in which they stand in the prompts, the first prompt's first:
            uint8 arrays ``[H, W, 3]``, or what `PIL.Image.open` returns, of any size.

        Raises:
          ImportError: if an image must be resized or converted and Pillow is not installed.
          TypeError: if an image is of another kind.
          ValueError: if there is none, or an array has another shape.
        """
        if not len(images):
            raise ValueError("images must hold at least one image: leave it out for text alone")
        size = self.config.image_size
        pixels = (self.preprocessing.pixels(image, size)[None] for image in images)
        return Images(
            jnp.concatenate([_run(self, one) for one in pixels]), self.config.image_token_id
        )

    def with_pixels(self, pixels: jax.Array) -> Images:
        """The same of pixels, see a call; all run at once, and gradients flow, for training."""
        return Images(self(pixels), self.config.image_token_id)


@jax.jit
def _run(model: VisionModel, pixels: jax.Array) -> jax.Array:
    return model(pixels)


def project(model: VisionModel, hidden: jax.Array) -> jax.Array:
    """Soft tokens ``[n, M, D]`` of the tower's output ``[n, patches, W]``.

    Neighbouring patches are averaged in squares, row by row, as many as leave `M`; then RMSNorm
    with a scale of ``1 + scale``, and a linear layer.
    """
    config = model.config
    side, tokens = config.patches_per_side, math.isqrt(config.tokens_per_image)
    size = side // tokens
    squares = hidden.reshape(-1, tokens, size, tokens, size, config.hidden_size)
    pooled = squares.mean((2, 4)).reshape(-1, config.tokens_per_image, config.hidden_size)
    normed = rms_norm(pooled, model.projector["scale"], config.norm_eps, 1.0)
    return normed @ model.projector["kernel"].astype(normed.dtype)


def _patches(pixels: jax.Array, config: VisionConfig) -> jax.Array:
    """``[n, S, S, 3]`` as ``[n, patches, P * P * 3]``, row by row."""
    side, size = config.patches_per_side, config.patch_size
    cut = pixels.reshape(-1, side, size, side, size, 3).swapaxes(2, 3)
    return cut.reshape(-1, side * side, size * size * 3)


def _layer(hidden: jax.Array, layer: Mapping[str, Arrays], config: VisionConfig) -> jax.Array:
    """Attention among all patches, then a feed-forward layer, each on its normed input."""
    normed = _layer_norm(hidden, layer["norm1"], config.norm_eps)
    heads = (*hidden.shape[:2], config.num_heads, config.hidden_size // config.num_heads)
    query, key, value = (
        _linear(normed, layer[name]).reshape(heads) for name in ("q_proj", "k_proj", "v_proj")
    )
    attended: Any = turbo_attention(query, key, value, config=_EXACT)
    hidden = hidden + _linear(attended.reshape(hidden.shape), layer["out_proj"])
    normed = _layer_norm(hidden, layer["norm2"], config.norm_eps)
    inner = jax.nn.gelu(_linear(normed, layer["fc1"]), approximate=True)
    return hidden + _linear(inner, layer["fc2"])


def _layer_norm(x: jax.Array, params: Arrays, eps: float) -> jax.Array:
    wide = rms_norm(x.astype(jnp.float32), params["scale"], eps, centered=True)
    return (wide + params["bias"][None, None].astype(jnp.float32)).astype(x.dtype)


def _linear(x: jax.Array, params: Arrays) -> jax.Array:
    return x @ params["kernel"].astype(x.dtype) + params["bias"][None, None].astype(x.dtype)
