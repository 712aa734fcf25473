"""Stages 1 and 2, e4m3, packing and head priorities: exact, the library must give the same bits."""

import ml_dtypes
import numpy as np

LEVELS = 119
FP8_MAX = 448
INV_LEVELS = np.float32(1 / LEVELS)
INV_FP8_MAX = np.float32(1 / FP8_MAX)


# Stage 1 -----------------------------------------------------------------------------------------


def f32(x):
    """The float32 values of bfloat16, float16 or float32 input (exact)."""
    return np.asarray(x).astype(np.float32)


def scale_of(maximum, inverse=INV_LEVELS):
    """Scale of values up to `maximum`: 1 where all are (nearly) zero, NaN where one is not finite.

    Nearly zero: the quotient is below the smallest normal float32 number.
    """
    maximum = np.asarray(maximum, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        scale = (maximum * inverse).astype(np.float32)
    if inverse == INV_LEVELS:
        scale = sixteen_bits(scale)
    scale = np.where(scale < np.finfo(np.float32).tiny, np.float32(1), scale)
    return np.where(np.isfinite(maximum), scale, np.float32(np.nan))


def sixteen_bits(scale):
    """Positive scales rounded up to 16 significant bits."""
    mantissa, exponent = np.frexp(np.asarray(scale, np.float64))
    return np.ldexp(np.ceil(mantissa * 2.0**16), exponent - 16).astype(np.float32)


def exact_codes(x, scale):
    """Rounded quotients of float32 numbers; float64 is wide enough to see every tie."""
    with np.errstate(all="ignore"):
        return np.rint(x.astype(np.float64) / np.asarray(scale, np.float64))


def divide_f32(x, scale):
    """The division of e4m3 as it is defined here: the float32 product with the float32 reciprocal.

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
    codes = exact_codes(x, np.expand_dims(scale, tuple(a % x.ndim for a in axes)))
    return np.nan_to_num(codes, nan=0).astype(np.int8), scale


def quantize_with_scale(x, scale):
    """Codes under a given scale, clamped to +-119; NaN gives an unspecified code (0 here)."""
    codes = exact_codes(f32(x), scale)
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
    if not np.isfinite(x).all():
        return np.nan
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
    """Slot of each head among the heads sorted by falling priority, ties in head order.

    NaN counts as the highest priority.
    """
    priority = np.where(np.isnan(priority), np.inf, priority)
    order = np.argsort(-priority, axis=-1, kind="stable")
    slots = np.empty_like(order)
    np.put_along_axis(slots, order, np.broadcast_to(np.arange(order.shape[-1]), order.shape), -1)
    return slots.astype(np.int32)
