"""The Triton kernel behind `int4_matmul`: the order of the tokens, and how it is launched."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from turbojax._device import (
    ADA,
    AMPERE,
    gpu_compute_capability,
    interpreting,
    multiprocessors,
    needs_gpu,
    unindexable,
)
from turbojax.matmul.int4.static import Activation
from turbojax.matmul.int4.weight import Int4Weight
from turbojax.numerics.fp8 import Fp8Tokens

# Dtypes of tokens that are multiplied unrounded.
_UNROUNDED = (jnp.bfloat16, jnp.float16)
# Compute capabilities whose matrix units read shared memory, so that a warp needs fewer registers.
_LARGE = (9.0, 10.0, 10.3)
_GROUP = 128
FEWEST_TOKENS, MOST_TOKENS = 16, 128
# Beyond this many tokens the matrix units, not memory, are the limit. Up to it, each multiprocessor
# gets this many warps, to keep loads in flight; beyond it, one program each.
_FEW_TOKENS, _WARPS = 128, 16
# Groups that are worth a program.
_FEWEST_GROUPS = 4
# The most float32 sums of programs that share a tile, in bytes, over the bytes of its codes.
_SUMS = 0.5


def unsupported(
    *,
    tokens: Fp8Tokens | jax.Array,
    weight: Int4Weight,
    bias: jax.Array | None,
    residual: jax.Array | None,
    activation: Activation | None,
) -> str | None:
    """Why the kernel cannot run this here; None if it can."""
    del bias, residual, activation
    if not isinstance(tokens, Fp8Tokens) and tokens.dtype not in _UNROUNDED:
        return f"dtype={tokens.dtype} must be bfloat16 or float16"
    rows, columns = tokens.shape[0], weight.padded_shape[1]
    # Tokens have 16 bits on the way, and sums are float32 (no more than that at a time).
    sizes = [(rows + MOST_TOKENS) * columns * 2, math.prod(weight.codes.shape)]
    sizes.append(rows * weight.result_size * 4)
    return unindexable(*sizes) or needs_gpu(AMPERE)


def matmul(
    tokens: Fp8Tokens | jax.Array,
    weight: Int4Weight,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    activation: Activation | None,
    is_precise: bool,
) -> jax.Array:
    """`reference.matmul` as one kernel, and a sum after it where tokens and outputs are few."""
    del is_precise  # sums of 16-bit products are always float32
    launch = _launch(tokens.shape[0], weight, activation)
    return _matmul(tokens, weight, bias, residual, launch=launch)


def is_large(capability: float | None) -> bool:
    """Whether matrix units read shared memory; True without a GPU: kernels are as on Hopper."""
    return capability is None or capability in _LARGE


def has_e4m3(capability: float | None) -> bool:
    """Whether the GPU converts to e4m3."""
    return capability is None or capability >= ADA


def _launch(rows: int, weight: Int4Weight, activation: Activation | None) -> Any:
    """Tiles and splits for this many tokens."""
    from pallas_kernels.triton.int4_matmul import Settings

    capability, processors = gpu_compute_capability(), multiprocessors()
    large = is_large(capability)
    most_tokens = MOST_TOKENS if large else MOST_TOKENS // 2
    tokens = min(most_tokens, max(FEWEST_TOKENS, 1 << (rows - 1).bit_length()))
    # Four warps multiply 64 rows of a weight on Hopper, and each warp converts rows of its own.
    outputs = 64 if tokens == FEWEST_TOKENS else 128
    num_warps = outputs // 16

    def tiles() -> int:
        return -(-rows // tokens) * -(-weight.result_size // outputs)

    if tokens == MOST_TOKENS and tiles() < processors:
        tokens //= 2
    groups = weight.scales.shape[1]
    most_splits = min(groups // _FEWEST_GROUPS, int(_SUMS * groups * _GROUP / (8 * rows)))
    programs = processors * (_WARPS // num_warps if rows <= _FEW_TOKENS else 1)
    return Settings(
        tokens=tokens,
        outputs=outputs,
        splits=_splits(tiles(), groups, most_splits, programs, processors),
        num_warps=num_warps,
        num_stages=(4 if tokens <= 32 else 3) if large else 2,
        gated=weight.gated,
        activation=activation,
        has_e4m3=has_e4m3(capability),
        interpret=interpreting(),
    )


def _splits(tiles: int, groups: int, most: int, wanted: int, processors: int) -> int:
    """How many programs share a tile, so that there are as many as `wanted`, evenly spread."""
    # All but the last get an equal share, so that the last is not empty either.
    even = {-(-groups // -(-groups // splits)) for splits in range(1, max(1, most) + 1)}
    enough = min((s for s in even if tiles * s >= wanted), default=max(even))
    if enough == 1:
        return 1

    def busy(splits: int) -> float:
        programs = tiles * splits
        return programs / (-(-programs // processors) * processors)

    return max((s for s in even if enough <= s <= 2 * enough), key=lambda s: (busy(s), -s))


@functools.partial(jax.jit, static_argnames="launch")
def _matmul(
    tokens: Fp8Tokens | jax.Array,
    weight: Int4Weight,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    launch: Any,
) -> jax.Array:
    from pallas_kernels.triton import int4_matmul

    if isinstance(tokens, Fp8Tokens):
        x, scale = tokens.codes.astype(jnp.float16), tokens.scale
    else:
        x, scale = tokens, None
    return int4_matmul.matmul(
        operand(x, weight.padded_shape[1], launch.tokens),
        weight.codes,
        scales_of(weight),
        weight.zeros,
        scale,
        weight.output_scale,
        bias,
        residual,
        shape=(tokens.shape[0], weight.result_size),
        dtype=tokens.dtype,
        settings=launch,
    )


def scales_of(weight: Int4Weight) -> jax.Array:
    """Scales as the kernel reads them: those in e4m3 as bytes."""
    if weight.scale_dtype != "e4m3":
        return weight.scales
    return jax.lax.bitcast_convert_type(weight.scales, jnp.uint8)


def operand(x: jax.Array, size: int, multiple: int) -> jax.Array:
    """Tokens as the kernel multiplies them: `x`, ``[M, K]`` in 16 bits, as ``[M', size]``.

    `size`, the inputs of a stored row of the weight, is a multiple of 128; tokens are padded with
    zeros to a `multiple`. Each 128 inputs are in the order of a weight's bytes
    (`turbojax.matmul.int4.layout`), first all of the low nibbles.
    """
    rows, inputs = x.shape
    x = jnp.pad(x, ((0, -rows % multiple), (0, size - inputs)))
    # Bits of an input's number, from the top: s (2), b // 2, t (2), b % 2, nibble.
    x = x.reshape(x.shape[0], -1, 4, 2, 4, 2, 2)
    return x.transpose(0, 1, 6, 4, 2, 3, 5).reshape(x.shape[0], size)
