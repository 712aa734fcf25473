"""Blocks of pages whose keys and values are stored each in its own way, as a warp finds them."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.mosaic.hopper.paged import inputs
from turbojax import polar

# Bits of keys and of values, each stored in its own way; 8 of e4m3, or "int8".
INT8 = "int8"
MIXED = {
    "k8v4": (8, 4),
    "int8": (INT8, INT8),
    "int8_v4": (INT8, 4),
    "turbo_k3v2": (3, 2),
    "turbo_k2v3": (2, 3),
    "turbo_k4v2": (4, 2),
}
# Turbo4 as well, as other head dims have it.
STORED_BITS = {**MIXED, "turbo_k4v4": (4, 4)}


def stored(bits):
    if bits == INT8:
        return inputs.Stored(8, is_int8=True)
    if bits == 8:
        return inputs.Stored(8)
    table, middle, _ = polar.integer_centroids(bits)
    return inputs.Stored(bits, tuple(table), middle)


def mixed_block(rng, kind, block, head_dim):
    """A block in shared memory, and its keys and values in float64."""
    sides = [random_side(rng, bits, block, head_dim) for bits in STORED_BITS[kind]]
    data, norms, values = zip(*sides, strict=True)
    return np.concatenate([*data, *norms]), list(values)


def random_side(rng, bits, block, head_dim):
    """Bytes of keys or values, those of their norms, and what they stand for."""
    if bits == 8:
        x = rng.normal(size=(block, head_dim)).astype(ml_dtypes.float8_e4m3fn)
        return x.view(np.uint8).ravel(), np.zeros(0, np.uint8), x.astype(np.float64)
    if bits == INT8:
        data = rng.integers(-127, 128, size=(block, head_dim), dtype=np.int8)
        scales = rng.uniform(0.005, 0.05, size=block).astype(np.float16)
        values = data * scales[:, None].astype(np.float64)
        return data.view(np.uint8).ravel(), scales.view(np.uint8), values
    data = rng.integers(2**bits, size=(block, head_dim), dtype=np.uint8)
    norms = rng.uniform(1, 20, size=block).astype(np.float16)
    table, middle, _ = polar.integer_centroids(bits)
    values = (np.asarray(table) - middle)[data] * norms[:, None].astype(np.float64)
    packed = np.asarray(polar.pack(jnp.asarray(data), bits))
    return packed.ravel(), norms.view(np.uint8), values


def norms_of(memory, s, head_dim, side):
    """The norms of a block's keys or values, to be changed in place."""
    sizes = [0 if x and x.is_float else 2 for x in s.stored or (None, None)]
    first = s.block * (s.token_bytes(head_dim) - sum(sizes[side:]))
    return memory[first : first + sizes[side] * s.block].view(np.float16)
