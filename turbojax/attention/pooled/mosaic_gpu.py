"""The Mosaic GPU kernels behind `pooled_attention` on Hopper: what they take, and their launch."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from turbojax._device import multiprocessors, needs_hopper
from turbojax.attention.pooled import lists, operands
from turbojax.attention.pooled.static import LEVELS, PooledOptions
from turbojax.attention.score_modifiers import NO_MODIFIERS, ScoreModifiers
from turbojax.numerics import rows

_LARGEST_HEAD_DIM = 128
_DTYPES = (jnp.bfloat16, jnp.float16)
_BLOCK_KV = (64, 128)
# Queries of a program, and pooled keys of a tile.
_TILE = 128
# An entry of the lists by key holds the number of a query block in 15 bits.
_MOST_QUERY_BLOCKS = 2**15


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
    del key, value
    if refusal := modifiers.refusal(operands.MARKS):
        return refusal
    if query.dtype not in _DTYPES:
        return f"query.dtype={query.dtype} must be bfloat16 or float16"
    if query.shape[-1] > _LARGEST_HEAD_DIM:
        return f"head_dim={query.shape[-1]} must be at most {_LARGEST_HEAD_DIM}"
    if options.block_q % _TILE:
        return f"block_q={options.block_q} must be a multiple of {_TILE}, its query tile"
    if options.block_kv not in _BLOCK_KV:
        return f"block_kv={options.block_kv} must be one of {_BLOCK_KV}"
    if levels.shape[2] > _MOST_QUERY_BLOCKS:
        return f"{levels.shape[2]} blocks of queries must be at most {_MOST_QUERY_BLOCKS}"
    return needs_hopper()


class Launch(NamedTuple):
    """How many tiles each kernel keeps in shared memory at a time."""

    forward: int
    query_gradient: int
    key_gradient: int


def default_launch(head_dim: int) -> Launch:
    """As many tiles as fit."""
    return Launch(4, 4, 6) if head_dim <= rows.HEAD_DIMS[0] else Launch(2, 2, 4)


class _Operands(NamedTuple):
    """A call's arrays as the kernels take them."""

    query: jax.Array
    """``[B, T, N, H]``, its sign that of the scale, `T` a multiple of 8, `H` 64 or 128."""
    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    query_length: jax.Array
    key_length: jax.Array


def _operands(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_length: jax.Array | None,
    key_length: jax.Array | None,
    options: PooledOptions,
) -> _Operands:
    from pallas_kernels.mosaic.hopper.pooled.pool import pool

    tokens = operands.lengths(query_length, *query.shape[:2])
    length = operands.lengths(key_length, *key.shape[:2])

    key, value = (rows.padded(rows.without_padding(x, key_length)) for x in (key, value))
    keys, values = pool(key, value, length, multiple=options.block_kv)
    query = _signed(rows.padded(query), options)
    return _Operands(query, (key, *keys), (value, *values), tokens, length)


def _signed(query: jax.Array, options: PooledOptions) -> jax.Array:
    """The query with the scale's sign: the kernel takes maxima before it scales."""
    return -query if options.scale < 0 else query


def _settings(options: PooledOptions, stages: int, modifiers: ScoreModifiers) -> Any:
    from pallas_kernels.mosaic.hopper.pooled.forward import Settings

    return Settings(
        block_q=options.block_q,
        block_kv=options.block_kv,
        scale=abs(options.scale),
        is_causal=options.is_causal,
        stages=stages,
        programs=multiprocessors(),
        has_segments=operands.segments(modifiers) is not None,
        is_shifted=modifiers.shift() is not None,
    )


def _marks(
    modifiers: ScoreModifiers, options: PooledOptions, *, by_key: bool
) -> tuple[jax.Array, ...]:
    """Segments and offsets, as the kernels that walk over keys take them, or over queries."""
    found, shift = operands.segments(modifiers), modifiers.shift()
    marks = () if shift is None else (shift,)
    if found is None:
        return marks
    queries, keys = found
    size = keys.shape[1]
    queries = rows.pad_axis(queries, 1, -(-queries.shape[1] // options.block_q) * options.block_q)
    if by_key:
        # Of the first token of each pooled key, level by level as their tiles.
        firsts = [keys[:, ::level] for level in LEVELS]
        padded = [rows.pad_axis(x, 1, -(-x.shape[1] // _TILE) * _TILE) for x in firsts]
        return queries, jnp.concatenate(padded, axis=1), *marks
    keys = jnp.pad(keys, ((0, 0), (_TILE, _TILE + -size % _TILE)))
    return queries, keys, *marks


@functools.partial(jax.jit, static_argnames=("options", "launch"))
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
    launch: Launch | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`reference.attention` as a pass of pooling and one kernel; weights are rounded to 16 bits."""
    from pallas_kernels.mosaic.hopper.pooled import forward as pooled_forward

    launch = launch or default_launch(query.shape[-1])
    sizes = (query.shape[1], key.shape[1])
    x = _operands(query, key, value, query_length, key_length, options)
    found = lists.by_query(levels, sizes, (query_length, key_length), options, modifiers)
    settings = _settings(options, launch.forward, modifiers)
    arrays = (x.query, x.keys, x.values, *found, x.query_length, x.key_length)
    marks = _marks(modifiers, options, by_key=False)
    out, residual = pooled_forward.attention(
        *arrays, settings, marks, options.dtype_of_output(query)
    )
    residual = jnp.swapaxes(residual[:, :, : sizes[0]], 1, 2)
    return out[:, : sizes[0], :, : query.shape[-1]], residual


@functools.partial(jax.jit, static_argnames=("options", "dtype", "launch"))
def gradient(
    arrays: operands.Backward,
    *,
    options: PooledOptions,
    modifiers: ScoreModifiers = NO_MODIFIERS,
    dtype: str | None = None,
    launch: Launch | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`reference.gradient` as kernels: queries, then keys and values level by level.

    Weights and the scores' gradients are rounded to the operands' 16 bits before they multiply, and
    the queries' gradients to these, whatever the `dtype`.
    """
    from pallas_kernels.mosaic.hopper.pooled import key_gradient as pooled_key_gradient
    from pallas_kernels.mosaic.hopper.pooled import query_gradient as pooled_query_gradient

    query, key, value, levels, query_length, key_length, out, residual, d_out, d_residual = arrays
    launch = launch or default_launch(query.shape[-1])
    sizes, head_dim = (query.shape[1], key.shape[1]), query.shape[-1]
    # The kernels load padding, too, and weight it with 0, which does not remove a NaN.
    query = rows.without_padding(query, query_length)
    x = _operands(query, key, value, query_length, key_length, options)
    # Whole blocks: copies beyond the end would read the next head's.
    padded = -(-sizes[0] // options.block_q) * options.block_q
    d_out, lse, delta = rows.gradient_rows(out, residual, d_out, d_residual, padded)
    queries = (x.query, rows.padded(d_out.astype(query.dtype)), lse, delta)
    given: tuple[Any, ...] = (sizes, (query_length, key_length), options, modifiers)
    found = lists.by_query(levels, *given)
    settings = _settings(options, launch.query_gradient, modifiers)
    marks = _marks(modifiers, options, by_key=False)
    d_query = pooled_query_gradient.query_gradient(
        *queries, x.keys, x.values, *found, x.key_length, settings, marks
    )
    settings = _settings(options, launch.key_gradient, modifiers)
    listed = lists.by_every_key(levels, _TILE, *given)
    marks = _marks(modifiers, options, by_key=True)
    by_level = pooled_key_gradient.key_gradient(
        *queries, x.keys, x.values, *listed, x.key_length, settings=settings, marks=marks
    )
    d_key, d_value = (
        operands.merge_gradients(parts, key_length, sizes[1], dtype or key.dtype)[..., :head_dim]
        for parts in by_level
    )
    d_query = _signed(d_query[:, : sizes[0], :, :head_dim], options)
    return d_query.astype(dtype or query.dtype), d_key, d_value
