"""Stage 1 of attention on Hopper: queries, keys and values to 8 bits, in the order of its products.

Roofline, for 2 sequences of 8,192 tokens, 8 KV heads of 128, bfloat16: 0.10 GB, 23.5 us at the 4.3
TB/s of a copy on an H200; some 6 operations a value, 6 us. Target: 28 us, 85 %. Seen: 24.9 us in
int8, 94 % of a copy, and 32.2 in e4m3, which reads values twice. Memory bounds it.

A program takes one block of one head of one sequence: it loads the block once, finds its scale,
rounds and stores. One launch has programs for keys and for values. Values in e4m3 share one scale
per sequence and head: then programs of the first launch find their maxima, after the keys, so that
the second finds in the L2 cache what they read.

Roofline in full and versions: `docs/kernels/attention.md`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.mosaic import block as blocks
from pallas_kernels.mosaic import eight_bits, lane, lanes
from pallas_kernels.mosaic.block import Block, Share
from pallas_kernels.mosaic.lane import Int, Pointer

# Maxima that every program may read.
_MOST_MAXIMA = 128
_WARP = 32


def unsupported(x: jax.Array, block: int) -> str | None:
    """Why blocks of `x` cannot be quantized by these kernels, or None."""
    if block < blocks.SMALLEST:
        return f"{block=} must be at least {blocks.SMALLEST}"
    if x.shape[3] % blocks.CHANNELS:
        return f"head_dim={x.shape[3]} must be a multiple of {blocks.CHANNELS}"
    return None


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    pair: Int  # ``batch * K + head``
    number: Int  # of the block among those of the pair
    x: Pointer  # the pair's first token
    length: Int  # tokens of the sequence that count
    share: Share
    memory: Pointer


@dataclasses.dataclass(frozen=True)
class Work:
    """Blocks that programs take, one each: static. Subclasses have `outputs` and `run`."""

    shape: tuple[int, ...]  # of the tensor, ``[B, S, K, H]``
    block: Block  # as a program holds it
    count: int  # blocks, or runs of them, of a sequence

    @property
    def programs(self) -> int:
        return self.shape[0] * self.shape[2] * self.count

    @property
    def shared_bytes(self) -> int:
        return blocks.MAXIMA_BYTES

    @property
    def row(self) -> int:
        return self.shape[2] * self.shape[3] * self.block.value_bytes

    def program(self, index: Int, x: Pointer, lengths: Pointer, memory: Pointer) -> Program:
        """Program `index`; programs of the heads of the same tokens follow each other."""
        heads = self.shape[2]
        head, rest = index % heads, index // heads
        number, batch = rest % self.count, rest // self.count
        x = x.times(batch * self.shape[1], self.row)
        x = x.at(head * (self.shape[3] * self.block.value_bytes))
        share = Share(self.block, lane.thread())
        length = lengths.at(batch << 2).word()
        return Program(batch * heads + head, number, x, length, share, memory)

    def load(self, p: Program, first: Int) -> blocks.Words:
        return p.share.load(p.x, self.row, first, self.shape[1], p.length)


@dataclasses.dataclass(frozen=True)
class Codes(Work):
    """Turns blocks to codes; see `quantize`."""

    is_int8: bool  # int8 or e4m3
    tokens_last: bool = False
    permuted: bool = False
    maxima: int = 0  # how many are given for each sequence and head, 0 if each block has its own

    @property
    def outputs(self) -> list[jax.ShapeDtypeStruct]:
        batch, _, heads, _ = self.shape
        tokens, channels = self.count * self.block.tokens, self.block.channels
        order = (channels, tokens) if self.tokens_last else (tokens, channels)
        dtype = jnp.int8 if self.is_int8 else jnp.float8_e4m3fn
        return [
            jax.ShapeDtypeStruct((batch, heads, *order), dtype),
            jax.ShapeDtypeStruct((batch, heads, self.count), jnp.float32),
        ]

    @property
    def shared_bytes(self) -> int:
        return blocks.MAXIMA_BYTES + (self.block.shared_bytes if self.tokens_last else 0)

    def run(
        self, index: Int, lengths: Pointer, x: list[Pointer], y: list[Pointer], memory: Pointer
    ) -> None:
        if self.maxima:  # what was read last for these is in the L2 cache
            index = lane.integer(self.programs - 1) - index
        p = self.program(index, x[0], lengths, memory)
        first = p.number * self.block.tokens
        given = self._given(x[1], p) if self.maxima else None
        values = self.load(p, first)
        if given is None:
            p.share.tell(memory, p.share.largest(values))
            lane.block_barrier()
            given = p.share.told(memory)
        scale = eight_bits.scale_of(given.as_float(), self.is_int8)
        codes = p.share.codes(values, scale, self.is_int8)
        with lane.when(p.share.thread.equals(0)):
            y[1].times(p.pair, 4 * self.count).at(p.number << 2).store(scale)
        self.store(p, y[0], first, codes)

    def _given(self, maxima: Pointer, p: Program) -> Int:
        """The largest bits of the given maxima; each warp searches all."""
        place = p.share.thread & (_WARP - 1)
        here = maxima.times(p.pair, 4 * self.maxima)
        found = [
            here.at((place + begin).minimum(self.maxima - 1) << 2).word() & 0x7FFFFFFF
            for begin in range(0, self.maxima, _WARP)
        ]
        return lane.largest_of_warp(lane.tree(found, Int.maximum))

    def store(self, p: Program, out: Pointer, first: Int, codes: blocks.Words) -> None:
        if not self.tokens_last:
            self.store_rows(p, out, first, codes)
            return
        memory = p.memory.at(blocks.MAXIMA_BYTES)
        p.share.transpose(memory, codes)
        lane.block_barrier()
        self.store_columns(p, out, first, memory)

    def store_rows(self, p: Program, out: Pointer, first: Int, codes: blocks.Words) -> None:
        tokens, channels = self.count * self.block.tokens, self.block.channels
        out = out.times(p.pair, tokens * channels).times(first, channels)
        p.share.store_rows(out, codes, permuted=self.permuted)

    def store_columns(self, p: Program, out: Pointer, first: Int, memory: Pointer) -> None:
        """Stores a block's codes, tokens last, which were transposed in shared memory."""
        tokens = self.count * self.block.tokens
        out = out.times(p.pair, tokens * self.block.channels).at(first)
        p.share.store_columns(out, tokens, memory)


@dataclasses.dataclass(frozen=True)
class Maxima(Work):
    """Maxima of absolute values over runs of `run_length` blocks; see `absolute_maxima`."""

    run_length: int

    @property
    def outputs(self) -> list[jax.ShapeDtypeStruct]:
        batch, _, heads, _ = self.shape
        return [jax.ShapeDtypeStruct((batch, heads, self.count), jnp.float32)]

    def run(
        self, index: Int, lengths: Pointer, x: list[Pointer], y: list[Pointer], memory: Pointer
    ) -> None:
        p = self.program(index, x[0], lengths, memory)
        tokens = self.block.tokens
        first = p.number * (self.run_length * tokens)

        def step(i: Int, found: list[Any]) -> list[Any]:
            values = self.load(p, first + i * tokens)
            return [found[0].maximum(p.share.largest(values))]

        if self.run_length == 1:
            [bits] = step(lane.integer(0), [lane.integer(0)])
        else:
            stop = lane.integer(self.run_length)
            [bits] = lane.loop(lane.integer(0), stop, 1, [lane.integer(0)], step)
        p.share.tell(memory, bits)
        lane.block_barrier()
        largest = p.share.told(memory).as_float()
        with lane.when(p.share.thread.equals(0)):
            known = eight_bits.is_finite(largest).where(largest, float("nan"))
            y[0].times(p.pair, 4 * self.count).at(p.number << 2).store(known)


def launch(
    name: str,
    lengths: jax.Array,
    given: Sequence[tuple[Any, Sequence[jax.Array]]],
    *,
    alternate: bool = False,
) -> list[list[jax.Array]]:
    """Runs all of the given work in one launch.

    `given` are kinds of `Work`, each with the arrays that it reads; `lengths` are int32 ``[B]``,
    for all of it. With `alternate` the programs of all kinds, equally many, take turns; otherwise
    kinds follow each other.
    """
    counts = [work.programs for work, _ in given]
    alternate = alternate and len(set(counts)) == 1
    outputs = [work.outputs for work, _ in given]

    def body(arrays: list[Pointer], ids: list[Int]) -> None:
        rest, begin, kinds = arrays[1:], 0, len(given)
        results = rest[sum(len(x) for _, x in given) :]
        memory = arrays[-1]
        for number, ((work, inputs), out) in enumerate(zip(given, outputs, strict=True)):
            x, rest = rest[: len(inputs)], rest[len(inputs) :]
            y, results = results[: len(out)], results[len(out) :]
            end = begin + counts[number]
            if kinds == 1:
                work.run(ids[0], arrays[0], x, y, memory)
            elif alternate:
                with lane.when((ids[0] % kinds).equals(number)):
                    work.run(ids[0] // kinds, arrays[0], x, y, memory)
            else:
                index = (ids[0] - begin).maximum(0).minimum(counts[number] - 1)
                with lane.when((ids[0] >= begin) & (ids[0] < end)):
                    work.run(index, arrays[0], x, y, memory)
            begin = end

    written = lanes.launch(
        body,
        name,
        [lengths, *(array for _, inputs in given for array in inputs)],
        [array for out in outputs for array in out],
        grid={"program": sum(counts)},
        warpgroups=given[0][0].block.warpgroups,
        shared=max(work.shared_bytes for work, _ in given),
    )
    results = []
    for out in outputs:
        results.append(written[: len(out)])
        written = written[len(out) :]
    return results


_CODES, _MAXIMA = "turbojax_quantize_hopper", "turbojax_maxima_hopper"


def codes_of(
    x: jax.Array,
    block: int,
    dtype: jax.typing.DTypeLike,
    multiple: int | None = None,
    channels: int | None = None,
    *,
    values: int | None = None,
    **options: Any,
) -> Codes:
    """Work of `quantize`; a lane holds `values` values if there are as many."""
    size, head_dim = x.shape[1], x.shape[3]
    channels, multiple = channels or head_dim, multiple or block
    count = pl.cdiv(size, multiple) * (multiple // block)
    if values is None:
        values = blocks.VALUES_PER_LANE * (1 if x.dtype == jnp.float32 else 2)
    warpgroups = blocks.default_warpgroups(block, channels, values)
    held = Block(block, head_dim, channels, x.dtype.name, warpgroups)
    return Codes(x.shape, held, count, is_int8=jnp.dtype(dtype) == jnp.int8, **options)


def _maxima(x: jax.Array, warpgroups: int) -> Maxima:
    """Work of `absolute_maxima`, with as many tokens at a time as give each lane 64 values."""
    size, channels = x.shape[1], x.shape[3]
    tokens = warpgroups * blocks.default_tokens(channels)
    length = pl.cdiv(size, tokens * _MOST_MAXIMA)
    held = Block(tokens, channels, channels, x.dtype.name, warpgroups)
    return Maxima(x.shape, held, pl.cdiv(size, tokens * length), length)


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
) -> tuple[jax.Array, jax.Array]:
    """Quantizes blocks of tokens with one scale each, or with one for all blocks of a head.

    `x` is bfloat16, float16 or float32 ``[B, S, K, H]``, `H` a multiple of 8 up to 256; tokens past
    `lengths`, int32 ``[B]``, at most `S`, count as zero. `block` tokens, a power of two from 16 to
    256, become `dtype`: int8 (scale of a maximum over 119) or float8_e4m3fn (over 448). The largest
    of `maxima`, float32 ``[B, K, m]``, `m` up to 128, NaN for what is not finite, sets the scale of
    all blocks; no absolute value may be larger.

    Returns codes ``[B, K, Sp, channels]``, or ``[B, K, channels, Sp]`` if `tokens_last`; `Sp` is
    `S` rounded up to `multiple`, a multiple of `block` and by default that; `channels`, a multiple
    of 8, is at least `H`, with zeros past it. If `permuted`, tokens are in the order of Hopper's
    products, see `pallas_kernels.mosaic.block.Share.store_rows`. Scales are float32
    ``[B, K, Sp / block]``: 1 for zeros alone, NaN with a value that is not finite; codes are then
    0, in e4m3 NaN.
    """
    count = 0 if maxima is None else maxima.shape[2]
    work = codes_of(
        *(x, block, dtype, multiple, channels),
        tokens_last=tokens_last,
        permuted=permuted,
        maxima=count,
    )
    [[codes, scale]] = launch(_CODES, lengths, [(work, [x] if maxima is None else [x, maxima])])
    return codes, scale


def absolute_maxima(x: jax.Array, lengths: jax.Array) -> jax.Array:
    """Maxima of absolute values, over some tokens and all channels each, for `quantize`.

    Arguments as there. Returns float32 ``[B, K, m]``, `m` up to 128, NaN where a value is not
    finite.
    """
    [[maxima]] = launch(_MAXIMA, lengths, [(_maxima(x, 1), [x])])
    return maxima


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
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """`quantize` of keys, and of values with tokens last: one launch, two with values in e4m3.

    int8 has one scale for each block, and so have keys in e4m3; values in e4m3 have one for all.
    `permuted` is for the keys. Returns codes and scales of keys, then of values.
    """
    given = (block, key_dtype, multiple, channels)
    keys = codes_of(key, *given, permuted=permuted)
    if jnp.dtype(value_dtype) == jnp.int8:
        values = codes_of(value, block, value_dtype, multiple, channels, tokens_last=True)
        both = launch(_CODES, lengths, [(keys, [key]), (values, [value])])
        [[k, k_scale], [v, v_scale]] = both
        return k, k_scale, v, v_scale
    maxima = _maxima(value, keys.block.warpgroups)
    [[k, k_scale], [found]] = launch(_CODES, lengths, [(keys, [key]), (maxima, [value])])
    v, v_scale = quantize(
        *(value, lengths, found),
        block=block,
        dtype=value_dtype,
        multiple=multiple,
        channels=channels,
        tokens_last=True,
    )
    return k, k_scale, v, v_scale
