"""Compress: keys or values to stage-1 and stage-2 codes, in one pass over memory.

A program takes one block of one head of one sequence: it loads the block once, finds its scale,
rounds to stage-1 codes, finds the channels' scales, rounds again, packs and stores.

Per value of bfloat16 at 4 bits, blocks of 64 and head dim 128:

  bytes       2 read, 0.5 + 2/64 written, 1 more with the stage-1 codes: 2.5 or 3.5
  operations  about 24 (conversion 1, maximum 2, stage 1 10, minimum and maximum 2, stage 2 7,
              packing 2), and the shuffles of the reductions over tokens
  floor       H100: 2.5 bytes at 3.0 TB/s are 0.84 ps, 24 operations at 29.5 T/s are 0.81 ps
  target      60 % of the copy bandwidth: 1.8 TB/s

Memory and arithmetic are balanced, so each operation counts: codes are rounded by additions and
not by conversions, which run at a quarter of the speed or less.

Ladder, keys and values, 4 sequences of 32,768 tokens with 8 heads, H100, jax 0.11.2; shuffles and
instructions counted in the PTX of a thread's 64 values:
  v1  a thread takes 16 channels: few threads along the channels, many along the tokens, among
      which the channels' extremes are found by shuffles, 329 and 67 of 3760 and 2700
      instructions: 1.01 and 1.68 TB/s
  v2  2 to 4 channels, so that a warp lies along the channels, 18 shuffles of 2711 and 2480
      instructions: 1.67 and 1.84 TB/s with 4
  v3  fused multiply-adds, which the lowering does not form by itself: 2.08 TB/s with 2 channels
      and 2.12 TB/s with 4, 69 and 70 % of a copy; with the stage-1 codes 2.53 and 2.49 TB/s.
      8 warps instead of 4: 1.81 and 1.82 TB/s
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.triton._common import WHOLE, next_power_of_2, parameters, rint
from pallas_kernels.triton._quantize import (
    BlockLayout as BlockLayout,
)
from pallas_kernels.triton._quantize import (
    magnitude_bits,
    scale_from_bits,
    stage1_codes,
    unknown_zero,
    write_block,
)

# Values that a thread holds; decides on the warps of a program.
_VALUES_PER_THREAD = 64
_MOST_WARPS = 16


class Compressed(NamedTuple):
    """What `compress` returns.

    Attributes:
      codes: the packed codes, see `compress`.
      channel_scale: int8 ``[B, K, n, H]``.
      channel_zero: int8 ``[B, K, n, H]``.
      block_scale: float32 ``[B, K, n]``.
      maximum: float32 ``[B, K, m]``, largest absolute value of each of the prompt's `m` blocks,
        NaN if one is not finite. Undefined for blocks that were neither stored nor asked for.
      stage1: None or int8 codes ``[B, K, m * block, H]``, ``[B, K, H, m * block]`` with tokens
        last, and their float32 scales ``[B, K, m]``.
    """

    codes: tuple[jax.Array, ...]
    channel_scale: jax.Array
    channel_zero: jax.Array
    block_scale: jax.Array
    maximum: jax.Array
    stage1: tuple[jax.Array, jax.Array] | None


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
    with_stage1: bool = False,
    num_warps: int | None = None,
    vector: int | None = None,
    interpret: bool = False,
) -> Compressed:
    """Compresses the blocks of prompts into the arrays of one side of a cache.

    Args:
      x: bfloat16, float16 or float32 ``[B, S, K, H]``.
      lengths: int32 ``[B]``, at most `S`: tokens past it count as zero.
      count: int32 ``[B]``: blocks to store, whole ones; the arrays keep the others as they are.
      slots: int32 ``[B, K]``, each head's place among the slots of `codes`.
      codes: uint8, one array a width: ``[B, K_i, n, block, H * bits / 8]``, with tokens last
        ``[B, K_i, n, H, block * bits / 8]``.
      channel_scale: int8 ``[B, K, n, H]``.
      channel_zero: int8 ``[B, K, n, H]``.
      block_scale: float32 ``[B, K, n]``.
      layout: of a block.
      with_stage1: also return the stage-1 codes of all of the prompt's blocks.
      num_warps: warps of a program; chosen from the block's size if not given.
      vector: channels that a thread takes at once, a power of two; chosen if not given.
      interpret: run without a GPU.

    Returns:
      The arrays with the blocks written, in their own memory where they were donated.
    """
    batch, size, heads, channels = x.shape
    blocks = pl.cdiv(size, layout.tokens)
    padded = blocks * layout.tokens
    state = (*codes, channel_scale, channel_zero, block_scale)
    outputs = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in state]
    per_block = jax.ShapeDtypeStruct((batch, heads, blocks), jnp.float32)
    outputs.append(per_block)
    if with_stage1:
        order = (channels, padded) if layout.tokens_last else (padded, channels)
        outputs += [jax.ShapeDtypeStruct((batch, heads, *order), jnp.int8), per_block]
    inputs = (lengths, count, slots, x, *state)
    kernel = functools.partial(
        _kernel,
        layout=layout,
        with_stage1=with_stage1,
        vector=vector or default_vector(layout),
        interpret=interpret,
    )
    written: Any = pl.pallas_call(
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
    stage1 = tuple(written[split + 4 :]) if with_stage1 else None
    return Compressed(tuple(written[:split]), scale, zero, stored_scale, maximum, stage1)


def default_warps(layout: BlockLayout) -> int:
    """Warps that leave each thread a fixed number of values."""
    values = layout.num_runs * math.prod(layout.tile)
    return min(_MOST_WARPS, max(1, next_power_of_2(values) // (32 * _VALUES_PER_THREAD)))


def default_vector(layout: BlockLayout) -> int:
    """Channels a thread takes at once: so many that a warp spans all channels of a run.

    Then a reduction over tokens stays within threads, but for one step across warps.
    """
    return min(16, max(2, layout.tile[1] // 32))


def _kernel(
    lengths: jax.Ref,
    count: jax.Ref,
    slots: jax.Ref,
    x: jax.Ref,
    *refs: jax.Ref,
    layout: BlockLayout,
    with_stage1: bool,
    vector: int,
    interpret: bool,
) -> None:
    widths = len(layout.bits)
    codes, outputs = refs[widths + 3 : 2 * widths + 3], refs[2 * widths + 3 :]
    channel_scale, channel_zero, block_scale, block_maximum, *stage1 = outputs
    head, block, sequence = (pl.program_id(axis) for axis in range(3))
    first = block * layout.tokens
    is_stored = block < count[sequence]
    nothing = unknown_zero(lengths[sequence], vector)

    def program() -> None:
        length = lengths[sequence]
        loaded = [
            _load_run(x, layout, run, sequence, head, first, length, nothing)
            for run in range(layout.num_runs)
        ]
        bits = magnitude_bits(loaded[0])
        for values in loaded[1:]:
            bits = jnp.maximum(bits, magnitude_bits(values))
        maximum, scale = scale_from_bits(jnp.max(bits))
        is_finite = scale == scale
        block_maximum[sequence, head, block] = maximum
        runs = [
            jnp.where(is_finite, stage1_codes(values, scale, interpret), 0.0) for values in loaded
        ]
        if with_stage1:
            stage1_out, stage1_scale = stage1
            stage1_scale[sequence, head, block] = scale
            mask = layout.transposed_mask()
            for i, run in enumerate(runs):
                place = layout.slices(i, first, nothing)
                place = place[::-1] if layout.tokens_last else place
                q1 = layout.transposed(rint(run).astype(jnp.int8))
                plgpu.store(stage1_out.at[(sequence, head, *place)], q1, mask=mask)

        def store() -> None:
            block_scale[sequence, head, block] = scale
            slot = slots[sequence, head]
            arrays, at = (codes, channel_scale, channel_zero), (sequence, head, slot, block)
            write_block(layout, runs, *arrays, *at, nothing=nothing, interpret=interpret)

        if with_stage1:
            pl.when(is_stored)(store)
        else:
            store()

    if with_stage1:
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
    """One run of the block that begins at token `first`, as float32, 0 past the length."""
    rows, columns = layout.slices(run, first, nothing)
    tokens = rows.start + jnp.arange(rows.size, dtype=jnp.int32)
    mask = jnp.broadcast_to((tokens < length)[:, None], layout.tile)
    channels = layout.mask()
    mask = mask if channels is None else mask & channels
    values = plgpu.load(x.at[sequence, rows, head, columns], mask=mask, other=0.0)
    return values.astype(jnp.float32)
