"""Append: one new token per sequence into the int8 buffer, which makes blocks when it is full.

Roofline: some 50 KB a step, which is negligible: the floor is one launch, 2 to 3 us, the target
twice that a side. It replaces some 30 kernels of plain JAX. Not timed alone.

A program takes one head of one sequence, fixes its universal scale if that is still open, rounds
the token and stores its codes. The step that fills the buffer also compresses its oldest block, or
all of it, and moves the rest down.

Roofline in full and versions: `docs/kernels/triton.md`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import varying
from pallas_kernels.triton._common import WHOLE, next_power_of_2, parameters, rint
from pallas_kernels.triton._quantize import (
    BlockLayout,
    clamped_stage1_codes,
    magnitude_bits,
    maximum_from_bits,
    scale_from_maximum,
    unknown_zero,
    write_block,
)
from pallas_kernels.triton.compress import default_vector, default_warps


def append(
    x: jax.Array,
    accepted: jax.Array,
    row: jax.Array,
    start: jax.Array,
    slots: jax.Array,
    codes: tuple[jax.Array, ...],
    channel_scale: jax.Array,
    channel_zero: jax.Array,
    block_scale: jax.Array,
    buffer: jax.Array,
    buffer_scale: jax.Array,
    *,
    layout: BlockLayout,
    flush: int,
    first_tokens: int = 0,
    num_warps: int | None = None,
    interpret: bool = False,
) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """`mosaic.hopper.append.append` for one side: the arrays with the token, donated memory reused.

    `x` is bfloat16, float16 or float32 ``[B, K, H]``; `slots`, int32 ``[B, K]``, are each head's
    place among the slots of `codes`, ignored if all heads have one width; `codes` and their scales
    as for `write_block`, `block_scale` float32 ``[B, K, n]``. `start` is not negative here, and
    `num_warps` depends on the block's size by default.
    """
    batch, heads, _ = x.shape
    state = (*codes, channel_scale, channel_zero, block_scale, buffer, buffer_scale)
    inputs = (accepted, row, start, slots, x, *state)
    written: Any = varying.pallas_call(
        functools.partial(
            _kernel, layout=layout, flush=flush, first_tokens=first_tokens, interpret=interpret
        ),
        grid=(heads, batch),
        in_specs=[WHOLE] * len(inputs),
        out_specs=[WHOLE] * len(state),
        out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in state],
        input_output_aliases={len(inputs) - len(state) + i: i for i in range(len(state))},
        compiler_params=parameters(num_warps or default_warps(layout), 1),
        interpret=interpret,
        name="turbojax_append",
    )(*inputs)
    scale, zero, stored_scale, rows, universal = written[len(codes) :]
    return tuple(written[: len(codes)]), scale, zero, stored_scale, rows, universal


def _kernel(
    accepted: jax.Ref,
    row: jax.Ref,
    start: jax.Ref,
    slots: jax.Ref,
    x: jax.Ref,
    *refs: jax.Ref,
    layout: BlockLayout,
    flush: int,
    first_tokens: int,
    interpret: bool,
) -> None:
    # The aliased arrays are read and written through their outputs.
    outputs = refs[len(refs) // 2 :]
    *codes, channel_scale, channel_zero, block_scale, buffer, buffer_scale = outputs
    head, sequence = pl.program_id(0), pl.program_id(1)
    size = buffer.shape[2]
    columns = next_power_of_2(layout.channels)
    mask = None
    if columns != layout.channels:
        mask = jnp.arange(columns, dtype=jnp.int32) < layout.channels

    nothing = unknown_zero(accepted[sequence], default_vector(layout))
    channels = pl.Slice(nothing, columns)

    def program() -> None:
        other = None if mask is None else 0.0
        token = plgpu.load(x.at[sequence, head, channels], mask=mask, other=other)
        token = token.astype(jnp.float32)
        maximum = maximum_from_bits(jnp.max(magnitude_bits(token)))
        held = buffer_scale[sequence, head]
        # The first token that is not all zero fixes an open scale.
        scale = jnp.where((held == 0) & (maximum != 0), scale_from_maximum(2 * maximum), held)
        broken = (maximum != maximum) | (scale != scale)
        scale = jnp.where(broken, jnp.nan, scale)
        buffer_scale[sequence, head] = scale
        one = jnp.where(scale == 0, 1.0, scale)  # all tokens were zero
        divisor = jnp.where(broken, 1.0, one)
        q1 = jnp.where(broken, 0.0, clamped_stage1_codes(token, divisor, interpret))
        place = (sequence, head, row[sequence], channels)
        plgpu.store(buffer.at[place], rint(q1).astype(jnp.int8), mask=mask)
        pl.when(row[sequence] == size - 1)(functools.partial(flush_full, one))

    def flush_full(scale: jax.Array) -> None:
        """Compresses the oldest tokens of a full buffer and moves the rest to its front."""
        _barrier(interpret)  # other threads read what was just stored
        slot = head if len(codes) == 1 else slots[sequence, head]
        first_block = start[sequence]

        def compress(i: jax.Array, _: None) -> None:
            first = i * layout.tokens + first_tokens
            runs = _load_block(buffer, layout, sequence, head, first, nothing)
            runs = [run.astype(jnp.float32) for run in runs]
            block = (first_block + i) % block_scale.shape[2]
            block_scale[sequence, head, block] = scale
            arrays, at = (codes, channel_scale, channel_zero), (sequence, head, slot, block)
            write_block(layout, runs, *arrays, *at, nothing=nothing, interpret=interpret)

        def move(i: jax.Array, _: None) -> None:
            to = i * layout.tokens + first_tokens
            runs = _load_block(buffer, layout, sequence, head, to + flush, nothing)
            _barrier(interpret)  # nothing may be written before all threads have read it
            _store_block(buffer, layout, sequence, head, to, nothing, runs)

        jax.lax.fori_loop(0, flush // layout.tokens, compress, None)
        jax.lax.fori_loop(0, pl.cdiv(size - first_tokens, layout.tokens), move, None)

    pl.when(accepted[sequence] > 0)(program)


def _load_block(
    buffer: jax.Ref,
    layout: BlockLayout,
    sequence: jax.Array,
    head: jax.Array,
    first: jax.Array,
    nothing: jax.Array,
) -> list[jax.Array]:
    """Runs of the block of buffered codes that begins at row `first`; 0 past the buffer."""
    runs = []
    for run in range(layout.num_runs):
        slices, mask = _slices(buffer, layout, run, first, nothing)
        runs.append(plgpu.load(buffer.at[(sequence, head, *slices)], mask=mask, other=0))
    return runs


def _store_block(
    buffer: jax.Ref,
    layout: BlockLayout,
    sequence: jax.Array,
    head: jax.Array,
    first: jax.Array,
    nothing: jax.Array,
    runs: list[jax.Array],
) -> None:
    """Stores runs to the rows from `first` on that exist."""
    for run, values in enumerate(runs):
        slices, mask = _slices(buffer, layout, run, first, nothing)
        plgpu.store(buffer.at[(sequence, head, *slices)], values, mask=mask)


def _slices(
    buffer: jax.Ref, layout: BlockLayout, run: int, first: jax.Array, nothing: jax.Array
) -> tuple[tuple[pl.Slice, pl.Slice], jax.Array]:
    """Where a run of the block from row `first` on is, and which of it is inside the buffer."""
    rows, columns = layout.slices(run, first, nothing)
    token = rows.start + jnp.arange(rows.size, dtype=jnp.int32)
    mask = jnp.broadcast_to((token < buffer.shape[2])[:, None], layout.tile)
    channels = layout.mask()
    return (rows, columns), mask if channels is None else mask & channels


def _barrier(interpret: bool) -> None:
    """Waits for the program's other threads; otherwise their loads and stores have no order."""
    if not interpret:
        plgpu.debug_barrier()
