"""Attention with segments, bounds, offsets, bias, slopes and sinks in float64, and its gradients.

All scores at once, from the formulas. Rounding is left to the callers: operands come as they are.
"""

import dataclasses
import math

import numpy as np

from tests.oracles.quantizers import f32


@dataclasses.dataclass
class Scores:
    """What a call's options do to scores [B, N, T, S]: which count, and what is added to them."""

    mask: np.ndarray  # bool [B, T, S]
    added: np.ndarray  # [B or 1, N or 1, T, S]
    distance: np.ndarray  # [B, 1, T, S]


def scores_of(
    batch,
    heads,
    tokens,
    size,
    *,
    is_causal=False,
    local_window_size=None,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    query_segment_ids=None,
    key_value_segment_ids=None,
    key_bounds=None,
    query_offset=0,
    key_offset=0,
    bias=None,
    alibi_slopes=None,
):
    """`Scores` from the arguments of `turbo_attention`, pair by pair."""
    row, column = np.arange(tokens), np.arange(size)
    one = np.zeros(batch, np.int64)
    p = (one + query_offset)[:, None, None] + row[None, :, None]
    k = (one + key_offset)[:, None, None] + column[None, None, :]
    mask = np.ones((batch, tokens, size), bool)
    if query_seq_lengths is not None:
        mask &= (row < np.asarray(query_seq_lengths)[:, None])[:, :, None]
    if key_value_seq_lengths is not None:
        mask &= (column < np.asarray(key_value_seq_lengths)[:, None])[:, None, :]
    if is_causal:
        mask &= k <= p
    if local_window_size is not None:
        left, right = local_window_size
        mask &= (p - left <= k) & (k <= p + right)
    if query_segment_ids is not None:
        same = np.asarray(query_segment_ids)[:, :, None], np.asarray(key_value_segment_ids)[:, None]
        mask &= same[0] == same[1]
    if key_bounds is not None:
        start, end = (np.asarray(x, np.int64)[:, :, None] for x in key_bounds)
        mask &= (start <= k) & (k < end)
    distance = np.abs(p - k)[:, None].astype(np.float64)
    added = np.zeros((1, 1, tokens, size))
    if bias is not None:
        added = added + f32(bias).astype(np.float64)
    if alibi_slopes is not None:
        added = added - f32(alibi_slopes).astype(np.float64)[:, None, None] * distance
    return Scores(mask, added, distance)


def attention_with_extras(
    query, key, value, scores, *, sinks=None, scale=None, logits_soft_cap=None, real=None
):
    """Output [B, T, N, Hv] and log-sum-exp [B, T, N]; `real` [B, T] are no padding."""
    s, _, mask = _scores(query, key, scores, scale, logits_soft_cap)
    m = np.where(mask, s, -np.inf).max(-1)
    if sinks is not None:
        m = np.maximum(m, f32(sinks).astype(np.float64)[:, None])
    m = np.where(np.isneginf(m), 0.0, m)
    p = np.where(mask, np.exp(s - m[..., None]), 0.0)
    total = p.sum(-1)
    if sinks is not None:
        total = total + np.exp(f32(sinks).astype(np.float64)[:, None] - m)
    if real is not None:
        total = np.where(real[:, None], total, 0.0)
    safe = np.where(total == 0, 1.0, total)
    out = np.einsum("bnts,bsnh->btnh", p / safe[..., None], _repeated(value, query))
    lse = np.where(total == 0, -np.inf, m + np.log(safe))
    return out, np.moveaxis(lse, 1, 2)


def gradients_with_extras(
    query,
    key,
    value,
    scores,
    d_out,
    d_residual,
    *,
    bias=None,
    sinks=None,
    scale=None,
    logits_soft_cap=None,
    real=None,
):
    """Cotangents by name: query, key, value, bias, alibi_slopes and sinks.

    Of rows whose log-sum-exp is minus infinity the cotangents count as zero.
    """
    out, lse = attention_with_extras(
        query,
        key,
        value,
        scores,
        sinks=sinks,
        scale=scale,
        logits_soft_cap=logits_soft_cap,
        real=real,
    )
    s, slope, mask = _scores(query, key, scores, scale, logits_soft_cap)
    some = np.isfinite(lse)
    d_o = np.where(some[..., None], f32(d_out).astype(np.float64), 0.0)
    d_lse = np.where(some, f32(d_residual).astype(np.float64), 0.0)
    lse_first = np.moveaxis(np.where(some, lse, np.inf), 2, 1)
    p = np.where(mask, np.exp(s - lse_first[..., None]), 0.0)
    delta = np.moveaxis((d_o * out).sum(-1) - d_lse, 2, 1)
    d_p = np.einsum("btnh,bsnh->bnts", d_o, _repeated(value, query))
    d_added = p * (d_p - delta[..., None])
    d_s = d_added * slope
    group = query.shape[2] // key.shape[2]
    q, k = (f32(x).astype(np.float64) for x in (query, key))

    def per_kv_head(x):
        return x.reshape(*x.shape[:2], -1, group, x.shape[-1]).sum(3)

    found = {
        "query": np.einsum("bnts,bsnh->btnh", d_s, np.repeat(k, group, 2)),
        "key": per_kv_head(np.einsum("bnts,btnh->bsnh", d_s, q)),
        "value": per_kv_head(np.einsum("bnts,btnh->bsnh", p, d_o)),
        "alibi_slopes": -(d_added * scores.distance).sum((0, 2, 3)),
    }
    if bias is not None:
        axes = tuple(i for i in range(3) if bias.shape[i] == 1)
        found["bias"] = d_added.sum(axes, keepdims=True)
    if sinks is not None:
        weight = np.exp(f32(sinks).astype(np.float64)[:, None] - lse_first)
        found["sinks"] = -(weight * delta).sum((0, 2))
    return found


def _repeated(x, query):
    return np.repeat(f32(x).astype(np.float64), query.shape[2] // x.shape[2], 2)


def _scores(query, key, scores, scale, soft_cap):
    """Scores with what is added, the derivative of a score by its product, and what counts."""
    q, k = f32(query).astype(np.float64), _repeated(key, query)
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    s, slope = np.einsum("btnh,bsnh->bnts", q, k) * factor, factor
    if soft_cap is not None:
        tanh = np.tanh(s / soft_cap)
        s, slope = soft_cap * tanh, factor * (1 - tanh**2)
    s = s + scores.added
    mask = np.broadcast_to(scores.mask[:, None], s.shape) & ~np.isneginf(s)
    return np.where(mask, s, 0.0), slope, mask
