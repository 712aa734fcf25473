"""Prefill attention on quantized operands (TurboAttention, Algorithm 1).

Roofline, for 2 sequences of 8,192 tokens, 32 query heads on 8 of 128 channels, not causal: 2.2 T
operations, 1.4 ms at 1,550 T/s in int8 on an H100; the softmax 1.5 ms, which the matrix units do
not hide here; bytes 0.08 ms. Target: 400 T/s. Seen: 456 with blocks of 64, 588 with 128; SAS 346
and 416. What bounds it: 8 instructions a score, 17 with SAS, and no overlap of products and softmax
within a program.

One program takes a tile of queries of one head and walks over the key blocks that some of them
see, those that all of them see without a mask.

Roofline in full and versions: `docs/kernels/triton.md`.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import varying
from pallas_kernels.triton import _common
from pallas_kernels.triton._common import Exponential, Ref
from pallas_kernels.triton._packed import Span, whole

_TINY = 1.1754943508222875e-38
_State = tuple[jax.Array, jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class Settings:
    mode: str  # ``"int8"``, ``"int8_fp8"``, ``"fp8"`` or ``"float"``
    exp: Exponential  # the softmax's exponential
    unit: float  # how many units of its argument are one nat
    block_q: int  # query tokens that share a scale
    block_kv: int  # tokens of a key block
    scale: float
    is_causal: bool
    window: tuple[int, int] | None
    soft_cap: float | None
    tile: int  # query tokens of a program
    num_warps: int
    num_stages: int
    interpret: bool


class ScoreModifiers(NamedTuple):
    """Optional arrays of a call (in the kernel refs); None where it has none."""

    # Int32 ``[B]``, by how much a query's position exceeds a key's of the same index.
    shift: Ref | None = None
    query_segments: Ref | None = None  # int32 ``[B, T]``
    key_segments: Ref | None = None  # int32 ``[B, S]``
    # Int32 ``[B, tiles, 2]``: for each tile of queries the key blocks ``first <= j < last`` outside
    # which none is of their segments.
    ranges: Ref | None = None
    # Int32 ``[B, T]``, 0 to `S`: keys of lower numbers are hidden from a query.
    starts: Ref | None = None
    ends: Ref | None = None  # int32 ``[B, T]`` beside them: so are keys from there on
    bias: Ref | None = None  # ``[B or 1, N or 1, T or 1, S]``, added to the scores
    slopes: Ref | None = None  # float32 ``[N]``: ``-slope * |distance|`` is added
    sinks: Ref | None = None  # float32 ``[N]``, logits in the denominators


NO_MODIFIERS = ScoreModifiers()  # A call that has none of them


class _Query(NamedTuple):
    """A program's tile of queries."""

    codes: jax.Array  # [tile, H]
    scale: jax.Array  # float32 [tile]
    position: jax.Array  # int32 [tile]
    first: jax.Array  # int32 scalar
    last: jax.Array  # int32 scalar, the last one that is real
    is_shifted: bool  # whether positions are not indices
    segment: jax.Array | None  # int32 [tile]
    bounds: tuple[jax.Array, jax.Array] | None  # int32 [tile], of key numbers
    modifiers: "_TileModifiers"

    def moved(self, shift: jax.Array) -> "_Query":
        places = {name: getattr(self, name) + shift for name in ("position", "first", "last")}
        return self._replace(**places, is_shifted=True)


class _TileModifiers(NamedTuple):
    """The refs of `ScoreModifiers` for a tile of queries of one head, or their contents."""

    sequence: jax.Array  # int32 scalar
    key_segments: Ref | None
    bias: Ref | None
    bias_at: tuple[jax.Array, ...]  # sequence, head and queries, as the bias has them
    slope: jax.Array | None  # float32 scalar


def _load(ref: Ref, at: tuple[jax.Array, ...], rows: jax.Array, channels: Span) -> jax.Array:
    mask = channels.mask()
    return plgpu.load(
        ref.at[(*at, rows[:, None], channels.positions()[None, :])],
        mask=None if mask is None else mask[None, :],
        other=None if mask is None else jnp.zeros((), ref.dtype),
    )


def _key_range(query: _Query, length: jax.Array, s: Settings) -> tuple[jax.Array, ...]:
    """Blocks that some query sees, ``first <= j < last``, and within them those that all see."""
    zero = jnp.int32(0)
    start, stop = zero, length
    full_start, full_stop = zero, length
    if s.is_causal:
        stop, full_stop = jnp.minimum(stop, query.last + 1), jnp.minimum(length, query.first + 1)
    if s.window is not None:
        left, right = s.window
        start, stop = jnp.maximum(query.first - left, 0), jnp.minimum(stop, query.last + right + 1)
        full_start = jnp.maximum(query.last - left, 0)
        full_stop = jnp.minimum(full_stop, query.first + right + 1)
    block = s.block_kv
    if query.is_shifted:
        stop = jnp.maximum(stop, 0)
        start = jnp.minimum(start, stop)
    first, last = start // block, (stop + block - 1) // block
    full_first = jnp.clip((full_start + block - 1) // block, first, last)
    full_last = jnp.clip(jnp.maximum(full_stop, 0) // block, full_first, last)
    return first, full_first, full_last, last


def _within_bounds(
    found: tuple[jax.Array, ...], bounds: tuple[jax.Array, jax.Array], real: jax.Array, block: int
) -> tuple[jax.Array, ...]:
    """The blocks that `_key_range` found, less those that bounds hide from all or some queries.

    Only `real` queries count, and for the blocks that some see those that see a key at all.
    """
    first, full_first, full_last, last = found
    start, end = bounds
    far = jnp.int32(2**30)
    some = real & (start < end)
    least = jnp.min(jnp.where(some, start, far))
    most = jnp.max(jnp.where(some, end, 0))
    first = jnp.maximum(first, least // block)
    last = jnp.maximum(jnp.minimum(last, (most + block - 1) // block), first)
    latest = jnp.max(jnp.where(real, start, 0))
    earliest = jnp.min(jnp.where(real, end, far))
    full_first = jnp.clip(jnp.maximum(full_first, (latest + block - 1) // block), first, last)
    full_last = jnp.clip(jnp.minimum(full_last, earliest // block), full_first, last)
    return first, full_first, full_last, last


def _mask(query: _Query, position: jax.Array, length: jax.Array, s: Settings) -> jax.Array:
    q, k = query.position[:, None], position[None, :]
    mask = jnp.broadcast_to(k < length, (q.shape[0], k.shape[1]))
    if s.is_causal:
        mask = mask & (k <= q)
    if s.window is not None:
        mask = mask & (k >= q - s.window[0]) & (k <= q + s.window[1])
    segments = query.modifiers.key_segments
    if segments is not None and query.segment is not None:
        at = query.modifiers.sequence, jnp.minimum(position, segments.shape[1] - 1)
        mask = mask & (query.segment[:, None] == plgpu.load(segments.at[at])[None, :])
    if query.bounds is not None:
        start, end = query.bounds
        mask = mask & (k >= start[:, None]) & (k < end[:, None])
    return mask


def _added(query: _Query, position: jax.Array) -> jax.Array | None:
    """What is added to the scores ``[tile, t]``: a bias, slopes times distances, or None."""
    modifiers, added = query.modifiers, None
    if modifiers.slope is not None:
        distance = jnp.abs(query.position[:, None] - position[None, :])
        added = -modifiers.slope * distance.astype(jnp.float32)
    if modifiers.bias is not None:
        b, head, rows = modifiers.bias_at
        inside = position < modifiers.bias.shape[3]
        at = modifiers.bias.at[b, head, rows[:, None], position[None, :]]
        mask = jnp.broadcast_to(inside[None, :], (rows.shape[0], position.shape[0]))
        zero = jnp.zeros((), modifiers.bias.dtype)
        bias = plgpu.load(at, mask=mask, other=zero).astype(jnp.float32)
        added = bias if added is None else bias + added
    return added


def _second_product(
    p: jax.Array, largest: jax.Array, v: jax.Array, s: Settings
) -> tuple[jax.Array, jax.Array | float]:
    """Rounded weights times values ``[H, t]``: float32 ``[tile, H]``, and its unit.

    The unit of e4m3 and of floating-point values is the same for all blocks, and left to the end.
    """
    dot = functools.partial(_common.dot, interpret=s.interpret)
    if s.mode == "int8":
        unit = largest * (1 / _common.INT8_RANGE)
        # So small a weight rounds to 0, and its reciprocal would be infinite.
        unit = jnp.where(unit < _TINY, 1.0, unit)
        codes = _common.round_product(p, (1 / unit)[:, None], s.interpret)
        return dot(codes, v).astype(jnp.float32), unit
    if s.mode in ("int8_fp8", "fp8"):
        return dot((p * _common.E4M3_MAX).astype(v.dtype), v), 1.0
    if v.dtype == jnp.float32:
        return dot(p, v), 1.0
    # Two 16-bit numbers hold a weight to 16 bits and more.
    high = p.astype(v.dtype)
    low = (p - high.astype(jnp.float32)).astype(v.dtype)
    # An infinite value times a weight is infinite; times 0, or with the other sign, NaN.
    rest = dot(low, v)
    return dot(high, v) + jnp.where(jnp.abs(rest) < jnp.inf, rest, 0.0), 1.0


def _scores(
    product: jax.Array,
    factor: jax.Array,
    mask: jax.Array | None,
    added: jax.Array | None,
    s: Settings,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Scores in the exponential's units as ``x * scale``, and their row maxima.

    Without a mask, a cap and additions the maximum is that of the products, and scaling and
    subtracting it are one instruction per score.
    """
    if mask is None and s.soft_cap is None and added is None:
        factor = factor * s.unit
        return product, factor, jnp.max(product, axis=1) * factor
    x = product * factor[:, None]
    if s.soft_cap is not None:
        x = _common.soft_cap(x, s.soft_cap)
    if added is not None:
        x = x + added
    x = x * s.unit
    if mask is not None:
        x = jnp.where(mask, x, -jnp.inf)
    return x, jnp.ones_like(factor), jnp.max(x, axis=1)


def _step(
    j: jax.Array,
    state: _State,
    *,
    query: _Query,
    refs: tuple[Ref, Ref, Ref, Ref],
    at: tuple[jax.Array, jax.Array],
    length: jax.Array,
    channels: Span,
    is_masked: bool,
    s: Settings,
) -> _State:
    k_ref, k_scale_ref, v_ref, v_scale_ref = refs
    exp = functools.partial(_common.evaluate, s.exp, interpret=s.interpret)
    o, m, l = state
    token = j * s.block_kv + jnp.arange(s.block_kv, dtype=jnp.int32)
    k = _load(k_ref, at, token, channels)
    product = _common.dot(query.codes, k, s.interpret).astype(jnp.float32)
    factor = query.scale * plgpu.load(k_scale_ref.at[(*at, j)])
    mask = _mask(query, token, length, s) if is_masked else None
    added = _added(query, token)
    if mask is not None and added is not None:
        mask = mask & (added != -jnp.inf)
    x, scale, block_max = _scores(product, factor, mask, added, s)
    new = jnp.maximum(m, block_max)
    shift = jnp.where(new > -jnp.inf, new, 0.0) if is_masked else new
    p = exp(_common.fma(x, scale[:, None], -shift[:, None], s.interpret))
    if s.mode == "float":
        # SAS loses a NaN score, which only operands that were not rounded can give.
        p = jnp.where(x == x, p, x)
    if mask is not None:
        p = jnp.where(mask, p, 0.0)
    v_mask = channels.mask()
    v = plgpu.load(
        v_ref.at[(*at, channels.positions()[:, None], token[None, :])],
        mask=None if v_mask is None else v_mask[:, None],
        other=None if v_mask is None else jnp.zeros((), v_ref.dtype),
    )
    output, unit = _second_product(p, exp(block_max - shift), v, s)
    if s.mode == "int8":
        output = output * (unit * plgpu.load(v_scale_ref.at[(*at, j)]))[:, None]
    # A maximum and SAS lose a NaN scale; the row sum brings it back.
    nan_or_zero = factor * 0.0
    if mask is not None:
        # Not by the maximum, which is -inf too where all that is visible is NaN.
        seen = jnp.max(jnp.where(mask, 1.0, 0.0), axis=1) > 0
        nan_or_zero = jnp.where(seen, nan_or_zero, 0.0)
        output = jnp.where(seen[:, None], output, 0.0)
    alpha = _common.exp2((m - shift) * (_common.LOG2_E / s.unit), s.interpret)
    o = _common.fma(o, alpha[:, None], output, s.interpret)
    return o, new, l * alpha + (jnp.sum(p, axis=1) + nan_or_zero)


def _kernel(
    q_ref: Ref,
    q_scale_ref: Ref,
    k_ref: Ref,
    k_scale_ref: Ref,
    v_ref: Ref,
    v_scale_ref: Ref,
    query_lengths_ref: Ref,
    key_lengths_ref: Ref,
    modifiers: ScoreModifiers,
    out_ref: Ref,
    lse_ref: Ref,
    *,
    s: Settings,
) -> None:
    _, heads, padded, _ = q_ref.shape
    tokens, head_dim = out_ref.shape[1], out_ref.shape[3]
    # The last tiles of a causal call have most to do: they start first.
    i = pl.num_programs(0) - 1 - pl.program_id(0)
    head, b = pl.program_id(1), pl.program_id(2)
    h = head // (heads // k_ref.shape[1])
    channels = whole(head_dim)
    first = i * s.tile
    position = first + jnp.arange(s.tile, dtype=jnp.int32)
    inside = jnp.minimum(position, padded - 1)
    query_length = plgpu.load(query_lengths_ref.at[b])
    length = plgpu.load(key_lengths_ref.at[b])
    shift = None if modifiers.shift is None else plgpu.load(modifiers.shift.at[b])
    segments = modifiers.query_segments
    last = jnp.minimum(first + s.tile, query_length) - 1
    bounds = None
    if modifiers.starts is not None and modifiers.ends is not None:
        row = jnp.minimum(position, modifiers.starts.shape[1] - 1)
        bounds = plgpu.load(modifiers.starts.at[b, row]), plgpu.load(modifiers.ends.at[b, row])
    codes = _load(q_ref, (b, head), inside, channels)
    query = _Query(
        # The factor of the scores stays positive, so that it does not move the maximum.
        codes=codes if s.scale >= 0 else (-codes.astype(jnp.float32)).astype(codes.dtype),
        scale=plgpu.load(q_scale_ref.at[b, head, inside // s.block_q]) * abs(s.scale),
        position=position,
        first=first,
        last=last,
        is_shifted=False,
        segment=None
        if segments is None
        else plgpu.load(segments.at[b, jnp.minimum(position, segments.shape[1] - 1)]),
        bounds=bounds,
        modifiers=_of_tile(modifiers, b, head, position),
    )
    if shift is not None:
        query = query.moved(shift)
    step = functools.partial(
        _step,
        query=query,
        refs=(k_ref, k_scale_ref, v_ref, v_scale_ref),
        at=(b, h),
        length=length,
        channels=channels,
        s=s,
    )
    found = _key_range(query, length, s)
    if bounds is not None:
        found = _within_bounds(found, bounds, position < query_length, s.block_kv)
    start, full_start, full_stop, stop = found
    # Nothing to see for a tile of padding.
    stop = jnp.where(last < first, start, stop)
    if modifiers.ranges is not None:
        start = jnp.maximum(start, plgpu.load(modifiers.ranges.at[b, i, jnp.int32(0)]))
        stop = jnp.maximum(
            jnp.minimum(stop, plgpu.load(modifiers.ranges.at[b, i, jnp.int32(1)])), start
        )
    if modifiers.ranges is not None or modifiers.bias is not None:
        full_start = full_stop = start  # every block has its mask
    full_stop = jnp.minimum(full_stop, stop)
    state = (
        jnp.zeros((s.tile, channels.padded), jnp.float32),
        jnp.full((s.tile,), -jnp.inf, jnp.float32),
        jnp.zeros((s.tile,), jnp.float32),
    )
    if s.window is not None or bounds is not None:
        before = functools.partial(step, is_masked=True)
        state = jax.lax.fori_loop(start, jnp.minimum(full_start, stop), before, state)
    state = jax.lax.fori_loop(
        full_start, full_stop, functools.partial(step, is_masked=False), state
    )
    after = functools.partial(step, is_masked=True)
    o, m, l = jax.lax.fori_loop(jnp.maximum(full_start, full_stop), stop, after, state)

    if s.mode in ("int8_fp8", "fp8"):
        o = o * (plgpu.load(v_scale_ref.at[b, h, jnp.int32(0)]) * (1 / _common.E4M3_MAX))
    nothing = (l == 0) | (position >= query_length)
    total = jnp.where(nothing, 1.0, l)
    out = jnp.where(nothing[:, None], 0.0, o * (1 / total)[:, None])
    lse = jnp.where(nothing, -jnp.inf, m / s.unit + jnp.log(total))
    if modifiers.sinks is not None:
        out, lse = _with_sink(
            out, lse, plgpu.load(modifiers.sinks.at[head]), position < query_length
        )
    c = jnp.arange(channels.padded, dtype=jnp.int32)
    is_token = position < tokens
    plgpu.store(
        out_ref.at[b, position[:, None], head, c[None, :]],
        out.astype(out_ref.dtype),
        mask=is_token[:, None] & (c < head_dim)[None, :],
    )
    plgpu.store(lse_ref.at[b, position, head], lse, mask=is_token)


def _of_tile(
    modifiers: ScoreModifiers, b: jax.Array, head: jax.Array, position: jax.Array
) -> _TileModifiers:
    """A tile's share of the modifiers, for the queries at these indices."""
    bias, zero = modifiers.bias, jnp.int32(0)
    at: tuple[jax.Array, ...] = ()
    if bias is not None:
        rows = jnp.minimum(position, bias.shape[2] - 1)
        at = (b if bias.shape[0] > 1 else zero, head if bias.shape[1] > 1 else zero, rows)
    return _TileModifiers(
        sequence=b,
        key_segments=modifiers.key_segments,
        bias=bias,
        bias_at=at,
        slope=None if modifiers.slopes is None else plgpu.load(modifiers.slopes.at[head]),
    )


def _with_sink(
    out: jax.Array, lse: jax.Array, sink: jax.Array, real: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Outputs ``[tile, H]`` and log-sum-exps, with a sink's weight in the denominator."""
    largest = jnp.maximum(lse, sink)
    shift = jnp.where(largest == -jnp.inf, 0.0, largest)
    weight = jnp.exp(lse - shift)
    total = weight + jnp.exp(sink - shift)
    share = jnp.where(total == 0, 0.0, weight / jnp.where(total == 0, 1.0, total))
    total = jnp.where(total == 0, -jnp.inf, shift + jnp.log(jnp.where(total == 0, 1.0, total)))
    share = jnp.where(real, share, 1.0)
    return out * share[:, None], jnp.where(real, total, lse)


def attention(
    q: jax.Array,
    q_scale: jax.Array,
    k: jax.Array,
    k_scale: jax.Array,
    v: jax.Array,
    v_scale: jax.Array,
    query_lengths: jax.Array,
    key_lengths: jax.Array,
    *,
    tokens: int,
    dtype: jax.typing.DTypeLike,
    settings: Settings,
    modifiers: ScoreModifiers = NO_MODIFIERS,
) -> tuple[jax.Array, jax.Array]:
    """Attends with operands that are already quantized, or in floating point.

    As `mosaic.hopper.attention.attention`, but keys are in the order of tokens, queries always come
    with their scales, and results are ``[B, T, N, H]`` and the float32 log-sum-exp ``[B, T, N]``.
    Shifts, segments, bounds, slopes and sinks are in `modifiers`.
    """
    batch, heads, _, head_dim = q.shape
    return varying.pallas_call(
        functools.partial(_kernel, s=settings),
        grid=(pl.cdiv(tokens, settings.tile), heads, batch),
        in_specs=[*[_common.WHOLE] * 8, jax.tree.map(lambda _: _common.WHOLE, modifiers)],
        out_specs=[_common.WHOLE] * 2,
        out_shape=[
            jax.ShapeDtypeStruct((batch, tokens, heads, head_dim), dtype),
            jax.ShapeDtypeStruct((batch, tokens, heads), jnp.float32),
        ],
        compiler_params=_common.parameters(settings.num_warps, settings.num_stages),
        interpret=settings.interpret,
        name="turbojax_attention",
    )(q, q_scale, k, k_scale, v, v_scale, query_lengths, key_lengths, modifiers)
