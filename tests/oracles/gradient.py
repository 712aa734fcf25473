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


def attention_with_modifiers(
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


def gradients_with_modifiers(
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
    out, lse = attention_with_modifiers(
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
