"""Attention as through a cache, all steps of a text at once, with parts that can be left exact.

Queries from the middle of the window on are decoded: each sees what was compressed before its own
step, and what waits in the buffer then. The half before is a prompt, which attends within itself.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from benchmarks.attribution.rounding import (
    BLOCK,
    FORMATS,
    e4m3,
    in_blocks,
    int8,
    joined,
    smoothed,
)


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
        """Attends as `turbojax.caches.Attend` has it; `cache` is whether the layer is one of `layers`.

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
        """The steps after the prompt."""
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
        """The prompt within itself."""
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
