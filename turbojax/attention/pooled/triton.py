"""The Triton kernels behind `pooled_attention`: what they take, how they are launched."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from turbojax._device import AMPERE, interpreting, needs_gpu, unindexable
from turbojax.attention.pooled import lists, operands
from turbojax.attention.pooled.static import LEVELS, PooledOptions
from turbojax.attention.score_modifiers import NO_MODIFIERS, ScoreModifiers
from turbojax.numerics import rows

_LARGEST_HEAD_DIM = 256
# An entry of the lists by key holds the number of a query block in 15 bits, and 16 blocks of keys.
_MOST_QUERY_BLOCKS, _MOST_BLOCKS = 2**15, 16


def unsupported(
    *,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    levels: jax.Array,
    options: PooledOptions,
    modifiers: ScoreModifiers = NO_MODIFIERS,
) -> str | None:
    """Why the kernels cannot run this here, forward or backward; None if they can."""
    del value
    if refusal := modifiers.refusal(operands.MARKS):
        return refusal
    for name in ("block_q", "block_kv"):
        block = getattr(options, name)
        if block & (block - 1) or not 16 <= block <= 256:
            return f"{name}={block} must be a power of two from 16 to 256"
    head_dim = query.shape[-1]
    if head_dim > _LARGEST_HEAD_DIM or head_dim % 8:
        return f"{head_dim=} must be a multiple of 8 up to {_LARGEST_HEAD_DIM}"
    if levels.shape[2] > _MOST_QUERY_BLOCKS:
        return f"{levels.shape[2]} blocks of queries must be at most {_MOST_QUERY_BLOCKS}"
    # Gradients of the keys are float32 on the way.
    sizes = [math.prod(query.shape) * query.dtype.itemsize, math.prod(key.shape) * 4]
    return unindexable(*sizes, math.prod(levels.shape) * 4) or needs_gpu(AMPERE)


# Bytes of an operand that a program keeps, and of one that each step loads: keys, or queries.
_PROGRAM_BYTES, _KEY_BYTES, _QUERY_BYTES = 32 * 2**10, 16 * 2**10, 8 * 2**10
# Queries (forward and of the gradient), or groups by level, of a program, at most: fewer for wide
# arrays. Measured: benchmarks/results/pooled_triton_launches_2026-11-21.json.
_FORWARD_QUERIES, _GRADIENT_QUERIES, _KEYS = 64, 128, 64
_GROUPS = {1: 128, 2: 64, 4: 64, 8: 64}


def _fitting(most: int, bytes_: int, dtype: jax.typing.DTypeLike, head_dim: int) -> int:
    """Rows of a tile that fit into `bytes_`: a power of two from 16 to `most`."""
    row = (1 << (head_dim - 1).bit_length()) * jnp.dtype(dtype).itemsize
    return max(16, min(most, bytes_ // row))


def _launch(rows: int, query: jax.Array) -> dict[str, int]:
    """Warps and stages for a tile of `rows`; its accumulators must fit into registers.

    Float32 operands are split in shared memory, which leaves less for stages.
    """
    num_warps = 8 if rows > 64 or query.shape[-1] > 128 else 4
    return {"num_warps": num_warps, "num_stages": 2 if query.dtype == jnp.float32 else 3}


def _walk_settings(query: jax.Array, options: PooledOptions, queries: int) -> Any:
    """Launch of a kernel that walks over lists by query, with this many queries at most."""
    from pallas_kernels.triton._pooled_common import Settings

    dtype, head_dim = query.dtype, query.shape[-1]
    tile = min(options.block_q, _fitting(queries, _PROGRAM_BYTES, dtype, head_dim))
    return Settings(
        block_q=options.block_q,
        block_kv=options.block_kv,
        scale=options.scale,
        is_causal=options.is_causal,
        tile=tile,
        tile_kv=_fitting(_KEYS, _KEY_BYTES, dtype, head_dim),
        **_launch(tile, query),
        interpret=interpreting(),
    )


def _key_settings(query: jax.Array, level: int, options: PooledOptions) -> Any:
    """Launch of the gradients of keys and values of one level."""
    from pallas_kernels.triton.pooled_key_gradient import Settings

    dtype, head_dim = query.dtype, query.shape[-1]
    rows = _fitting(_GROUPS[level], _PROGRAM_BYTES, dtype, head_dim)
    rows = min(rows, _MOST_BLOCKS * options.block_kv // level)
    return Settings(
        level=level,
        rows=rows,
        step=min(options.block_q, _fitting(options.block_q, _QUERY_BYTES, dtype, head_dim)),
        block_q=options.block_q,
        block_kv=options.block_kv,
        scale=options.scale,
        is_causal=options.is_causal,
        **_launch(rows, query),
        interpret=interpreting(),
    )


@functools.partial(jax.jit, static_argnames="options")
def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    levels: jax.Array,
    query_length: jax.Array | None,
    key_length: jax.Array | None,
    *,
    options: PooledOptions,
    modifiers: ScoreModifiers = NO_MODIFIERS,
) -> tuple[jax.Array, jax.Array]:
    """`reference.attention` as a pass of pooling and one kernel."""
    from pallas_kernels.triton import _pooled_common, pooled_forward

    tokens = (query.shape[1], key.shape[1])
    lengths = _lengths(query, key, query_length, key_length)
    given: tuple[Any, ...] = (tokens, (query_length, key_length), options, modifiers)
    return pooled_forward.forward(
        query,
        _side(key, lengths[1]),
        _side(value, lengths[1]),
        _pooled_common.Lists(*lists.by_query(levels, *given)),
        *lengths,
        _walk_settings(query, options, _FORWARD_QUERIES),
        _marks(modifiers),
        options.dtype_of_output(query),
    )


@functools.partial(jax.jit, static_argnames=("options", "dtype"))
def gradient(
    arrays: operands.Backward,
    *,
    options: PooledOptions,
    modifiers: ScoreModifiers = NO_MODIFIERS,
    dtype: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`reference.gradient` as kernels: queries, then keys and values level by level.

    The queries' gradients are rounded to their own dtype, whatever the `dtype`.
    """
    from pallas_kernels.triton import _pooled_common, pooled_key_gradient, pooled_query_gradient

    query, key, value, levels, query_length, key_length, out, residual, d_out, d_residual = arrays
    tokens = (query.shape[1], key.shape[1])
    lengths = _lengths(query, key, query_length, key_length)
    k, v = (_side(x, lengths[1]) for x in (key, value))
    d_out, *row_numbers = rows.gradient_rows(out, residual, d_out, d_residual, query.shape[1])
    queries = _pooled_common.Queries(query, d_out.astype(query.dtype), *row_numbers)
    given: tuple[Any, ...] = (tokens, (query_length, key_length), options, modifiers)
    marks = _marks(modifiers)
    d_query = pooled_query_gradient.query_gradient(
        queries,
        k,
        v,
        _pooled_common.Lists(*lists.by_query(levels, *given)),
        *lengths,
        _walk_settings(query, options, _GRADIENT_QUERIES),
        marks,
    )
    by_level = []
    for level in LEVELS:
        settings = _key_settings(query, level, options)
        found = lists.by_key(levels, level, settings.rows, *given)
        entries = pooled_key_gradient.Lists(*found)
        by_level.append(
            pooled_key_gradient.key_gradient(queries, k, v, entries, *lengths, settings, marks)
        )
    d_key, d_value = (
        operands.merge_gradients(d, key_length, tokens[1], dtype or key.dtype)
        for d in zip(*by_level, strict=True)
    )
    return d_query.astype(dtype or query.dtype), d_key, d_value


def _lengths(
    query: jax.Array, key: jax.Array, query_length: jax.Array | None, key_length: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """int32 ``[B]`` each."""
    return (
        operands.lengths(query_length, *query.shape[:2]),
        operands.lengths(key_length, *key.shape[:2]),
    )


def _marks(modifiers: ScoreModifiers) -> Any:
    """Segments and offsets as the kernels take them."""
    from pallas_kernels.triton._pooled_common import Marks

    ids, shift = operands.segments(modifiers), modifiers.shift()
    queries, keys = ((), ()) if ids is None else ((ids[0],), (ids[1],))
    return Marks(queries, keys, () if shift is None else (shift,))


def _side(x: jax.Array, key_length: jax.Array) -> Any:
    """Keys or values as the kernels take them."""
    from pallas_kernels.triton import _pooled_common, pooled_pool

    pooled = pooled_pool.pool_together(x, key_length, interpret=interpreting())
    return _pooled_common.Side(x, pooled)
