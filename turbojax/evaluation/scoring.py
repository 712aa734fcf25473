"""What text costs through a cache: teacher-forced, as it is used, beside the exact cache."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks
from turbojax.evaluation.decoding import (
    AnyDecoder,
    AnyModel,
    Batches,
    decoder_of,
    forced_logits,
    greedy_choice,
    start,
    with_targets,
)
from turbojax.evaluation.methods import Method
from turbojax.models.generation.caching import ModelCacheKind, init_caches
from turbojax.models.generation.padding import check_tokens
from turbojax.models.generation.session import Progress

EXACT = Method("exact", "exact")
"""What methods are compared with: keys and values in the model's dtype."""

_Logits = list[tuple[int, np.ndarray]]
"""The logits of a batch, chunk by chunk, see `forced_logits`."""

_MOST_KEPT = 2**31
"""Bytes of logits that `ExactRun` keeps."""


@dataclasses.dataclass(frozen=True)
class Scores:
    """What tokens cost through a cache, and through the exact one.

    numpy arrays ``[n, D]``: of `n` windows of T + 1 tokens the ``D = T + 1 - prompt`` targets that
    follow the prompt.

    Attributes:
      bits: float32, information content of the true token; NaN where logits were.
      exact_bits: the same through the exact cache.
      choices: int32, the most likely token; -1 where logits were NaN.
      exact_choices: the same through the exact cache.
      divergence: float32, Kullback-Leibler divergence of the method's distribution of the next
        token from the exact one's, ``sum(p_exact * log2(p_exact / p))``, in bits.
      cache_bytes: of one sequence's caches of T tokens, as allocated, of all layers.
      exact_cache_bytes: of bfloat16 keys and values.
    """

    bits: np.ndarray
    exact_bits: np.ndarray
    choices: np.ndarray
    exact_choices: np.ndarray
    divergence: np.ndarray
    cache_bytes: int
    exact_cache_bytes: int


class ExactRun:
    """The exact cache's logits of some windows, for one method after the other.

    They are computed with the first method's, and kept on the host if they are few enough; if not,
    they are computed anew each time. Bits are the same either way.

    Args:
      model: the model.
      tokens: int ``[n, T + 1]``.
      prompt: how many tokens of each window are prefilled.
      batch_size: windows that run at once.
    """

    def __init__(
        self, model: AnyModel, tokens: np.ndarray, *, prompt: int, batch_size: int = 8
    ) -> None:
        self.model, self.decoder = model, decoder_of(model)
        self.tokens = checked_windows(self.decoder, tokens, prompt, batch_size)
        self.prompt = prompt
        self.batches = Batches(min(batch_size, len(self.tokens)))
        size = self.tokens[:, prompt:].size * self.decoder.config.vocab_size * 4
        self._kept: dict[int, _Logits] | None = {} if size <= _MOST_KEPT else None

    @property
    def max_length(self) -> int:
        """Tokens that a window's caches hold."""
        return int(self.tokens.shape[1] - 1)

    def logits(self, batch: int, tokens: np.ndarray) -> Iterator[tuple[int, jax.Array]]:
        """`forced_logits` of a batch, given its number and its tokens ``[B, T + 1]``."""
        if self._kept is not None and batch in self._kept:
            yield from ((count, jnp.asarray(found)) for count, found in self._kept[batch])
            return
        session = start(self.decoder, tokens[:, : self.prompt], self.max_length, EXACT)
        kept: _Logits = []
        for count, found in forced_logits(session, tokens[:, self.prompt :]):
            if self._kept is not None:
                kept.append((count, np.asarray(found)))
            yield count, found
        if self._kept is not None:
            self._kept[batch] = kept


def score(
    model: AnyModel,
    tokens: np.ndarray,
    method: Method,
    *,
    prompt: int,
    batch_size: int = 8,
    progress: Progress | None = None,
    exact: ExactRun | None = None,
) -> Scores:
    """Scores windows through a method's cache, and through the exact one beside it.

    Each window's prompt is prefilled, as the method prefills. The rest is decoded token by token,
    fed the true tokens. The exact cache is in the model's dtype, with the same weights. On one
    device two calls with equal arguments give equal bits.

    Args:
      model: of floating point or with INT4 weights.
      tokens: int ``[n, T + 1]``.
      method: see `turbojax.evaluation.method`.
      prompt: tokens of each window that are prefilled, 1 to T.
      batch_size: windows that run at once. Results of other sizes may differ by rounding.
      progress: called after each chunk with how many targets are done since.
      exact: an `ExactRun` of the same model, windows and prompt, to share between methods; its
        batch size goes before `batch_size`.

    Raises:
      TypeError: if the model is another, or tokens or sizes are not integers.
      ValueError: if a shape or a size does not fit, a token is not in the vocabulary, the cache
        cannot hold the model's heads, or `exact` is of another model or other windows.
      NotImplementedError: if a layer's attention cannot run through the cache.
    """
    if exact is None:
        exact = ExactRun(model, tokens, prompt=prompt, batch_size=batch_size)
    elif model is not exact.model and model is not exact.decoder:
        raise ValueError("exact is of another model")
    elif exact.prompt != prompt or not np.array_equal(exact.tokens, tokens):
        raise ValueError(f"exact is of other windows, or of another prompt than {prompt=}")
    run, decoder = exact, exact.decoder
    parts: list[list[np.ndarray]] = []
    for batch, (rows, tokens) in enumerate(run.batches.of(run.tokens)):
        session = start(decoder, tokens[:, :prompt], run.max_length, method)
        targets, found = tokens[:, prompt:], []
        # In turn, not in one program: so for the exact method both are results of the same program.
        ours = with_targets(forced_logits(session, targets), targets)
        for (count, logits, now), (_, exactly) in zip(ours, run.logits(batch, tokens), strict=True):
            found.append([np.asarray(x)[:count] for x in _compare(logits, exactly, now)])
            if progress is not None:
                progress(rows * count)
        parts.append([np.concatenate(x).T[:rows] for x in zip(*found, strict=True)])
    arrays: Any = [np.concatenate(x) for x in zip(*parts, strict=True)]
    sizes = [cache_bytes(decoder, run.max_length, x) for x in (method.cache, "bfloat16")]
    return Scores(*arrays, *sizes)


def cache_bytes(decoder: AnyDecoder, max_length: int, cache: ModelCacheKind) -> int:
    """Bytes of one sequence's caches of all layers, as `init_caches` allocates them, or raises."""
    # A split decoder has equally many sequences on all devices.
    count = 1 if decoder.axes is None else decoder.axes.size("batch")
    caches = jax.eval_shape(lambda: init_caches(decoder, count, max_length, cache))
    return int(caches.nbytes) // count


@jax.jit
def _compare(
    logits: jax.Array, exact: jax.Array, targets: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Of float32 ``[n, B, V]`` twice and int32 ``[n, B]``: bits, choices, and the divergence."""
    log_p, exact_log_p = (jax.nn.log_softmax(x, axis=-1) for x in (logits, exact))
    bits, exact_bits = (
        -jnp.take_along_axis(x, targets[..., None], axis=-1)[..., 0] / math.log(2)
        for x in (log_p, exact_log_p)
    )
    p = jnp.exp(exact_log_p)
    terms = jnp.where(p == 0, 0, p * (exact_log_p - log_p))
    divergence = jnp.sum(terms, axis=-1) / math.log(2)
    return bits, exact_bits, greedy_choice(logits), greedy_choice(exact), divergence


def checked_windows(
    decoder: AnyDecoder, tokens: np.ndarray, prompt: int, batch_size: int
) -> np.ndarray:
    """The windows, int32 ``[n, T + 1]``.

    Raises TypeError if tokens or sizes are not integers, ValueError if a shape or a size does not
    fit, or a token is not in the vocabulary.
    """
    _checks.check_sizes(prompt=prompt, batch_size=batch_size)
    found = np.asarray(check_tokens(tokens, decoder.config.vocab_size))
    if found.ndim != 2 or not len(found) or found.shape[1] < 2:
        raise ValueError(f"tokens.shape={found.shape} must be [n, T + 1], n and T at least 1")
    if prompt > found.shape[1] - 1:
        raise ValueError(f"{prompt=} must be at most T, the window's {found.shape[1] - 1} tokens")
    return found
