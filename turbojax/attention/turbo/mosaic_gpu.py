"""The Mosaic GPU kernel behind `turbo_attention` on Hopper: what it takes, how it is launched."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from turbojax._device import multiprocessors, needs_hopper
from turbojax.attention.options import Options
from turbojax.attention.score_modifiers import NO_MODIFIERS, ScoreModifiers
from turbojax.attention.turbo.operands import (
    Stage1,
    bias_of_hopper,
    hopper_refusal,
    quantize_keys_and_values,
    quantize_queries,
)
from turbojax.numerics.config import TurboConfig
from turbojax.numerics.rows import HEAD_DIMS, pad_axis, padded_head_dim
from turbojax.numerics.sas import SAS

_BLOCK_KV = (64, 128)
# Key tokens of a tile where the block size does not set it.
_TILE = 128
# Query rows of one warpgroup, which share one scale.
_ROWS = 64
# Above this threshold the hardware's powers of two cannot be shifted far enough to become 0.
_HIGHEST_THRESHOLD = -5.0


def attention_unsupported(
    *,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    config: TurboConfig,
    options: Options,
    modifiers: ScoreModifiers = NO_MODIFIERS,
) -> str | None:
    """Why `turbo_attention` cannot run this here; None if it can."""
    refusal = hopper_refusal(key, value, options, modifiers)
    if refusal is not None:
        return refusal
    head_dim = query.shape[-1]
    if config.mode == "float":
        return "config.mode='float' must be an 8-bit mode: 'int8', 'int8_fp8' or 'fp8'"
    if config.block_kv not in _BLOCK_KV:
        return f"config.block_kv={config.block_kv} must be one of {_BLOCK_KV}, its key tile"
    if config.block_q % _ROWS:
        return f"config.block_q={config.block_q} must be a multiple of {_ROWS}, its query tile"
    if head_dim > HEAD_DIMS[-1]:
        return f"{head_dim=} must be at most {HEAD_DIMS[-1]}"
    return needs_hopper()


class Launch(NamedTuple):
    """How the kernel is laid out: `pallas_kernels.mosaic.hopper.attention.Settings`."""

    stages: int
    intra_warpgroup_overlap: bool
    tile: int
    consumers: int = 2
    quantizes: bool = False
    ping_pong: bool = False


@functools.partial(jax.jit, static_argnames=("config", "options", "launch"))
def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_length: jax.Array,
    key_length: jax.Array,
    *,
    config: TurboConfig,
    options: Options,
    modifiers: ScoreModifiers = NO_MODIFIERS,
    stage1: Stage1 | None = None,
    launch: Launch | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Prefill attention with the numerics of `config`, as `reference.attention` defines them.

    Beyond the order of float32 sums three things differ from the reference: hardware exponentials,
    also in SAS, of which only the threshold is kept (they are within 1.2e-3 of it); and e4m3
    products, which Hopper accumulates with about 14 bits within one block of keys (or over the head
    dim).

    Values have at most as many channels as keys: zeros are added. Mode ``"float"`` is not
    supported. The keys of `stage1` must be permuted (see `Operands`).
    """
    from pallas_kernels.mosaic.hopper import attention as kernel

    if options.scale < 0:  # the kernel takes the maximum of scores before it scales them
        query, options = -query, dataclasses.replace(options, scale=-options.scale)
    has_segments = modifiers.query_segment_ids is not None or modifiers.key_bounds is not None
    bias = bias_of_hopper(modifiers)
    launch = launch or default_launch(query, config, has_segments=has_segments, bias=bias)
    of_values, value = value.shape[3], pad_axis(value, 3, key.shape[3])
    head_dim, size = query.shape[-1], padded_head_dim(query.shape[-1])
    stage1 = stage1 or quantize_keys_and_values(
        key, value, key_length, config, permuted=True, multiple=launch.tile, channels=size
    )
    if stage1[0].shape[2] % launch.tile:  # quantized elsewhere
        launch = launch._replace(tile=config.block_kv)
    q, q_scale = query, None
    if not launch.quantizes:
        q, q_scale = quantize_queries(query, query_length, config, size)
    k, k_scale, v, v_scale = stage1
    dtype, segments = options.dtype_of_output(query), None
    if modifiers.query_segment_ids is not None and modifiers.key_value_segment_ids is not None:
        segments = kernel.Segments(modifiers.query_segment_ids, modifiers.key_value_segment_ids)
    out, residual = kernel.attention(
        pad_axis(q, 3, size),
        q_scale,
        pad_axis(k, 3, size),
        k_scale,
        pad_axis(v, 2, size),
        v_scale,
        query_length,
        key_length,
        tokens=query.shape[1],
        channels=kernel.writes(head_dim, size, dtype),
        dtype=dtype,
        settings=kernel.Settings(
            mode=config.mode,
            exponential=_exponential(config, kernel.Exponential),
            block_q=config.block_q,
            block_kv=config.block_kv,
            scale=options.scale,
            is_causal=options.is_causal,
            window=options.window,
            soft_cap=options.logits_soft_cap,
            programs=multiprocessors(),
            stages=launch.stages,
            intra_warpgroup_overlap=launch.intra_warpgroup_overlap,
            tile=launch.tile,
            consumers=launch.consumers,
            ping_pong=launch.ping_pong,
        ),
        shifts=modifiers.shift(),
        segments=segments,
        key_bounds=modifiers.key_bounds,
        sinks=modifiers.sinks,
        slopes=modifiers.alibi_slopes,
        bias=bias,
    )
    return out[..., :of_values], residual


def default_launch(
    query: jax.Array,
    config: TurboConfig,
    *,
    has_segments: bool = False,
    bias: jax.Array | None = None,
) -> Launch:
    """The fastest launch in the measurements of `pallas_kernels.mosaic.hopper.attention`.

    Weights in e4m3 have a static scale, so tiles of keys need not be blocks; but what SAS leaves
    out is relative to the maximum up to a weight's block. Computing the next scores meanwhile takes
    more registers than there are in mode ``"int8"``, whose second products are converted too, and
    with 256 channels. With 64 channels a third warpgroup fits instead, if a sequence has queries
    for it. Ping-pong is slower there, and in mode ``"int8"``. A bias of tiles of 64 keys has
    registers, also overlapped, but not one of all pairs in float32 (see
    `pallas_kernels.mosaic.bias`).
    """
    head_dim, is_int8 = padded_head_dim(query.shape[-1]), config.mode == "int8"
    is_narrow, is_wide = head_dim == HEAD_DIMS[0], head_dim == HEAD_DIMS[-1]
    has_bias = bias is not None
    is_large = bias is not None and bias.shape[2] > 1 and bias.dtype.itemsize > 2
    is_block = is_int8 or has_bias or is_wide or isinstance(config.softmax, SAS)
    may_be_three = is_narrow and not is_int8 and not has_bias
    consumers = 3 if may_be_three and query.shape[1] > 2 * _ROWS else 2
    tile = config.block_kv if is_block else _TILE
    if is_wide:
        stages = 3 if tile < _TILE else 2
    else:
        stages = 4 if is_narrow or is_block or config.mode != "fp8" else 3
        if has_segments and tile == _TILE and not is_narrow:  # ids or bounds need some room, too
            stages = 3
    return Launch(
        stages=stages,
        intra_warpgroup_overlap=consumers == 2
        and not (is_int8 or is_wide or is_large)
        and not (has_bias and tile == _TILE),
        tile=tile,
        consumers=consumers,
        quantizes=quantizes_queries(query, config, consumers),
        ping_pong=is_wide or not (is_narrow or is_int8 or has_bias),
    )


def quantizes_queries(query: jax.Array, config: TurboConfig, consumers: int) -> bool:
    """Whether the kernel itself can quantize queries.

    They must be in 16 bits, to fit into memory unrounded, and their blocks must divide its tiles.
    """
    return (
        query.shape[-1] in HEAD_DIMS[:-1]
        and query.dtype in (jnp.bfloat16, jnp.float16)
        and config.block_q in (_ROWS, 2 * _ROWS)
        and consumers * _ROWS % config.block_q == 0
    )


def _exponential(config: TurboConfig, make):  # type: ignore[no-untyped-def]
    """The softmax's exponential as the kernel computes it fastest."""
    sas = config.softmax
    if not isinstance(sas, SAS):
        return make("exact")
    kind = "hardware" if sas.threshold <= _HIGHEST_THRESHOLD else "polynomial"
    return make(kind, sas.threshold, sas.coefficients, sas.base == "2")
