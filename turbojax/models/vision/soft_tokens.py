"""Embeddings of images in the places of a prompt's image tokens."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks
from turbojax._pytrees import pytree


@pytree
@dataclasses.dataclass(frozen=True)
class Images:
    """Images as a text model reads them: what `VisionModel.images` returns.

    Attributes:
      embeddings: float ``[n, M, D]``, soft tokens of each image, in the order in which the images
        stand in the prompts, the first prompt's first. They take the place of embeddings, and are
        not scaled as those are.
      token_id: the token in whose places they stand, ``M`` in a row for each image; it need not be
        in the text model's vocabulary.
    """

    embeddings: jax.Array
    token_id: int = dataclasses.field(metadata={"static": True})


@pytree
@dataclasses.dataclass(frozen=True)
class SoftTokens:
    """Which tokens of a batch are of images, and their embeddings.

    Attributes:
      embeddings: float ``[B, T, D]``; rows of text mean nothing.
      types: int32 ``[B, T]``: 0 for text; the tokens of an image have a number of their own, as
        `turbojax.bounds.image_blocks` takes them.
    """

    embeddings: jax.Array
    types: jax.Array


def embedded(hidden: jax.Array, images: SoftTokens | None) -> jax.Array:
    """Embedded tokens ``[B, T, D]`` with those of images replaced, if there are any."""
    if images is None:
        return hidden
    is_image = (images.types != 0)[..., None]
    return jnp.where(is_image, images.embeddings.astype(hidden.dtype), hidden)


def places_of(is_image: Any) -> Any:
    """Which image token stands where: int32 ``[B, T]``, counted from 1 on; 0 for text.

    `is_image` is bool ``[B, T]``, an array of numpy or of jax, and so is the result.
    """
    mask = is_image.astype("int32")
    return mask.reshape(-1).cumsum(dtype="int32").reshape(mask.shape) * mask


def soft_tokens(images: Images, places: jax.Array) -> SoftTokens:
    """The images at `places`, see `places_of`; a place beyond the last image has NaN."""
    count, size, width = images.embeddings.shape
    rows = images.embeddings.reshape(count * size, width)
    found = rows.at[jnp.maximum(places - 1, 0)].get(mode="fill", fill_value=jnp.nan)
    return SoftTokens(found, jnp.where(places > 0, (places - 1) // size + 1, 0))


def check_images(images: Images, width: int) -> None:
    """Raises TypeError or ValueError unless these are images for a model of width `width`."""
    given: Any = images
    if not isinstance(given, Images):
        raise TypeError(
            f"images is a {type(given).__name__}, must be Images, as VisionModel.images returns"
        )
    shape = jnp.shape(images.embeddings)
    if len(shape) != 3 or 0 in shape or shape[2] != width:
        raise ValueError(
            f"images.embeddings.shape={shape} must be [n, M, {width}], the model's hidden_size last"
        )


def check_places(images: Images, is_image: np.ndarray) -> None:
    """Raises ValueError unless each image has its tokens in the prompts, and no others are there.

    `is_image` is bool ``[B, T]``, in host memory.
    """
    count, size, _ = images.embeddings.shape
    held = int(is_image.sum())
    if held != count * size:
        raise ValueError(
            f"the prompts hold {held} tokens {images.token_id}, must hold {count * size}: {size} "
            f"for each of {count} images"
        )
    edges = np.diff(np.pad(is_image, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    for row in edges:
        runs = np.flatnonzero(row < 0) - np.flatnonzero(row > 0)
        if wrong := sorted({*runs.tolist()} - {size}):
            raise ValueError(
                f"the prompts hold {wrong[0]} tokens {images.token_id} in a row, must hold {size}, "
                "an image's, with other tokens between images"
            )


def placed(
    images: Images, tokens: np.ndarray, lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Checked prompts without image tokens, for which there is 0, and `places_of` these.

    `tokens` are int32 ``[B, T]`` and `lengths` int32 ``[B]``, in host memory.
    """
    inside = np.arange(tokens.shape[1])[None] < lengths[:, None]
    same = tokens == images.token_id
    check_places(images, same & inside)
    return np.where(same, np.int32(0), tokens), places_of(same & inside)


def among(images: Images, tokens: jax.Array, width: int) -> tuple[jax.Array, SoftTokens]:
    """What `placed` and `soft_tokens` give, of tokens ``[B, T]`` that may be traced.

    Only tokens that are not traced are checked.
    """
    check_images(images, width)
    is_image = tokens == images.token_id
    if _checks.is_concrete(is_image):
        check_places(images, np.asarray(is_image))
    places = places_of(is_image)
    return jnp.where(places > 0, jnp.zeros_like(tokens), tokens), soft_tokens(images, places)
