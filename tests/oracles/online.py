"""Attention in float64, prefill and decode, with a *derived* tolerance.

A float32 implementation of the same rounding steps may differ from float64 by its own rounding,
and where that rounding moves a weight across a half-integer (or across a step of SAS) by one
code. Each oracle therefore also evaluates every weight at scores moved by the rounding that
float32 may commit and returns, per output element, how far the output may move: next to nothing
where no code is near a tie.
"""

import dataclasses
import math

import numpy as np

from tests.oracles.quantizers import FP8_MAX, LEVELS, e4m3, f32, quantize_fp8, quantize_int8
from tests.oracles.softmax import exponential

EPS = 2.0**-23


@dataclasses.dataclass
class Attended:
    """What an attention oracle says: output, residual, and how far float32 may stray from them."""

    out: np.ndarray
    residual: np.ndarray
    out_tolerance: np.ndarray
    residual_tolerance: np.ndarray


@dataclasses.dataclass
class Tile:
    """Weights of one block: scores in, rounded weights out, with bounds (see the module)."""

    weights: np.ndarray  # what multiplies V: rounded as the mode says
    weights_slack: np.ndarray
    sums: np.ndarray  # row sums of the unrounded weights
    sums_slack: np.ndarray


def visible(positions, keys, *, is_causal, window, lengths):
    """Mask [B, T, S] of query positions [B, T] and key positions [S]."""
    q, k = positions[:, :, None], keys[None, None, :]
    mask = np.broadcast_to(
        k < np.asarray(lengths)[:, None, None], np.broadcast_shapes(q.shape, k.shape)
    ).copy()
    if is_causal:
        mask &= k <= q
    if window is not None:
        left, right = (window, window) if isinstance(window, int) else window
        mask &= (k >= q - left) & (k <= q + right)
    return mask


def _scores(product, magnitude, factor, soft_cap, exact_product):
    """Scores and the float32 error they may carry."""
    scores = product * factor
    error = 4 * EPS * np.abs(scores)
    if not exact_product:
        error = error + 4 * EPS * magnitude * np.abs(factor)
    if soft_cap is not None:
        error = error + 8 * EPS * soft_cap
        scores = soft_cap * np.tanh(scores / soft_cap)
    return scores, error


def _tile(scores, error, mask, running_max, max_error, exp, mode, static_scale):
    """Weights of one block under the maximum `running_max` [..., rows]."""
    base = np.where(np.isneginf(running_max), 0.0, running_max)[..., None]
    dx = error + max_error[..., None] + 2 * EPS
    x = scores - base

    def weigh(shift):
        return np.where(mask, exp(np.minimum(x + shift, 0.0)), 0.0)

    p, low, high = weigh(0.0), weigh(-dx), weigh(dx)
    # SAS jumps by a few parts in ten thousand at whole numbers, in either direction.
    low, high = np.minimum(low, high), np.maximum(low, high)
    low, high = np.minimum(low, p) * (1 - 8 * EPS), np.maximum(high, p) * (1 + 8 * EPS)
    sums_slack = np.maximum(high - p, p - low).sum(-1)

    if mode == "float":
        rounded = [p, low, high]
    elif mode == "int8":
        rounded = [
            _int8_weights(*v, static_scale)
            for v in ((p, p, p), (low, high, low), (high, low, high))
        ]
    else:
        rounded = [e4m3(FP8_MAX * v) / FP8_MAX for v in (p, low, high)]
    w, w_low, w_high = rounded
    slack = np.maximum(np.abs(w_high - w), np.abs(w - w_low))
    return Tile(w, slack, p.sum(-1), sums_slack)


def _int8_weights(p, for_scale, result_scale, static_scale):
    """Weights rounded to int8 with a scale per row: that of the row's largest weight."""

    def scale_from(values):
        if static_scale is not None:
            return np.float64(static_scale)
        top = np.max(values, -1, keepdims=True)
        return np.where(top == 0, 1.0, top / LEVELS)

    codes = np.rint(p / scale_from(for_scale))
    return codes * scale_from(result_scale)


class _Accumulator:
    """Online softmax over blocks: maximum, sum and output, each with its bound."""

    def __init__(self, rows, head_dim):
        self.m = np.full(rows, -np.inf)
        self.m_error = np.zeros(rows)
        self.l = np.zeros(rows)
        self.dl = np.zeros(rows)
        self.o = np.zeros((*rows, head_dim))
        self.do = np.zeros((*rows, head_dim))
        self.bad = np.zeros((*rows, head_dim), bool)

    def raise_maximum(self, scores, error, mask):
        """Lifts the maximum to cover a block and decays what was summed, exactly."""
        m_new = np.maximum(self.m, scores.max(-1, initial=-np.inf))
        error = np.where(mask, error, 0.0).max(-1, initial=0.0)
        self.m_error = np.maximum(self.m_error, error)
        with np.errstate(invalid="ignore"):
            alpha = np.where(np.isneginf(self.m), 1.0, np.exp(self.m - m_new))
        slip = alpha * (self.m_error + 4 * EPS)
        self.dl = self.dl * alpha + self.l * slip
        self.do = self.do * alpha[..., None] + np.abs(self.o) * slip[..., None]
        self.l, self.o = self.l * alpha, self.o * alpha[..., None]
        self.m = m_new

    def add(self, tile, values, mask, factor=1.0):
        """Adds the weighted values [..., S, H] of a block; a NaN counts for rows that see it."""
        finite = np.isfinite(values)
        safe = np.where(finite, values, 0.0)
        self.o = self.o + factor * (tile.weights @ safe)
        self.do = self.do + factor * ((tile.weights_slack + 4 * EPS * tile.weights) @ np.abs(safe))
        self.bad |= (mask.astype(np.float64) @ (~finite).astype(np.float64)) > 0
        self.l = self.l + tile.sums
        self.dl = self.dl + tile.sums_slack + 4 * EPS * tile.sums

    def finish(self):
        """Output and residual; a row that saw nothing is zero and minus infinity."""
        some = self.l != 0
        l = np.where(some, self.l, 1.0)
        out = np.where(some[..., None], self.o / l[..., None], 0.0)
        out = np.where(self.bad, np.nan, out)
        tolerance = (self.do + np.abs(out) * self.dl[..., None]) / l[..., None]
        tolerance = tolerance + 8 * EPS * np.abs(out)
        with np.errstate(invalid="ignore"):
            residual = np.where(some, np.where(some, self.m, 0.0) + np.log(l), -np.inf)
        residual_tolerance = (
            self.m_error + self.dl / l + 8 * EPS * (1 + np.abs(np.where(some, residual, 0.0)))
        )
        return Attended(out, residual, tolerance, residual_tolerance)


def _heads_first(x):
    return np.moveaxis(x, 2, 1)


def _tokens_first(a: Attended) -> Attended:
    def swap(x):
        return np.moveaxis(x, 1, 2)

    return Attended(*(swap(getattr(a, f.name)) for f in dataclasses.fields(a)))


def cut(size, block):
    return [(start, min(start + block, size)) for start in range(0, size, block)]


def quantize_blocks(x, block, number):
    """Codes (float64) [B, T, N, H] and scales [B, T, N], one scale per block and head."""
    if number == "float":
        return f32(x).astype(np.float64), np.ones(x.shape[:3])
    codes, scales = np.zeros(x.shape), np.zeros(x.shape[:3])
    for start, stop in cut(x.shape[1], block):
        quantize = quantize_int8 if number == "int8" else quantize_fp8
        c, s = quantize(x[:, start:stop], (1, 3))
        codes[:, start:stop] = np.where(np.isnan(s)[:, None, :, None], 0, c.astype(np.float64))
        scales[:, start:stop] = s[:, None, :]
    return codes, scales


def _operand_formats(mode):
    """Number formats of (Q and K, V)."""
    return {
        "int8": ("int8", "int8"),
        "int8_fp8": ("int8", "fp8"),
        "fp8": ("fp8", "fp8"),
        "float": ("float", "float"),
    }[mode]


def attention(
    query,
    key,
    value,
    *,
    mode="int8",
    softmax=(-6.0, "e"),
    block_q=64,
    block_kv=64,
    scale=None,
    is_causal=False,
    key_value_seq_lengths=None,
    local_window_size=None,
    logits_soft_cap=None,
):
    """Prefill attention (Algorithm 1): operands quantized per block, online over key blocks."""
    batch, tokens, heads, head_dim = query.shape
    size = key.shape[1]
    group = heads // key.shape[2]
    exp = exponential(softmax)
    lengths = (
        np.full(batch, size) if key_value_seq_lengths is None else np.asarray(key_value_seq_lengths)
    )
    padding = (np.arange(size)[None, :] >= lengths[:, None])[:, :, None, None]
    key, value = (np.where(padding, np.float32(0), f32(x)) for x in (key, value))
    qk_format, v_format = _operand_formats(mode)

    q, s_q = quantize_blocks(f32(query), block_q, qk_format)
    k, s_k = quantize_blocks(key, block_kv, qk_format)
    v, s_v = quantize_blocks(value, size if v_format == "fp8" else block_kv, v_format)
    k, s_k, v, s_v = (np.repeat(x, group, 2) for x in (k, s_k, v, s_v))
    q, k, v = (_heads_first(x) for x in (q, k, v))
    s_q, s_k, s_v = (np.moveaxis(x, 2, 1) for x in (s_q, s_k, s_v))
    factor = 1 / math.sqrt(head_dim) if scale is None else scale
    mask = visible(
        np.broadcast_to(np.arange(tokens), (batch, tokens)),
        np.arange(size),
        is_causal=is_causal,
        window=local_window_size,
        lengths=lengths,
    )

    acc = _Accumulator((batch, heads, tokens), head_dim)
    with np.errstate(invalid="ignore"):
        for start, stop in cut(size, block_kv):
            see = np.broadcast_to(
                mask[:, None, :, start:stop], (batch, heads, tokens, stop - start)
            )
            k_t = np.swapaxes(k[:, :, start:stop], -1, -2)
            scores, error = _scores(
                q @ k_t,
                np.abs(q) @ np.abs(k_t),
                s_q[..., None] * s_k[:, :, None, start:stop] * factor,
                logits_soft_cap,
                qk_format == "int8",
            )
            scores = np.where(see, scores, -np.inf)
            error = np.where(see, error, 0.0)
            acc.raise_maximum(scores, error, see)
            tile = _tile(scores, error, see, acc.m, acc.m_error, exp, mode, None)
            v_block = v[:, :, start:stop] * s_v[:, :, start:stop, None]
            acc.add(tile, v_block, see)
    return _tokens_first(acc.finish())


def decode(
    query,
    key,
    value,
    splits,
    *,
    lengths,
    mode="int8",
    softmax=(-6.0, "e"),
    scale=None,
    local_window_size=None,
    logits_soft_cap=None,
):
    """Decode attention (Algorithm 2) over dequantized keys and values [B, S, K, H].

    `splits[b]` lists the tokens of the blocks of sequence b: each is weighted against its own
    maximum, and they are merged exactly. The queries are the last ones of each sequence.
    Queries and weights are int8 in every mode but "float".
    """
    numbers = "float" if mode == "float" else "int8"
    parts = [
        _decode_one(
            query[b : b + 1],
            key[b : b + 1],
            value[b : b + 1],
            splits[b],
            lengths[b],
            numbers,
            exponential(softmax),
            scale,
            local_window_size,
            logits_soft_cap,
        )
        for b in range(query.shape[0])
    ]
    return Attended(
        *(np.concatenate([getattr(p, f.name) for p in parts]) for f in dataclasses.fields(Attended))
    )


def _decode_one(query, key, value, splits, length, mode, exp, scale, window, soft_cap):
    _, tokens, heads, head_dim = query.shape
    group = heads // key.shape[2]
    q, s_q = _quantize_vectors(f32(query), _operand_formats(mode)[0])
    q = _heads_first(q * s_q)
    k, v = (_heads_first(np.repeat(np.asarray(x, np.float64), group, 2)) for x in (key, value))
    factor = 1 / math.sqrt(head_dim) if scale is None else scale
    positions = (length - tokens + np.arange(tokens))[None]
    mask = visible(
        positions,
        np.arange(key.shape[1]),
        is_causal=True,
        window=window,
        lengths=np.array([length]),
    )
    static = float(exp(np.zeros(()))) / LEVELS

    rows = (1, heads, tokens)
    total = _Accumulator(rows, head_dim)
    with np.errstate(invalid="ignore"):
        for part in splits:
            see = np.broadcast_to(mask[:, None][..., part], (*rows, len(part)))
            k_t = np.swapaxes(k[:, :, part], -1, -2)
            scores, error = _scores(q @ k_t, np.abs(q) @ np.abs(k_t), factor, soft_cap, False)
            scores, error = np.where(see, scores, -np.inf), np.where(see, error, 0.0)
            m_j = scores.max(-1, initial=-np.inf)
            m_j_error = error.max(-1, initial=0.0)
            tile = _tile(scores, error, see, m_j, m_j_error, exp, mode, static)
            total.raise_maximum(scores, error, see)
            share = np.where(
                np.isneginf(m_j), 0.0, np.exp(m_j - np.where(np.isneginf(total.m), 0.0, total.m))
            )
            slip = m_j_error + total.m_error + 4 * EPS
            merged = Tile(
                tile.weights * share[..., None],
                (tile.weights_slack + tile.weights * slip[..., None]) * share[..., None],
                tile.sums * share,
                (tile.sums_slack + tile.sums * slip) * share,
            )
            total.add(merged, v[:, :, part], see)
    return _tokens_first(total.finish())


def _quantize_vectors(query, number):
    """Codes and scales of queries, one scale per query vector."""
    if number == "float":
        return query.astype(np.float64), np.ones((*query.shape[:3], 1))
    codes, scale = (quantize_int8 if number == "int8" else quantize_fp8)(query, -1)
    return codes.astype(np.float64), scale[..., None].astype(np.float64)


def plain_attention(query, key, value, *, scale=None, mask=None, logits_soft_cap=None):
    """Exact softmax attention in float64, all scores at once; mask [B, T, S]."""
    group = query.shape[2] // key.shape[2]
    q = _heads_first(f32(query).astype(np.float64))
    k, v = (_heads_first(np.repeat(f32(x).astype(np.float64), group, 2)) for x in (key, value))
    scores = q @ np.swapaxes(k, -1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if logits_soft_cap is not None:
        scores = logits_soft_cap * np.tanh(scores / logits_soft_cap)
    if mask is not None:
        scores = np.where(mask[:, None], scores, -np.inf)
    m = scores.max(-1, keepdims=True)
    p = np.exp(scores - np.where(np.isneginf(m), 0.0, m))
    l = p.sum(-1, keepdims=True)
    return np.moveaxis((p @ v) / np.where(l == 0, 1.0, l), 1, 2)
