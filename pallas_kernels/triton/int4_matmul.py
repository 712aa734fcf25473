"""INT4 weights times FP8 tokens (FireQ), on any GPU since Ampere.

Roofline, for weights of 14336 x 4096: 30 MB, 10 us at the 3.0 TB/s of a copy on an H100; 601 us of
operations for 4096 tokens, and 4 instructions for each weight and tile of tokens, 8 us. Seen: 30 us
for 16 tokens, 51 for 64, at a third to a fifth of the floor's speed; beyond, XLA in bfloat16 is
faster.

Weights are the rows of the products, tokens the columns: weights are converted in registers, of
which the matrix units take their first operand, and few tokens are a narrow product. Both operands
are float16, which holds every e4m3 value: products are exact, sums those of float32. A byte tile of
a group gives two operands of 64 inputs, low and high nibbles; the tokens come in that order
(`turbojax.matmul.int4.triton`). Where tiles are few, programs share a tile's groups and leave
float32 sums, which XLA adds up and finishes.

Roofline in full and versions: `docs/kernels/triton.md`.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import varying
from pallas_kernels.triton import _common, _e4m3
from pallas_kernels.triton._common import WHOLE, Ref, parameters

GROUP = 128
_BYTES = GROUP // 2
# Tiles of tokens that follow each other for one tile of outputs, which the L2 cache then holds.
_NEIGHBOURS = 8


@dataclasses.dataclass(frozen=True)
class Settings:
    tokens: int  # of a program, a power of two and at least 16
    outputs: int  # of a program, the same
    splits: int  # programs that share the groups of a tile
    num_warps: int
    num_stages: int  # steps in flight
    gated: bool  # whether rows are gate and up, in alternating groups of eight
    activation: str | None  # None, "silu" or "gelu"; "swiglu" or "geglu" exactly for gated weights
    has_e4m3: bool  # whether the GPU converts to e4m3
    interpret: bool


def matmul(
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    token_scale: jax.Array | None,
    output_scale: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    shape: tuple[int, int],
    dtype: jax.typing.DTypeLike,
    settings: Settings,
) -> jax.Array:
    """``activation(token_scale * output_scale * (x @ weights.T) + bias) + residual``, ``[M, N]``.

    `x` is float16 ``[M', K']``, exact e4m3 values, or unrounded tokens in float16 or bfloat16; each
    128 inputs in the order of the nibbles, low ones first. `M'` is a multiple of `settings.tokens`.
    `codes` are uint8 ``[N' / 64, K' / 128, 64, 64]``, tiles of 64 rows and 128 inputs. `scales` are
    ``[N' / 64, K' / g, 64]`` of groups of `g` inputs, 32, 64 or 128: uint8, the bits of e4m3
    scales, by which the weights are rounded to e4m3 values; or bfloat16 or float16, by which sums
    of groups are multiplied. `zeros`, int8 of that shape, are subtracted from the codes, never with
    e4m3 scales.

    `token_scale` is bfloat16 ``[M]``, or None for 1; `output_scale` and `bias` float32 ``[N']``;
    `residual` ``[M, N]``. `shape` is `M` and `N`, tokens and outputs: of gated weights at most half
    of `N'`, else `N'`.
    """
    s = settings
    (size, outputs), sides = shape, 2 if s.gated else 1
    tiles = (x.shape[0] // s.tokens, pl.cdiv(outputs, s.outputs))
    if token_scale is None:
        token_scale = jnp.ones((size,), jnp.bfloat16)
    vectors = [token_scale, output_scale]
    if bias is not None:
        vectors.append(bias)
    inputs = [x, codes, scales] if zeros is None else [x, codes, scales, zeros]
    has_zeros = zeros is not None
    if s.splits == 1:
        inputs += vectors if residual is None else [*vectors, residual]
        kernel = functools.partial(
            _finishing_kernel,
            tiles=tiles,
            has_zeros=has_zeros,
            has_bias=bias is not None,
            has_residual=residual is not None,
            s=s,
        )
        out = jax.ShapeDtypeStruct((size, outputs), dtype)
    else:
        kernel = functools.partial(_summing_kernel, tiles=tiles, has_zeros=has_zeros, s=s)
        out = jax.ShapeDtypeStruct((s.splits, sides, size, outputs), jnp.float32)
    result = varying.pallas_call(
        kernel,
        grid=(tiles[0] * tiles[1], s.splits),
        in_specs=[WHOLE] * len(inputs),
        out_specs=WHOLE,
        out_shape=out,
        compiler_params=parameters(s.num_warps, s.num_stages),
        interpret=s.interpret,
        name="turbojax_int4_matmul",
    )(*inputs)
    if s.splits == 1:
        return result
    partial = jnp.sum(result, axis=0)
    rows = [rows_of(jnp.arange(outputs), side, s) for side in range(sides)]
    return finish(
        list(partial),
        token_scale.astype(jnp.float32)[:, None],
        [output_scale[row][None] for row in rows],
        None if bias is None else [bias[row][None] for row in rows],
        residual,
        s.activation,
        dtype,
    )


def finish(
    sums: list[jax.Array],
    token_scale: jax.Array,
    output_scale: list[jax.Array],
    bias: list[jax.Array] | None,
    residual: jax.Array | None,
    activation: str | None,
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """Scales, bias, activation, residual; in float32, inside a kernel and outside.

    `sums` are float32 of one rank, of gated weights gate and up. `token_scale` broadcasts to them,
    and so do `output_scale` and `bias`, given for each of them; `residual` has their shape and any
    floating-point type.
    """
    y = [x * token_scale * scale for x, scale in zip(sums, output_scale, strict=True)]
    if bias is not None:
        y = [x + b for x, b in zip(y, bias, strict=True)]
    if activation in ("swiglu", "geglu"):
        gate, up = y
        result = _activate(gate, "silu" if activation == "swiglu" else "gelu") * up
    else:
        [result] = y
        result = _activate(result, activation)
    if residual is not None:
        result = result + residual.astype(jnp.float32)
    return result.astype(dtype)


def _activate(x: jax.Array, kind: str | None) -> jax.Array:
    if kind == "silu":
        return _sigmoid_product(x, x)
    if kind == "gelu":
        # 1 + tanh(z) is twice the logistic function of 2 z.
        return _sigmoid_product(x, 1.5957691216057308 * (x + 0.044715 * (x * x * x)))
    return x


def _sigmoid_product(x: jax.Array, z: jax.Array) -> jax.Array:
    return x / (1.0 + jnp.exp(-z))


def rows_of(output: jax.Array, side: int, s: Settings) -> jax.Array:
    """Rows of the weight that give these outputs, gate (0) or up (1) if it is gated."""
    return 2 * output - (output & 7) + 8 * side if s.gated else output


def _tile(tiles: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
    # With x64, plain numbers would be 64 bits wide.
    index, across, down = pl.program_id(0), jnp.int32(tiles[0]), jnp.int32(tiles[1])
    if tiles[0] <= _NEIGHBOURS:
        return jax.lax.rem(index, across), jax.lax.div(index, across)
    band = jax.lax.div(index, _NEIGHBOURS * down)
    inside = index - band * (_NEIGHBOURS * down)
    width = jnp.minimum(across - band * _NEIGHBOURS, jnp.int32(_NEIGHBOURS))
    return band * _NEIGHBOURS + jax.lax.rem(inside, width), jax.lax.div(inside, width)


def _finishing_kernel(
    x: Ref,
    codes: Ref,
    *refs: Ref,
    tiles: tuple[int, int],
    has_zeros: bool,
    has_bias: bool,
    has_residual: bool,
    s: Settings,
) -> None:
    *given, out = refs
    groups, vectors = given[: 1 + has_zeros], given[1 + has_zeros :]
    token_scale, output_scale = vectors[:2]
    sums, token, output, rows = _sums(x, codes, groups, tiles, out.shape, s)
    # Past the last token or output anything may be read.
    token_at = jnp.minimum(token, out.shape[0] - 1)
    at = (token[None, :], output[:, None])
    mask = _mask(token, output, out.shape)
    residual = plgpu.load(vectors[-1].at[at], mask=mask, other=0.0) if has_residual else None
    result = finish(
        sums,
        plgpu.load(token_scale.at[token_at]).astype(jnp.float32)[None, :],
        [plgpu.load(output_scale.at[row])[:, None] for row in rows],
        [plgpu.load(vectors[2].at[row])[:, None] for row in rows] if has_bias else None,
        residual,
        s.activation,
        out.dtype,
    )
    plgpu.store(out.at[at], result, mask=mask)


def _summing_kernel(
    x: Ref, codes: Ref, *refs: Ref, tiles: tuple[int, int], has_zeros: bool, s: Settings
) -> None:
    groups, out = refs[: 1 + has_zeros], refs[-1]
    sums, token, output, _ = _sums(x, codes, groups, tiles, out.shape[2:], s)
    mask = _mask(token, output, out.shape[2:])
    for side, value in enumerate(sums):
        at = (pl.program_id(1), side, token[None, :], output[:, None])
        plgpu.store(out.at[at], value, mask=mask)


def _mask(token: jax.Array, output: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return (token < shape[0])[None, :] & (output < shape[1])[:, None]


def _sums(
    x: Ref,
    codes: Ref,
    of_groups: Sequence[Ref],
    tiles: tuple[int, int],
    shape: tuple[int, ...],
    s: Settings,
) -> tuple[list[jax.Array], jax.Array, jax.Array, list[jax.Array]]:
    """This program's sums of products, float32 ``[outputs, tokens]``, of gated weights gate and up.

    Then its tokens and outputs, int32, and for each of the sums its rows of the weights, int32
    ``[outputs]``, inside the array.
    """
    groups = of_groups[0].shape[1]
    column, row = _tile(tiles)
    token = column * s.tokens + jnp.arange(s.tokens, dtype=jnp.int32)
    output = row * s.outputs + jnp.arange(s.outputs, dtype=jnp.int32)
    inside = jnp.minimum(output, shape[1] - 1) if shape[1] % s.outputs else output
    rows = [rows_of(inside, side, s) for side in range(2 if s.gated else 1)]
    each = pl.cdiv(groups, s.splits)
    first: Any = pl.program_id(1) * each if s.splits > 1 else 0
    last: Any = jnp.minimum(first + each, groups) if s.splits > 1 else groups
    return sums_of(x, codes, of_groups, token, rows, (first, last), s), token, output, rows


def sums_of(
    x: Ref,
    codes: Ref,
    of_groups: Sequence[Ref],
    token: jax.Array,
    rows: list[jax.Array],
    span: tuple[Any, Any],
    s: Settings,
) -> list[jax.Array]:
    """Sums of products of some tokens and rows over the groups of inputs in `span`.

    `of_groups` are scales, and zeros if there are any; `token` is int32 ``[tokens]``, and `rows`
    int32 ``[outputs]``, of gated weights twice, both inside the array. Returns float32
    ``[outputs, tokens]`` for each of `rows`.
    """
    groups = of_groups[0].shape[1]
    parts = groups // codes.shape[1]
    first, last = span

    def scale_of(group: jax.Array) -> list[list[jax.Array]]:
        group = jnp.minimum(group, groups - 1)
        places = [(row >> 6, group, row & 63) for row in rows]
        return [[plgpu.load(ref.at[place]) for ref in of_groups] for place in places]

    def step(group: jax.Array, state: Any) -> Any:
        sums, scale = state
        # Asked for one step ahead: the compiler's pipeline leaves loads of single bytes alone.
        following = scale_of(group + 1)
        block, byte = _place(group, parts)
        operands = [_tokens(x, token, block, byte, half) for half in range(2)]
        added = [
            _add(total, codes, row, (block, byte), one, operands, s)
            for total, row, one in zip(sums, rows, scale, strict=True)
        ]
        return added, following

    zeros = [jnp.zeros((s.outputs, s.tokens), jnp.float32) for _ in rows]
    sums, _ = jax.lax.fori_loop(first, last, step, (zeros, scale_of(jnp.int32(first))))
    return list(sums)


def _place(group: jax.Array, parts: int) -> tuple[jax.Array, jax.Array]:
    """A group's block of 128 inputs, which has `parts` groups, and the group's bytes of a row."""
    index = jnp.arange(_BYTES // parts, dtype=jnp.int32)
    if parts == 1:
        return group, index
    # Byte 16 t + 4 s + b is of the block's quarter s.
    wide, divisor = 16 // parts, jnp.int32(parts)
    byte = ((index & -wide) * parts) + (index & (wide - 1)) + jax.lax.rem(group, divisor) * wide
    return jax.lax.div(group, divisor), byte


def _tokens(x: Ref, token: jax.Array, block: jax.Array, byte: jax.Array, half: int) -> jax.Array:
    """The inputs of a block that belong to the low or the high nibbles of these bytes."""
    column = block * GROUP + half * _BYTES + byte
    return plgpu.load(x.at[token[:, None], column[None, :]])


def _add(
    total: jax.Array,
    codes: Ref,
    row: jax.Array,
    place: tuple[jax.Array, jax.Array],
    of_group: list[jax.Array],
    operands: list[jax.Array],
    s: Settings,
) -> jax.Array:
    """`total` plus the products of one group; `of_group` are its scales, and zeros if any."""
    scale, *zeros = of_group
    block, byte = place
    tile = plgpu.load(codes.at[row[:, None] >> 6, block, row[:, None] & 63, byte[None, :]])
    tile = jax.lax.bitcast_convert_type(tile, jnp.int8)
    halves = [_e4m3.nibble(tile, bool(half), s.interpret) for half in range(2)]
    dtype = operands[0].dtype
    if scale.dtype == jnp.uint8:
        factor = _e4m3.from_bits(scale.astype(jnp.int32)).astype(jnp.float16)[:, None]
        halves = [_e4m3.round_float16(q * factor, s.has_e4m3, s.interpret) for q in halves]
        for weight, tokens in zip(halves, operands, strict=True):
            total = total + _common.dot(weight.astype(dtype), tokens, s.interpret)
        return total
    for zero in zeros:
        halves = [q - zero.astype(jnp.float16)[:, None] for q in halves]
    low, high = (
        _common.dot(weight.astype(dtype), tokens, s.interpret)
        for weight, tokens in zip(halves, operands, strict=True)
    )
    return total + (low + high) * scale.astype(jnp.float32)[:, None]
