"""Grouped INT4 x FP8 products in plain JAX: the definition.

A loop over tiles of tokens, each of one expert, whose weight alone is dequantized: memory and time
are those of the experts that have tokens. What a tile computes is `int4_matmul.reference`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from turbojax.matmul.grouped.tiles import Tiles, cut
from turbojax.matmul.int4 import reference
from turbojax.matmul.int4.gradient import exact
from turbojax.matmul.int4.static import Activation
from turbojax.matmul.int4.weight import Int4Weight
from turbojax.numerics.fp8 import Fp8Tokens
from turbojax.sharding import varying_like

_FEWEST, _MOST = 8, 128


def _tile(rows: int, experts: int) -> int:
    """Tokens of a tile: as many as an expert has on average, rounded up to a power of two."""
    mean = -(-rows // experts)
    return min(rows, max(_FEWEST, min(_MOST, 1 << (mean - 1).bit_length())))


def _of(arrays: Any, expert: jax.Array) -> Any:
    """One expert's arrays of a stack."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, expert, keepdims=False), arrays)


def _rows_of(tiles: Tiles, number: jax.Array, tile: int) -> tuple[jax.Array, jax.Array]:
    """A tile's rows, int32 ``[tile]``, and which of them exist."""
    begin = tiles.first[number] + (number - tiles.start[number]) * tile
    row = begin + jnp.arange(tile, dtype=jnp.int32)
    return row, row < tiles.end[number]


def _start(tiles: Tiles, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """The initial result: zeros, which rows of no expert keep; NaN where groups are not valid."""
    return jnp.full(shape, jnp.where(tiles.is_valid, 0.0, jnp.nan).astype(dtype))


@functools.partial(jax.jit, static_argnames=("activation", "is_precise"))
def matmul(
    tokens: Fp8Tokens,
    weight: Int4Weight,
    group_sizes: jax.Array,
    bias: jax.Array | None,
    *,
    activation: Activation | None,
    is_precise: bool,
) -> jax.Array:
    """Each expert's rows times its weight; `is_precise` has no effect, all sums are float32.

    Rows are sorted by expert. Those behind the last group are zeros; all are NaN if the sizes of
    groups are not valid. The bias is float32 ``[E, N]`` in the order of the weight's rows.
    """
    count, experts = tokens.codes.shape[0], group_sizes.shape[0]
    tile = _tile(count, experts)
    tiles = cut(group_sizes, count, tile)

    def step(number: jax.Array, out: jax.Array) -> jax.Array:
        row, is_there = _rows_of(tiles, number, tile)
        at = jnp.minimum(row, count - 1)
        some = Fp8Tokens(tokens.codes[at], tokens.scale[at], tokens.dtype)
        one, one_bias = _of((weight, bias), tiles.expert[number])
        y = reference.matmul(
            some, one, one_bias, None, activation=activation, is_precise=is_precise
        )
        return out.at[jnp.where(is_there, row, count)].set(y, mode="drop")

    start = _start(tiles, (count, weight.result_size), tokens.dtype)
    start = varying_like(start, tokens, weight, group_sizes, bias)
    return jax.lax.fori_loop(0, tiles.total, step, start)


@functools.partial(jax.jit, static_argnames="activation")
def gradient(
    x: jax.Array,
    weight: Int4Weight,
    group_sizes: jax.Array,
    bias: jax.Array | None,
    d_out: jax.Array,
    *,
    activation: Activation | None,
) -> tuple[jax.Array, jax.Array | None]:
    """Straight through the rounding of activations, as `int4_matmul.gradient.exact`.

    `d_x` is zero behind the last group. It and `d_bias` are NaN if the sizes of groups are not
    valid.
    """
    count, experts = x.shape[0], group_sizes.shape[0]
    tile = _tile(count, experts)
    tiles = cut(group_sizes, count, tile)

    def step(number: jax.Array, found: Any) -> Any:
        d_x, d_bias = found
        row, is_there = _rows_of(tiles, number, tile)
        at, expert = jnp.minimum(row, count - 1), tiles.expert[number]
        # Rows of other experts are zeros, so that nothing of them reaches this one's bias.
        mine = [jnp.where(is_there[:, None], array[at], 0) for array in (x, d_out)]
        one, one_bias = _of((weight, bias), expert)
        d_some, d_one = exact(mine[0], one, one_bias, mine[1], activation=activation)
        d_x = d_x.at[jnp.where(is_there, row, count)].set(d_some, mode="drop")
        return d_x, None if d_bias is None else d_bias.at[expert].add(d_one)

    d_bias = None if bias is None else _start(tiles, bias.shape, jnp.float32)
    start = _start(tiles, x.shape, x.dtype), d_bias
    start = varying_like(start, x, weight, group_sizes, bias, d_out)
    return jax.lax.fori_loop(0, tiles.total, step, start)
