"""Compress: keys or values to stage-1 and stage-2 codes, in one pass over memory.

Roofline, for a value of bfloat16 at 4 bits: 2.5 bytes, 3.5 with the stage-1 codes, and about 24
operations, 0.8 ps each on an H100, so each operation counts: codes are rounded by additions and not
by conversions, which run at a quarter of the speed or less. Target: 60 % of the copy bandwidth.
Seen: 2.12 TB/s, 70 %.

A program takes one block of one head of one sequence: it loads the block once, finds its scale,
rounds to stage-1 codes, finds the channels' scales, rounds again, packs and stores.

Roofline in full and versions: `docs/kernels/triton.md`.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import varying
from pallas_kernels.layouts import Compressed
from pallas_kernels.triton._common import WHOLE, next_power_of_2, parameters, rint
from pallas_kernels.triton._quantize import (
    BlockLayout as BlockLayout,
)
from pallas_kernels.triton._quantize import (
    e4m3_codes,
    e4m3_scale_from_maximum,
    magnitude_bits,
    maximum_from_bits,
    permuted_positions,
    scale_from_maximum,
    stage1_codes,
    unknown_zero,
    write_block,
)

# Values that a thread holds, which determines the warps of a program.
_VALUES_PER_THREAD = 64
_MOST_WARPS = 16


def compress(
    x: jax.Array,
    lengths: jax.Array,
    count: jax.Array,
    slots: jax.Array,
    codes: tuple[jax.Array, ...],
    channel_scale: jax.Array,
    channel_zero: jax.Array,
    block_scale: jax.Array,
    *,
    layout: BlockLayout,
    every_block: bool = False,
    operand: jax.typing.DTypeLike | None = None,
    permuted: bool = False,
    begin: int = 0,
    num_warps: int | None = None,
    vector: int | None = None,
    interpret: bool = False,
) -> Compressed:
    """`mosaic.hopper.compress.compress` for one side of a cache.

    `x` and the arrays are the fields of its `Prompt`, `layout`, `every_block` and `operand` its
    entries for the side. `permuted` is for the operand's tokens, see `permuted_positions`.
    `num_warps` and `vector`, the channels that a thread takes at once, a power of two, are chosen
    if not given.
    """
    if permuted and layout.tokens_last:
        raise ValueError("permuted=True with tokens last: only keys are stored in this order")
    batch, size, heads, channels = x.shape
    blocks = pl.cdiv(size - begin, layout.tokens)
    padded = blocks * layout.tokens
    state = (*codes, channel_scale, channel_zero, block_scale)
    outputs = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in state]
    per_block = jax.ShapeDtypeStruct((batch, heads, blocks), jnp.float32)
    outputs.append(per_block)
    if operand is not None:
        order = (channels, padded) if layout.tokens_last else (padded, channels)
        outputs += [jax.ShapeDtypeStruct((batch, heads, *order), operand), per_block]
    inputs = (lengths, count, slots, x, *state)
    kernel = functools.partial(
        _kernel,
        layout=layout,
        every_block=every_block or operand is not None,
        permuted=permuted,
        begin=begin,
        vector=vector or default_vector(layout),
        interpret=interpret,
    )
    written: Any = varying.pallas_call(
        kernel,
        grid=(heads, blocks, batch),
        in_specs=[WHOLE] * len(inputs),
        out_specs=[WHOLE] * len(outputs),
        out_shape=outputs,
        input_output_aliases={len(inputs) - len(state) + i: i for i in range(len(state))},
        compiler_params=parameters(num_warps or default_warps(layout), 1),
        interpret=interpret,
        name="turbojax_compress",
    )(*inputs)
    split = len(codes)
    scale, zero, stored_scale, maximum = written[split : split + 4]
    codes_and_scale = tuple(written[split + 4 :]) if operand is not None else None
    return Compressed(tuple(written[:split]), scale, zero, stored_scale, maximum, codes_and_scale)


def default_warps(layout: BlockLayout) -> int:
    """As many warps as leave each thread a fixed number of values."""
    values = layout.num_runs * math.prod(layout.tile)
    return min(_MOST_WARPS, max(1, next_power_of_2(values) // (32 * _VALUES_PER_THREAD)))


def default_vector(layout: BlockLayout) -> int:
    """As many channels for a thread at once as let a warp span all channels of a run.

    Then a reduction over tokens stays within threads, except for one step across warps.
    """
    return min(16, max(2, layout.tile[1] // 32))


def _kernel(
    lengths: jax.Ref,
    count: jax.Ref,
    slots: jax.Ref,
    x: jax.Ref,
    *refs: jax.Ref,
    layout: BlockLayout,
    every_block: bool,
    permuted: bool,
    begin: int,
    vector: int,
    interpret: bool,
) -> None:
    widths = len(layout.bits)
    codes, outputs = refs[widths + 3 : 2 * widths + 3], refs[2 * widths + 3 :]
    channel_scale, channel_zero, block_scale, block_maximum, *operand = outputs
    head, block, sequence = (pl.program_id(axis) for axis in range(3))
    first = block * layout.tokens
    room = block_scale.shape[2]
    is_stored = (block < count[sequence]) & (block >= count[sequence] - room)
    nothing = unknown_zero(lengths[sequence], vector)

    def program() -> None:
        length = lengths[sequence]
        loaded = [
            _load_run(x, layout, run, sequence, head, first + begin, length, nothing)
            for run in range(layout.num_runs)
        ]
        bits = magnitude_bits(loaded[0])
        for values in loaded[1:]:
            bits = jnp.maximum(bits, magnitude_bits(values))
        maximum = maximum_from_bits(jnp.max(bits))
        scale = scale_from_maximum(maximum)
        is_finite = scale == scale
        block_maximum[sequence, head, block] = maximum
        runs = [
            jnp.where(is_finite, stage1_codes(values, scale, interpret), 0.0) for values in loaded
        ]
        if operand:
            codes_out, scale_out = operand
            given = scale
            if codes_out.dtype != jnp.int8:
                given = e4m3_scale_from_maximum(maximum)
                operands = [e4m3_codes(values, given) for values in loaded]
            else:
                operands = [rint(run).astype(jnp.int8) for run in runs]
            scale_out[sequence, head, block] = given
            at = sequence, head, first, nothing
            for i, values in enumerate(operands):
                _store_run(codes_out, layout, i, values, *at, permuted=permuted)

        def store() -> None:
            place = block % room
            slot = head if widths == 1 else slots[sequence, head]
            block_scale[sequence, head, place] = scale
            arrays, at = (codes, channel_scale, channel_zero), (sequence, head, slot, place)
            write_block(layout, runs, *arrays, *at, nothing=nothing, interpret=interpret)

        if every_block:
            pl.when(is_stored)(store)
        else:
            store()

    if every_block:
        program()
    else:
        pl.when(is_stored)(program)


def _load_run(
    x: jax.Ref,
    layout: BlockLayout,
    run: int,
    sequence: jax.Array,
    head: jax.Array,
    first: jax.Array,
    length: jax.Array,
    nothing: jax.Array,
) -> jax.Array:
    """One run of the block that begins at token `first`, as float32; 0 past the length."""
    rows, columns = layout.slices(run, first, nothing)
    tokens = rows.start + jnp.arange(rows.size, dtype=jnp.int32)
    mask = jnp.broadcast_to((tokens < length)[:, None], layout.tile)
    channels = layout.mask()
    mask = mask if channels is None else mask & channels
    values = plgpu.load(x.at[sequence, rows, head, columns], mask=mask, other=0.0)
    return values.astype(jnp.float32)


def _store_run(
    out: jax.Ref,
    layout: BlockLayout,
    run: int,
    values: jax.Array,
    sequence: jax.Array,
    head: jax.Array,
    first: jax.Array,
    nothing: jax.Array,
    *,
    permuted: bool,
) -> None:
    """Stores one run of the operand's block that begins at token `first`."""
    rows, columns = layout.slices(run, first, nothing)
    place: tuple[Any, ...] = (rows, columns)
    if permuted:  # of keys, whose runs hold all tokens of a block
        channel = columns.start + jnp.arange(columns.size, dtype=jnp.int32)
        place = permuted_positions(first, layout.tokens)[:, None], channel[None]
    place = place[::-1] if layout.tokens_last else place
    mask = layout.transposed_mask()
    plgpu.store(out.at[(sequence, head, *place)], layout.transposed(values), mask=mask)
