"""Running a model through a KV cache: prefill, one step, teacher-forced scoring, generation."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from turbojax import _checks
from turbojax.models.caching import (
    CacheKind,
    LayerCache,
    attend_new_tokens,
    attend_prompt,
    init_caches,
)
from turbojax.models.llama import Llama

Progress = Callable[[int], None]
"""Called with the number of tokens done since the last call."""


@dataclasses.dataclass(frozen=True)
class Session:
    """Sequences in progress: a model, its caches, and the logits of the next token.

    Attributes:
      graph: the model's structure.
      params: its parameters.
      caches: KV caches of all layers.
      logits: float32 ``[B, V]``, scores of the token that follows.
      lengths: int32 ``[B]``, tokens seen.
    """

    graph: Any
    params: Any
    caches: LayerCache
    logits: jax.Array
    lengths: jax.Array

    def step(self, tokens: jax.Array) -> "Session":
        """Feeds one token per sequence.

        Args:
          tokens: int ``[B]``. The caches of `self` are donated: go on with the result only.

        Raises:
          ValueError: if a cache is full or `tokens` has another shape.
        """
        if tokens.shape != self.lengths.shape:
            raise ValueError(f"{tokens.shape=} must be {self.lengths.shape}, one per sequence")
        self._check_room()
        logits, caches = _step(self.graph, self.params, self.caches, tokens, self.lengths)
        return dataclasses.replace(self, caches=caches, logits=logits, lengths=self.lengths + 1)

    def _check_room(self) -> None:
        longest = int(np.max(np.asarray(self.lengths)))
        if longest >= self.caches.max_length:
            raise ValueError(f"the cache is full: {longest=} of {self.caches.max_length} tokens")


def start(
    model: Llama,
    tokens: jax.Array,
    *,
    max_length: int,
    cache: CacheKind = "exact",
    lengths: jax.Array | None = None,
) -> Session:
    """Runs prompts through the model and fills its caches.

    Args:
      model: the model.
      tokens: int ``[B, T]``, prompts padded on the right.
      max_length: tokens each sequence will hold at most.
      cache: ``"exact"`` or a `TurboConfig`.
      lengths: optional int ``[B]``, the prompts' lengths, at least 1; `T` if not given.

    Returns:
      The session after the prompts.

    Raises:
      TypeError: if tokens or lengths are no integers.
      ValueError: if a shape does not fit, a token is not in the vocabulary, a length is outside
        ``1..T``, a prompt is longer than `max_length`, or that is more than the model's.
    """
    if tokens.ndim != 2 or 0 in tokens.shape:
        raise ValueError(f"{tokens.shape=} must be [B, T], no axis empty")
    batch, size = tokens.shape
    _check_tokens(tokens, model.config.vocab_size)
    if size > max_length:
        raise ValueError(f"prompts of {size} tokens must be at most {max_length=}")
    if max_length > model.config.max_length:
        raise ValueError(f"{max_length=} must be at most the model's {model.config.max_length}")
    lengths = _checks.check_lengths("lengths", lengths, batch, size)
    if np.any(np.asarray(lengths) < 1):
        raise ValueError(f"lengths={np.asarray(lengths).tolist()} must be at least 1")
    caches = init_caches(model, batch, max_length, cache)
    graph, params = nnx.split(model)
    logits, caches = _prefill(graph, params, caches, tokens, lengths)
    return Session(graph, params, caches, logits, lengths)


def score(session: Session, tokens: jax.Array, progress: Progress | None = None) -> jax.Array:
    """Teacher-forced decoding: the logits that precede each given token.

    Args:
      session: a started session; its caches are donated.
      tokens: int ``[B, T]``, the true continuation.
      progress: called after each token.

    Returns:
      float32 ``[B, T, V]``.
    """
    logits = []
    for t in range(tokens.shape[1]):
        logits.append(session.logits)
        if t + 1 < tokens.shape[1]:
            session = session.step(tokens[:, t])
        if progress is not None:
            jax.block_until_ready(session.logits)
            progress(1)
    return jnp.stack(logits, axis=1)


def stream(session: Session, max_new_tokens: int) -> Iterator[np.ndarray]:
    """Generates greedily, token by token.

    Args:
      session: a started session; its caches are donated.
      max_new_tokens: how many tokens per sequence.

    Yields:
      int32 ``[B]``, the next token of each sequence.
    """
    for i in range(max_new_tokens):
        tokens = jnp.argmax(session.logits, axis=-1)
        yield np.asarray(tokens, np.int32)
        if i + 1 < max_new_tokens:
            session = session.step(tokens)


def generate(
    model: Llama,
    tokens: jax.Array,
    *,
    max_new_tokens: int,
    cache: CacheKind = "exact",
    lengths: jax.Array | None = None,
) -> jax.Array:
    """Continues prompts greedily through a KV cache.

    Args:
      model: the model.
      tokens: int ``[B, T]``, prompts padded on the right.
      max_new_tokens: tokens to add, at least 1; ``T + max_new_tokens`` must be at most the model's
        `max_length`.
      cache: ``"exact"``, or the `TurboConfig` of a compressed cache.
      lengths: optional int ``[B]``, the prompts' lengths.

    Returns:
      int32 ``[B, max_new_tokens]``.

    Raises:
      TypeError: if tokens or lengths are no integers.
      ValueError: if a shape or a number does not fit.
    """
    if max_new_tokens < 1:
        raise ValueError(f"{max_new_tokens=} must be at least 1")
    total = tokens.shape[-1] + max_new_tokens
    if total > model.config.max_length:
        raise ValueError(
            f"{total} tokens, prompt and new ones, must be at most "
            f"max_length={model.config.max_length}"
        )
    session = start(model, tokens, max_length=total, cache=cache, lengths=lengths)
    return jnp.stack([jnp.asarray(t) for t in stream(session, max_new_tokens)], axis=1)


def _check_tokens(tokens: jax.Array, vocab_size: int) -> None:
    """Raises unless all tokens are in the vocabulary; a gather would clamp them silently."""
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise TypeError(f"tokens.dtype={tokens.dtype} must be an integer type")
    smallest, largest = int(jnp.min(tokens)), int(jnp.max(tokens))
    if smallest < 0 or largest >= vocab_size:
        raise ValueError(f"tokens in {smallest}..{largest} must be within 0..{vocab_size - 1}")


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _prefill(
    graph: Any, params: Any, caches: LayerCache, tokens: jax.Array, lengths: jax.Array
) -> tuple[jax.Array, LayerCache]:
    model = nnx.merge(graph, params)
    logits, caches = model(tokens, attend=attend_prompt(lengths), caches=caches)
    last = jnp.take_along_axis(logits, (lengths - 1)[:, None, None], axis=1)
    return last[:, 0], caches


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _step(
    graph: Any, params: Any, caches: LayerCache, tokens: jax.Array, lengths: jax.Array
) -> tuple[jax.Array, LayerCache]:
    model = nnx.merge(graph, params)
    logits, caches = model(
        tokens[:, None], positions=lengths[:, None], attend=attend_new_tokens, caches=caches
    )
    return logits[:, 0], caches
