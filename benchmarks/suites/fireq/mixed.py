"""jax's own kernel of int8 weights and bfloat16 tokens, beside which INT4 products are timed.

`jax.experimental.pallas.ops.gpu.hopper_mixed_type_matmul_mgpu` takes weights of plain int8, twice
the bytes of INT4, without scales, and tokens as columns.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.measuring.calls import Arrays, Call, compared_rows
from benchmarks.suites.fireq import inputs
from turbojax._device import needs_hopper

# Tokens of a tile are at least as many.
_FEWEST = 16
_ONE_TILE = 64


def product(sizes: tuple[int, int, int], arrays: Arrays) -> Call:
    """``W x^T`` of ``(inputs, outputs, tokens)``; of few tokens 16 columns.

    Raises:
      NotImplementedError: on anything but a Hopper GPU.
    """
    refusal = needs_hopper()
    if refusal is not None:
        raise NotImplementedError(refusal)
    from jax.experimental.pallas.ops.gpu import hopper_mixed_type_matmul_mgpu as kernel

    size, outputs, tokens = sizes
    w = arrays.get(_weights, outputs, size)
    x = arrays.get(_columns, max(tokens, _FEWEST), size)
    config = kernel.TuningConfig(**_settings(kernel, x.shape[1]))

    def multiply(w: jax.Array, x: jax.Array) -> jax.Array:
        return kernel.mixed_matmul_kernel(w, x, out_dtype=jnp.bfloat16, config=config)

    needs = inputs.product_needs(sizes, (w, x), "bf16")
    return Call(multiply, (w, x), needs, _check, (w, x))


def _settings(kernel: Any, tokens: int) -> dict[str, Any]:
    """Few tokens in one tile, with the faster of two settings on an H200; many in tiles of 128."""
    rows, columns = kernel.MatmulDimension.M, kernel.MatmulDimension.N
    if tokens <= _ONE_TILE:
        few = {"tile_m": 64, "tile_n": tokens, "tile_k": 128, "epi_tile_n": tokens}
        return {**few, "max_concurrent_steps": 6, "wg_dimension": rows, "grid_minor_dim": rows}
    many = {"tile_m": 128, "tile_n": 128, "tile_k": 64, "max_concurrent_steps": 4}
    width = 8 if tokens > 2 * 128 else 1
    return {
        **many,
        "wg_dimension": rows,
        "grid_minor_dim": columns,
        "grid_tile_width": width,
    }


def _weights(outputs: int, size: int) -> jax.Array:
    """int8 ``[outputs, size]``: the weights of the others, times 32."""
    w = inputs.dense_fp8(outputs, size).astype(jnp.float32) * 32
    return jnp.clip(jnp.round(w), -127, 127).astype(jnp.int8)


def _columns(tokens: int, size: int) -> jax.Array:
    """bfloat16 ``[size, tokens]``."""
    return inputs.activations(tokens, size).T


def _check(out: jax.Array, w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    rows = np.unique(compared_rows(out.shape[1]))
    want = inputs.product(inputs.values(x.T[rows]), inputs.values(w))
    return out.T[rows], want, jnp.all(jnp.isfinite(out))
