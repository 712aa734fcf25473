"""Decode: a few new queries per sequence against keys and 4-bit values with a scale per token.

Roofline, for 16 sequences of 32,768 tokens, 8 KV heads of 4 queries each, head dim 128: KV4 554 MB,
K8V4 822, on an H100 185 and 274 us, on an H200 129 and 192; operations 22 us, unpacking 50. Memory
is the floor. Target: 60 % of its speed, K8V4 70 %. Seen on an H200: 253 and 308 us, 51 and 62 %.
1,024 programs of one warp are too few for KV4 to hide memory.

Keys are 4-bit codes, as the values (KV4), or e4m3 (K8V4).

One program takes one KV head of one sequence, all its query heads, and a run of tiles of tokens,
as far as that sequence goes: programs past its length stop at once. Tokens, and channels of values,
are the rows of the products, as in `decode`: queries are few, and eight columns are the fewest that
a product takes. A byte of codes holds channels `c` and ``c + H/2``, so each product is one of low
nibbles and one of high ones; e4m3 keys are loaded in the same halves, so that a warp holds one of
them at a time. Codes as bfloat16 are exact, and so are the queries they meet, which are e4m3
values. e4m3 keys as float16 are exact, and queries, over a power of two, keep 11 bits: all that
bfloat16 and float16 have. Weights times values' scales are rounded to bfloat16. Softmax online,
programs merged by log-sum-exp (`merge`).

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
from pallas_kernels.triton import _common
from pallas_kernels.triton._common import Ref, quantize_rows
from pallas_kernels.triton._merge import merge
from pallas_kernels.triton._paged_codes import fp8_to_float16, to_float16

# Columns of the smallest matrix product, and terms of its sum.
_ROWS, _NARROWEST = 8, 16

# Nibbles of four bytes as four bfloat16: with its sign bit flipped a nibble is the code plus 8, and
# below 0x43, the upper byte of 128, that plus 128.
_UNPACK = """{{
.reg .b32 x, one, offset;
mov.b32 one, 0x3F803F80;
mov.b32 offset, 0xC308C308;
shr.u32 x, $2, {shift};
lop3.b32 x, x, 0x0F0F0F0F, 0x08080808, 0x6A;
prmt.b32 $0, x, 0x43434343, 0x4140;
prmt.b32 $1, x, 0x43434343, 0x4342;
fma.rn.bf16x2 $0, $0, one, offset;
fma.rn.bf16x2 $1, $1, one, offset;
}}"""

_ToOperand = Callable[[tuple[jax.Array, ...]], tuple[tuple[jax.Array, ...], jax.Array]]
"""Rows ``[R, c]``, in parts of their channels, as an operand, and their scales ``[R]``."""

_State = tuple[tuple[jax.Array, jax.Array], jax.Array, jax.Array]
"""Outputs of both halves of the channels ``[c, R]``, maxima in powers of two and sums ``[R]``."""


@dataclasses.dataclass(frozen=True)
class Settings:
    scale: float
    window: tuple[int, int] | None
    soft_cap: float | None
    tile: int  # tokens taken at a time, a power of two from 16; the cache holds whole tiles
    splits: int  # programs that share a KV head's tokens
    num_warps: int
    num_stages: int
    interpret: bool
    out_dtype: str | None = None  # of the output, ``"float32"``; None for the queries'


class Side(NamedTuple):
    """Keys or values: packed codes uint8 ``[B, K, S, H / 2]``, scales bfloat16 ``[B, K, S]``.

    Keys may be float8_e4m3fn ``[B, K, S, H]`` instead.
    """

    codes: Ref
    scale: Ref


class _Query(NamedTuple):
    """A program's queries and their positions."""

    halves: tuple[jax.Array, ...]  # of the channels, [R, c]: e4m3 values as bfloat16, or float16
    scale: jax.Array  # float32 [R], of the scores too
    position: jax.Array  # int32 [R]
    is_real: jax.Array  # bool [R]


def decode(
    query: jax.Array,
    key: Side,
    value: Side,
    lengths: jax.Array,
    query_lengths: jax.Array,
    settings: Settings,
) -> tuple[jax.Array, jax.Array]:
    """Attends the last `T` cached tokens' queries to a cache.

    `query` is ``[B, T, N, H]``; the cache has `S` tokens, a multiple of the tile. int32 ``[B]``:
    `lengths`, tokens seen so far, past which what is stored is not used; `query_lengths`, how many
    of the `T` queries are real. With a window the cache may be a rolling buffer: token `p` is in
    row ``p % S``, and every token that a query sees is there. Returns ``[B, T, N, H]`` in the
    query's dtype, or the settings', and the float32 log-sum-exp ``[B, T, N]``.
    """
    batch, tokens, heads, head_dim = query.shape
    kv_heads = key.scale.shape[1]
    rows, pairs = heads // kv_heads * tokens, batch * kv_heads
    arguments = (query, key, value, lengths, query_lengths)
    o, m, l = varying.pallas_call(
        functools.partial(_kernel, s=settings),
        grid=(pairs, settings.splits),
        in_specs=jax.tree.map(lambda _: _common.WHOLE, arguments),
        out_specs=[_common.WHOLE] * 3,
        out_shape=[
            jax.ShapeDtypeStruct((pairs, settings.splits, rows, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((pairs, settings.splits, rows), jnp.float32),
            jax.ShapeDtypeStruct((pairs, settings.splits, rows), jnp.float32),
        ],
        compiler_params=_common.parameters(settings.num_warps, settings.num_stages),
        interpret=settings.interpret,
        name="turbojax_kv4_decode",
    )(*arguments)
    result = jax.ShapeDtypeStruct(query.shape, settings.out_dtype or query.dtype)
    return merge(o, m, l, result, kv_heads, settings.interpret)


def _kernel(
    q_ref: Ref,
    key: Side,
    value: Side,
    lengths_ref: Ref,
    query_lengths_ref: Ref,
    o_ref: Ref,
    m_ref: Ref,
    l_ref: Ref,
    *,
    s: Settings,
) -> None:
    kv_heads, half = key.scale.shape[1], value.codes.shape[3]
    _, tokens, heads, _ = q_ref.shape
    group = heads // kv_heads
    pair, split = pl.program_id(0), pl.program_id(1)
    at = pair // kv_heads, pair % kv_heads
    length, query_length = (plgpu.load(ref.at[at[0]]) for ref in (lengths_ref, query_lengths_ref))
    begin = length - query_length
    rows = max(_ROWS, _common.next_power_of_2(group * tokens))
    channel = jnp.arange(max(_NARROWEST, _common.next_power_of_2(half)), dtype=jnp.int32)
    to_operand = _to_e4m3 if key.codes.dtype == jnp.uint8 else to_float16
    query = _load_query(q_ref, at, channel, rows, group, half, begin, query_length, to_operand, s)

    tiles, first = (length + s.tile - 1) // s.tile, jnp.int32(0)
    if s.window is not None:
        first = jnp.clip((begin - s.window[0]) // s.tile, 0, tiles)
    share = (tiles - first + s.splits - 1) // s.splits
    start = first + split * share
    step = functools.partial(_step, query=query, key=key, value=value, at=at, channel=channel, s=s)
    empty = jnp.zeros((channel.shape[0], rows), jnp.float32)
    state = (empty, empty), jnp.full(rows, -jnp.inf, jnp.float32), jnp.zeros(rows, jnp.float32)
    stop = jnp.minimum(start + share, tiles)
    outputs, m, l = jax.lax.fori_loop(start, stop, step, state)

    r = jnp.arange(rows, dtype=jnp.int32)
    is_row = r < group * tokens
    mask = is_row[None, :] & (channel < half)[:, None]
    for offset, o in zip((0, half), outputs, strict=True):
        to = o_ref.at[pair, split, r[None, :], offset + channel[:, None]]
        plgpu.store(to, o, mask=mask)
    plgpu.store(m_ref.at[pair, split, r], m, mask=is_row)
    plgpu.store(l_ref.at[pair, split, r], l, mask=is_row)


def _load_query(
    q_ref: Ref,
    at: tuple[jax.Array, jax.Array],
    channel: jax.Array,
    rows: int,
    group: int,
    half: int,
    begin: jax.Array,
    query_length: jax.Array,
    to_operand: _ToOperand,
    s: Settings,
) -> _Query:
    """A KV head's query rows, row ``g * T + t``, each as the products with keys need it."""
    tokens = q_ref.shape[1]
    r = jnp.arange(rows, dtype=jnp.int32)
    is_row = r < group * tokens
    t, head = r % tokens, at[1] * group + jnp.minimum(r // tokens, group - 1)
    mask = is_row[:, None] & (channel < half)[None, :]
    low, high = (
        plgpu.load(
            q_ref.at[at[0], t[:, None], head[:, None], offset + channel[None, :]],
            mask=mask,
            other=0,
        )
        for offset in (0, half)
    )
    halves, scale = to_operand((low, high))
    return _Query(halves, scale * s.scale, begin + t, is_row & (t < query_length))


def _to_e4m3(parts: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Rows rounded to e4m3 values, which bfloat16 holds."""
    return quantize_rows(parts, "fp8")


def _step(
    i: jax.Array,
    state: _State,
    *,
    query: _Query,
    key: Side,
    value: Side,
    at: tuple[jax.Array, jax.Array],
    channel: jax.Array,
    s: Settings,
) -> _State:
    """Attends to tile `i`; tokens are rows and queries columns."""
    outputs, m, l = state
    offset = jnp.arange(s.tile, dtype=jnp.int32)
    token = i * s.tile + offset
    # What has a window may be a rolling buffer.
    row = token if s.window is None else i % (key.scale.shape[2] // s.tile) * s.tile + offset
    scores, key_scale = _scores(query, key, at, row, channel, s)
    visible = _visible(query, token, s)
    scores = jnp.where(visible, scores * key_scale[:, None] * query.scale[None, :], -jnp.inf)
    if s.soft_cap is not None:
        scores = jnp.where(visible, _common.soft_cap(scores, s.soft_cap), -jnp.inf)
    scores = scores * _common.LOG2_E
    new = jnp.maximum(m, jnp.max(scores, axis=0))
    shift = jnp.where(new > -jnp.inf, new, 0.0)
    # A column that sees nothing has no maximum but only zero weights: 2 ** -inf.
    p = _common.exp2(scores - shift[None, :], s.interpret)
    alpha = _common.exp2(m - shift, s.interpret)

    value_scale = plgpu.load(value.scale.at[(*at, row)]).astype(jnp.float32)
    # What a query does not see must not reach it, not even as 0 * NaN.
    weights = jnp.where(visible, p * value_scale[:, None], 0.0).astype(jnp.bfloat16)
    low, high = _load_operands(value, at, row, channel, s)
    product = functools.partial(_common.dot, b=weights, interpret=s.interpret, contracting=(0, 0))
    outputs = (
        outputs[0] * alpha[None, :] + product(low),
        outputs[1] * alpha[None, :] + product(high),
    )
    return outputs, new, l * alpha + jnp.sum(p, axis=0)


def _scores(
    query: _Query,
    key: Side,
    at: tuple[jax.Array, jax.Array],
    token: jax.Array,
    channel: jax.Array,
    s: Settings,
) -> tuple[jax.Array, jax.Array]:
    """Products of codes ``[t, R]``, and the tokens' scales."""
    low, high = _load_operands(key, at, token, channel, s)
    products = _common.dot(low, query.halves[0], s.interpret)
    products = products + _common.dot(high, query.halves[1], s.interpret)
    return products, plgpu.load(key.scale.at[(*at, token)]).astype(jnp.float32)


def _load_operands(
    side: Side,
    at_head: tuple[jax.Array, jax.Array],
    token: jax.Array,
    channel: jax.Array,
    s: Settings,
) -> tuple[jax.Array, jax.Array]:
    """Both halves of the channels ``[t, c]``: codes as bfloat16, e4m3 as float16.

    Those of the padding are multiplied with queries that are 0 there, or make rows of the output
    that are not stored. They are masked, because an address chosen for each channel would be a load
    for each.
    """
    width = side.codes.shape[3]
    half = width if side.codes.dtype == jnp.uint8 else width // 2
    mask = None if channel.shape[0] == half else (channel < half)[None, :]

    def load(first: int) -> jax.Array:
        at = side.codes.at[(*at_head, token[:, None], first + channel[None, :])]
        other = 0 if side.codes.dtype == jnp.uint8 else 0.0
        return plgpu.load(at) if mask is None else plgpu.load(at, mask=mask, other=other)

    if half < width:
        low, high = (fp8_to_float16(load(first), s.interpret) for first in (0, half))
        return low, high
    tile = jax.lax.bitcast_convert_type(load(0), jnp.int8)
    low, high = (_nibbles(tile, shift, s.interpret) for shift in (0, 4))
    return low, high


def _nibbles(x: jax.Array, shift: int, interpret: bool) -> jax.Array:
    """The signed nibbles from bit `shift` on of int8 `x`, bfloat16."""
    if interpret:
        nibble = (x.astype(jnp.int32) >> shift) & 15
        return ((nibble ^ 8) - 8).astype(jnp.bfloat16)
    [out] = plgpu.elementwise_inline_asm(
        _UNPACK.format(shift=shift),
        args=[x],
        constraints="=r,=r,r",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)],
    )
    return out


def _visible(query: _Query, token: jax.Array, s: Settings) -> jax.Array:
    """Which tokens each query sees, ``[t, R]``: none past its own, so none past the length."""
    q, k = query.position[None, :], token[:, None]
    visible = (k <= q) & query.is_real[None, :]
    if s.window is not None:
        visible = visible & (k >= q - s.window[0]) & (k <= q + s.window[1])
    return visible
