"""Teacher-forced decoding in chunks: many steps of a model through its caches in one program."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbojax.caches import PooledAttention
from turbojax.caches.exact import REPEATABLE
from turbojax.evaluation.methods import Method
from turbojax.models import Decoder, ModelCaches, QuantizedDecoder, Session, Transformer
from turbojax.models.decoder import for_length, unstack, warn_of_long_factors
from turbojax.models.generation.caching import init_caches
from turbojax.models.generation.padding import (
    cache_bucket,
    check_prompts,
    pad_prompts,
    prompt_bucket,
)
from turbojax.models.generation.steps import decode_step, run_prompts
from turbojax.models.tensor_parallel.programs import accepted_options

# On a GPU XLA measures several ways to multiply matrices and takes the fastest: in another process
# that may be another one, which adds in another order. The first that fits is always the same, and
# compiles sooner; steps of few tokens are bound by memory either way.
_ALIKE = {"xla_gpu_autotune_level": 0}


@functools.cache
def _options() -> dict[str, Any] | None:
    """XLA's options; None where there is no GPU, or XLA does not know them."""
    return accepted_options(_ALIKE) if jax.default_backend() == "gpu" else None


def repeatable(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a function with `jax.jit(**options)`, compiled with `_ALIKE` on a GPU.

    Whether there is a GPU is checked when the function is first called.
    """

    def decorate(run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.cache
        def program() -> Any:
            return jax.jit(run, compiler_options=_options(), **options)

        @functools.wraps(run)
        def call(*arrays: Any, **static: Any) -> Any:
            return program()(*arrays, **static)

        return call

    return decorate


AnyDecoder = Decoder | QuantizedDecoder
AnyModel = Transformer | AnyDecoder

STEPS = 64
"""Tokens of a chunk at most: what progress is reported by."""

_MOST_LOGITS = 2**26
"""Numbers that a chunk's logits may be."""


def decoder_of(model: AnyModel) -> AnyDecoder:
    """The decoder of a model, a `Transformer`'s layers unstacked; TypeError if there is none."""
    if isinstance(model, Transformer):
        return unstack(model)
    if not isinstance(model, AnyDecoder):
        raise TypeError(
            f"model is a {type(model).__name__}, must be a Transformer, a Decoder or a "
            "QuantizedDecoder"
        )
    return model


def start(
    decoder: AnyDecoder,
    tokens: np.ndarray,
    max_length: int,
    method: Method,
    *,
    lengths: np.ndarray | None = None,
    in_buckets: bool = False,
) -> Session:
    """Prompts through the model, into a method's caches.

    As `turbojax.models.start`, but by a program that `repeatable` compiles alike every time. With
    `in_buckets`, prompts and caches are rounded up to sizes that other calls share, as
    `turbojax.models.generate` does. `tokens` is int ``[B, T]``, padded on the right, with `lengths`
    int ``[B]`` (all T if None); each sequence will hold at most `max_length` tokens.
    """
    tokens, lengths, *_ = check_prompts(decoder.config, tokens, lengths, max_length, None)
    warn_of_long_factors(decoder.config, int(lengths.min()), max_length, stacklevel=2)
    decoder, room, longest = for_length(decoder, max_length), max_length, int(lengths.max())
    if in_buckets:
        limit = decoder.config.max_length
        room = cache_bucket(longest, max_length - longest, limit)
        if method.pooled is None:  # whose levels depend on the prompts' size
            tokens = pad_prompts(tokens, prompt_bucket(longest, limit))
    caches = init_caches(decoder, len(tokens), room, method.cache)
    logits, caches = _prompts(decoder, caches, tokens, lengths, pooled=method.pooled)
    placed = jax.device_put(lengths, None if decoder.axes is None else decoder.axes.sharding("B"))
    return Session(decoder, caches, logits, placed, longest)


def step(session: Session, tokens: np.ndarray) -> Session:
    """Feeds a token int32 ``[B]``, as `Session.step`; there must be room. Donates the caches."""
    caches, logits, lengths = _step(session.decoder, session.caches, tokens, session.lengths)
    return dataclasses.replace(
        session, caches=caches, logits=logits, lengths=lengths, longest=session.longest + 1
    )


@repeatable(donate_argnames="caches")
def _step(
    decoder: AnyDecoder, caches: ModelCaches, tokens: jax.Array, lengths: jax.Array
) -> tuple[ModelCaches, jax.Array, jax.Array]:
    done: tuple[ModelCaches, jax.Array, jax.Array] = decode_step(
        decoder, caches, tokens, lengths, implementation=REPEATABLE
    )
    return done


@repeatable(static_argnames="pooled", donate_argnames="caches")
def _prompts(
    decoder: AnyDecoder,
    caches: ModelCaches,
    tokens: jax.Array,
    lengths: jax.Array,
    *,
    pooled: PooledAttention | None,
) -> tuple[jax.Array, ModelCaches]:
    """Whole prompts: logits float32 ``[B, V]`` after them, and the caches."""
    done: tuple[jax.Array, ModelCaches] = run_prompts(
        decoder, caches, tokens, lengths, jnp.int32(0), implementation=None, pooled=pooled
    )
    return done


def forced_logits(session: Session, tokens: np.ndarray) -> Iterator[tuple[int, jax.Array]]:
    """The logits that precede each given token, decoded through the session's caches.

    `tokens` is int32 ``[B, D]``, the true continuation, whose last token is not fed; the session's
    caches, which hold the prompt, are donated. Yields how many positions follow, up to `STEPS`, and
    their logits, float32 ``[more, B, V]``, whose rows after these positions mean nothing.
    """
    steps, total = chunk_of(session.logits.shape), tokens.shape[1]
    caches, logits, lengths = session.caches, session.logits, session.lengths
    for first in range(0, total, steps):
        part = tokens[:, first : first + steps]
        count = part.shape[1]
        # One shape, so that the same program runs the last chunk, which feeds fewer.
        full = np.pad(part, ((0, 0), (0, steps - count))).T
        feeds = count - (first + count == total)
        caches, logits, lengths, found = _chunk(
            session.decoder, caches, logits, lengths, full, np.int32(feeds)
        )
        yield count, found


def with_targets(
    chunks: Iterator[tuple[int, jax.Array]], tokens: np.ndarray
) -> Iterator[tuple[int, jax.Array, np.ndarray]]:
    """The chunks of `forced_logits`, with their tokens, int32 ``[more, B]``, filled up with 0."""
    done = 0
    for count, logits in chunks:
        now = tokens[:, done : done + count]
        yield count, logits, np.pad(now, ((0, 0), (0, len(logits) - count))).T
        done += count


def counted(progress: Callable[[int, int], None], total: int) -> Callable[[int], None]:
    """A `Progress` that tells how much is done since the beginning, and of how much."""
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    return advance


def chunk_of(shape: tuple[int, ...]) -> int:
    """Steps of a chunk, of logits ``[B, V]``."""
    return int(max(1, min(STEPS, _MOST_LOGITS // (shape[0] * shape[1]))))


@repeatable(donate_argnames="caches")
def _chunk(
    decoder: AnyDecoder,
    caches: ModelCaches,
    logits: jax.Array,
    lengths: jax.Array,
    tokens: jax.Array,
    feeds: jax.Array,
) -> tuple[ModelCaches, jax.Array, jax.Array, jax.Array]:
    """Feeds the first `feeds` of int32 ``[steps, B]`` tokens.

    Returns the caches, the last logits ``[B, V]``, the lengths, and float32 ``[steps + 1, B, V]``:
    the logits before each token, and after the last one.
    """

    def step(i: jax.Array, carry: Any) -> Any:
        caches, logits, lengths, out = carry
        out = jax.lax.dynamic_update_index_in_dim(out, logits, i, 0)
        caches, logits, lengths = decode_step(
            decoder, caches, tokens[i], lengths, implementation=REPEATABLE
        )
        return caches, logits, lengths, out

    out = jnp.zeros((len(tokens) + 1, *logits.shape), jnp.float32)
    state = (caches, logits, lengths, out)
    caches, logits, lengths, out = jax.lax.fori_loop(0, feeds, step, state)
    return caches, logits, lengths, jax.lax.dynamic_update_index_in_dim(out, logits, feeds, 0)


def greedy_choice(logits: jax.Array) -> jax.Array:
    """The most likely token, int32 of float32 ``[..., V]``; -1 where a logit is NaN."""
    nothing = jnp.any(jnp.isnan(logits), axis=-1)
    return jnp.where(nothing, -1, jnp.argmax(logits, axis=-1).astype(jnp.int32))


@dataclasses.dataclass(frozen=True)
class Batches:
    """Rows of `size` at a time, so that one program runs all batches."""

    size: int

    def of(self, rows: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """How many rows of a batch are meant, and the batch, filled up with its own first row."""
        for first in range(0, len(rows), self.size):
            part = rows[first : first + self.size]
            more = np.repeat(part[:1], self.size - len(part), axis=0)
            yield len(part), np.concatenate([part, more])
