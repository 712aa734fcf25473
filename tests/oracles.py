"""Numpy oracles of the numerics: float64 and integers, no jax, written from the equations.

The quantizers here are exact: the library must give the same bits. The attention oracles run in
float64 and come with a *derived* tolerance. A float32 implementation of the same rounding steps
may differ from float64 by its own rounding, and where that rounding moves a weight across a
half-integer (or across a step of SAS) by one code. Each oracle therefore also evaluates every
weight at scores moved by the rounding that float32 may commit and returns, per output element,
how far the output may move: next to nothing where no code is near a tie.
"""

import dataclasses
import math
from collections.abc import Callable

import ml_dtypes
import numpy as np

LEVELS = 119
FP8_MAX = 448
EPS = 2.0**-23
INV_LEVELS = np.float32(1 / LEVELS)
INV_FP8_MAX = np.float32(1 / FP8_MAX)


# Stage 1 -----------------------------------------------------------------------------------------


def f32(x):
    """The float32 values of bfloat16, float16 or float32 input (exact)."""
    return np.asarray(x).astype(np.float32)


def scale_of(maximum, inverse=INV_LEVELS):
    """Scale of values up to `maximum`: 1 where all are zero, NaN where one is not finite."""
    maximum = np.asarray(maximum, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        scale = (maximum * inverse).astype(np.float32)
    scale = np.where(maximum == 0, np.float32(1), scale)
    return np.where(np.isfinite(maximum), scale, np.float32(np.nan))


def divide_f32(x, scale):
    """Division as it is defined here: the float32 product with the float32 reciprocal.

    Both steps are rounded correctly (a double product of float32 numbers is exact).
    """
    with np.errstate(all="ignore"):
        reciprocal = np.float32(1) / np.asarray(scale, np.float32)
        return (x.astype(np.float64) * reciprocal.astype(np.float64)).astype(np.float32)


def quantize_int8(x, axis):
    """Symmetric int8 codes with one scale over `axis`."""
    x = f32(x)
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    scale = scale_of(np.max(np.abs(x), axis=axes, initial=0.0))
    codes = np.rint(divide_f32(x, np.expand_dims(scale, tuple(a % x.ndim for a in axes))))
    return np.nan_to_num(codes, nan=0).astype(np.int8), scale


def quantize_with_scale(x, scale):
    """Codes under a given scale, clamped to +-119; NaN gives an unspecified code (0 here)."""
    codes = np.rint(divide_f32(f32(x), scale))
    return np.clip(np.nan_to_num(codes, nan=0), -LEVELS, LEVELS).astype(np.int8)


def quantize_fp8(x, axis):
    """e4m3 codes with one scale over `axis`."""
    x = f32(x)
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    scale = scale_of(np.max(np.abs(x), axis=axes, initial=0.0), INV_FP8_MAX)
    quotient = divide_f32(x, np.expand_dims(scale, tuple(a % x.ndim for a in axes)))
    return quotient.astype(ml_dtypes.float8_e4m3fn), scale


def e4m3(x):
    """Rounds to e4m3, back in float64."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(x, np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)


# Stage 2 and packing -----------------------------------------------------------------------------


def round_ratio(numerator, denominator):
    """``rint(n / d)`` of integers, half to even, in integers (d > 0)."""
    n, d = np.asarray(numerator, np.int64), np.asarray(denominator, np.int64)
    floor, rest = n // d, n % d
    up = (2 * rest > d) | ((2 * rest == d) & (floor % 2 == 1))
    return floor + up


def channel_parameters(lo, hi, bits):
    """Integer scale, zero and code bounds of a channel whose stage-1 codes span ``lo..hi``."""
    top = 2**bits - 1
    scale = np.maximum(1, round_ratio(np.asarray(hi, np.int64) - lo, top))
    zero = round_ratio(lo, scale)
    first = np.maximum(0, -(127 // scale) - zero)  # ceil(-127 / s) = -floor(127 / s)
    last = np.minimum(top, 127 // scale - zero)
    return scale, zero, first, last


def quantize_channels(codes, bits):
    """Stage-2 codes [..., B, H], scales and zeros [..., H] of stage-1 codes [..., B, H]."""
    codes = np.asarray(codes, np.int64)
    scale, zero, first, last = channel_parameters(codes.min(-2), codes.max(-2), bits)
    s, z, a, b = (v[..., None, :] for v in (scale, zero, first, last))
    q2 = np.clip(round_ratio(codes, s) - z, a, b)
    return q2.astype(np.uint8), scale.astype(np.int8), zero.astype(np.int8)


def dequantize_channels(q2, scale, zero):
    """Stage-1 integers of stage-2 codes; int64, so that leaving int8 would be seen."""
    s, z = (np.asarray(v, np.int64)[..., None, :] for v in (scale, zero))
    return (np.asarray(q2, np.int64) + z) * s


def pack(codes, bits, axis=-1):
    """Packs codes along `axis`: planes of halves, quarters or eighths, first part lowest."""
    codes = np.moveaxis(np.asarray(codes, np.int64), axis, -1)
    planes = {4: [(4, 0)], 2: [(2, 0)], 3: [(2, 0), (1, 2)]}[bits]
    packed = []
    for width, shift in planes:
        parts = 8 // width
        size = codes.shape[-1] // parts
        values = (codes >> shift) % 2**width
        split = values.reshape(*codes.shape[:-1], parts, size)
        weights = 2 ** (width * np.arange(parts))
        packed.append((split * weights[:, None]).sum(-2))
    return np.moveaxis(np.concatenate(packed, -1).astype(np.uint8), -1, axis)


def unpack(packed, bits, axis=-1):
    """Inverse of `pack`."""
    packed = np.moveaxis(np.asarray(packed, np.int64), axis, -1)
    size = packed.shape[-1] * 8 // bits
    planes = {4: [(4, 0)], 2: [(2, 0)], 3: [(2, 0), (1, 2)]}[bits]
    codes = np.zeros((*packed.shape[:-1], size), np.int64)
    start = 0
    for width, shift in planes:
        stop = start + size * width // 8
        field = packed[..., start:stop]
        parts = [(field >> (width * k)) % 2**width for k in range(8 // width)]
        codes += np.concatenate(parts, -1) << shift
        start = stop
    return np.moveaxis(codes.astype(np.uint8), -1, axis)


# Head priorities ---------------------------------------------------------------------------------


def head_priority(x, method="gap_std", where=None):
    """Priority [B, K] of heads of x [B, S, K, H] in float64, one head at a time."""
    x = f32(x)
    batch, _, heads, _ = x.shape
    result = np.zeros((batch, heads))
    for b in range(batch):
        rows = x[b] if where is None else x[b][np.asarray(where[b])]
        for h in range(heads):
            result[b, h] = _one_priority(rows[:, h], method) if len(rows) else 0.0
    return result


def _one_priority(x, method):
    x64 = x.astype(np.float64)
    gap = x64.max() - x64.min()
    spread = np.std(x64.max(0) - x64.min(0))
    if method == "entropy":
        codes, _ = quantize_int8(x, (0, 1))
        counts = np.bincount(codes.astype(np.int64).ravel() + LEVELS, minlength=2 * LEVELS + 1)
        p = counts[counts > 0] / counts.sum()
        return float(-(p * np.log2(p)).sum())
    return {"gap_std": gap * spread, "min_max": gap, "variation": spread}[method]


def rank_heads(priority):
    """Slot of each head among the heads sorted by falling priority, ties in head order."""
    order = np.argsort(-np.asarray(priority, np.float64), axis=-1, kind="stable")
    slots = np.empty_like(order)
    np.put_along_axis(slots, order, np.broadcast_to(np.arange(order.shape[-1]), order.shape), -1)
    return slots.astype(np.int32)


# SAS ---------------------------------------------------------------------------------------------

PRINTED_CUBIC = (-0.1025, 0.4626, -0.9922, 0.9996)


def least_squares_cubic(base):
    """Least-squares cubic of ``base ** -f`` on [0, 1), highest power first.

    Solves the normal equations of the continuous problem with Legendre polynomials.
    """
    x, w = np.polynomial.legendre.leggauss(40)
    target = base ** -((x + 1) / 2)
    legendre = np.polynomial.legendre.Legendre(
        [
            (2 * n + 1) / 2 * np.sum(w * target * np.polynomial.legendre.legval(x, [0] * n + [1]))
            for n in range(4)
        ]
    )
    in_f = legendre.convert(kind=np.polynomial.Polynomial)(np.polynomial.Polynomial([-1.0, 2.0]))
    return tuple(in_f.coef[::-1])


def sas(x, threshold=-6.0, base="e"):
    """Sparse activated softmax's exponential, float64."""
    x = np.asarray(x, np.float64)
    cubic = PRINTED_CUBIC if base == "e" else least_squares_cubic(2.0)
    unit, steps = (np.e, 1.0) if base == "e" else (2.0, 1 / math.log(2))
    with np.errstate(invalid="ignore"):
        y = np.maximum(-x, 0.0) * steps
        whole = np.where(np.isinf(y), 0, np.floor(y))
        fraction = np.where(np.isinf(y), 0, y - whole)
        value = unit**-whole * np.polyval(cubic, fraction)
        return np.where(x < threshold, 0.0, value)


def exponential(softmax) -> Callable:
    """The exponential named by a configuration: ``"exact"`` or a pair (threshold, base)."""
    if softmax == "exact":
        return lambda x: np.exp(np.minimum(x, 0.0))
    threshold, base = softmax
    return lambda x: sas(x, threshold, base)


# Attention ---------------------------------------------------------------------------------------


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


def _blocks(size, block):
    return [(start, min(start + block, size)) for start in range(0, size, block)]


def quantize_blocks(x, block, number):
    """Codes (float64) [B, T, N, H] and scales [B, T, N], one scale per block and head."""
    if number == "float":
        return f32(x).astype(np.float64), np.ones(x.shape[:3])
    codes, scales = np.zeros(x.shape), np.zeros(x.shape[:3])
    for start, stop in _blocks(x.shape[1], block):
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
        for start, stop in _blocks(size, block_kv):
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

    `splits[b]` lists the (start, stop) of the blocks of sequence b: each is weighted against its
    own maximum, and they are merged exactly. The queries are the last ones of each sequence.
    """
    parts = [
        _decode_one(
            query[b : b + 1],
            key[b : b + 1],
            value[b : b + 1],
            splits[b],
            lengths[b],
            mode,
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
        for start, stop in splits:
            see = np.broadcast_to(mask[:, None, :, start:stop], (*rows, stop - start))
            k_t = np.swapaxes(k[:, :, start:stop], -1, -2)
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
            total.add(merged, v[:, :, start:stop], see)
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


# The cache ---------------------------------------------------------------------------------------


class CacheSide:
    """Keys or values of every sequence: plain lists of compressed blocks and buffered tokens."""

    def __init__(self, spec, bits, num_low, scale=None):
        self.spec, self.bits, self.num_low = spec, bits, num_low
        shape = (spec.batch, spec.heads)
        self.scale = [None] * spec.batch
        if scale is not None:
            self.scale = list(np.broadcast_to(np.float32(scale), shape).astype(np.float32))
        self.blocks = [[] for _ in range(spec.batch)]
        self.buffer = [[] for _ in range(spec.batch)]
        self.slots = [None] * spec.batch

    def head_bits(self, b, h):
        is_low = self.slots[b][h] >= self.spec.heads - self.num_low
        return self.spec.low_bits if is_low else self.bits

    def fix_scale(self, b, maximum, factor=1.0):
        """Fixes the universal scale from a maximum [K] unless it is fixed already."""
        if self.scale[b] is None:
            self.scale[b] = scale_of(np.float32(factor) * np.float32(maximum))

    def rank(self, b, x):
        """Ranks the heads by x [S, K, H] unless they are ranked already."""
        if self.slots[b] is None:
            self.slots[b] = rank_heads(head_priority(x[None], self.spec.priority))[0]

    def compress(self, b, codes, scale):
        """Stores a block of stage-1 codes [block, K, H] with its scales [K]."""
        heads = []
        for h in range(self.spec.heads):
            bits = self.head_bits(b, h)
            q2, s, z = quantize_channels(codes[:, h], bits)
            heads.append(
                {
                    "bits": bits,
                    "q2": q2,
                    "channel_scale": s,
                    "channel_zero": z,
                    "codes": dequantize_channels(q2, s, z),
                    "scale": scale[h],
                }
            )
        self.blocks[b].append(heads)

    def prefill(self, b, x):
        """Compresses the whole blocks of a prompt [N, K, H] and buffers the rest."""
        if not len(x):
            return
        self.fix_scale(b, np.abs(x).max((0, 2)))
        whole = len(x) // self.spec.block
        if whole:
            self.rank(b, x)
        for j in range(whole):
            part = x[j * self.spec.block : (j + 1) * self.spec.block]
            self.compress(b, *quantize_int8(part, (0, 2)))
        for token in x[whole * self.spec.block :]:
            self.push(b, token)

    def append(self, b, token):
        """Appends one token [K, H]."""
        self.fix_scale(b, np.abs(token).max(-1), 2.0)
        self.push(b, token)

    def push(self, b, token):
        """Buffers one token; a full buffer is compressed at once."""
        bad = ~np.isfinite(token).all(-1)
        self.scale[b] = np.where(bad, np.float32(np.nan), self.scale[b]).astype(np.float32)
        self.buffer[b].append(quantize_with_scale(token, self.scale[b][:, None]))
        if len(self.buffer[b]) == self.spec.buffer_size:
            codes = np.stack(self.buffer[b])
            self.rank(b, f32(codes) * self.scale[b][None, :, None])
            for start, stop in _blocks(len(codes), self.spec.block):
                self.compress(b, codes[start:stop], self.scale[b])
            self.buffer[b] = []

    def dequantize(self):
        """Values [B, max_length, K, H] in float32, zeros past each length."""
        spec = self.spec
        out = np.zeros((spec.batch, spec.max_length, spec.heads, spec.head_dim), np.float32)
        for b in range(spec.batch):
            position = 0
            for heads in self.blocks[b]:
                stop = position + spec.block
                for h, block in enumerate(heads):
                    out[b, position:stop, h] = f32(block["codes"]) * block["scale"]
                position = stop
            for codes in self.buffer[b]:
                out[b, position] = f32(codes) * self.scale[b][:, None]
                position += 1
        return out


class Cache:
    """A progressive cache as plain Python lists: what the library's arrays must hold."""

    def __init__(
        self,
        batch,
        max_length,
        heads,
        head_dim,
        *,
        block=64,
        buffer_size=64,
        key_bits=4,
        value_bits=4,
        num_low_key=0,
        num_low_value=0,
        low_bits=2,
        priority="gap_std",
        key_scale=None,
        value_scale=None,
    ):
        self.batch, self.max_length, self.heads, self.head_dim = batch, max_length, heads, head_dim
        self.block, self.buffer_size, self.low_bits = block, buffer_size, low_bits
        self.priority = priority
        self.key = CacheSide(self, key_bits, num_low_key, key_scale)
        self.value = CacheSide(self, value_bits, num_low_value, value_scale)
        self.lengths = np.zeros(batch, np.int64)
        self.overflowed = np.zeros(batch, bool)

    @property
    def buffer_lengths(self):
        return np.array([len(x) for x in self.key.buffer])

    def prefill(self, key, value, lengths=None):
        """Stores a prompt [B, S, K, H] of which `lengths` tokens are real."""
        lengths = np.full(self.batch, key.shape[1]) if lengths is None else lengths
        for b, n in enumerate(lengths):
            if n and self.lengths[b]:
                self.overflowed[b] = True
                continue
            self.key.prefill(b, f32(key)[b, :n])
            self.value.prefill(b, f32(value)[b, :n])
            self.lengths[b] = n

    def append(self, key, value, lengths=None):
        """Appends [B, T, K, H] of which `lengths` tokens are real; what does not fit is dropped."""
        lengths = np.full(self.batch, key.shape[1]) if lengths is None else lengths
        for b, n in enumerate(lengths):
            for t in range(n):
                if self.lengths[b] == self.max_length:
                    self.overflowed[b] = True
                    break
                self.key.append(b, f32(key)[b, t])
                self.value.append(b, f32(value)[b, t])
                self.lengths[b] += 1

    def dequantize(self):
        return self.key.dequantize(), self.value.dequantize()

    def splits(self):
        """The (start, stop) of each compressed block and of the buffer, per sequence."""
        result = []
        for b in range(self.batch):
            stop = len(self.key.blocks[b]) * self.block
            rest = [(stop, int(self.lengths[b]))] if self.key.buffer[b] else []
            result.append(_blocks(stop, self.block) + rest)
        return result
