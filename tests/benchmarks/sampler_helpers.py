"""Rows whose next tokens are chosen, and the engine's program run on them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from turbojax.models import AllowedTokens, Request
from turbojax.models.engine.sampler import Chosen, Wanted, choose, no_processors, wanted_of
from turbojax.models.generation.constraints import pack
from turbojax.models.generation.sampling import greedy_rows

V, SLOTS, LENGTH = 77, 9, 24
"""A vocabulary that is no multiple of 32."""


@dataclasses.dataclass
class Row:
    """One row's request and where its text is: what an engine knows."""

    request: Request
    slot: int
    length: int
    prompt: int
    allowed: np.ndarray | None = None


def everything(vocabulary: int = V) -> AllowedTokens:
    return AllowedTokens(lambda _: None, vocabulary)


def run(
    logits, history, rows: list[Row], wanted: Wanted | None = None
) -> tuple[np.ndarray, Chosen]:
    """What `choose` makes of them, in numpy."""
    wanted = wanted_of([row.request for row in rows]) if wanted is None else wanted
    sampling = greedy_rows(len(rows))
    processors = no_processors(len(rows), logits.shape[1], wanted)
    lengths, prompts = (np.zeros(len(history), np.int32) for _ in range(2))
    slots = np.full(len(rows), len(history), np.int32)
    for i, row in enumerate(rows):
        sampling.set(i, row.request.sampling, 99)  # follows from the tokens
        processors.set(i, row.request, None if row.allowed is None else pack(row.allowed))
        slots[i] = row.slot
        if row.slot < len(history):
            lengths[row.slot], prompts[row.slot] = row.length, row.prompt
    given = jnp.asarray(logits), jnp.asarray(history)
    history, chosen = choose(*given, lengths, prompts, slots, sampling, processors, wanted=wanted)
    return np.asarray(history), jax.tree.map(np.asarray, chosen)


def changed(logits: np.ndarray, text: np.ndarray, row: Row) -> np.ndarray:
    """The definition, token by token, in float64."""
    out = logits.astype(np.float64)
    given = row.request.penalties
    for token, value in row.request.logit_bias.items():
        out[token] = -np.inf if value == -np.inf else out[token] + value
    for token in {int(x) for x in text[: row.length]}:
        factor = given.repetition
        out[token] = out[token] / factor if out[token] > 0 else out[token] * factor
    for token in text[row.prompt : row.length]:
        out[token] -= given.frequency
    for token in {int(x) for x in text[row.prompt : row.length]}:
        out[token] -= given.presence
    if row.allowed is not None:
        out[~row.allowed] = -np.inf
    return out


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x = x - x.max()
    return x - np.log(np.exp(x).sum())
