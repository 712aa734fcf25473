"""What a paged cache holds, in float64 and by definition: the codecs and a pool without pages."""

import ml_dtypes
import numpy as np

# Lloyd-Max for N(0, 1) by the bits of a code: the upper half, as published tables have it.
CENTROIDS = {
    2: (0.452780, 1.510418),
    3: (0.245094, 0.756005, 1.343909, 2.151946),
    4: (0.128395, 0.388048, 0.656759, 0.942340, 1.256231, 1.618046, 2.069017, 2.732590),
}
# What attention and `gather` read instead, in steps, and the steps.
INTEGERS = {
    2: (17.5, 58.5),
    3: (6.5, 20.5, 36.5, 58.5),
    4: (2.5, 7.5, 12.5, 18.5, 24.5, 31.5, 40.5, 53.5),
}
STEPS = {2: 0.02582753204675787, 3: 0.03683768730761924, 4: 0.05129103841924366}

FP8 = {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}


def hadamard(order):
    """Sylvester's matrix, `order` a power of two."""
    matrix = np.ones((1, 1))
    while len(matrix) < order:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def code_bits(kv_dtype):
    """Of keys' and of values' codes; None for what is not stored as codes."""
    if kv_dtype.startswith("turbo_k"):
        return int(kv_dtype[7]), int(kv_dtype[9])
    return {"turbo4": (4, 4), "k8v4": (None, 4), "int8_v4": (None, 4)}.get(kv_dtype, (None, None))


def fp8_names(kv_dtype):
    """How keys and values are stored if in 8-bit floats; None otherwise."""
    if kv_dtype == "k8v4":
        return "fp8_e4m3", None
    return (kv_dtype, kv_dtype) if kv_dtype in FP8 else (None, None)


def int8_sides(kv_dtype):
    """Whether keys and values are stored as integers of 8 bits."""
    return kv_dtype in ("int8", "int8_v4"), kv_dtype == "int8"


def has_codes(kv_dtype):
    """Whether either side is stored as codes."""
    return any(code_bits(kv_dtype))


def packed(codes, bits):
    """Bytes of ``[..., H]`` codes, bit by bit as `turbojax.polar.pack` describes them."""
    codes = np.asarray(codes).astype(np.int64)
    out = np.zeros((*codes.shape[:-1], codes.shape[-1] * bits // 8), np.int64)
    for channel in range(codes.shape[-1]):
        for bit in range(bits):
            byte, place = _place(channel, bit, bits, codes.shape[-1])
            out[..., byte] |= (codes[..., channel] >> bit & 1) << place
    return out.astype(np.uint8)


def unpacked(content, bits, dim):
    """The inverse of `packed`."""
    content = np.asarray(content).astype(np.int64)
    out = np.zeros((*content.shape[:-1], dim), np.int64)
    for channel in range(dim):
        for bit in range(bits):
            byte, place = _place(channel, bit, bits, dim)
            out[..., channel] |= (content[..., byte] >> place & 1) << bit
    return out


def _place(channel, bit, bits, dim):
    """Which bit of which byte holds a bit of a channel's code."""
    if bits == 4:
        return channel // 2, 4 * (channel % 2) + bit
    if bit < 2:
        return channel // 4, 2 * (channel % 4) + bit
    return dim // 4 + channel // 8, (0, 1, 4, 5, 2, 3, 6, 7)[channel % 8]


def encoded(x, signs, bits=4):
    """Codes, packed bytes and norms of ``[..., H]``, `H` a power of two."""
    x = np.asarray(x).astype(np.float64)
    dim = x.shape[-1]
    rotated = (x * signs) @ hadamard(dim).T / np.sqrt(dim)
    length = np.linalg.norm(x, axis=-1)
    upper = np.asarray(CENTROIDS[bits]) / np.sqrt(dim)
    centroids = np.concatenate([-upper[::-1], upper])
    thresholds = (centroids[1:] + centroids[:-1]) / 2
    codes = (rotated[..., None] >= length[..., None, None] * thresholds).sum(-1)
    norms = length / np.linalg.norm(centroids[codes], axis=-1)
    return codes, packed(codes, bits), norms.astype(np.float16)


def rotated_values(codes, norms, bits):
    """What codes and norms stand for when read, in rotated channels."""
    upper = np.asarray(INTEGERS[bits]) * STEPS[bits] / np.sqrt(codes.shape[-1])
    table = np.concatenate([-upper[::-1], upper])
    return table[codes] * norms[..., None].astype(np.float64)


def decoded(codes, norms, signs, bits=4):
    """What codes and norms stand for when read."""
    dim = codes.shape[-1]
    return rotated_values(codes, norms, bits) @ hadamard(dim) / np.sqrt(dim) * signs


def fp8(x, kv_dtype, scale):
    """What values become when stored in 8 bits: the codes, NaN beyond the format's range."""
    kind = FP8[kv_dtype]
    largest = float(ml_dtypes.finfo(kind).max)
    with np.errstate(invalid="ignore", over="ignore"):
        x = np.asarray(x).astype(np.float32) * np.float32(np.float32(1) / np.float32(scale))
        return np.where(np.abs(x) <= largest, x, np.nan).astype(kind)


def int8(x):
    """Integers of 8 bits and a float16 scale for each of ``[..., H]``: NaN beyond the range."""
    x = np.asarray(x).astype(np.float64)
    largest = np.abs(x).max(-1)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        wanted = largest.astype(np.float32) * np.float32(1 / 127)
        scale = wanted.astype(np.float16)
        scale = np.where(scale < wanted, np.nextafter(scale, np.float16(np.inf)), scale)
        scale = np.where(largest <= 2.0**-25, np.float16(0), scale)
        scale = np.where(np.isfinite(scale), scale, np.float16(np.nan))
        numbers = np.rint(x / scale.astype(np.float64)[..., None])
    return np.where((scale > 0)[..., None], numbers, 0).astype(np.int8), scale


def through(x, kv_dtype, side=0, *, scale=1.0, signs=None):
    """Vectors ``[..., H]`` as the cache gives them back: keys (`side` is 0) or values (1)."""
    bits, name = code_bits(kv_dtype)[side], fp8_names(kv_dtype)[side]
    if bits is not None:
        codes, _, norms = encoded(x, signs, bits)
        return decoded(codes, norms, signs, bits)
    if int8_sides(kv_dtype)[side]:
        numbers, scales = int8(x)
        return numbers * scales[..., None].astype(np.float64)
    if name is not None:
        return fp8(x, name, scale).astype(np.float64) * scale
    return np.asarray(x).astype(np.float64)
