"""Compress on Hopper: a prompt's keys and values to stage-1 and stage-2 codes, in one launch.

Roofline, for a value of bfloat16 at 4 bits: 2.5 bytes, 3.5 with the codes for attention, and about
18 operations, 0.6 ps each on an H200. Target: 60 % of the copy bandwidth. Seen: 2.8 TB/s, 66 % of a
copy; with codes of 8 bits 3.1. Memory and arithmetic bound it alike.

A program takes one block of one head of one sequence, of keys or of values: it loads the block
once, finds its scale, rounds, finds the channels' scales, rounds again, packs and stores.

Roofline in full and versions: `docs/kernels/decode.md`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.layouts import Compressed
from pallas_kernels.mosaic import block as blocks
from pallas_kernels.mosaic import eight_bits, lane, lanes, stage2
from pallas_kernels.mosaic.block import Block
from pallas_kernels.mosaic.hopper.quantize import Codes, Program
from pallas_kernels.mosaic.lane import Int, Pointer
from pallas_kernels.mosaic.stage2 import Arrays, Layout, Target


class Prompt(NamedTuple):
    """One side of a prompt, and where its blocks go."""

    x: jax.Array  # bfloat16, float16 or float32 ``[B, S, K, H]``
    # int32 ``[B, K]``, each head's place among the slots of `codes`; ignored if all have one width.
    slots: jax.Array
    # Uint8, one array for each width, see `pallas_kernels.mosaic.stage2.Arrays`.
    codes: tuple[jax.Array, ...]
    channel_scale: jax.Array  # int8 ``[B, K, n, H]``
    channel_zero: jax.Array  # int8 ``[B, K, n, H]``
    block_scale: jax.Array  # float32 ``[B, K, n]``

    @property
    def state(self) -> list[jax.Array]:
        return [*self.codes, self.channel_scale, self.channel_zero, self.block_scale]


@dataclasses.dataclass(frozen=True)
class _Side:
    layout: Layout  # of a stored block
    stored: int  # how many blocks there is room for
    operand: Codes  # the codes for attention, or only the blocks' place in the prompt
    has_operand: bool  # which of the two
    every_block: bool  # whether to find the maxima of blocks that are not stored, too
    begin: int  # the first token of the first block

    @classmethod
    def of(
        cls,
        p: Prompt,
        layout: Layout,
        operand: jax.typing.DTypeLike | None,
        every_block: bool,
        permuted: bool,
        begin: int,
    ) -> "_Side":
        if layout.tokens_last and operand is not None and jnp.dtype(operand) != jnp.int8:
            raise ValueError(f"{operand=} with tokens last: values in e4m3 have one scale a head")
        size, channels = p.x.shape[1], p.x.shape[3]
        warpgroups = blocks.default_warpgroups(layout.tokens, channels)
        held = Block(layout.tokens, channels, channels, p.x.dtype.name, warpgroups)
        operands = Codes(
            *(p.x.shape, held, pl.cdiv(size - begin, layout.tokens)),
            is_int8=operand is None or jnp.dtype(operand) == jnp.int8,
            tokens_last=layout.tokens_last,
            permuted=permuted and not layout.tokens_last,
        )
        has_operand = operand is not None
        stored, every_block = p.block_scale.shape[2], every_block or has_operand
        return cls(layout, stored, operands, has_operand, every_block, begin)

    @property
    def outputs(self) -> list[jax.ShapeDtypeStruct]:
        """Types of the maxima of blocks, the codes for attention and their scales."""
        codes, scales = self.operand.outputs
        return [scales, codes, scales] if self.has_operand else [scales]

    @property
    def shared_bytes(self) -> int:
        return blocks.MAXIMA_BYTES + stage2.shared_bytes(self.operand.block, self.layout)

    def run(
        self,
        index: Int,
        inputs: list[Pointer],
        state: list[Pointer],
        out: list[Pointer],
        memory: Pointer,
    ) -> None:
        x, lengths, counts, slots = inputs
        p = self.operand.program(index, x, lengths, memory)
        heads = self.operand.shape[2]
        batch, head = p.pair // heads, p.pair % heads
        stored = counts.at(batch << 2).word()
        is_stored = (p.number < stored) & (p.number >= stored - self.stored)
        if self.every_block:
            self._block(p, is_stored, batch, head, slots, state, out)
            return
        with lane.when(is_stored):
            self._block(p, is_stored, batch, head, slots, state, out)

    def _block(
        self,
        p: Program,
        is_stored: lane.Bool,
        batch: Int,
        head: Int,
        slots: Pointer,
        state: list[Pointer],
        out: list[Pointer],
    ) -> None:
        share, memory, heads = p.share, p.memory, self.operand.shape[2]
        staging = stage2.staging(share.block, memory)
        first = p.number * self.layout.tokens
        values = self.operand.load(p, first + self.begin)
        share.tell(memory, share.largest(values))
        lane.block_barrier()
        maximum = share.told(memory).as_float()
        is_first, count = share.thread.equals(0), self.operand.count
        with lane.when(is_first):
            known = eight_bits.is_finite(maximum).where(maximum, float("nan"))
            out[0].times(p.pair, 4 * count).at(p.number << 2).store(known)
        is_int8 = self.operand.is_int8
        scale, given = (eight_bits.scale_of(maximum, x) for x in (True, is_int8))
        if not is_int8:  # before the codes that stay in registers
            self.operand.store_rows(p, out[1], first, share.codes(values, given, is_int8))
        codes = share.codes(values, scale, True)
        if self.has_operand:
            with lane.when(is_first):
                out[2].times(p.pair, 4 * count).at(p.number << 2).store(given)
            if self.layout.tokens_last:
                share.transpose(staging, codes)
            elif is_int8:
                self.operand.store_rows(p, out[1], first, codes)
        stage2.tell_extremes(share, codes, memory)
        lane.block_barrier()
        if self.has_operand and self.layout.tokens_last:
            self.operand.store_columns(p, out[1], first, staging)
        widths = len(self.layout.bits)
        scale_of, zero_of, block_scale = state[widths:]
        arrays = Arrays(
            state[:widths], scale_of, zero_of, block_scale, blocks=self.stored, layout=self.layout
        )
        slot = head if widths == 1 else slots.at((batch * heads + head) << 2).word()
        at = Target(batch, head, heads, slot, p.number % self.stored)
        with lane.when(is_stored):
            with lane.when(is_first):
                block_scale.times(at.of_head(arrays), 4).store(scale)
            stage2.write(share, codes, memory, arrays, at)


def compress(
    prompts: Sequence[Prompt],
    lengths: jax.Array,
    count: jax.Array,
    *,
    layouts: Sequence[Layout],
    operands: Sequence[jax.typing.DTypeLike | None],
    every_block: Sequence[bool],
    permuted: bool = False,
    begin: int = 0,
) -> list[Compressed]:
    """Compresses blocks of prompts into the arrays of a cache, keys and values in one launch.

    `prompts`, `layouts`, `operands` and `every_block` have an entry for each side; blocks of all
    sides have the same size and shape. `lengths`, int32 ``[B]``, are at most `S`: later tokens
    count as zero. `count`, int32 ``[B]``, is how many blocks are stored, whole ones, block `i` in
    place ``i % n``; if there are more than `n`, the last `n`. The arrays keep everything else, in
    their own memory if they were donated.

    An operand dtype (int8, the codes of stage 1; or float8_e4m3fn, with its own scale) asks for
    codes for attention of all blocks, for keys in the order of Hopper's products if `permuted`.
    `every_block` finds the maxima of all blocks, stored or not; otherwise `count` must be at most
    `n`. Tokens before `begin` are not read.
    """
    sides = [
        _Side.of(*given, permuted, begin)
        for given in zip(prompts, layouts, operands, every_block, strict=True)
    ]
    inputs = [lengths, count, *(array for p in prompts for array in (p.x, p.slots))]
    written = [
        [*p.state, *map(_empty, side.outputs)] for p, side in zip(prompts, sides, strict=True)
    ]
    programs = [side.operand.programs for side in sides]

    def body(arrays: list[Pointer], ids: list[Int]) -> None:
        begin, rest = 0, arrays[len(inputs) :]
        for i, (side, own) in enumerate(zip(sides, written, strict=True)):
            x, slots = arrays[2 + 2 * i : 4 + 2 * i]
            mine, rest = rest[: len(own)], rest[len(own) :]
            split = len(own) - len(side.outputs)
            end = begin + programs[i]
            index = (ids[0] - begin).maximum(0).minimum(programs[i] - 1)
            with lane.when((ids[0] >= begin) & (ids[0] < end)):
                given = [x, arrays[0], arrays[1], slots]
                side.run(index, given, mine[:split], mine[split:], arrays[-1])
            begin = end

    results = lanes.update(
        body,
        "turbojax_compress_hopper",
        inputs,
        [array for own in written for array in own],
        grid={"program": sum(programs)},
        warpgroups=sides[0].operand.block.warpgroups,
        shared=max(side.shared_bytes for side in sides),
    )
    out = []
    for p, own in zip(prompts, written, strict=True):
        mine, results = results[: len(own)], results[len(own) :]
        out.append(_compressed(mine, len(p.codes)))
    return out


def _empty(x: jax.ShapeDtypeStruct) -> jax.Array:
    array: jax.Array = jax.lax.empty(x.shape, x.dtype)
    return array


def _compressed(arrays: list[Any], widths: int) -> Compressed:
    scale, zero, block_scale, maximum, *operand = arrays[widths:]
    return Compressed(
        tuple(arrays[:widths]), scale, zero, block_scale, maximum, tuple(operand) or None
    )
