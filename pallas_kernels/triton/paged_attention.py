"""Attention of new queries to keys and values in pages: 16-bit or wider, fp8, int8, or codes.

Roofline, for 16 sequences of 32,768 tokens, 8 KV heads of 4 queries each, head dim 128, H100: 4
bits 185 us, fp8 358, bfloat16 716, k8v4 271, int8 364; products 22 us, look-ups of 4-bit codes 57.
Memory is the floor. Target: 80 % of its speed for bfloat16 and fp8, half of it for 4 bits. Seen on
an H100: 303, 407 and 780 us; on an H200 k8v4 65 % of the floor's speed, turbo4 43. Pages of codes
are bound by issue.

One program takes some query rows of one KV head (row ``g * T + t``: all heads of the group share
what is read) and one part of its tokens, as far as those rows see it: programs past the end
stop at once and write nothing, and the parts are merged (see
`pallas_kernels.triton._merge`). Tokens, and channels of values, are the rows of the products, as in
`kv4_decode`: queries are few, and eight columns are the fewest that a product takes. A tile of
tokens spans one page or several, whose numbers are loaded from the table. All tiles are at fixed
positions, and the launch does not depend on the queries: a
row's bits are the same whatever its neighbours are.

Codes of 4 bits: four nibbles select in a byte permute, so two permutes look four codes up in
the lower and the upper half of the table of 7-bit integers; a selector whose highest bit is set
replicates the (zero) sign of a byte, so the wrong half gives 0 and the bytes are joined by OR. A
byte holds channels `2 i` and ``2 i + 1``, so each product is one of even and one of odd channels.
Keys are multiplied as float16 subnormals, whose bits are the integers, and values as bfloat16 128
and more, whose low bits are the integers; the offset this adds is subtracted again, using the sums
of the rounded queries and weights. Queries are scaled by a power of two to fit float16. A byte of
codes of 2 or 3 bits holds (the lower two bits of) four, so there are four products with every
fourth channel each; one permute looks up four of them.

Int8 becomes 16-bit floats, exactly, by byte permutes and a subtraction (`_paged_codes`); a token's
scale multiplies its scores and its weights, as a norm does. Not measured.

Roofline in full and versions: `docs/kernels/triton.md`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import varying
from pallas_kernels.triton import _common, _paged_codes
from pallas_kernels.triton._common import Ref
from pallas_kernels.triton._merge import finish, finite, merge_parts
from pallas_kernels.triton._paged_codes import Codec as Codec


@dataclasses.dataclass(frozen=True)
class Settings:
    # Optional (left, right); queries never see past their own position.
    window: tuple[int, int] | None
    soft_cap: float | None
    key_codec: Codec | None  # of keys that are codes, None for others
    value_codec: Codec | None  # of values that are codes, None for others
    part: int  # tokens of a program, a power of two
    tile: int  # tokens taken at a time, a power of two from 16 to `part`
    rows: int  # queries of a program at most, a power of two from 8
    num_warps: int
    num_stages: int
    interpret: bool


class Side(NamedTuple):
    """Keys or values ``[P, K, page_size, W]``, and of codes norms float16 ``[P, K, page_size]``.

    For int8 the norms are scales. Codes of 4 bits are two to a byte, of 2 bits four, the first in
    the lowest bits. Of 3 bits the first two thirds of the bytes hold the lower two bits in that
    way, and the last third the third ones: those of bytes ``2 m`` and ``2 m + 1`` in byte `m`, see
    `_paged_codes.look_up`.
    """

    data: Ref
    norm: Ref | None


class Place(NamedTuple):
    """Where a program reads."""

    sequence: jax.Array
    head: jax.Array


class Vectors(NamedTuple):
    """A side, and how a program takes its vectors: in pieces, each of which is an operand.

    Piece `j` of `n` has the channels ``n * c + j`` of the head: all of them, or those that begin at
    the same bit of a byte.
    """

    side: Side
    codec: Codec | None
    width: int  # of a piece, without padding
    column: jax.Array  # int32 [c], of a piece, padded to a power of two

    @property
    def channels(self) -> tuple[jax.Array, ...]:
        count = 1 if self.codec is None else self.codec.pieces
        return tuple(count * self.column + j for j in range(count)) if count > 1 else (self.column,)


def vectors(side: Side, codec: Codec | None) -> Vectors:
    width = side.data.shape[3]
    if codec is not None and codec.bits == 3:
        width = width // 3 * 2
    padded = max(_NARROWEST, _common.next_power_of_2(width))
    return Vectors(side, codec, width, jnp.arange(padded, dtype=jnp.int32))


def locate(
    i: jax.Array, token: jax.Array, tables_ref: Ref, place: Place, page_size: int, s: Settings
) -> tuple[jax.Array, jax.Array]:
    """The page (one, or one for each token) and the tokens' slots in it."""
    if page_size % s.tile == 0:
        in_page = page_size // s.tile
        page = plgpu.load(tables_ref.at[place.sequence, i // in_page])
        return page, i % in_page * s.tile + jnp.arange(s.tile, dtype=jnp.int32)
    # A table need not end with a tile.
    entry = jnp.minimum(token // page_size, tables_ref.shape[1] - 1)
    return plgpu.load(tables_ref.at[place.sequence, entry]), token % page_size


def load(
    x: Vectors,
    page: jax.Array,
    slot: jax.Array,
    place: Place,
    some: jax.Array | None,
    kind: str,
    s: Settings,
) -> tuple[jax.Array, ...]:
    """A tile as operands ``[t, c]``, one for each piece; 0 where not `some`, except integers."""
    mask = None if x.column.shape[0] == x.width else (x.column < x.width)[None, :]
    is_integer = x.codec is not None or x.side.data.dtype == jnp.int8
    if some is not None and not is_integer:
        mask = some[:, None] if mask is None else some[:, None] & mask
    if page.ndim:
        page = page[:, None]

    def read(column: jax.Array) -> jax.Array:
        at = x.side.data.at[page, place.head, slot[:, None], column[None, :]]
        other = 0 if is_integer else 0.0
        return plgpu.load(at) if mask is None else plgpu.load(at, mask=mask, other=other)

    tile = read(x.column)
    if x.codec is not None:
        high = _third_bits(x, page, slot, place) if x.codec.bits == 3 else None
        return _paged_codes.look_up(tile, high, x.codec, kind, s.interpret)
    if tile.dtype == jnp.int8:
        return (_paged_codes.int8_to_16_bits(tile, kind, s.interpret),)
    if tile.dtype.itemsize == 1:
        return (_paged_codes.fp8_to_float16(tile, s.interpret),)
    return (tile,)


def _third_bits(x: Vectors, page: jax.Array, slot: jax.Array, place: Place) -> jax.Array:
    """Bytes of third bits, each twice: once for each byte of lower bits to which it belongs."""
    count = x.column.shape[0]
    column = jnp.arange(count // 2, dtype=jnp.int32)
    at = x.side.data.at[page, place.head, slot[:, None], x.width + column[None, :]]
    mask = None if count == x.width else (column < x.width // 2)[None, :]
    tile = plgpu.load(at) if mask is None else plgpu.load(at, mask=mask, other=0)
    pairs = jnp.broadcast_to(tile[:, :, None], (*tile.shape, 2))
    return pairs.reshape(tile.shape[0], count)


def norm(side: Side, page: jax.Array, slot: jax.Array, place: Place) -> jax.Array:
    assert side.norm is not None
    return plgpu.load(side.norm.at[page, place.head, slot]).astype(jnp.float32)


# Columns of the smallest matrix product, and the fewest of a weights' sum.
_ROWS, _NARROWEST = 8, 16
_NO_POSITION = 2**30


class _Query(NamedTuple):
    """A program's queries and their positions."""

    pieces: tuple[jax.Array, ...]  # [R, c]: channels of each piece of the keys
    scale: jax.Array  # float32 [R], of the scores too
    offset: jax.Array | None  # float32 [R], to be taken off the products
    position: jax.Array  # int32 [R], -1 for padding


class _State(NamedTuple):
    """The state of an online softmax."""

    outputs: tuple[jax.Array, ...]  # float32 [c, R] for each piece of the values
    weights: jax.Array | None  # float32 [16, R]: 16 times the same sums of rounded weights
    m: jax.Array  # float32 [R], maxima in powers of two
    l: jax.Array  # float32 [R], sums of weights


def attend(
    query: jax.Array,
    key: Side,
    value: Side,
    block_tables: jax.Array,
    lengths: jax.Array,
    query_lengths: jax.Array,
    factor: jax.Array,
    settings: Settings,
) -> tuple[jax.Array, jax.Array]:
    """Attends the newest tokens' queries to their sequences' pages.

    `query` is ``[B, T, N, H]``; float32 for keys that are codes, in their dtype for 16 bits or
    wider. int32: `block_tables` ``[B, max_pages]``, all within the pool; `lengths` ``[B]``, tokens
    held, the queries' own included; `query_lengths` ``[B]``, how many of the `T` queries are real.
    `factor`, a float32 scalar, is that of the scores. Returns float32 ``[B, T, N, H]`` and the
    log-sum-exp ``[B, T, N]``.
    """
    batch, tokens, heads, head_dim = query.shape
    _, kv_heads, page_size, _ = key.data.shape
    rows, pairs = heads // kv_heads * tokens, batch * kv_heads
    parts = pl.cdiv(block_tables.shape[1] * page_size, settings.part)
    arguments = (query, key, value, block_tables, lengths, query_lengths, factor.reshape(1))
    shapes = [(batch, tokens, heads, head_dim), (batch, tokens, heads)]
    if parts > 1:
        shapes = [(pairs, parts, rows, head_dim), (pairs, parts, rows), (pairs, parts, rows)]
    results = varying.pallas_call(
        functools.partial(_kernel if parts > 1 else _single_kernel, s=settings),
        grid=(pl.cdiv(rows, _tile_rows(rows, settings)), parts, pairs),
        in_specs=jax.tree.map(lambda _: _common.WHOLE, arguments),
        out_specs=[_common.WHOLE] * len(shapes),
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        compiler_params=_common.parameters(settings.num_warps, settings.num_stages),
        interpret=settings.interpret,
        name="turbojax_paged_attention",
    )(*arguments)
    if parts == 1:
        return results[0], results[1]
    o, m, l = results
    return merge_parts(
        o,
        m,
        l,
        lengths,
        query_lengths,
        part=settings.part,
        tokens=tokens,
        heads=heads,
        kv_heads=kv_heads,
        window=settings.window,
        interpret=settings.interpret,
    )


def _tile_rows(rows: int, s: Settings) -> int:
    # How several warps share a sum over tokens depends on the number of columns.
    if s.num_warps > 1:
        return s.rows
    return min(max(_ROWS, _common.next_power_of_2(rows)), s.rows)


class _Rows(NamedTuple):
    """Which query a row is."""

    number: jax.Array  # int32 [R]
    is_row: jax.Array  # bool [R]
    t: jax.Array  # int32 [R]
    head: jax.Array  # int32 [R], of the query's heads
    position: jax.Array  # int32 [R], -1 for padding


class _Tiles(NamedTuple):
    """Numbers of tiles: first, the first and past the last that all rows see whole, end."""

    first: jax.Array
    whole: jax.Array
    whole_end: jax.Array
    end: jax.Array
    seen_first: jax.Array  # the tokens that some row sees are from here ..
    seen_last: jax.Array  # .. to here


def _kernel(
    q_ref: Ref,
    key: Side,
    value: Side,
    tables_ref: Ref,
    lengths_ref: Ref,
    query_lengths_ref: Ref,
    factor_ref: Ref,
    o_ref: Ref,
    m_ref: Ref,
    l_ref: Ref,
    *,
    s: Settings,
) -> None:
    part, pair = pl.program_id(1), pl.program_id(2)
    rows = _rows(q_ref, key, lengths_ref, query_lengths_ref, s)
    place, tiles = _place(key), _tiles(rows, part, s)
    keys, values = vectors(key, s.key_codec), vectors(value, s.value_codec)

    @pl.when(tiles.first < tiles.end)
    def _() -> None:
        state = _attend(rows, tiles, place, q_ref, keys, values, tables_ref, factor_ref, s)
        for o, channel in zip(_centred(state, s), values.channels, strict=True):
            mask = rows.is_row[None, :] & (channel < q_ref.shape[3])[:, None]
            to = o_ref.at[pair, part, rows.number[None, :], channel[:, None]]
            plgpu.store(to, o, mask=mask)
        plgpu.store(m_ref.at[pair, part, rows.number], state.m, mask=rows.is_row)
        plgpu.store(l_ref.at[pair, part, rows.number], state.l, mask=rows.is_row)


def _single_kernel(
    q_ref: Ref,
    key: Side,
    value: Side,
    tables_ref: Ref,
    lengths_ref: Ref,
    query_lengths_ref: Ref,
    factor_ref: Ref,
    out_ref: Ref,
    lse_ref: Ref,
    *,
    s: Settings,
) -> None:
    """Rows of one KV head, if there is only one part: the result."""
    rows = _rows(q_ref, key, lengths_ref, query_lengths_ref, s)
    place, tiles = _place(key), _tiles(rows, pl.program_id(1), s)
    keys, values = vectors(key, s.key_codec), vectors(value, s.value_codec)
    state = _attend(rows, tiles, place, q_ref, keys, values, tables_ref, factor_ref, s)
    is_query = rows.position >= 0
    for o, channel in zip(_centred(state, s), values.channels, strict=True):
        out, _ = finish(o, finite(state.m), state.l)
        out = jnp.where(is_query[None, :], out, 0.0)
        mask = rows.is_row[None, :] & (channel < q_ref.shape[3])[:, None]
        to = out_ref.at[place.sequence, rows.t[None, :], rows.head[None, :], channel[:, None]]
        plgpu.store(to, out, mask=mask)
    _, lse = finish(state.outputs[0], finite(state.m), state.l)
    to = lse_ref.at[place.sequence, rows.t, rows.head]
    plgpu.store(to, jnp.where(is_query, lse, -jnp.inf), mask=rows.is_row)


def _place(key: Side) -> Place:
    kv_heads, pair = key.data.shape[1], pl.program_id(2)
    return Place(pair // kv_heads, pair % kv_heads)


def _rows(q_ref: Ref, key: Side, lengths_ref: Ref, query_lengths_ref: Ref, s: Settings) -> _Rows:
    _, tokens, heads, _ = q_ref.shape
    kv_heads = key.data.shape[1]
    group = heads // kv_heads
    count = _tile_rows(group * tokens, s)
    pair = pl.program_id(2)
    length, real = (
        plgpu.load(ref.at[pair // kv_heads]) for ref in (lengths_ref, query_lengths_ref)
    )
    number = pl.program_id(0) * count + jnp.arange(count, dtype=jnp.int32)
    is_row = number < group * tokens
    t = number % tokens
    head = pair % kv_heads * group + number // tokens
    position = jnp.where(is_row & (t < real), length - real + t, -1)
    return _Rows(number, is_row, t, head, position)


def _tiles(rows: _Rows, part: jax.Array, s: Settings) -> _Tiles:
    """What the rows see of a part."""
    last = jnp.max(rows.position)
    earliest = jnp.min(jnp.where(rows.position >= 0, rows.position, _NO_POSITION))
    seen_first, whole = jnp.int32(0), jnp.int32(0)
    if s.window is not None:
        seen_first = jnp.maximum(earliest - s.window[0], 0)
        whole = jnp.maximum(last - s.window[0] + s.tile - 1, 0) // s.tile
    in_part = s.part // s.tile
    first = jnp.maximum(seen_first // s.tile, part * in_part)
    end = jnp.minimum((last + s.tile) // s.tile, (part + 1) * in_part)
    end = jnp.maximum(end, first)
    whole = jnp.clip(whole, first, end)
    whole_end = jnp.clip((earliest + 1) // s.tile, whole, end)
    return _Tiles(first, whole, whole_end, end, seen_first, last)


def _attend(
    rows: _Rows,
    tiles: _Tiles,
    place: Place,
    q_ref: Ref,
    key: Vectors,
    value: Vectors,
    tables_ref: Ref,
    factor_ref: Ref,
    s: Settings,
) -> _State:
    """Attends rows to tiles; only tiles that some row does not see whole are masked."""
    query = _load_query(q_ref, factor_ref, rows, place, key, s)
    count = rows.number.shape[0]
    empty = jnp.zeros((value.column.shape[0], count), jnp.float32)
    state = _State(
        outputs=tuple(empty for _ in value.channels),
        weights=None if value.codec is None else jnp.zeros((_NARROWEST, count), jnp.float32),
        m=jnp.full(count, -jnp.inf, jnp.float32),
        l=jnp.zeros(count, jnp.float32),
    )
    step = functools.partial(
        _step, query=query, key=key, value=value, tables_ref=tables_ref, place=place, s=s
    )
    masked = functools.partial(step, tiles=tiles, shared=q_ref.shape[1] == 1)
    if s.window is not None:
        state = jax.lax.fori_loop(tiles.first, tiles.whole, masked, state)
    state = jax.lax.fori_loop(tiles.whole, tiles.whole_end, step, state)
    return jax.lax.fori_loop(tiles.whole_end, tiles.end, masked, state)


def _load_query(
    q_ref: Ref, factor_ref: Ref, rows: _Rows, place: Place, key: Vectors, s: Settings
) -> _Query:
    """The rows, in float16 for keys of 8 bits or fewer."""
    pieces = tuple(
        plgpu.load(
            q_ref.at[place.sequence, rows.t[:, None], rows.head[:, None], channel[None, :]],
            mask=rows.is_row[:, None] & (channel < q_ref.shape[3])[None, :],
            other=0,
        )
        for channel in key.channels
    )
    scale = plgpu.load(factor_ref.at[jnp.zeros_like(rows.number)])
    if s.soft_cap is None:
        scale = scale * _common.LOG2_E
    offset = None
    if key.side.data.dtype.itemsize == 1:
        pieces, powers = _paged_codes.to_float16(pieces)
        scale = scale * powers
    if key.codec is not None:
        unit = _paged_codes.key_unit(s.interpret)
        sums = (jnp.sum(x.astype(jnp.float32), axis=1) for x in pieces)
        total = functools.reduce(jnp.add, sums)
        offset, scale = total * (key.codec.half * unit), scale * (1 / unit)
    return _Query(pieces, scale, offset, rows.position)


def _step(
    i: jax.Array,
    state: _State,
    *,
    query: _Query,
    key: Vectors,
    value: Vectors,
    tables_ref: Ref,
    place: Place,
    s: Settings,
    tiles: _Tiles | None = None,
    shared: bool = True,
) -> _State:
    """Attends to tile `i`; tokens are rows and queries columns.

    `tiles` says what rows see, and is None if all see the tile whole; `shared` says whether all
    rows see the same tokens.
    """
    token = i * s.tile + jnp.arange(s.tile, dtype=jnp.int32)
    page, slot = locate(i, token, tables_ref, place, key.side.data.shape[2], s)
    keys = load(key, page, slot, place, None, _paged_codes.KEYS, s)
    some = None
    if tiles is not None:
        some = (token >= tiles.seen_first) & (token <= tiles.seen_last)
    values = load(value, page, slot, place, some, _paged_codes.VALUES, s)

    products = (_common.dot(x, q, s.interpret) for x, q in zip(keys, query.pieces, strict=True))
    scores = functools.reduce(jnp.add, products)
    if query.offset is not None:
        scores = scores - query.offset[None, :]
    if key.side.norm is not None:
        scores = scores * norm(key.side, page, slot, place)[:, None]
    scores = scores * query.scale[None, :]
    if s.soft_cap is not None:
        scores = _common.soft_cap(scores, s.soft_cap) * _common.LOG2_E
    visible = None if tiles is None else _visible(query, token, s)
    if visible is not None:
        scores = jnp.where(visible, scores, -jnp.inf)
    new = jnp.maximum(state.m, jnp.max(scores, axis=0))
    shift = finite(new)
    # A column that sees nothing has no maximum but only zero weights: 2 ** -inf.
    p = _common.exp2(scores - shift[None, :], s.interpret)
    alpha = _common.exp2(state.m - shift, s.interpret)

    weights = p
    if value.side.norm is not None:
        weights = p * norm(value.side, page, slot, place)[:, None]
        if visible is not None:  # not even as 0 * NaN
            weights = jnp.where(visible, weights, 0.0)
    weights = weights.astype(values[0].dtype)
    product = functools.partial(_common.dot, interpret=s.interpret, contracting=(0, 0))
    # Values with norms are integers, and finite.
    hidden = visible if value.side.norm is None and not shared else None
    outputs = tuple(
        _add(o * alpha[None, :], x, weights, hidden, product)
        for o, x in zip(state.outputs, values, strict=True)
    )
    sums = state.weights
    if sums is not None:
        ones = jnp.ones((s.tile, _NARROWEST), weights.dtype)
        sums = sums * alpha[None, :] + product(ones, weights)
    return _State(outputs, sums, new, state.l * alpha + jnp.sum(p, axis=0))


def _add(
    o: jax.Array,
    x: jax.Array,
    weights: jax.Array,
    visible: jax.Array | None,
    product: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """Adds the product of values and weights; NaN in what a row does not see does not reach it.

    `o` is float32 ``[c, R]``, `x` values ``[t, c]``, `weights` ``[t, R]``, 0 where not visible;
    `visible` is bool ``[t, R]``, or None if everything that some row does not see is 0 in `x`.
    """
    if visible is None:
        return o + product(x, weights)
    is_finite = jnp.abs(x.astype(jnp.float32)) < jnp.inf
    clean = jnp.where(is_finite, x, jnp.zeros_like(x))
    spoiled = jnp.where(is_finite, jnp.zeros_like(x), jnp.ones_like(x))
    count = product(spoiled, visible.astype(x.dtype))
    return jnp.where(count > 0, jnp.nan, o + product(clean, weights))


def _visible(query: _Query, token: jax.Array, s: Settings) -> jax.Array:
    """Which tokens each query sees, ``[t, R]``: none past its own, so none past the length."""
    q, k = query.position[None, :], token[:, None]
    return k <= q if s.window is None else (k <= q) & (k >= q - s.window[0])


def _centred(state: _State, s: Settings) -> tuple[jax.Array, ...]:
    """The outputs less the offset of the codes' operands, see `_paged_codes`."""
    if s.value_codec is None or state.weights is None:
        return state.outputs
    # The rows are all the same.
    total = jnp.max(state.weights, axis=0) * (s.value_codec.half + _paged_codes.VALUE_OFFSET)
    return tuple(o - total[None, :] for o in state.outputs)
