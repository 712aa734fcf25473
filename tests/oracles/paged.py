"""What a paged cache holds, in float64 and by definition: the codecs and a pool without pages."""

import ml_dtypes
import numpy as np

# Lloyd-Max for N(0, 1) with 16 levels: the upper half, as published tables have it.
CENTROIDS = (0.128395, 0.388048, 0.656759, 0.942340, 1.256231, 1.618046, 2.069017, 2.732590)
# What attention and `gather` read instead, in steps.
INTEGERS = (2.5, 7.5, 12.5, 18.5, 24.5, 31.5, 40.5, 53.5)

FP8 = {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}


def hadamard(order):
    """Sylvester's matrix, `order` a power of two."""
    matrix = np.ones((1, 1))
    while len(matrix) < order:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def turbo4(x, signs):
    """Codes, packed bytes and norms of ``[..., H]``, `H` a power of two."""
    x = np.asarray(x).astype(np.float64)
    dim = x.shape[-1]
    rotated = (x * signs) @ hadamard(dim).T / np.sqrt(dim)
    length = np.linalg.norm(x, axis=-1)
    upper = np.asarray(CENTROIDS) / np.sqrt(dim)
    centroids = np.concatenate([-upper[::-1], upper])
    thresholds = (centroids[1:] + centroids[:-1]) / 2
    codes = (rotated[..., None] >= length[..., None, None] * thresholds).sum(-1)
    norms = length / np.linalg.norm(centroids[codes], axis=-1)
    packed = codes[..., ::2] + 16 * codes[..., 1::2]
    return codes, packed.astype(np.uint8), norms.astype(np.float16)


def turbo4_values(codes, norms, signs, step):
    """What codes and norms stand for when read."""
    dim = codes.shape[-1]
    upper = np.asarray(INTEGERS) * step / np.sqrt(dim)
    table = np.concatenate([-upper[::-1], upper])
    rotated = table[codes] * norms[..., None].astype(np.float64)
    return rotated @ hadamard(dim) / np.sqrt(dim) * signs


def fp8(x, kv_dtype, scale):
    """What values become when stored in 8 bits: the codes, NaN beyond the format's range."""
    kind = FP8[kv_dtype]
    largest = float(ml_dtypes.finfo(kind).max)
    with np.errstate(invalid="ignore", over="ignore"):
        x = np.asarray(x).astype(np.float32) * np.float32(np.float32(1) / np.float32(scale))
        return np.where(np.abs(x) <= largest, x, np.nan).astype(kind)


def through(x, kv_dtype, *, scale=1.0, signs=None, step=None):
    """Vectors ``[..., H]`` as the cache gives them back."""
    if kv_dtype == "auto":
        return np.asarray(x).astype(np.float64)
    if kv_dtype == "turbo4":
        codes, _, norms = turbo4(x, signs)
        return turbo4_values(codes, norms, signs, step)
    return fp8(x, kv_dtype, scale).astype(np.float64) * scale
