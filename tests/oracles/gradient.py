"""Gradients of attention in float64, all scores at once, from the analytic formulas.

Of exact attention; or straight through the rounding of what multiplies in the forward pass.
"""

import dataclasses
import math

import numpy as np

from tests.oracles.quantizers import f32, quantize_fp8, quantize_int8


@dataclasses.dataclass
class Gradients:
    """Gradients of query, key and value, and for each the sum of its terms' magnitudes.

    A term of a score's gradient is a product of two numbers too: what rounding can move is
    proportional to these, not to what is left after they cancel.
    """

    values: tuple[np.ndarray, np.ndarray, np.ndarray]
    magnitudes: tuple[np.ndarray, np.ndarray, np.ndarray]


def rounded(x, lengths, block, mode):
    """Tokens [B, S, K, H] as the codes of blocks stand for them; 0 past the lengths."""
    there = np.arange(x.shape[1]) < np.asarray(lengths)[:, None]
    x = np.where(there[:, :, None, None], f32(x), 0)
    out = x.astype(np.float64)
    if mode == "float":
        return out
    quantize = quantize_fp8 if mode == "fp8" else quantize_int8
    for begin in range(0, x.shape[1], block):
        codes, scale = quantize(x[:, begin : begin + block], (1, 3))
        part = np.asarray(codes, np.float64) * np.asarray(scale, np.float64)[:, None, :, None]
        out[:, begin : begin + block] = part
    return out


def rounded_values(x, lengths, block, mode):
    """Values [B, S, K, H] as the forward pass rounds them: e4m3 with one scale for all blocks."""
    if mode in ("int8_fp8", "fp8"):
        return rounded(x, lengths, x.shape[1], "fp8")
    return rounded(x, lengths, block, mode)


def attention_gradients(
    query,
    key,
    value,
    d_out,
    d_residual,
    *,
    mask,
    scale=None,
    logits_soft_cap=None,
    scored=None,
    weighed=None,
    forward=None,
):
    """The vector-Jacobian product of output and log-sum-exp; mask [B, T, S].

    Rows that see nothing are constants: no gradient, whatever their cotangents.

    Args: `scored`, query and key of the scores; `weighed`, `d_out` and value of `dP`; `forward`,
    output and log-sum-exp that a forward pass gave: each where it differs from exact attention.
    """
    q, k, v, d_o = (f32(x).astype(np.float64) for x in (query, key, value, d_out))
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, group, 2) for x in (k, v))
    scored_q, scored_k = (q, k) if scored is None else (scored[0], np.repeat(scored[1], group, 2))
    d_w, v_w = (d_o, v) if weighed is None else (weighed[0], np.repeat(weighed[1], group, 2))
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    mask = np.broadcast_to(mask[:, None], (q.shape[0], q.shape[2], *mask.shape[1:]))
    some = mask.any(-1)
    d_o, d_w = (np.where(np.moveaxis(some, 1, 2)[..., None], x, 0) for x in (d_o, d_w))
    d_lse = np.where(some, np.moveaxis(f32(d_residual).astype(np.float64), 2, 1), 0)

    scores, slope = np.einsum("btnh,bsnh->bnts", scored_q, scored_k) * factor, factor
    if logits_soft_cap is not None:
        tanh = np.tanh(scores / logits_soft_cap)
        scores, slope = logits_soft_cap * tanh, factor * (1 - tanh**2)
    scores = np.where(mask, scores, -np.inf)
    p = np.exp(scores - np.where(some, scores.max(-1), 0)[..., None])
    p = p / np.where(some, p.sum(-1), 1)[..., None]
    d_p = np.einsum("btnh,bsnh->bnts", d_w, v_w)
    delta = (p * d_p).sum(-1)
    if forward is not None:
        out, lse = (np.asarray(x, np.float64) for x in forward)
        p = np.exp(scores - np.where(some, np.moveaxis(lse, 2, 1), 0)[..., None])
        delta = np.moveaxis((d_w * out).sum(-1), 2, 1)
    d_s = p * (d_p - delta[..., None] + d_lse[..., None]) * slope
    terms = np.einsum("btnh,bsnh->bnts", np.abs(d_w), np.abs(v_w))
    terms = terms + (p * terms).sum(-1, keepdims=True) + np.abs(d_lse)[..., None]
    terms = p * terms * np.abs(slope)

    def per_kv_head(x):
        return x.reshape(*x.shape[:2], -1, group, x.shape[-1]).sum(3)

    def products(d_s, q, k, d_o):
        return (
            np.einsum("bnts,bsnh->btnh", d_s, k),
            per_kv_head(np.einsum("bnts,btnh->bsnh", d_s, q)),
            per_kv_head(np.einsum("bnts,btnh->bsnh", p, d_o)),
        )

    return Gradients(products(d_s, q, k, d_o), products(terms, *map(np.abs, (q, k, d_o))))
