"""The Triton kernel behind `int4_matmul`: the order of the tokens, and how it is launched."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from turbojax._device import (
    gpu_compute_capability,
    interpreting,
    multiprocessors,
    needs_gpu,
    unindexable,
)
from turbojax.ops.int4_matmul.static import Activation
from turbojax.quantizers import Fp8Tokens, Int4Weight

_AMPERE, _ADA = 8.0, 8.9
# Compute capabilities whose matrix units read shared memory, so that a warp needs fewer registers.
_LARGE = (9.0, 10.0, 10.3)
_GROUP = 128
_FEWEST_TOKENS, _MOST_TOKENS = 16, 128
# Beyond this many tokens the matrix units, not memory, are the limit. Up to it, each multiprocessor
# gets this many warps, to keep loads in flight; beyond it, one program.
_FEW_TOKENS, _WARPS = 128, 16
# Groups that are worth a program.
_FEWEST_GROUPS = 4
# Bytes of the float32 sums of programs that share a tile, at most, over those of its codes.
_SUMS = 0.5


def unsupported(
    *,
    tokens: Fp8Tokens,
    weight: Int4Weight,
    bias: jax.Array | None,
    residual: jax.Array | None,
    activation: Activation | None,
) -> str | None:
    """Why the kernel cannot run this here; None if it can."""
    del bias, residual, activation
    if weight.group_size != _GROUP:
        return f"group_size={weight.group_size} must be {_GROUP}"
    if weight.zeros is not None:
        return "weight.zeros must be None: weights must be symmetric"
    rows, columns = tokens.codes.shape[0], weight.padded_shape[1]
    # Tokens are float16 on their way, and sums float32 (of which no more than that at a time).
    sizes = [(rows + _MOST_TOKENS) * columns * 2, math.prod(weight.codes.shape)]
    sizes.append(rows * weight.result_size * 4)
    return unindexable(*sizes) or needs_gpu(_AMPERE)


def matmul(
    tokens: Fp8Tokens,
    weight: Int4Weight,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    activation: Activation | None,
    is_precise: bool,
) -> jax.Array:
    """`reference.matmul` as one kernel, and a sum after it where tokens and outputs are few."""
    del is_precise  # sums of float16 products are always float32
    launch = _launch(tokens.codes.shape[0], weight, activation, interpreting())
    return _matmul(tokens, weight, bias, residual, launch=launch)


def _launch(rows: int, weight: Int4Weight, activation: Activation | None, interpret: bool) -> Any:
    """Tiles and splits for this many tokens."""
    from pallas_kernels.triton.int4_matmul import Settings

    capability, processors = gpu_compute_capability(), multiprocessors()
    is_large = capability is None or capability in _LARGE
    most_tokens = _MOST_TOKENS if is_large else _MOST_TOKENS // 2
    tokens = min(most_tokens, max(_FEWEST_TOKENS, 1 << (rows - 1).bit_length()))
    # Four warps multiply 64 rows of a weight on Hopper, and each warp converts rows of its own.
    outputs = 64 if tokens == _FEWEST_TOKENS else 128
    num_warps = outputs // 16

    def tiles() -> int:
        return -(-rows // tokens) * -(-weight.result_size // outputs)

    if tokens == _MOST_TOKENS and tiles() < processors:
        tokens //= 2
    groups = weight.scales.shape[1]
    most_splits = min(groups // _FEWEST_GROUPS, int(_SUMS * groups * _GROUP / (8 * rows)))
    programs = processors * (_WARPS // num_warps if rows <= _FEW_TOKENS else 1)
    return Settings(
        tokens=tokens,
        outputs=outputs,
        splits=_splits(tiles(), groups, most_splits, programs, processors),
        num_warps=num_warps,
        num_stages=(4 if tokens <= 32 else 3) if is_large else 2,
        gated=weight.gated,
        activation=activation,
        has_e4m3=capability is None or capability >= _ADA,
        interpret=interpret,
    )


def _splits(tiles: int, groups: int, most: int, wanted: int, processors: int) -> int:
    """How many programs share a tile, so that there are as many as `wanted`, evenly spread."""
    # With an equal share for all but the last, which then is not empty either.
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
    tokens: Fp8Tokens,
    weight: Int4Weight,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    launch: Any,
) -> jax.Array:
    from pallas_kernels.triton import int4_matmul

    scales = weight.scales
    if weight.scale_dtype == "e4m3":
        scales = jax.lax.bitcast_convert_type(scales, jnp.uint8)
    return int4_matmul.matmul(
        operand(tokens.codes, weight.padded_shape[1], launch.tokens),
        weight.codes,
        scales,
        tokens.scale,
        weight.output_scale,
        bias,
        residual,
        shape=(tokens.codes.shape[0], weight.result_size),
        dtype=tokens.dtype,
        settings=launch,
    )


def operand(codes: jax.Array, size: int, multiple: int) -> jax.Array:
    """Tokens as the kernel multiplies them.

    Args:
      codes: float8_e4m3fn ``[M, K]``.
      size: inputs of a stored row of the weight, a multiple of 128.
      multiple: of tokens, to which they are padded.

    Returns:
      float16 ``[M', size]``, exact, padded with zeros; each 128 inputs in the order of a weight's
      bytes (`turbojax.quantizers.int4_layout`), first all of the low nibbles.
    """
    rows, inputs = codes.shape
    x = jnp.pad(codes.astype(jnp.float16), ((0, -rows % multiple), (0, size - inputs)))
    # Bits of an input's number, from the top: s (2), b // 2, t (2), b % 2, nibble.
    x = x.reshape(x.shape[0], -1, 4, 2, 4, 2, 2)
    return x.transpose(0, 1, 6, 4, 2, 3, 5).reshape(x.shape[0], size)
