"""Decode: a few new queries per sequence against a cache of packed codes (TurboAttention, Alg. 2).

Roofline, for 16 sequences of 32,768 tokens, 8 KV heads of 4 queries each, head dim 128, 4 bits: 571
MB, 190 us at the 3.0 TB/s of a copy on an H100; operations under 20 us. Memory is the floor.
Target: 60 % of its speed. Seen: 323 us, with blocks of 128 tokens 293, 2.14 times as fast as cuDNN.
The latency of some 1,700 instructions a block bounds it.

One program, usually a single warp, takes one KV head of one sequence, all its query heads, and a
run of blocks. Tokens, and channels of values, are the rows of the products: queries are few, and
eight columns are the fewest that a product takes. Scales and zeros of channels are folded in: a
query's code times its channel's scale is an integer of 14 bits, taken as two planes of 7, so that
all products are of int8 codes and exact; those of the values act on a block's result. Each block,
and the int8 buffer, has its own softmax, merged by log-sum-exp, first inside a program, then over
programs (`merge`).

Roofline in full and versions: `docs/kernels/triton.md`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import varying
from pallas_kernels.layouts import Side as Side
from pallas_kernels.merge import merge
from pallas_kernels.triton import _common
from pallas_kernels.triton._common import Ref
from pallas_kernels.triton._decode_inputs import Query, load_query
from pallas_kernels.triton._decode_inputs import Settings as Settings
from pallas_kernels.triton._decode_split import (
    State,
    empty,
    mask_of,
    merge_split,
    round_weights,
    seen_of,
    softmax,
)
from pallas_kernels.triton._packed import Span, load_codes, spans, whole

_LOW_BITS = 7
# Columns of the smallest matrix product.
_ROWS = 8


def _planes(part: jax.Array, channel_scale: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query codes times channel scales: the int32 product, and its two int8 planes."""
    scaled = part * channel_scale[None, :]
    low = scaled & (2**_LOW_BITS - 1)
    return scaled, (scaled >> _LOW_BITS).astype(jnp.int8), low.astype(jnp.int8)


def _block_products(
    query: Query,
    key: Side,
    at: tuple[jax.Array, ...],
    codes: tuple[Ref, tuple[jax.Array, ...], int],
    channels: tuple[Span, ...],
    tokens: tuple[Span, ...],
    s: Settings,
) -> list[jax.Array]:
    """Keys times queries ``[t, R]`` of a block, one float32 tile per token span."""
    ref, code_at, bits = codes
    head_dim = key.buffer.shape[-1]
    dot = functools.partial(_common.dot, interpret=s.interpret)
    products: list[Any] = [0] * len(tokens)
    offset: Any = 0
    for part, span in zip(query.parts, channels, strict=True):
        mask = span.mask()
        other = None if mask is None else 0
        scale, zero = (
            plgpu.load(x.at[(*at, span.positions())], mask=mask, other=other).astype(jnp.int32)
            for x in (key.channel_scale, key.channel_zero)
        )
        if s.mode == "int8":
            scaled, high, low = _planes(part, scale)
            offset = offset + jnp.sum(scaled * zero[None, :], axis=1)
        for i, token_span in enumerate(tokens):
            tile = load_codes(ref, code_at, token_span, span, head_dim, bits, s.interpret)
            if s.mode == "int8":
                product = (dot(tile, high) << _LOW_BITS) + dot(tile, low)
            else:
                value = (tile.astype(jnp.int32) + zero[None, :]) * scale[None, :]
                product = dot(value.astype(jnp.float32).astype(part.dtype), part)
            products[i] = products[i] + product
    if s.mode == "float":
        return products
    return [(x + offset[None, :]).astype(jnp.float32) for x in products]


def _walk(
    state: State,
    query: Query,
    sides: tuple[Side, Side],
    group: tuple[int, int],
    at: tuple[jax.Array, jax.Array],
    bounds: tuple[jax.Array, jax.Array],
    always_visible: bool,
    s: Settings,
) -> State:
    """Attends to the blocks from ``bounds[0]`` to before ``bounds[1]``.

    `state` are running outputs, maxima, sums; `group` is which code array of each side holds this
    head, `at` sequence and head; `always_visible` says that every query sees all of these blocks.
    """
    (key, value), head_dim = sides, sides[0].buffer.shape[-1]
    (b, h), (key_bits, value_bits) = at, (s.key_bits[group[0]], s.value_bits[group[1]])
    slots = [_slot(side, at, number) for side, number in zip(sides, group, strict=True)]
    channels, tokens = spans(head_dim, key_bits), spans(s.block, value_bits)
    rows = whole(head_dim)

    def step(j: jax.Array, state: State) -> State:
        # What has a window may be a ring.
        place = j if s.window is None else j % key.block_scale.shape[2]
        here = (b, h, place)
        codes = (key.codes[group[0]], (b, slots[0], place), key_bits)
        products = _block_products(query, key, here, codes, channels, tokens, s)
        factor = query.scale * plgpu.load(key.block_scale.at[here])
        masks = None
        if not always_visible:
            first = j * s.block + s.first_tokens
            masks = [mask_of(query, first + t.positions(), t.mask(), s) for t in tokens]
        elif tokens[0].size != tokens[0].padded:
            masks = [jnp.broadcast_to(t.inside()[:, None], products[0].shape) for t in tokens]
        weights, maximum, total = softmax(products, factor, masks, s)
        output: Any = 0
        count: Any = 0
        for p, span in zip(weights, tokens, strict=True):
            operand, span_count, unit = round_weights(p, s)
            count = count + span_count
            at = (b, slots[1], place)
            ref = value.codes[group[1]]
            tile = load_codes(ref, at, rows, span, s.block, value_bits, s.interpret)
            tile = _as_operand(tile, operand.dtype)
            output = output + _common.dot(tile, operand, s.interpret, (1, 0))
        scale, zero = (
            plgpu.load(x.at[(*here, rows.positions())]).astype(count.dtype)
            for x in (value.channel_scale, value.channel_zero)
        )
        # In mode "int8" these are integers below 2**24, and exact as float32.
        output = (output + zero[:, None] * count[None, :]).astype(jnp.float32)
        scale = scale.astype(jnp.float32) * (unit * plgpu.load(value.block_scale.at[here]))
        output = output * scale[:, None]
        seen = None if always_visible or masks is None else seen_of(masks)
        return merge_split(state, output, maximum, total, factor, seen, s)

    return jax.lax.fori_loop(*bounds, step, state)


def _as_operand(codes: jax.Array, dtype: Any) -> jax.Array:
    """Integers as another operand type, converted through float32."""
    return codes if codes.dtype == dtype else codes.astype(jnp.float32).astype(dtype)


def _slot(side: Side, at: tuple[jax.Array, jax.Array], group: int) -> jax.Array:
    """The head's index in code array number `group` of its side."""
    if len(side.codes) == 1:
        return at[1]
    return plgpu.load(side.head_slots.at[at]) - group * side.codes[0].shape[1]


def _attend_buffer(
    query: Query,
    sides: tuple[Side, Side],
    at: tuple[jax.Array, jax.Array],
    first: jax.Array,
    count: jax.Array,
    number: jax.Array,
    s: Settings,
) -> State:
    """Attends to block `number` of the int8 buffer, one split."""
    (key, value), head_dim = sides, sides[0].buffer.shape[-1]
    tokens, column = whole(s.block), whole(head_dim)
    offset = number * s.block + tokens.positions()
    index = (*at, offset[:, None], column.positions()[None, :])
    [part] = query.parts
    if s.mode == "int8":
        part = part.astype(jnp.int8)
    product = _common.dot(
        _as_operand(plgpu.load(key.buffer.at[index]), part.dtype), part, s.interpret
    )
    factor = query.scale * plgpu.load(key.buffer_scale.at[at])
    position = jnp.where(offset < s.first_tokens, offset, first + offset)
    mask = mask_of(query, position, (offset < count) & tokens.inside(), s)
    [p], maximum, total = softmax([product.astype(jnp.float32)], factor, [mask], s)
    operand, _, unit = round_weights(p, s)
    # Tokens are rows here, and only 16-bit operands may be transposed; int8 codes are exact.
    if operand.dtype == jnp.int8:
        operand = _as_operand(operand, jnp.bfloat16)
    tile = _as_operand(plgpu.load(value.buffer.at[index]), operand.dtype)
    output = _common.dot(tile, operand, s.interpret, (0, 0))
    output = output * (unit * plgpu.load(value.buffer_scale.at[at]))
    return merge_split(empty(output.shape), output, maximum, total, factor, seen_of([mask]), s)


def _kernel(
    q_ref: Ref,
    key: Side,
    value: Side,
    lengths_ref: Ref,
    buffered_ref: Ref,
    query_lengths_ref: Ref,
    o_ref: Ref,
    m_ref: Ref,
    l_ref: Ref,
    *,
    s: Settings,
) -> None:
    """One split of one KV head: `Settings.splits` runs of blocks, then blocks of the buffer."""
    kv_heads, head_dim = key.buffer.shape[1], key.buffer.shape[-1]
    _, tokens, heads, _ = q_ref.shape
    group = heads // kv_heads
    pair, split = pl.program_id(0), pl.program_id(1)
    b, h = pair // kv_heads, pair % kv_heads
    length, buffered = plgpu.load(lengths_ref.at[b]), plgpu.load(buffered_ref.at[b])
    query_length = plgpu.load(query_lengths_ref.at[b])
    compressed, begin = length - buffered, length - query_length
    blocks = compressed // s.block
    first = jnp.int32(0)
    if s.window is not None:
        first = jnp.clip((begin - s.window[0] - s.first_tokens) // s.block, 0, blocks)
    share = (blocks - first + s.splits - 1) // s.splits
    start = first + split * share
    bounds = (start, jnp.minimum(start + share, blocks))
    rows = max(_ROWS, _common.next_power_of_2(group * tokens))
    load = functools.partial(
        load_query,
        q_ref,
        (b, h),
        rows=rows,
        group=group,
        begin=begin,
        query_length=query_length,
        s=s,
    )
    # One query at the end of its sequence sees every block.
    always_visible = tokens == 1 and s.window is None

    def walk(key_group: int, value_group: int) -> State:
        query = load(spans(head_dim, s.key_bits[key_group]))
        start = empty((whole(head_dim).padded, rows))
        groups = (key_group, value_group)
        return _walk(start, query, (key, value), groups, (b, h), bounds, always_visible, s)

    def attend_blocks() -> State:
        choice = jnp.int32(0)
        for side in (key, value):
            if len(side.codes) == 2:
                is_low = plgpu.load(side.head_slots.at[b, h]) >= side.codes[0].shape[1]
                choice = choice * 2 + is_low.astype(jnp.int32)
        pairs = [(i, j) for i in range(len(key.codes)) for j in range(len(value.codes))]
        if len(pairs) == 1:
            return walk(0, 0)
        return jax.lax.switch(choice, [functools.partial(walk, *p) for p in pairs])

    def attend_buffer() -> State:
        query = load((whole(head_dim),))
        number = split - s.splits
        return _attend_buffer(query, (key, value), (b, h), compressed, buffered, number, s)

    o, m, l = jax.lax.cond(split < s.splits, attend_blocks, attend_buffer)
    r = jnp.arange(rows, dtype=jnp.int32)
    c = jnp.arange(whole(head_dim).padded, dtype=jnp.int32)
    real = r < group * tokens
    plgpu.store(
        o_ref.at[pair, split, r[None, :], c[:, None]],
        o,
        mask=real[None, :] & (c < head_dim)[:, None],
    )
    # Maxima leave in powers of two.
    plgpu.store(m_ref.at[pair, split, r], m * (_common.LOG2_E / s.unit), mask=real)
    plgpu.store(l_ref.at[pair, split, r], l, mask=real)


def decode(
    query: jax.Array,
    key: Side,
    value: Side,
    lengths: jax.Array,
    buffer_lengths: jax.Array,
    query_lengths: jax.Array,
    settings: Settings,
) -> tuple[jax.Array, jax.Array]:
    """As `mosaic.hopper.decode.kernel.decode`, for every GPU that Triton compiles for."""
    batch, tokens, heads, head_dim = query.shape
    kv_heads = key.buffer.shape[1]
    rows, parts = (
        heads // kv_heads * tokens,
        settings.splits + key.buffer.shape[2] // settings.block,
    )
    pairs = batch * kv_heads
    arguments = (query, key, value, lengths, buffer_lengths, query_lengths)
    o, m, l = varying.pallas_call(
        functools.partial(_kernel, s=settings),
        grid=(pairs, parts),
        in_specs=jax.tree.map(lambda _: _common.WHOLE, arguments),
        out_specs=[_common.WHOLE] * 3,
        out_shape=[
            jax.ShapeDtypeStruct((pairs, parts, rows, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((pairs, parts, rows), jnp.float32),
            jax.ShapeDtypeStruct((pairs, parts, rows), jnp.float32),
        ],
        compiler_params=_common.parameters(settings.num_warps, settings.num_stages),
        interpret=settings.interpret,
        name="turbojax_decode",
    )(*arguments)
    result = jax.ShapeDtypeStruct(query.shape, settings.out_dtype or query.dtype)
    return merge(o, m, l, result, kv_heads, settings.interpret)
