"""Bits per byte of a byte-level model on files it has not seen."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from turbojax.models import BEGINNING_OF_FILE, Attend, Transformer, causal_attention


def windows(data: bytes, context: int) -> np.ndarray:
    """Cuts a file into windows that do not overlap: `[n, context + 1]` int32.

    Each window's inputs are `[:, :-1]`, its targets `[:, 1:]`. The first window begins with
    `BEGINNING_OF_FILE`, every other one with the byte before its first target. Bytes after the last
    full window are left out. Raises ValueError if the file is shorter than `context`.
    """
    if len(data) < context:
        raise ValueError(f"a file of {len(data)} bytes must have at least {context=} bytes")
    stream = np.frombuffer(bytes([BEGINNING_OF_FILE]) + data, np.uint8).astype(np.int32)
    starts = np.arange(len(data) // context) * context
    return stream[starts[:, None] + np.arange(context + 1)[None, :]]


@functools.partial(jax.jit, static_argnums=(0, 3))
def _bits(graph: Any, state: Any, tokens: jax.Array, attend: Attend) -> jax.Array:
    """Information content of every target of `[n, T + 1]` tokens: `[n, T]` float32 bits."""
    logits = nnx.merge(graph, state)(tokens[:, :-1], attend=attend)
    log_p = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1)[..., 0]
    return chosen * (-1.0 / math.log(2.0))


def bits_per_byte(
    model: Transformer,
    files: Mapping[str, bytes],
    context: int,
    *,
    attend: Attend = causal_attention,
    batch_size: int = 16,
) -> dict[str, float]:
    """Mean bits per byte of each file over all of its windows, by name.

    Files shorter than `context` are left out. ``"all"`` is the mean over all bytes of all files.
    `batch_size` windows are evaluated at once.
    """
    graph, state = nnx.split(model)
    results: dict[str, float] = {}
    total = count = 0.0
    for name, data in files.items():
        if len(data) < context:
            continue
        cut = windows(data, context)
        padded = np.pad(cut, ((0, -len(cut) % batch_size), (0, 0)))
        batches = padded.reshape(-1, batch_size, context + 1)
        scores = [np.asarray(_bits(graph, state, jnp.asarray(x), attend)) for x in batches]
        kept = np.concatenate(scores)[: len(cut)].astype(np.float64)
        results[name] = float(kept.mean())
        total, count = total + float(kept.sum()), count + kept.size
    results["all"] = total / max(count, 1)
    return results
