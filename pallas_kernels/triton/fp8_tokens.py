"""Tokens to e4m3 with a scale each, as they are or normalized first (FireQ).

Roofline, for 4096 tokens of 4096 channels, bfloat16, normalized: 50 MB, 17 us at the 3.0 TB/s of a
copy on an H100; about 12 operations a value, 7 us. Seen: 16,384 tokens 69 us, normalized 81 (floor
67); 16 tokens 1.6 and 2.0, a launch and its latency.

A program takes one token and holds all of it in registers, as chunks of a power of two: it is read
once, and little is masked at its end. Chunks are combined element by element before they are
reduced, so that a token has three reductions, whatever its size.

Roofline in full and versions: `docs/kernels/triton.md`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import varying
from pallas_kernels.triton import _e4m3
from pallas_kernels.triton._common import E4M3_MAX, WHOLE, Ref, next_power_of_2, parameters

LARGEST = 2**15  # the most channels that a program holds

_RECIPROCAL_MAX = float(np.float32(1 / E4M3_MAX))
_TINY = float(np.finfo(np.float32).tiny)
# A token is cut into at most this many chunks, of at least this many channels: 16-byte loads.
_MOST_CHUNKS, _SMALLEST_CHUNK = 8, 1024
_VALUES_PER_THREAD = 32


def quantize(
    x: jax.Array,
    norm_scale: jax.Array | None = None,
    *,
    eps: float = 0.0,
    has_e4m3: bool = True,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """As `mosaic.hopper.fp8_tokens.quantize`, for bfloat16, float16 or float32 ``[M, K]``.

    `K` is at most `LARGEST`, and there is always a norm with `norm_scale`. `has_e4m3` says whether
    the GPU converts to e4m3.
    """
    tokens, channels = x.shape
    chunk = max(_SMALLEST_CHUNK, next_power_of_2(pl.cdiv(channels, _MOST_CHUNKS)))
    chunk = min(chunk, next_power_of_2(channels))
    values = chunk * pl.cdiv(channels, chunk)
    inputs = (x,) if norm_scale is None else (x, norm_scale)
    stores_e4m3 = has_e4m3 and not interpret
    codes, scale = varying.pallas_call(
        functools.partial(_kernel, chunk=chunk, eps=eps, interpret=interpret),
        grid=(tokens,),
        in_specs=[WHOLE] * len(inputs),
        out_specs=[WHOLE] * 2,
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, jnp.float8_e4m3fn if stores_e4m3 else jnp.uint8),
            jax.ShapeDtypeStruct((tokens,), jnp.bfloat16),
        ],
        compiler_params=parameters(_warps(values, chunk), 1),
        interpret=interpret,
        name="turbojax_fp8_tokens",
    )(*inputs)
    if not stores_e4m3:
        codes = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
    return codes, scale


def _warps(values: int, chunk: int) -> int:
    """As many as have enough to do, with 8 values of a chunk a thread: loads of 16 bytes."""
    wanted = next_power_of_2(pl.cdiv(values, 32 * _VALUES_PER_THREAD))
    return max(1, min(16, wanted, chunk // 256))


def _kernel(x: Ref, *refs: Ref, chunk: int, eps: float, interpret: bool) -> None:
    *norm, codes, scales = refs
    token, channels = pl.program_id(0), x.shape[1]
    starts = range(0, channels, chunk)
    places = [_place(start, chunk, channels) for start in starts]
    values = [_load(x, (token, at), inside) for at, inside in places]
    if norm:
        factors = [_load(norm[0], (at,), inside) for at, inside in places]
        values = _normalized(values, factors, channels, eps, x.dtype, interpret)
    scale = _round_to(_scale(values), jnp.bfloat16, interpret)
    reciprocal = 1 / scale
    for (at, inside), value in zip(places, values, strict=True):
        code = jnp.minimum(jnp.maximum(value * reciprocal, -E4M3_MAX), E4M3_MAX)
        # Selected, because a maximum loses NaN.
        code = jnp.where(scale == scale, code, jnp.nan)
        stored = (
            code.astype(codes.dtype)
            if codes.dtype == jnp.float8_e4m3fn
            else _e4m3.to_bits(code).astype(jnp.uint8)
        )
        plgpu.store(codes.at[token, at], stored, mask=inside)
    scales[token] = scale.astype(jnp.bfloat16)


def _place(start: int, chunk: int, channels: int) -> tuple[jax.Array, jax.Array | None]:
    """Channels of a chunk, and which of them exist; None if all."""
    at = start + jnp.arange(chunk, dtype=jnp.int32)
    return at, None if start + chunk <= channels else at < channels


def _load(ref: Ref, at: tuple[jax.Array, ...], inside: jax.Array | None) -> jax.Array:
    """Values as float32, 0 past the last channel."""
    other = None if inside is None else 0.0
    return plgpu.load(ref.at[at], mask=inside, other=other).astype(jnp.float32)


def _normalized(
    values: list[jax.Array],
    factors: list[jax.Array],
    channels: int,
    eps: float,
    dtype: jax.typing.DTypeLike,
    interpret: bool,
) -> list[jax.Array]:
    squares = functools.reduce(jnp.add, [x * x for x in values])
    inverse = jax.lax.rsqrt(jnp.sum(squares) / channels + eps)
    return [
        _round_to(x * inverse * factor, dtype, interpret)
        for x, factor in zip(values, factors, strict=True)
    ]


def _round_to(x: jax.Array, dtype: jax.typing.DTypeLike, interpret: bool) -> jax.Array:
    rounded = x.astype(dtype)
    if interpret:  # XLA would drop a conversion there and back
        rounded = jax.lax.optimization_barrier(rounded)
    return rounded.astype(jnp.float32)


def _scale(values: list[jax.Array]) -> Any:
    """The float32 scale of a token: NaN unless all is finite, 1 if all is zero."""
    magnitudes = [jnp.abs(x) for x in values]
    maximum = jnp.max(functools.reduce(jnp.maximum, magnitudes))
    # A maximum loses NaN here.
    nonfinite = [jnp.where(x < jnp.inf, 0.0, 1.0) for x in magnitudes]
    any_nonfinite = jnp.max(functools.reduce(jnp.maximum, nonfinite))
    scale = jnp.maximum(maximum * _RECIPROCAL_MAX, _TINY)
    scale = jnp.where(maximum < _TINY, 1.0, scale)
    return jnp.where(any_nonfinite > 0, jnp.nan, scale)
