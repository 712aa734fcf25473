"""The Triton kernel behind `grouped_matmul`: the order of the tokens, and how it is launched."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from turbojax._device import gpu_compute_capability, interpreting, unindexable
from turbojax.matmul.grouped.tiles import cut, listed
from turbojax.matmul.int4 import triton
from turbojax.matmul.int4.static import Activation
from turbojax.matmul.int4.weight import BLOCK, Int4Weight
from turbojax.numerics.fp8 import Fp8Tokens


def unsupported(
    *,
    tokens: Fp8Tokens,
    weight: Int4Weight,
    group_sizes: jax.Array,
    bias: jax.Array | None,
    activation: Activation | None,
) -> str | None:
    """Why the kernel cannot run this here; None if it can."""
    del group_sizes
    if weight.group_size != BLOCK:
        return f"group_size={weight.group_size} must be {BLOCK}"
    if weight.zeros is not None:
        return "weight.zeros must be None: weights must be symmetric"
    refusal = triton.unsupported(
        tokens=tokens, weight=weight, bias=bias, residual=None, activation=activation
    )
    # Of all experts together.
    return refusal or unindexable(math.prod(weight.codes.shape))


def matmul(
    tokens: Fp8Tokens,
    weight: Int4Weight,
    group_sizes: jax.Array,
    bias: jax.Array | None,
    *,
    activation: Activation | None,
    is_precise: bool,
) -> jax.Array:
    """`reference.matmul` as one kernel, after the list of its tiles."""
    del is_precise  # sums of float16 products are always float32
    launch = _launch(tokens.codes.shape[0], weight, activation)
    return _matmul(tokens, weight, group_sizes, bias, launch=launch)


def _launch(rows: int, weight: Int4Weight, activation: Activation | None) -> Any:
    """Tiles for as many tokens as an expert has on average."""
    from pallas_kernels.triton.grouped_matmul import Settings

    capability = gpu_compute_capability()
    [experts] = weight.stack
    is_large = triton.is_large(capability)
    # Gated tiles have twice as many sums: with 128 tokens a thread spilled 12 KB, and 512 tokens of
    # Mixtral took 42.7 ms where 256 took 1.3.
    is_small = weight.gated or not is_large
    most_tokens = triton.MOST_TOKENS // 2 if is_small else triton.MOST_TOKENS
    mean = -(-rows // experts)
    tokens = min(most_tokens, max(triton.FEWEST_TOKENS, 1 << (mean - 1).bit_length()))
    outputs = 64 if tokens == triton.FEWEST_TOKENS else 128
    return Settings(
        tokens=tokens,
        outputs=outputs,
        splits=1,
        num_warps=outputs // 16,
        num_stages=(4 if tokens <= 32 else 3) if is_large else 2,
        gated=weight.gated,
        activation=activation,
        has_e4m3=triton.has_e4m3(capability),
        interpret=interpreting(),
    )


@functools.partial(jax.jit, static_argnames="launch")
def _matmul(
    tokens: Fp8Tokens,
    weight: Int4Weight,
    group_sizes: jax.Array,
    bias: jax.Array | None,
    *,
    launch: Any,
) -> jax.Array:
    from pallas_kernels.triton import grouped_matmul

    count = tokens.codes.shape[0]
    tiles = cut(group_sizes, count, launch.tokens)
    start = jnp.where(tiles.is_valid, 0.0, jnp.nan).astype(tokens.dtype)
    return grouped_matmul.matmul(
        triton.operand(tokens.codes, weight.padded_shape[1], 1),
        weight.codes,
        triton.scales_of(weight),
        tokens.scale,
        weight.output_scale,
        bias,
        *listed(tiles),
        jnp.full((count, weight.result_size), start),
        settings=launch,
    )
