"""Rows to sample, and what they are drawn from."""

import jax.numpy as jnp
import numpy as np

from turbojax.models.generation.sampling import SamplingRows

SIZE = 12
KINDS = ("greedy", "draw", "restrict")


def rows(count, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=None, index=0) -> SamplingRows:
    def full(x, dtype):
        return jnp.asarray(np.broadcast_to(np.asarray(x), (count,)).astype(dtype))

    return SamplingRows(
        temperature=full(temperature, np.float32),
        top_k=full(top_k, np.int32),
        top_p=full(top_p, np.float32),
        min_p=full(min_p, np.float32),
        seed=full(np.arange(count) if seed is None else seed, np.uint32),
        index=full(index, np.int32),
    )


def distribution(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float = 0.0
) -> np.ndarray:
    """What is to be drawn from, float64: an independent definition."""
    scaled = logits.astype(np.float64) / temperature
    p = np.exp(scaled - scaled.max())
    order = np.argsort(-p, kind="stable")
    if top_k:
        p[p < p[order[min(top_k, len(p)) - 1]]] = 0
    p /= p.sum()
    total, smallest = 0.0, 0.0
    for token in order:
        if total >= top_p:
            break
        total, smallest = total + p[token], p[token]
    p[p < smallest] = 0
    p /= p.sum()
    p[p < min_p * p.max()] = 0
    return p / p.sum()
