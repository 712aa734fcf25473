"""INT4 weights of many experts times FP8 tokens that are sorted by expert, on any GPU since Ampere.

Roofline, for 128 experts of 1536 x 2048 and 512 tokens with 8 experts each: 201 MB of codes, 67 us
at the 3.0 TB/s that a copy reaches on an H100; conversion of 403 M weights, once for each tile of
tokens, in about 5 instructions, 57 us of all its lanes.

A program computes a tile of one expert's tokens, which a list names, as `int4_matmul` computes one
of all tokens. Programs past the last tile of the list find nothing to do.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import varying
from pallas_kernels.triton import int4_matmul
from pallas_kernels.triton._common import WHOLE, Ref, parameters
from pallas_kernels.triton.int4_matmul import Settings as Settings

_TILE_ROWS = 64


def matmul(
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array,
    token_scale: jax.Array,
    output_scale: jax.Array,
    bias: jax.Array | None,
    tiles: jax.Array,
    bounds: jax.Array,
    start: jax.Array,
    *,
    settings: Settings,
) -> jax.Array:
    """``activation(token_scale * output_scale * (x @ weights.T) + bias)`` of each expert's tokens.

    `x` is float16 ``[M, K']``, exact e4m3 values in the order of `int4_matmul`, sorted by expert;
    `token_scale` bfloat16 ``[M]``. `codes`, `scales`, `output_scale` and `bias` are those of
    `int4_matmul` with a leading axis `E`. `tiles`, int32 ``[U, 5]``, are for each tile of
    `settings.tokens` tokens of one expert, in order: the expert, its first token, the token after
    its last, the number of its first tile, and how many tiles it has. `bounds`, int32, begins with
    how many of these tiles there are. `start`, ``[M, N]``, which is overwritten, is what rows of no
    expert hold. `settings` have one split. Returns ``[M, N]``.
    """
    s = settings
    experts, blocks = codes.shape[:2]
    across = pl.cdiv(start.shape[1], s.outputs)
    flat = [array.reshape(experts * blocks, *array.shape[2:]) for array in (codes, scales)]
    vectors = [output_scale, *([] if bias is None else [bias])]
    vectors = [v.reshape(-1) for v in vectors]
    inputs = [start, tiles, bounds, x, *flat, token_scale, *vectors]
    kernel = functools.partial(_kernel, across=across, rows=blocks * _TILE_ROWS, s=s)
    return varying.pallas_call(
        kernel,
        grid=(tiles.shape[0] * across,),
        in_specs=[WHOLE] * len(inputs),
        out_specs=WHOLE,
        out_shape=jax.ShapeDtypeStruct(start.shape, start.dtype),
        input_output_aliases={0: 0},
        compiler_params=parameters(s.num_warps, s.num_stages),
        interpret=s.interpret,
        name="turbojax_grouped_matmul",
    )(*inputs)


def _kernel(
    _: Ref,
    tiles: Ref,
    bounds: Ref,
    x: Ref,
    codes: Ref,
    scales: Ref,
    token_scale: Ref,
    *refs: Ref,
    across: int,
    rows: int,
    s: Settings,
) -> None:
    *vectors, out = refs
    number = pl.program_id(0)
    some = jax.lax.div(number, jnp.int32(across))
    expert, begin, end, first, count = (tiles[some, jnp.int32(i)] for i in range(5))
    # Of one expert's tiles, tokens vary fastest: weights come from the cache after the first.
    within = number - first * across
    count = jnp.maximum(count, 1)
    token = begin + jax.lax.rem(within, count) * s.tokens + jnp.arange(s.tokens, dtype=jnp.int32)
    output = jax.lax.div(within, count) * s.outputs + jnp.arange(s.outputs, dtype=jnp.int32)
    is_tile = some < bounds[jnp.int32(0)]
    mask = (is_tile & (token < end))[None, :] & (output < out.shape[1])[:, None]
    # Past the last token or output anything may be read.
    token_at = jnp.clip(token, 0, x.shape[0] - 1)
    inside = jnp.clip(output, 0, out.shape[1] - 1)
    chosen = [
        expert * rows + int4_matmul.rows_of(inside, side, s) for side in range(2 if s.gated else 1)
    ]
    span = jnp.int32(0), jnp.where(is_tile, jnp.int32(scales.shape[1]), jnp.int32(0))
    sums = int4_matmul.sums_of(x, codes, [scales], token_at, chosen, span, s)
    factors, *biases = [[plgpu.load(v.at[row])[:, None] for row in chosen] for v in vectors]
    result = int4_matmul.finish(
        sums,
        plgpu.load(token_scale.at[token_at]).astype(jnp.float32)[None, :],
        factors,
        biases[0] if biases else None,
        None,
        s.activation,
        out.dtype,
    )
    plgpu.store(out.at[token[None, :], output[:, None]], result, mask=mask)
