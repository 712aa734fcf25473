"""What an attention costs within whole windows, without a cache: one pass, all layers at once."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.evidence.attends import Exact, Whole
from turbojax.caches.whole import attend_within
from turbojax.evaluation import Scores
from turbojax.evaluation.decoding import greedy_choice, repeatable
from turbojax.models import Decoder
from turbojax.numerics.config import TurboConfig

_WIDE = TurboConfig(mode="float", softmax="exact", block_q=512, block_kv=512, buffer_size=512)

HeadTensors = tuple[jax.Array, jax.Array, jax.Array]
"""Queries ``[L, n, T, N, H]``, keys and values ``[L, n, T, K, H]`` of all layers."""


class WholeScores(NamedTuple):
    """What `score_whole` finds."""

    scores: Scores
    reports: np.ndarray


@repeatable(static_argnames=("attend", "first"))
def hidden_of(
    decoder: Decoder, batches: jax.Array, *, attend: Whole, first: int
) -> tuple[jax.Array, tuple[Any, ...]]:
    """The normed residual stream of windows ``[m, b, T]``, one batch after the other.

    From position `first` on, ``[m, b, T - first, D]`` in the model's dtype; and what layers report.
    """
    marks = attend.marks(decoder.config.num_layers)

    def run(tokens: jax.Array) -> tuple[jax.Array, tuple[Any, ...]]:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
        hidden, reports = decoder.hidden(tokens, positions, attend, marks)
        return hidden[:, first:], reports

    return jax.lax.map(run, batches)


def batched(tokens: np.ndarray, batch: int) -> np.ndarray:
    """Windows ``[n, T]`` as ``[m, b, T]``, `b` at most `batch` and a divisor of `n`."""
    count = len(tokens)
    size = max(b for b in range(1, min(batch, count) + 1) if count % b == 0)
    return tokens.reshape(-1, size, tokens.shape[1])


def score_whole(
    decoder: Decoder,
    tokens: np.ndarray,
    attend: Whole,
    *,
    first: int,
    batch: int,
    exact: jax.Array | None = None,
) -> WholeScores:
    """Scores of windows ``[n, T + 1]`` from position `first` on; see `exact_hidden`."""
    inputs = jnp.asarray(batched(tokens[:, :-1], batch))
    targets = jnp.asarray(batched(tokens[:, first + 1 :], batch))
    if exact is None:
        exact = exact_hidden(decoder, tokens, first=first, batch=batch)
    hidden, reports = hidden_of(decoder, inputs, attend=attend, first=first)
    compared = _compare(decoder, hidden, exact, targets)
    bits, exact_bits, choices, exact_choices, divergence = (
        np.asarray(x).reshape(len(tokens), -1) for x in compared
    )
    scores = Scores(bits, exact_bits, choices, exact_choices, divergence, 0, 0)
    reported = [math.nan if r is None else float(np.mean(np.asarray(r))) for r in reports]
    return WholeScores(scores, np.asarray(reported, np.float32))


def exact_hidden(decoder: Decoder, tokens: np.ndarray, *, first: int, batch: int) -> jax.Array:
    """`hidden_of` under exact attention, for `score_whole`."""
    inputs = jnp.asarray(batched(tokens[:, :-1], batch))
    return hidden_of(decoder, inputs, attend=Exact(), first=first)[0]


@repeatable()
def _compare(
    decoder: Decoder, hidden: jax.Array, exact: jax.Array, targets: jax.Array
) -> tuple[jax.Array, ...]:
    """Bits and choices of both, as `Scores` orders them, and the divergence: ``[m * b, D]``."""

    def one_window(item: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        hidden, exact, targets = item
        got, want = (jax.nn.log_softmax(decoder.logits(x), axis=-1) for x in (hidden, exact))
        choices = (greedy_choice(x) for x in (got, want))
        bits = (
            jnp.take_along_axis(x, targets[:, None], axis=-1)[:, 0] * (-1 / math.log(2))
            for x in (got, want)
        )
        p = jnp.exp(want)
        divergence = jnp.sum(jnp.where(p == 0, 0, p * (want - got)), axis=-1)
        return (*bits, *choices, divergence * (1 / math.log(2)))

    count = hidden.shape[0] * hidden.shape[1]
    flat = (hidden.reshape(count, *hidden.shape[2:]), exact.reshape(count, *exact.shape[2:]))
    return jax.lax.map(one_window, (*flat, targets.reshape(count, -1)))


@repeatable()
def layer_tensors(decoder: Decoder, tokens: jax.Array) -> HeadTensors:
    """What each layer attends with, of windows ``[n, T]`` under exact attention."""

    def attend(query, key, value, cache=None, options=None, sinks=None):  # type: ignore[no-untyped-def]
        out, _ = Exact()(query, key, value, None, options, sinks)
        return out, (query, key, value)

    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    nothing = (None,) * decoder.config.num_layers
    _, found = decoder.hidden(tokens, positions, attend, nothing)
    query, key, value = (jnp.stack(x) for x in zip(*found, strict=True))
    return query, key, value


@repeatable(static_argnames=("attend", "first"))
def output_errors(
    tensors: HeadTensors, *, attend: Whole, first: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Error of each layer's attention output, given exact queries, keys and values.

    Cosine, relative L1 and RMSE against float32 exact attention, as
    `turbojax.evaluation.layer_errors` has them: float32 ``[L]`` each. A layer that `attend` would
    leave exact is measured as the others.
    """

    def one_layer(layer: HeadTensors) -> tuple[jax.Array, jax.Array, jax.Array]:
        query, key, value = (x.astype(jnp.float32) for x in layer)
        want = attend_within(query, key, value, None, _WIDE, implementation="xla")[:, first:]
        mark = attend.marks(1 + getattr(attend, "dense_layers", 0))[-1]
        got = attend(*layer, mark)[0].astype(jnp.float32)[:, first:]
        squares = jnp.sum(got * got, axis=-1) * jnp.sum(want * want, axis=-1)
        off = got - want
        return (
            jnp.mean(jnp.sum(got * want, axis=-1) / jnp.sqrt(squares)),
            jnp.sum(jnp.abs(off)) / jnp.sum(jnp.abs(want)),
            jnp.sqrt(jnp.mean(off * off)),
        )

    return jax.lax.map(one_layer, tensors)
