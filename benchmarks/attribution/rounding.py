"""Keys and values as caches store them, in float32: formulas with parts that can be left out.

Arrays are ``[B, T, K, H]``. A stored side is a pair: tokens as they are once their block is
compressed, and as they are while they wait in the buffer.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import polar

BLOCK = 64
"""Tokens of a block, and of the buffer."""
_RANGE = 119
_E4M3_MAX = 448

Pair = tuple[jax.Array, jax.Array]
Axes = int | tuple[int, ...]


def in_blocks(x: jax.Array) -> jax.Array:
    """``[B, T / 64, 64, K, H]``."""
    return x.reshape(x.shape[0], -1, BLOCK, *x.shape[2:])


def joined(blocks: jax.Array) -> jax.Array:
    """The inverse of `in_blocks`."""
    return blocks.reshape(blocks.shape[0], -1, *blocks.shape[3:])


def largest(x: jax.Array, axes: Axes, top: float) -> jax.Array:
    """The scale that maps the largest absolute value over `axes` to `top`; 1 where all is zero."""
    maximum = jnp.max(jnp.abs(x), axis=axes, keepdims=True)
    return jnp.where(maximum == 0, 1, maximum / top)


def int8(x: jax.Array, axes: Axes) -> jax.Array:
    """Rounded to int8 with one scale over `axes`."""
    scale = largest(x, axes, _RANGE)
    return jnp.rint(x / scale) * scale


def e4m3(x: jax.Array, axes: Axes | None = None) -> jax.Array:
    """Rounded to e4m3, with one scale over `axes` if given.

    By the number of bits and not by conversions, of which XLA drops a pair. Its subnormal numbers
    are normal here.
    """
    scale = jnp.ones((), x.dtype) if axes is None else largest(x, axes, _E4M3_MAX)
    half = jnp.clip(x / scale, -_E4M3_MAX, _E4M3_MAX) * 0.5
    return jax.lax.reduce_precision(half, 4, 3) * 2 * scale


def _affine(blocks: jax.Array, axis: int, bits: int) -> jax.Array:
    """Asymmetric codes with a scale and a zero of floating point over `axis`."""
    low = jnp.min(blocks, axis=axis, keepdims=True)
    step = (jnp.max(blocks, axis=axis, keepdims=True) - low) / (2**bits - 1)
    step = jnp.where(step == 0, 1, step)
    return jnp.rint((blocks - low) / step) * step + low


def _stage2(codes: jax.Array, bits: int, fine: int) -> jax.Array:
    """FlashQ's second stage of stage-1 codes, back as such; scales in steps of ``1 / fine``."""
    top = 2**bits - 1
    low, high = (f(codes, axis=2, keepdims=True) for f in (jnp.min, jnp.max))
    step = jnp.maximum(1 / fine, jnp.rint(fine * (high - low) / top) / fine)
    zero = jnp.rint(low / step)
    return (jnp.clip(jnp.rint(codes / step) - zero, 0, top) + zero) * step


def _buffered(x: jax.Array, prompt: int) -> Pair:
    """Int8 with the universal scale of a prompt, and that scale ``[B, 1, K, 1]``."""
    scale = largest(x[:, :prompt], (1, 3), _RANGE)
    return jnp.clip(jnp.rint(x / scale), -_RANGE, _RANGE) * scale, scale


def _progressive(x: jax.Array, bits: int, prompt: int, fine: int) -> Pair:
    """Both stages: blocks of the prompt with scales of their own, later ones with the universal."""
    buffered, universal = _buffered(x, prompt)
    blocks = in_blocks(x)
    is_prompt = jnp.arange(blocks.shape[1])[None, :, None, None, None] < prompt // BLOCK
    scale = jnp.where(is_prompt, largest(blocks, (2, 4), _RANGE), universal[:, :, None])
    codes = jnp.clip(jnp.rint(blocks / scale), -_RANGE, _RANGE)
    return joined(_stage2(codes, bits, fine) * scale), buffered


def _rotated(x: jax.Array) -> jax.Array:
    """turbo4's codes and norms, back as vectors."""
    rotation = polar.rotation(x.shape[-1])
    return polar.decode(*polar.encode(x, rotation), rotation)


def _everywhere(function: Callable[[jax.Array], jax.Array]) -> Callable[..., Pair]:
    """A format that stores a token alike wherever it is."""

    def store(x: jax.Array, bits: int, prompt: int, fine: int) -> Pair:
        del bits, prompt, fine
        stored = function(x)
        return stored, stored

    return store


def _in_groups(function: Callable[[jax.Array], jax.Array], size: int) -> Callable[..., Pair]:
    """`_everywhere` of so many channels at a time."""
    return _everywhere(
        lambda x: function(x.reshape(*x.shape[:-1], -1, size)).reshape(x.shape),
    )


def _symmetric(x: jax.Array) -> jax.Array:
    """4-bit codes as `kv4` has them, with one scale over the last axis."""
    scale = largest(x, -1, 7)
    return jnp.rint(x / scale) * scale


_four_bits = functools.partial(_affine, axis=-1, bits=4)

FORMATS: dict[str, Callable[..., Pair]] = {
    "exact": _everywhere(lambda x: x),
    "progressive": _progressive,
    "stage 1": lambda x, bits, prompt, fine: (
        joined(int8(in_blocks(x), (2, 4))),
        _buffered(x, prompt)[0],
    ),
    "channels": lambda x, bits, prompt, fine: (joined(_affine(in_blocks(x), 2, bits)), x),
    "channels, int8 buffer": lambda x, bits, prompt, fine: (
        joined(_affine(in_blocks(x), 2, bits)),
        _buffered(x, prompt)[0],
    ),
    "tokens": lambda x, bits, prompt, fine: (joined(_affine(in_blocks(x), -1, bits)), x),
    "kv4": _everywhere(_symmetric),
    "minimum": _everywhere(_four_bits),
    "minimum of 32": _in_groups(_four_bits, 32),
    "minimum of 16": _in_groups(_four_bits, 16),
    "int8 tokens": _everywhere(functools.partial(int8, axes=-1)),
    "e4m3 tokens": _everywhere(functools.partial(e4m3, axes=-1)),
    "e4m3": _everywhere(e4m3),
    "turbo4": _everywhere(_rotated),
}
"""What a side is stored as: ``(x, bits, prompt, fine) -> Pair``."""


def pair_norms(x: jax.Array) -> jax.Array:
    """Norms of RoPE's pairs, channels i and i + H/2, which no rotation changes: ``[..., H/2]``."""
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.sqrt(first * first + second * second)


def smoothed(
    x: jax.Array, shift: str, scale: str, prompt: int, query: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``(x - shift) / scale``, both of the prompt but for its first four tokens.

    Args:
      x: ``[B, T, K, H]``.
      shift: ``"no"``, or ``"mean"`` or ``"first"``: the mean, or the first token.
      scale: ``"no"``; ``"channel"``: the largest value of each channel; ``"pair"`` or ``"pair
        rms"``: that of each pair's norms; ``"balanced"``: the root of a pair's size over that of
        the queries', which makes equal errors of all channels count alike.
      prompt: its tokens.
      query: ``[B, T, K, G, H]``.

    Returns:
      The numbers, the shift, and the scale ``[B, 1, K, H]``.
    """
    seen = x[:, 4:prompt]
    moved = {"no": jnp.zeros_like(x[:, :1]), "first": x[:, :1], "mean": None}[shift]
    moved = jnp.mean(seen, axis=1, keepdims=True) if moved is None else moved
    if scale == "no":
        factor = jnp.ones_like(moved)
    elif scale == "channel":
        factor = jnp.max(jnp.abs(seen - moved), axis=1, keepdims=True)
    else:
        norms = pair_norms(seen)
        mean = jnp.sqrt(jnp.mean(norms * norms, axis=1, keepdims=True))
        half = jnp.max(norms, axis=1, keepdims=True) if scale == "pair" else mean
        if scale == "balanced":
            of_queries = pair_norms(query)
            squares = jnp.mean(of_queries * of_queries, axis=(1, 3))[:, None]
            half = jnp.sqrt(half / jnp.maximum(jnp.sqrt(squares), np.float32(1e-6)))
        factor = jnp.concatenate([half, half], axis=-1)
    factor = jnp.maximum(factor, np.float32(1e-6))
    return (x - moved) / factor, moved, factor
