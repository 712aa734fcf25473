"""Gradients of exact attention in float64, all scores at once, from the analytic formulas."""

import dataclasses
import math

import numpy as np

from oracles.quantizers import f32


@dataclasses.dataclass
class Gradients:
    """Gradients of query, key and value, and for each the sum of its terms' magnitudes."""

    values: tuple[np.ndarray, np.ndarray, np.ndarray]
    magnitudes: tuple[np.ndarray, np.ndarray, np.ndarray]


def attention_gradients(
    query, key, value, d_out, d_residual, *, mask, scale=None, logits_soft_cap=None
):
    """The vector-Jacobian product of output and log-sum-exp; mask [B, T, S].

    Rows that see nothing are constants: no gradient, whatever their cotangents.
    """
    q, k, v, d_o = (f32(x).astype(np.float64) for x in (query, key, value, d_out))
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, group, 2) for x in (k, v))
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    mask = np.broadcast_to(mask[:, None], (q.shape[0], q.shape[2], *mask.shape[1:]))
    some = mask.any(-1)
    d_o = np.where(np.moveaxis(some, 1, 2)[..., None], d_o, 0)
    d_lse = np.where(some, np.moveaxis(f32(d_residual).astype(np.float64), 2, 1), 0)

    scores, slope = np.einsum("btnh,bsnh->bnts", q, k) * factor, factor
    if logits_soft_cap is not None:
        tanh = np.tanh(scores / logits_soft_cap)
        scores, slope = logits_soft_cap * tanh, factor * (1 - tanh**2)
    scores = np.where(mask, scores, -np.inf)
    p = np.exp(scores - np.where(some, scores.max(-1), 0)[..., None])
    p = p / np.where(some, p.sum(-1), 1)[..., None]
    d_p = np.einsum("btnh,bsnh->bnts", d_o, v)
    d_s = p * (d_p - (p * d_p).sum(-1, keepdims=True) + d_lse[..., None]) * slope

    def per_kv_head(x):
        return x.reshape(*x.shape[:2], -1, group, x.shape[-1]).sum(3)

    def products(d_s, q, k, d_o):
        return (
            np.einsum("bnts,bsnh->btnh", d_s, k),
            per_kv_head(np.einsum("bnts,btnh->bsnh", d_s, q)),
            per_kv_head(np.einsum("bnts,btnh->bsnh", p, d_o)),
        )

    return Gradients(products(d_s, q, k, d_o), products(*(np.abs(x) for x in (d_s, q, k, d_o))))
