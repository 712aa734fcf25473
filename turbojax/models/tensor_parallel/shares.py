"""The numbers of the outputs and channels of joined linear layers that a device has."""

import jax
import jax.numpy as jnp
import numpy as np

from turbojax.matmul.int4.parts import NOTHING
from turbojax.models.config import TransformerConfig
from turbojax.models.tensor_parallel.layout import parts
from turbojax.sharding import Axes


def qkv_outputs(config: TransformerConfig, axes: Axes, index: int) -> np.ndarray:
    """The outputs of joined query, key and value projections of device `index` of `hidden_axes`."""
    width = config.head_dim
    queries = config.num_heads * width // parts(axes)
    keys = config.num_kv_heads // axes.size("heads") * width
    key = config.num_heads * width + index // axes.size("sequence") * keys + np.arange(keys)
    query = index * queries + np.arange(queries)
    return np.concatenate([query, key, key + config.num_kv_heads * width])


def channels(size: int, each: int, index: int) -> np.ndarray:
    """The numbers of device `index`'s `each` channels out of `size`; `NOTHING` past the end."""
    found = index * each + np.arange(each)
    return np.where(found < size, found, NOTHING)


def picked(x: jax.Array, rows: np.ndarray) -> jax.Array:
    """Rows of an array, zeros for `NOTHING`."""
    found = x[np.maximum(rows, 0)]
    there = jnp.asarray(rows >= 0).reshape(-1, *(1,) * (x.ndim - 1))
    return jnp.where(there, found, jnp.zeros_like(found))
