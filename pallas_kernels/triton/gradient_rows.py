"""What the backward pass needs of its rows, in one pass: codes of Q and dO, log-sum-exps, D.

Roofline, for 2 sequences of 8,192 tokens, 32 heads of 128, bfloat16, with codes of both: 0.545 GB,
127 us at the 4.3 TB/s of a copy on an H200, without codes of d_out 111; operations 75 us. Target:
80 %. Seen: 127 us, blocks of 128 138. Memory bounds it.

A program takes one block of one head of one sequence. Half of the programs load the block of
`d_out` and of `out` once, round `d_out` with one scale, sum its rounded numbers times `out` for
every row, and store; the others do with the block of queries what `quantize` does.

Roofline in full and versions: `docs/kernels/triton.md`.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import varying
from pallas_kernels.layouts import GradientRows
from pallas_kernels.triton._common import LOG2_E, WHOLE, Ref, next_power_of_2, parameters
from pallas_kernels.triton._quantize import (
    as_codes,
    block_numbers,
    channels_of,
    default_warps,
    load_tokens,
    magnitude_bits,
)


class _Inputs(NamedTuple):
    query: Ref
    d_out: Ref
    out: Ref
    residual: Ref
    d_residual: Ref
    lengths: Ref


def prepare_rows(
    query: jax.Array,
    d_out: jax.Array,
    out: jax.Array,
    residual: jax.Array,
    d_residual: jax.Array,
    lengths: jax.Array,
    *,
    block: int,
    query_dtype: jax.typing.DTypeLike,
    gradient_dtype: jax.typing.DTypeLike | None,
    tokens: int,
    num_warps: int | None = None,
    interpret: bool = False,
) -> GradientRows:
    """As `mosaic.hopper.gradient.rows.prepare_rows`, for any `H` and any power of two `block`."""
    batch, size, heads, channels = query.shape
    blocks = pl.cdiv(size, block)
    shape = (batch, heads, blocks * block, channels)
    scale = jax.ShapeDtypeStruct((batch, heads, blocks), jnp.float32)
    row = jax.ShapeDtypeStruct((batch, heads, tokens), jnp.float32)
    has_codes = gradient_dtype is not None
    inputs = _Inputs(query, d_out, out, residual, d_residual, lengths)
    outputs = GradientRows(
        q8=jax.ShapeDtypeStruct(shape, query_dtype),
        q_scale=scale,
        d8=jax.ShapeDtypeStruct(shape, gradient_dtype) if has_codes else None,
        d_scale=scale if has_codes else None,
        lse=row,
        delta=row,
    )
    programs = pl.cdiv(max(blocks * block, tokens), block)
    values = block * next_power_of_2(channels)
    results: GradientRows = varying.pallas_call(
        functools.partial(_kernel, block=block, interpret=interpret),
        grid=(2 * heads, programs, batch),
        in_specs=[jax.tree.map(lambda _: WHOLE, inputs)],
        out_specs=jax.tree.map(lambda _: WHOLE, outputs),
        out_shape=outputs,
        compiler_params=parameters(num_warps or default_warps(values), 1),
        interpret=interpret,
        name="turbojax_gradient_rows",
    )(inputs)
    return results


def _kernel(x: _Inputs, *results: Ref | None, block: int, interpret: bool) -> None:
    y = GradientRows(*results)
    heads, blocks = y.q_scale.shape[1:]
    head, number, sequence = (pl.program_id(axis) for axis in range(3))
    is_of_queries = head >= heads
    head = jnp.where(is_of_queries, head - heads, head)
    token = number * block + jnp.arange(block, dtype=jnp.int32)
    length, channels = x.lengths[sequence], next_power_of_2(x.query.shape[3])
    b = _Block(sequence, head, number, token, length, channels, interpret)
    is_there = number < blocks

    @pl.when(is_of_queries & is_there)
    def _() -> None:
        b.store_codes(b.load(x.query).astype(jnp.float32), y.q8, y.q_scale)

    @pl.when(~is_of_queries & is_there)
    def _() -> None:
        _rows(b, x, y)

    @pl.when(~is_of_queries & ~is_there)
    def _() -> None:
        b.store_rows(y.lse, jnp.full(block, math.inf, jnp.float32))
        b.store_rows(y.delta, jnp.zeros(block, jnp.float32))


class _Block(NamedTuple):
    """A program's part of all arrays."""

    sequence: jax.Array
    head: jax.Array
    number: jax.Array
    token: jax.Array  # int32 [block]
    length: jax.Array
    channels: int  # a power of two
    interpret: bool

    def load(self, x: Ref) -> jax.Array:
        """A part of ``[B, T, N, H]``, 0 where there is nothing."""
        channel, inside = channels_of(x, self.channels)
        return load_tokens(x, self.sequence, self.token, self.head, channel, inside, self.length)

    def load_rows(self, x: Ref, other: float) -> jax.Array:
        at = x.at[self.sequence, self.token, self.head]
        return plgpu.load(at, mask=self.token < x.shape[1], other=other)

    def store_rows(self, ref: Ref, x: jax.Array) -> None:
        at = ref.at[self.sequence, self.head, self.token]
        plgpu.store(at, x, mask=self.token < ref.shape[2])

    def store_codes(
        self, values: jax.Array, codes: Ref, scales: Ref
    ) -> tuple[jax.Array, jax.Array]:
        """Rounds float32 values and stores them; see `block_numbers`."""
        bits = jnp.max(magnitude_bits(values))
        numbers, scale = block_numbers(values, bits, codes.dtype, self.interpret)
        scales[self.sequence, self.head, self.number] = scale
        channel, inside = channels_of(codes)
        mask = None if inside is None else jnp.broadcast_to(inside[None], values.shape)
        at = codes.at[self.sequence, self.head, self.token[:, None], channel[None]]
        plgpu.store(at, as_codes(numbers), mask=mask)
        return numbers, scale


def _rows(b: _Block, x: _Inputs, y: GradientRows) -> None:
    """Computes and stores everything that depends on `d_out`."""
    d_out, out = b.load(x.d_out), b.load(x.out)
    residual = b.load_rows(x.residual, -math.inf)
    sees = residual != -math.inf
    b.store_rows(y.lse, jnp.where(sees, residual * LOG2_E, math.inf))
    numbers = jnp.where(sees[:, None], d_out.astype(jnp.float32), 0.0)
    scale = None
    if y.d8 is not None:
        numbers, scale = b.store_codes(numbers, y.d8, y.d_scale)
    delta = jnp.sum(numbers.astype(jnp.float32) * out.astype(jnp.float32), axis=1)
    delta = delta if scale is None else delta * scale
    delta = delta - b.load_rows(x.d_residual, 0.0)
    b.store_rows(y.delta, jnp.where(sees, delta, 0.0))
