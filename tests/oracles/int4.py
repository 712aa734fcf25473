"""INT4 weights, e4m3 tokens and their product in float64, from the definitions alone.

Nothing here uses jax or ml_dtypes' conversions: e4m3 is a table of its values, bfloat16 a rounding
of significands, a packed byte its formula.
"""

import dataclasses

import numpy as np

MAX = 448.0


def _e4m3_values():
    bits = np.arange(127)
    exponent, fraction = bits >> 3, bits & 7
    normal = (8 + fraction) * 2.0 ** (exponent - 10)
    return np.where(exponent == 0, fraction * 2.0**-9, normal)


E4M3 = _e4m3_values()
_MIDDLES = (E4M3[1:] + E4M3[:-1]) / 2


def e4m3_bits(x):
    """Bits of the nearest e4m3 value, ties to even bits, saturating; NaN for NaN."""
    magnitude = np.abs(np.asarray(x, np.float64))
    below = np.searchsorted(_MIDDLES, magnitude, side="left")
    tie = (below < 126) & (_MIDDLES[np.minimum(below, 125)] == magnitude)
    bits = np.where(tie & (below % 2 == 1), below + 1, below)
    bits = bits + 128 * np.signbit(x)
    return np.where(np.isnan(x), 0x7F, bits).astype(np.uint8)


def e4m3(x):
    """The nearest e4m3 value."""
    bits = e4m3_bits(x).astype(np.int64)
    value = E4M3[np.minimum(bits & 127, 126)] * np.where(bits & 128, -1.0, 1.0)
    return np.where(np.isnan(x), np.nan, value)


def bf16(x):
    """The nearest bfloat16 value, of normal numbers."""
    significand, exponent = np.frexp(np.asarray(x, np.float64))
    return np.ldexp(np.rint(significand * 256), exponent - 8)


def f16(x):
    """The nearest float16 value."""
    _, exponent = np.frexp(np.asarray(x, np.float64))
    exponent = np.maximum(exponent, -13)  # smaller numbers are subnormal
    unit = np.ldexp(1.0, exponent - 11)
    return np.rint(np.asarray(x, np.float64) / unit) * unit


def f32(x):
    """Float64, rounded to float32."""
    return np.asarray(x, np.float64).astype(np.float32).astype(np.float64)


@dataclasses.dataclass
class Weight:
    """Codes ``[out, in]``, scales ``[out, groups]``, powers of rows ``[out]``; nothing padded."""

    codes: np.ndarray
    scales: np.ndarray
    powers: np.ndarray
    group_size: int
    scale_dtype: str

    @property
    def values(self):
        """Dequantized ``[out, in]``."""
        scale = np.repeat(self.scales, self.group_size, axis=1)[:, : self.codes.shape[1]]
        values = scale * self.codes
        values = e4m3(values) if self.scale_dtype == "e4m3" else values
        return values * 2.0 ** -self.powers[:, None]


def quantize_weight(w, group_size=128, scale_dtype="e4m3"):
    """One group at a time."""
    w = np.asarray(w).astype(np.float64)
    out_size, in_size = w.shape
    groups = -(-in_size // group_size)
    codes, scales = np.zeros(w.shape, np.int64), np.zeros((out_size, groups))
    parts = [slice(g * group_size, (g + 1) * group_size) for g in range(groups)]
    powers = np.zeros(out_size)
    for n in range(out_size):
        row = w[n]
        if scale_dtype != "bf16":
            powers[n] = row_power([np.abs(row[part]).max() for part in parts], scale_dtype)
        if powers[n]:
            row = np.where(np.abs(row) < 2.0**-126, 0, row) * 2.0 ** powers[n]
        for g, part in enumerate(parts):
            scales[n, g], codes[n, part] = _one_group(row[part], scale_dtype)
    return Weight(codes, scales, powers, group_size, scale_dtype)


def row_power(largest, scale_dtype="e4m3"):
    """By which power of two a row is multiplied, given the largest numbers of its groups.

    By none, unless a scale would round to more than 64 or lie below the smallest, 2**-9; in
    float16, lie above 65504 or below 2**-14.
    """
    top, most, least = (448, 68, 2.0**-9)
    if scale_dtype == "f16":
        top, most, least = (7 * 2**15, 65504, 2.0**-14)
    held = [x for x in largest if 2.0**-126 <= x < np.inf]
    if not held:
        return 0
    power = 0
    while max(held) * 2.0**power >= top:
        power -= 1
    while max(held) * 2.0**power < top / 2:
        power += 1
    if max(held) / 7 > most:
        return power
    # One from 448 on whose scale rounds to 64 stays.
    return max(0, min(power, 126)) if min(held) / 7 < least else 0


def _one_group(w, scale_dtype):
    if not np.isfinite(w).all():
        return np.nan, 0
    largest = np.abs(w).max()
    if scale_dtype == "e4m3":
        scale = max(float(e4m3(largest / 7)), 2.0**-9)
    elif scale_dtype == "f16":
        scale = max(float(f16(largest / 7)), 2.0**-24) if largest > 0 else 1.0
    else:
        scale = float(bf16(largest / 7)) if largest > 0 else 1.0
    return scale, np.clip(np.rint(w / scale), -8, 7)


def pack(codes):
    """Codes ``[N, K]`` to bytes ``[N, K / 2]``, one byte at a time."""
    codes = np.asarray(codes, np.int64)
    packed = np.zeros((codes.shape[0], codes.shape[1] // 2), np.uint8)
    for first in range(0, codes.shape[1], 128):
        for j in range(64):
            t, s, b = j // 16, j // 4 % 4, j % 4
            k = first + 32 * s + 4 * t + 2 * b % 4 + 16 * (2 * b // 4)
            packed[:, first // 2 + j] = codes[:, k] % 16 + 16 * (codes[:, k + 1] % 16)
    return packed


def tiles(packed):
    """Bytes ``[N, K / 2]`` as ``[N / 64, K / 128, 64, 64]``, one tile at a time."""
    rows, blocks = packed.shape[0] // 64, packed.shape[1] // 64
    parts = [
        [packed[64 * i : 64 * i + 64, 64 * j : 64 * j + 64] for j in range(blocks)]
        for i in range(rows)
    ]
    return np.array(parts)


def group_tiles(numbers):
    """One number a row and group, ``[N, groups]``, as ``[N / 64, groups, 64]``."""
    parts = [numbers[i : i + 64].T for i in range(0, len(numbers), 64)]
    return np.array(parts)


def quantize_tokens(x):
    """Codes (as values) and scales of ``[M, K]``: products with float32 reciprocals, as defined."""
    x = np.asarray(x).astype(np.float64)
    largest = np.abs(x).max(-1)
    bad = ~np.isfinite(x).all(-1)
    smallest = 2.0**-126
    with np.errstate(all="ignore"):
        scale = bf16(np.maximum(f32(largest * f32(1 / MAX)), smallest))
        scale = np.where(largest < smallest, 1.0, scale)
        scale = np.where(bad, np.nan, scale)
        codes = e4m3(np.clip(f32(x * f32(1 / scale)[..., None]), -MAX, MAX))
    return codes, scale


def sigmoid(x):
    """Logistic function."""
    return 1 / (1 + np.exp(-x))


def gelu(x):
    """Its tanh form."""
    return x * sigmoid(2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))


ACTIVATIONS = {None: lambda x: x, "silu": lambda x: x * sigmoid(x), "gelu": gelu}


def activate(z, activation):
    """``[M, out]``; with ``"swiglu"`` the first half of the outputs is the gate."""
    if activation != "swiglu":
        return ACTIVATIONS[activation](z)
    gate, up = np.split(z, 2, axis=-1)
    return gate * sigmoid(gate) * up


def matmul(
    codes,
    scale,
    values,
    *,
    output_scale=1.0,
    bias=0.0,
    activation=None,
    residual=0.0,
    depth=None,
):
    """The product and its epilogue, and a bound of what float32 arithmetic may be off by.

    Sums of `K` exact products are off by at most ``K u sum|x w|`` in any order; the epilogue adds a
    few roundings. An activation's slope is below 1.2. Sums of `depth` inputs that Hopper's matrix
    unit computes lose what `matrix_unit_error` says, too.
    """
    unit = 2.0**-24
    factor = np.asarray(scale)[:, None] * output_scale
    z = codes @ values.T * factor + bias
    size = np.abs(codes) @ np.abs(values).T * np.abs(factor) + np.abs(bias)
    # The sum, scales of groups, two factors and the bias.
    error = (codes.shape[1] + 8) * unit * size
    if depth is not None:
        error = error + matrix_unit_error(codes, values, depth) * np.abs(factor)
    y = activate(z, activation)
    if activation == "swiglu":
        (gate, up), (d_gate, d_up) = np.split(z, 2, axis=-1), np.split(error, 2, axis=-1)
        error = 1.2 * d_gate * (np.abs(up) + d_up) + np.abs(gate) * d_up
    elif activation is not None:
        error = 1.2 * error
    # The functions themselves are good to a few units; so is what they are made of.
    error = error + 16 * unit * (np.abs(y) + np.abs(residual))
    return y + residual, error


# Hopper's matrix unit for e4m3: how many products an instruction adds, and at how many places.
_STEP, _FRACTION = 32, 13


def _exponent(x):
    """Of each number's leading bit; of zero, a very small one."""
    return np.where(x == 0, -99, np.frexp(x)[1] - 1)


def matrix_unit(codes, values):
    """``codes @ values.T`` as the matrix unit computes it, of e4m3 numbers.

    An instruction takes 32 products and the sum before them, aligns them to the largest of their
    exponents, and drops what lies below 13 binary places of it; then it adds them, and drops what
    lies below 13 places of the result. Operands' exponents, not their products', are compared.
    """
    low = -6  # the exponent of subnormal numbers
    total = np.zeros((codes.shape[0], values.shape[0]))
    for k in range(0, codes.shape[1], _STEP):
        x, w = codes[:, None, k : k + _STEP], values[None, :, k : k + _STEP]
        exponents = np.maximum(_exponent(x), low) + np.maximum(_exponent(w), low)
        largest = np.where(x * w == 0, -99, exponents).max(-1)
        unit = np.ldexp(1.0, np.maximum(largest, _exponent(total)) - _FRACTION)
        total = unit * (np.trunc(x * w / unit[..., None]).sum(-1) + np.trunc(total / unit))
        unit = np.ldexp(1.0, _exponent(total) - _FRACTION)
        total = unit * np.trunc(total / unit)
    return total


def matrix_unit_error(codes, values, depth):
    """A bound of what `matrix_unit` loses if its sums are taken out after every `depth` inputs.

    Let a unit be ``2^-13`` of the largest number in an instruction, which is at most the sum or the
    root of the products' squares. The instruction may lose one unit of the sum before it and one of
    its result. Products have 8 bits, and lose something only if they are ``2^6`` times smaller
    than the largest; what they lose has their signs and mostly cancels: one unit for all of them.
    """
    total = np.zeros((codes.shape[0], values.shape[0]))
    error = np.zeros_like(total)
    for k in range(0, codes.shape[1], _STEP):
        x, w = codes[:, k : k + _STEP], values[:, k : k + _STEP].T
        before = total if k % depth else np.zeros_like(total)
        total = before + x @ w
        largest = np.maximum(np.maximum(np.abs(before), np.abs(total)), np.sqrt(x**2 @ w**2))
        error += 3 * 2.0**-_FRACTION * largest
    return error
