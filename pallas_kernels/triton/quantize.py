"""Stage 1 of attention: queries, keys and values to 8 bits, in the order that matrix units need.

Roofline, for 2 sequences of 8,192 tokens, 32 query and 8 KV heads of 128, bfloat16: 0.30 GB, 100 us
at the 3.0 TB/s of a copy on an H100, in e4m3 112; about 13 operations a value, 45 us. Target: 140
us. Seen: whole calls 130 us in int8, 123 in fp8.

A program takes one block of one head of one sequence: it loads the block once, finds its scale,
rounds and stores. Values in e4m3 share one scale per sequence and head, so a kernel before finds
their maxima.

Roofline in full and versions: `docs/kernels/triton.md`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import varying
from pallas_kernels.triton._common import WHOLE, Ref, next_power_of_2, parameters
from pallas_kernels.triton._quantize import (
    as_codes,
    block_numbers,
    channels_of,
    default_warps,
    load_tokens,
    magnitude_bits,
    maximum_from_bits,
    permuted_positions,
)

# Maxima that every program of `quantize` may read, and tokens that are looked through at once.
_MOST_MAXIMA = 128
_TILE_OF_MAXIMA = 64


def quantize(
    x: jax.Array,
    lengths: jax.Array,
    maxima: jax.Array | None = None,
    *,
    block: int,
    dtype: jax.typing.DTypeLike,
    multiple: int | None = None,
    channels: int | None = None,
    tokens_last: bool = False,
    permuted: bool = False,
    num_warps: int | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """As `mosaic.hopper.quantize.quantize`, for any `H`, any power of two `block`, and any `m`.

    With `permuted`, `block` is a multiple of 16. `num_warps` depends on the block's size by
    default.
    """
    batch, size, heads, head_dim = x.shape
    channels, multiple = channels or head_dim, multiple or block
    blocks = pl.cdiv(size, multiple) * (multiple // block)
    order = (channels, blocks * block) if tokens_last else (blocks * block, channels)
    if maxima is not None and maxima.shape[2] > _MOST_MAXIMA:
        maxima = maximum_from_bits(jnp.max(magnitude_bits(maxima), axis=2, keepdims=True))
    inputs = (lengths, x) if maxima is None else (lengths, x, maxima)
    values = block * next_power_of_2(channels)
    codes, scale = varying.pallas_call(
        functools.partial(
            _quantize_kernel,
            block=block,
            channels=channels,
            tokens_last=tokens_last,
            permuted=permuted,
            interpret=interpret,
        ),
        grid=(heads, blocks, batch),
        in_specs=[WHOLE] * len(inputs),
        out_specs=[WHOLE] * 2,
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, *order), dtype),
            jax.ShapeDtypeStruct((batch, heads, blocks), jnp.float32),
        ],
        compiler_params=parameters(num_warps or default_warps(values), 1),
        interpret=interpret,
        name="turbojax_quantize",
    )(*inputs)
    return codes, scale


def absolute_maxima(x: jax.Array, lengths: jax.Array, *, interpret: bool = False) -> jax.Array:
    """As `mosaic.hopper.quantize.absolute_maxima`, for any `H`."""
    batch, size, heads, channels = x.shape
    tiles = pl.cdiv(size, _TILE_OF_MAXIMA * _MOST_MAXIMA)
    programs = pl.cdiv(size, _TILE_OF_MAXIMA * tiles)
    values = _TILE_OF_MAXIMA * next_power_of_2(channels)
    return varying.pallas_call(
        functools.partial(_maxima_kernel, tiles=tiles),
        grid=(heads, programs, batch),
        in_specs=[WHOLE] * 2,
        out_specs=WHOLE,
        out_shape=jax.ShapeDtypeStruct((batch, heads, programs), jnp.float32),
        compiler_params=parameters(default_warps(values), 1),
        interpret=interpret,
        name="turbojax_maxima",
    )(lengths, x)


def keys_and_values(
    key: jax.Array,
    value: jax.Array,
    lengths: jax.Array,
    *,
    block: int,
    key_dtype: jax.typing.DTypeLike,
    value_dtype: jax.typing.DTypeLike,
    multiple: int | None = None,
    channels: int | None = None,
    permuted: bool = False,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """As `mosaic.hopper.quantize.keys_and_values`."""
    run = functools.partial(
        quantize, block=block, multiple=multiple, channels=channels, interpret=interpret
    )
    is_e4m3 = jnp.dtype(value_dtype) != jnp.int8
    maxima = absolute_maxima(value, lengths, interpret=interpret) if is_e4m3 else None
    return (
        *run(key, lengths, dtype=key_dtype, permuted=permuted),
        *run(value, lengths, maxima, dtype=value_dtype, tokens_last=True),
    )


def _quantize_kernel(
    lengths: Ref,
    x: Ref,
    *refs: Ref,
    block: int,
    channels: int,
    tokens_last: bool,
    permuted: bool,
    interpret: bool,
) -> None:
    *maxima, codes, scales = refs
    head, number, sequence = (pl.program_id(axis) for axis in range(3))
    first, length = number * block, lengths[sequence]
    token = first + jnp.arange(block, dtype=jnp.int32)
    channel, inside = channels_of(x, next_power_of_2(channels))
    values = load_tokens(x, sequence, token, head, channel, inside, length).astype(jnp.float32)
    if maxima:
        bits = _bits_of_maxima(maxima[0], sequence, head)
    else:
        bits = jnp.max(magnitude_bits(values))
    numbers, scale = block_numbers(values, bits, codes.dtype, interpret)
    result = as_codes(numbers)
    scales[sequence, head, number] = scale
    row = permuted_positions(first, block) if permuted else token
    mask = None
    if channel.shape[0] != channels:
        mask = jnp.broadcast_to((channel < channels)[None], values.shape)
    at: tuple[Any, ...] = (row[:, None], channel[None])
    if tokens_last:
        result, at = result.T, (channel[:, None], row[None])
        mask = None if mask is None else mask.T
    plgpu.store(codes.at[(sequence, head, *at)], result, mask=mask)


def _maxima_kernel(lengths: Ref, x: Ref, maxima: Ref, *, tiles: int) -> None:
    head, number, sequence = (pl.program_id(axis) for axis in range(3))
    length = lengths[sequence]
    channel, inside = channels_of(x)

    def step(tile: jax.Array, bits: jax.Array) -> jax.Array:
        first = (number * tiles + tile) * _TILE_OF_MAXIMA
        token = first + jnp.arange(_TILE_OF_MAXIMA, dtype=jnp.int32)
        values = load_tokens(x, sequence, token, head, channel, inside, length).astype(jnp.float32)
        return jnp.maximum(bits, magnitude_bits(values))

    bits = jnp.zeros((_TILE_OF_MAXIMA, channel.shape[0]), jnp.int32)
    bits = jax.lax.fori_loop(0, tiles, step, bits)
    maxima[sequence, head, number] = maximum_from_bits(jnp.max(bits))


def _bits_of_maxima(maxima: Ref, sequence: jax.Array, head: jax.Array) -> jax.Array:
    count = maxima.shape[2]
    place = jnp.arange(next_power_of_2(count), dtype=jnp.int32)
    found = plgpu.load(maxima.at[sequence, head, place], mask=place < count, other=0.0)
    return jnp.max(magnitude_bits(found))
