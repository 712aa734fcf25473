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

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import varying
from pallas_kernels.layouts import Side as Side
from pallas_kernels.triton import _common
from pallas_kernels.triton._common import Exponential, Ref, quantize_rows
from pallas_kernels.triton._merge import merge
from pallas_kernels.triton._packed import Span, load_codes, spans, whole


@dataclasses.dataclass(frozen=True)
class Settings:
    mode: str  # ``"int8"``, or ``"float"``: queries and weights are not rounded
    exp: Exponential  # the softmax's exponential
    unit: float  # how many units of its argument are one nat
    largest: float  # its value at 0
    key_bits: tuple[int, ...]  # widths of the keys' code arrays
    value_bits: tuple[int, ...]  # widths of the values' code arrays
    block: int  # tokens of a cache block
    # The first tokens that are in the buffer's first slots, before those of blocks.
    first_tokens: int
    scale: float
    window: tuple[int, int] | None
    soft_cap: float | None
    splits: int  # programs that share a KV head's blocks
    num_warps: int
    num_stages: int
    interpret: bool
    out_dtype: str | None = None  # of the output, ``"float32"``; None for the queries'


class Query(NamedTuple):
    """A program's queries, and which tokens they see."""

    parts: tuple[jax.Array, ...]  # codes [R, span], one per channel span
    scale: jax.Array  # float32 [R]
    position: jax.Array  # int32 [R]
    is_real: jax.Array  # bool [R]


def load_query(
    q_ref: Ref,
    at: tuple[jax.Array, jax.Array],
    channels: tuple[Span, ...],
    *,
    rows: int,
    group: int,
    begin: jax.Array,
    query_length: jax.Array,
    s: Settings,
) -> Query:
    """Loads a KV head's query rows, row ``g * T + t``, and quantizes each."""
    b, h = at
    tokens = q_ref.shape[1]
    r = jnp.arange(rows, dtype=jnp.int32)
    is_row = r < group * tokens
    t, head = r % tokens, h * group + jnp.minimum(r // tokens, group - 1)
    parts = []
    for span in channels:
        ref = q_ref.at[b, t[:, None], head[:, None], span.positions()[None, :]]
        x = plgpu.load(ref, mask=is_row[:, None] & span.inside()[None, :], other=0)
        # The factor of the scores stays positive, so that it does not move the maximum.
        parts.append(x if s.scale >= 0 else -x)
    codes, scale = quantize_rows(tuple(parts), s.mode)
    return Query(codes, scale * abs(s.scale), begin + t, is_row & (t < query_length))


State = tuple[jax.Array, jax.Array, jax.Array]
"""Outputs ``[H, R]``, maxima in the exponential's units and sums of weights ``[R]``, float32."""


def empty(shape: tuple[int, ...]) -> State:
    """The state before the first split, for outputs ``[H, R]``."""
    lowest = jnp.full(shape[1:], -jnp.inf, jnp.float32)
    return jnp.zeros(shape, jnp.float32), lowest, jnp.zeros(shape[1:], jnp.float32)


def softmax(
    products: list[jax.Array],
    factor: jax.Array,
    masks: list[jax.Array] | None,
    s: Settings,
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """A split's own softmax, over tokens, which are rows.

    Returns unnormalized weights ``[t, R]``, and for each column its maximum in the exponential's
    units (``-inf`` where nothing is visible, and perhaps where scores are NaN) and sum.
    """
    scores = products
    scale = factor * s.unit
    if s.soft_cap is not None:
        scores = [_common.soft_cap(x * factor[None, :], s.soft_cap) for x in scores]
        scale = jnp.full_like(factor, s.unit)
    if masks is not None:
        scores = [
            jnp.where(mask, x * scale[None, :], -jnp.inf)
            for x, mask in zip(scores, masks, strict=True)
        ]
        scale = jnp.ones_like(factor)
    maximum = functools.reduce(jnp.maximum, [jnp.max(x, axis=0) for x in scores]) * scale
    shift = maximum
    if masks is not None:
        shift = jnp.where(maximum > -jnp.inf, maximum, 0.0)
    weights = []
    for i, x in enumerate(scores):
        x = _common.fma(x, scale[None, :], -shift[None, :], s.interpret)
        p = _common.evaluate(s.exp, x, s.interpret)
        weights.append(p if masks is None else jnp.where(masks[i], p, 0.0))
    total = functools.reduce(jnp.add, [jnp.sum(p, axis=0) for p in weights])
    return weights, maximum, total


def round_weights(p: jax.Array, s: Settings) -> tuple[jax.Array, jax.Array, float]:
    """Weights as the second product's operand, their sums over tokens, and the value of a unit."""
    if s.mode == "int8":
        unit = s.largest / _common.INT8_RANGE
        codes = _common.round_product(p, 1 / unit, s.interpret)
        return codes, jnp.sum(codes.astype(jnp.int32), axis=0), unit
    return p, jnp.sum(p, axis=0), 1.0


def seen_of(masks: list[jax.Array]) -> jax.Array:
    """Which queries see anything, from masks ``[t, R]``."""
    found = [jnp.max(jnp.where(mask, 1.0, 0.0), axis=0) for mask in masks]
    return functools.reduce(jnp.maximum, found) > 0


def merge_split(
    state: State,
    product: jax.Array,
    maximum: jax.Array,
    total: jax.Array,
    factor: jax.Array,
    seen: jax.Array | None,
    s: Settings,
) -> State:
    """Adds a split's result, float32 ``[H, R]``, to the running outputs, maxima and sums.

    `maximum` ``[R]`` is ``-inf`` where the split shows nothing; `total` ``[R]`` are sums of
    weights; `factor` scales the scores, and is NaN where a key was; `seen` ``[R]`` says which
    queries see something of the split, None if all see all of it.
    """
    o, m, l = state
    exp = functools.partial(_exp_of_units, s=s)
    # A maximum and SAS lose a NaN; the sum brings it back.
    nan_or_zero = factor * 0.0
    new = jnp.maximum(m, maximum)
    shift = new
    if seen is not None:
        nan_or_zero = jnp.where(seen, nan_or_zero, 0.0)
        product = jnp.where(seen[None, :], product, 0.0)
        shift = jnp.where(new > -jnp.inf, new, 0.0)
    alpha, weight = exp(m - shift), exp(maximum - shift)
    o = _common.fma(product, weight[None, :], o * alpha[None, :], s.interpret)
    return o, new, l * alpha + (total * weight + nan_or_zero)


def _exp_of_units(x: jax.Array, s: Settings) -> jax.Array:
    return _common.exp2(x * (_common.LOG2_E / s.unit), s.interpret)


def mask_of(query: Query, position: jax.Array, extra: jax.Array | None, s: Settings) -> jax.Array:
    """Which tokens at `position` ``[t]`` each query sees, ``[t, R]``."""
    q, k = query.position[None, :], position[:, None]
    mask = (k <= q) & query.is_real[None, :]
    if s.window is not None:
        mask = mask & (k >= q - s.window[0]) & (k <= q + s.window[1])
    return mask if extra is None else mask & extra[:, None]


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
        # What has a window may be a rolling buffer.
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
