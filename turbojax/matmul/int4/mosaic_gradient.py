"""The Mosaic GPU kernels behind the gradient of `int4_matmul` on Hopper."""

import functools
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from turbojax._device import multiprocessors
from turbojax.matmul.int4.mosaic_operands import padded_tokens, tables
from turbojax.matmul.int4.weight import Int4Weight, in_blocks
from turbojax.numerics.fp8 import Fp8Tokens

if TYPE_CHECKING:
    from pallas_kernels.mosaic.hopper.matmul.fp8 import Epilogue

# Outputs of a tile; tokens that it may have.
_TILE, _TOKENS = 128, (8, 16, 32, 64, 128, 256)
# Tokens up to which programs share a tile, and groups of rows that are worth one.
_SHARED, _FEWEST_GROUPS = 256, 8
_GROUP, _MOST_STAGES, _SHARED_BYTES = 128, 12, 227 * 1024


class Launch(NamedTuple):
    """Tokens of a tile, stages of groups of rows in shared memory, programs that share a tile."""

    tokens: int
    stages: int
    parts: int


def default_launch(rows: int, weight: Int4Weight) -> Launch:
    """The launch for this many tokens."""
    from pallas_kernels.mosaic.hopper.matmul import fp8 as fp8_matmul

    outputs, inputs = weight.padded_shape
    tokens = next((n for n in _TOKENS if n >= rows), _TOKENS[-1])
    parts = 1
    if rows <= _SHARED:
        tiles = -(-rows // tokens) * -(-inputs // _TILE)
        groups = -(-outputs // _GROUP)
        parts = max(1, min(multiprocessors() // tiles, groups // _FEWEST_GROUPS))

    def size(stages: int) -> int:
        settings = fp8_matmul.Settings(_epilogue("bfloat16", tokens), tokens, stages, 1, parts)
        return settings.shared_bytes(fp8_matmul.STAGE_BYTES)

    stages = max(n for n in range(1, _MOST_STAGES + 1) if size(n) <= _SHARED_BYTES)
    return Launch(tokens, stages, parts)


def transposed(tokens: Fp8Tokens, weight: Int4Weight) -> jax.Array:
    """`reference.transposed` as two kernels: the weight to e4m3 with its outputs last; a product.

    Sums stay in the matrix unit, whose additions keep about 14 bits.
    """
    weight = in_blocks(weight)
    launch = default_launch(tokens.codes.shape[0], weight)
    return _transposed(tokens, weight, launch=launch)


@functools.partial(jax.jit, static_argnames="launch")
def _transposed(tokens: Fp8Tokens, weight: Int4Weight, *, launch: Launch) -> jax.Array:
    from pallas_kernels.mosaic.hopper.matmul import fp8 as fp8_matmul
    from pallas_kernels.mosaic.hopper.matmul.expand import int4_expand_transposed

    rows, programs = tokens.codes.shape[0], multiprocessors()
    values = int4_expand_transposed(
        weight.codes, weight.scales, jnp.asarray(tables()), programs=programs
    )
    inputs, outputs = values.shape
    settings = fp8_matmul.Settings(
        epilogue=_epilogue(str(tokens.dtype), launch.tokens),
        tokens=launch.tokens,
        stages=launch.stages,
        parts=launch.parts,
        is_two_level=False,
        programs=programs,
    )
    out = fp8_matmul.fp8_matmul(
        values,
        *padded_tokens(tokens, outputs),
        jnp.ones(inputs, jnp.float32),
        None,
        None,
        columns=inputs,
        settings=settings,
    )
    if launch.parts > 1:
        scale = tokens.scale.astype(jnp.float32)[:, None]
        out = (jnp.sum(out, axis=0)[:rows] * scale).astype(tokens.dtype)
    return out[:rows, : weight.in_size]


def _epilogue(dtype: str, tokens: int) -> "Epilogue":
    from pallas_kernels.mosaic.hopper.matmul.fp8 import Epilogue

    return Epilogue(None, False, False, dtype, 0 if tokens < 64 else 128)
