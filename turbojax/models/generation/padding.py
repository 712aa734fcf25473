"""Prompts with padding anywhere: checked, in host memory, and padded on the right to few sizes.

XLA compiles a program for every shape. `generate` therefore pads prompts, and makes caches a little
longer, to sizes that calls with other lengths share.
"""

from typing import Any, NamedTuple

import jax
import numpy as np

from turbojax import _checks
from turbojax.models.config import TransformerConfig
from turbojax.models.vision.soft_tokens import Images, check_images, placed


class Prompts(NamedTuple):
    """Checked prompts in host memory.

    Attributes:
      tokens: int32 ``[B, T]``, padded on the right; 0 in the places of images.
      lengths: int32 ``[B]``, at least 1.
      images: what stands in these places, or None.
      places: int32 ``[B, T]`` beside them, see `places_of`.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    images: Images | None = None
    places: np.ndarray | None = None


def align(tokens: Any, attention_mask: Any) -> tuple[jax.Array, jax.Array]:
    """Moves the real tokens of every row to its beginning.

    Args:
      tokens: int ``[B, T]``, with any numbers in the padding.
      attention_mask: bool or 0 and 1 ``[B, T]``, what a Hugging Face tokenizer returns along with
        the tokens: true at real tokens, which must follow each other. Padding may stand on either
        side of them, or on both.

    Returns:
      Tokens int32 ``[B, T]``, with zeros on the right, and lengths int32 ``[B]``: what `start` and
      `generate` take.

    Raises:
      TypeError: if the tokens are not integers, or the mask is neither bool nor integers.
      ValueError: if a shape does not fit, the mask holds something else than 0 and 1, a row has no
        real token, or padding between real ones.
    """
    ids, mask = host_int32("tokens", tokens), np.asarray(attention_mask)
    if ids.ndim != 2 or 0 in ids.shape:
        raise ValueError(f"tokens.shape={ids.shape} must be [B, T], no axis empty")
    if mask.shape != ids.shape:
        raise ValueError(f"attention_mask.shape={mask.shape} must be tokens.shape={ids.shape}")
    if mask.dtype != bool and not np.issubdtype(mask.dtype, np.integer):
        raise TypeError(f"attention_mask.dtype={mask.dtype} must be bool or an integer type")
    if wrong := sorted(set(np.unique(mask).tolist()) - {0, 1}):
        raise ValueError(f"attention_mask holds {wrong[0]}, must be 0 and 1")
    mask = mask.astype(bool)
    lengths, first = mask.sum(axis=1), mask.argmax(axis=1)[:, None]
    place = np.arange(ids.shape[1])[None]
    if not lengths.all():
        rows = np.flatnonzero(lengths == 0).tolist()
        raise ValueError(f"attention_mask: rows {rows} must have at least one real token")
    holes = mask != ((place >= first) & (place < first + lengths[:, None]))
    if holes.any():
        rows = np.flatnonzero(holes.any(axis=1)).tolist()
        raise ValueError(f"attention_mask: rows {rows} must not have padding between real tokens")
    moved = np.take_along_axis(ids, (place + first) % ids.shape[1], axis=1)
    moved = np.where(place < lengths[:, None], moved, 0)
    return jax.device_put(moved.astype(np.int32)), jax.device_put(lengths.astype(np.int32))


def host_int32(name: str, x: Any) -> np.ndarray:
    """Integers as int32 in host memory; compiles nothing."""
    try:
        host = np.asarray(x)
    except ValueError as error:
        raise ValueError(
            f"{name} holds lists of different lengths: pad them on the right, and give lengths"
        ) from error
    return np.asarray(_checks.as_int32(name, host if host.size else host.astype(np.int32)))


def check_tokens(tokens: Any, vocab_size: int) -> jax.Array:
    """Tokens as int32; raises unless all are integers in the vocabulary."""
    tokens = _checks.as_int32("tokens", tokens)
    if not tokens.size:
        return tokens
    host = np.asarray(tokens)
    smallest, largest = int(host.min()), int(host.max())
    if smallest < 0 or largest >= vocab_size:
        raise ValueError(f"tokens in {smallest}..{largest} must be within 0..{vocab_size - 1}")
    return tokens


def check_prompts(
    config: TransformerConfig,
    tokens: Any,
    lengths: Any,
    max_length: int,
    prefill_batch_size: int | None,
    images: Images | None = None,
) -> Prompts:
    """Prompts in host memory.

    The arguments, and the errors raised, are those of `turbojax.models.start`.
    """
    host = host_int32("tokens", tokens)
    if host.ndim != 2 or 0 in host.shape:
        raise ValueError(f"tokens.shape={host.shape} must be [B, T], no axis empty")
    batch, size = host.shape
    if images is None:
        check_tokens(host, config.vocab_size)
    if size > max_length:
        raise ValueError(f"prompts of {size} tokens must be at most {max_length=}")
    if max_length > config.max_length:
        raise ValueError(f"{max_length=} must be at most the model's {config.max_length}")
    if lengths is None:
        held = np.full(batch, size, np.int32)
    else:
        held = np.asarray(_checks.check_lengths("lengths", lengths, batch, size))
    if np.any(held < 1):
        raise ValueError(f"lengths={held.tolist()} must be at least 1")
    if prefill_batch_size is not None:
        _checks.check_sizes(prefill_batch_size=prefill_batch_size)
    if images is None:
        return Prompts(host, held)
    check_images(images, config.hidden_size)
    host, places = placed(images, host, held)
    check_tokens(host, config.vocab_size)
    return Prompts(host, held, images, places)


def prompts_of_width(prompts: Prompts, width: int) -> Prompts:
    """The same with `pad_prompts` of all arrays ``[B, T]``."""
    places = None if prompts.places is None else pad_prompts(prompts.places, width)
    return prompts._replace(tokens=pad_prompts(prompts.tokens, width), places=places)


def pad_prompts(tokens: np.ndarray, width: int) -> np.ndarray:
    """``[B, T]`` as ``[B, width]``: with zeros added, or padding cut off, on the right."""
    padded = np.zeros((tokens.shape[0], width), tokens.dtype)
    kept = min(tokens.shape[1], width)
    padded[:, :kept] = tokens[:, :kept]
    return padded


def check_pad_token(pad_token: int) -> None:
    """Raises unless it is an integer within int32."""
    _checks.check_integer("pad_token", pad_token)
    if not -(2**31) <= pad_token < 2**31:
        raise ValueError(f"{pad_token=} must be within int32")


_SHORTEST = 32
_STEP = 64


def bucket(length: int) -> int:
    """The smallest of a few sizes that holds so many tokens, at least 1.

    The sizes are 32, the multiples of 64 up to 512, and from there on four to each doubling: 640,
    768, 896, 1024, 1280, ... A size is less than 64 tokens or a quarter more than asked for.
    """
    length = int(length)  # numpy's integers have no bit_length
    if length <= _SHORTEST:
        return _SHORTEST
    step = max(_STEP, 2 ** ((length - 1).bit_length() - 3))
    return -(-length // step) * step


def prompt_bucket(longest: int, limit: int) -> int:
    """The size that prompts are padded to, at most the model's `limit`, which is a size too."""
    return min(bucket(longest), limit)


def cache_bucket(longest: int, max_new_tokens: int, limit: int) -> int:
    """The tokens that caches are made for: a size for the prompts plus one for the new tokens.

    So calls whose prompts share a size, and whose `max_new_tokens` do, share both programs: that of
    the prompts and that of a step. A size of the sum alone would divide the prompts' sizes into
    two.
    """
    return min(bucket(longest) + bucket(max_new_tokens), limit)
