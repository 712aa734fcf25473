"""Attention as through a cache, all steps of a text at once, with parts that can be left exact.

Queries from the middle of the window on are decoded: each sees what was compressed before its own
step, and what waits in the buffer then. The half before is a prompt, which attends within itself.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import polar


@dataclasses.dataclass(frozen=True)
class Variant:
    """What is rounded, and how; static under `jit`. Everything else is exact.

    Attributes:
      name: of its row.
      key: the format of the keys, see `rounding.FORMATS`.
      value: that of the values.
      key_bits: of codes.
      value_bits: of codes.
      fine: steps of a second scale within 1; FlashQ's are integers.
      products: whether queries and probabilities are rounded to int8 in decoding.
      prompt: what prompts attend with: ``"exact"``, ``"int8_fp8"`` or ``"fp8"``.
      sinks: first tokens that are kept exactly.
      newest: tokens at least that are not compressed, besides those that fill no block.
      exact_buffer: whether what is not compressed is not rounded either.
      key_shift: see `rounding.smoothed`.
      key_scale: the same.
      value_shift: the same.
      value_scale: the same.
      layers: the layers it is for; all if empty.
    """

    name: str
    key: str = "progressive"
    value: str = "progressive"
    key_bits: int = 4
    value_bits: int = 4
    fine: int = 1
    products: bool = True
    prompt: Literal["exact", "int8_fp8", "fp8"] = "exact"
    sinks: int = 0
    newest: int = 0
    exact_buffer: bool = False
    key_shift: str = "no"
    key_scale: str = "no"
    value_shift: str = "no"
    value_scale: str = "no"
    layers: tuple[int, ...] = ()

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        cache: jax.Array,
        options: Any = None,
        sinks: Any = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Attends as `turbojax.caches.Attend`; `cache` is whether the layer is one of `layers`.

        The number of tokens is a multiple of 128.
        """
        del options, sinks
        batch, tokens, heads, channels = query.shape
        kv_heads, prompt = key.shape[2], tokens // 2
        query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
        q = query.reshape(batch, tokens, kv_heads, heads // kv_heads, channels) * channels**-0.5
        k, _, k_scale = smoothed(key, self.key_shift, self.key_scale, prompt, q)
        v, v_shift, v_scale = smoothed(value, self.value_shift, self.value_scale, prompt, q)
        scaled = q * k_scale[:, :, :, None]

        def restored(out: jax.Array) -> jax.Array:
            return out * v_scale[:, :, :, None] + v_shift[:, :, :, None]

        out = jnp.concatenate(
            [
                self._prompt((q, key, value), (scaled, k, v), restored, prompt),
                restored(self._decoded(scaled[:, prompt:], k, v, prompt)),
            ],
            axis=1,
        )
        if self.layers:
            first = jnp.arange(tokens)
            exact = _attend(q, key, value, first[None] <= first[:, None], "exact")
            out = jnp.where(cache, out, exact)
        return out.reshape(batch, tokens, heads, channels), cache

    def _decoded(self, q: jax.Array, k: jax.Array, v: jax.Array, prompt: int) -> jax.Array:
        stored = []
        for x, form, bits in ((k, self.key, self.key_bits), (v, self.value, self.value_bits)):
            compressed, buffered = FORMATS[form](x, bits, prompt, self.fine)
            if self.exact_buffer:
                buffered = x
            sinks = x[:, : self.sinks]
            stored += [y.at[:, : self.sinks].set(sinks) for y in (compressed, buffered)]
        if self.products:
            q = int8(q, -1)
        step, token = jnp.arange(prompt, k.shape[1])[:, None], jnp.arange(k.shape[1])[None]
        is_compressed = token < (step + 1) // BLOCK * BLOCK - self.newest
        scores = jnp.where(is_compressed, _scores(q, stored[0]), _scores(q, stored[1]))
        p = _probabilities(scores, token <= step, "int8" if self.products else "exact")
        parts = (jnp.where(is_compressed, p, 0), jnp.where(is_compressed, 0, p))
        return sum(_sums(part, x) for part, x in zip(parts, stored[2:], strict=True))

    def _prompt(self, exact: Any, smooth: Any, restored: Any, prompt: int) -> jax.Array:
        position = jnp.arange(prompt)
        mask = position[None] <= position[:, None]
        if self.prompt == "exact":
            return _attend(*(x[:, :prompt] for x in exact), mask, "exact")
        q, k, v = (x[:, :prompt] for x in smooth)
        rounded = int8 if self.prompt == "int8_fp8" else e4m3
        q = rounded(q.reshape(q.shape[0], -1, BLOCK, *q.shape[2:]), (2, 5)).reshape(q.shape)
        k = joined(rounded(in_blocks(k), (2, 4)))
        return restored(_attend(q, k, e4m3(v, (1, 3)), mask, "e4m3"))


def _scores(q: jax.Array, k: jax.Array) -> jax.Array:
    return jnp.einsum("btkgh,bskh->bkgts", q, k)


def _sums(p: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.einsum("bkgts,bskh->btkgh", p, v)


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, rounding: str) -> jax.Array:
    return _sums(_probabilities(_scores(q, k), mask, rounding), v)


def _probabilities(scores: jax.Array, mask: jax.Array, rounding: str) -> jax.Array:
    """The softmax ``[..., t, s]``, rounded relative to the largest of each block of keys."""
    scores = jnp.where(mask, scores, -jnp.inf)
    if rounding == "exact":
        return jax.nn.softmax(scores, axis=-1)
    tiles = scores.reshape(*scores.shape[:-1], -1, BLOCK)
    most = jnp.max(tiles, axis=-1, keepdims=True)
    weights = jnp.exp(tiles - jnp.where(most == -jnp.inf, 0, most))
    of_tile = jnp.exp(most - jnp.max(most, axis=-2, keepdims=True))
    total = jnp.sum(weights * of_tile, axis=(-1, -2), keepdims=True)
    rounded = jnp.rint(weights * 119) / 119 if rounding == "int8" else e4m3(weights * 448) / 448
    return (rounded * of_tile / total).reshape(scores.shape)


# Keys and values as caches store them -------------------------------------------------------------

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
    """``(x - shift) / scale`` and both, which are of the prompt but for its first four tokens.

    The shift is the mean or the first token. A scale of each ``"channel"`` is its largest value;
    of each ``"pair"`` or ``"pair rms"`` that of its norms; ``"balanced"``: the root of a pair's
    size over that of the queries', which makes equal errors of all channels count alike.
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
