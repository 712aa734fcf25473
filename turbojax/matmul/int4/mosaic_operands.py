"""What the Mosaic GPU kernels of INT4 products read beside a weight: padded tokens, and tables."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from turbojax.matmul.int4.weight import Int4Weight
from turbojax.numerics.fp8 import E4M3_MAX, Fp8Tokens

# The unit of copies of more tokens than this.
_COPY = 8


def padded(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`x` with zeros behind it."""
    if x.shape == shape:
        return x
    return jnp.pad(x, [(0, new - old) for old, new in zip(x.shape, shape, strict=True)])


def padded_tokens(tokens: Fp8Tokens, inputs: int) -> tuple[jax.Array, jax.Array]:
    """Codes ``[M', inputs]`` and scales of tokens, padded with zeros as copies need it."""
    rows = tokens.codes.shape[0]
    size = rows if rows <= _COPY else -(-rows // _COPY) * _COPY
    x = padded(tokens.codes, (size, inputs))
    # Under `vmap` its rows are copied too, whose strides must be multiples of 16 bytes.
    return x, padded(tokens.scale, (-(-size // _COPY) * _COPY,))


def tables_of(weight: Int4Weight) -> jax.Array | None:
    """Products of scales and codes, for weights whose scales are e4m3."""
    return jnp.asarray(tables()) if weight.scale_dtype == "e4m3" else None


@functools.cache
def tables() -> np.ndarray:
    """uint8 ``[128, 16]``: for each e4m3 scale, by its bits, its products with 0..7, -8..-1."""
    scales = np.arange(128, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)
    codes = np.array([*range(8), *range(-8, 0)], np.float32)
    products = np.clip(scales[:, None] * codes, -E4M3_MAX, E4M3_MAX)
    return products.astype(jnp.float8_e4m3fn).view(np.uint8)
