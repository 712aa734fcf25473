"""The Triton kernel behind `turbo_attention`: what it takes, and its launch."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from turbojax._device import ADA, AMPERE, interpreting, needs_gpu, unindexable
from turbojax.attention.options import Options
from turbojax.attention.score_modifiers import NO_MODIFIERS, ScoreModifiers
from turbojax.attention.turbo.operands import Operands, Stage1, plain_refusal, quantize_operands
from turbojax.numerics.config import TurboConfig
from turbojax.numerics.sas import SAS

# Compute capabilities: int8 matrix units with asynchronous copies, and e4m3 conversions.
_LARGEST_HEAD_DIM = 256
_SHORTEST_8_BIT_BLOCK = 32
# Shared memory: one key block at most, and the key and value blocks in flight.
_LARGEST_TILE, _BYTES_IN_FLIGHT = 2**16, 96 * 2**10
# Modifiers that the prefill kernel supports.
_MODIFIERS = (*(field.name for field in dataclasses.fields(ScoreModifiers)), "output_dtype")


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
    refusal = plain_refusal(key, value, options, modifiers, _MODIFIERS)
    if refusal is not None:
        return refusal
    if config.mode != "float" and config.block_kv < _SHORTEST_8_BIT_BLOCK:
        return (
            f"block_kv={config.block_kv} must be at least {_SHORTEST_8_BIT_BLOCK}: 8-bit products "
            "take 32 tokens at a time"
        )
    bytes_each = _operand_bytes(config, query.dtype)
    tile = _tile_bytes(config, query.shape[-1], bytes_each)
    if tile > _LARGEST_TILE:
        return (
            f"block_kv={config.block_kv} keys of head_dim={query.shape[-1]} take {tile} bytes of "
            f"shared memory, must be at most {_LARGEST_TILE}"
        )
    sizes = [math.prod(x.shape) * bytes_each for x in (query, key)]
    needed = ADA if config.mode in ("int8_fp8", "fp8") else AMPERE
    return unsupported(config, query.shape[-1], sizes, needed)


def _operand_bytes(config: TurboConfig, dtype: jax.typing.DTypeLike) -> int:
    return jnp.dtype(dtype).itemsize if config.mode == "float" else 1


def _tile_bytes(config: TurboConfig, head_dim: int, bytes_each: int) -> int:
    """Shared memory of one key block, the head dim rounded up to a power of two."""
    return config.block_kv * (1 << (head_dim - 1).bit_length()) * bytes_each


@functools.partial(jax.jit, static_argnames=("config", "options"))
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
) -> tuple[jax.Array, jax.Array]:
    """`reference.attention` as one kernel; stage 1 runs in XLA unless `stage1` is given."""
    operands = quantize_operands(query, key, value, query_length, key_length, config, stage1)
    return attend_operands(
        operands,
        query_length,
        key_length,
        tokens=query.shape[1],
        dtype=options.dtype_of_output(query),
        config=config,
        options=options,
        modifiers=modifiers,
    )


def attend_operands(
    operands: Operands,
    query_length: jax.Array,
    key_length: jax.Array,
    *,
    tokens: int,
    dtype: jax.typing.DTypeLike,
    config: TurboConfig,
    options: Options,
    modifiers: ScoreModifiers = NO_MODIFIERS,
) -> tuple[jax.Array, jax.Array]:
    """Launches the prefill kernel; see `pallas_kernels.triton.attention.attention`."""
    from pallas_kernels.triton import attention as kernel

    tile, num_warps, num_stages = _ATTENTION_LAUNCH[config.mode]
    bytes_each = _operand_bytes(config, operands.k.dtype)
    block_bytes = 2 * _tile_bytes(config, operands.k.shape[-1], bytes_each)
    num_stages = max(1, min(num_stages, _BYTES_IN_FLIGHT // block_bytes))
    exp, unit = exponential(config)
    settings = kernel.Settings(
        mode=config.mode,
        exp=exp,
        unit=unit,
        block_q=config.block_q,
        block_kv=config.block_kv,
        scale=options.scale,
        is_causal=options.is_causal,
        window=options.window,
        soft_cap=options.logits_soft_cap,
        tile=tile,
        num_warps=num_warps,
        num_stages=num_stages,
        interpret=interpreting(),
    )
    ranges = None
    if modifiers.query_segment_ids is not None and modifiers.key_value_segment_ids is not None:
        ids = modifiers.query_segment_ids, modifiers.key_value_segment_ids
        ranges = _key_blocks(*ids, tile, config.block_kv)
    starts, ends = modifiers.key_bounds or (None, None)
    return kernel.attention(
        *operands,
        query_length,
        key_length,
        tokens=tokens,
        dtype=dtype,
        settings=settings,
        modifiers=kernel.ScoreModifiers(
            modifiers.shift(),
            modifiers.query_segment_ids,
            modifiers.key_value_segment_ids,
            ranges,
            starts,
            ends,
            modifiers.bias,
            modifiers.alibi_slopes,
            modifiers.sinks,
        ),
    )


# Query tile, warps, stages, by mode: the fastest on an H100 at head dim 128.
_ATTENTION_LAUNCH = {
    "int8": (64, 4, 3),
    "int8_fp8": (128, 8, 3),
    "fp8": (128, 8, 3),
    "float": (64, 4, 3),
}


def unsupported(config: TurboConfig, head_dim: int, sizes: list[int], needed: float) -> str | None:
    """Why the kernels of prompts and caches cannot run this here, or None. `sizes`: bytes."""
    block = config.block_kv
    if block & (block - 1) or not 16 <= block <= 256:
        return f"block_kv={block} must be a power of two from 16 to 256"
    if head_dim > _LARGEST_HEAD_DIM or head_dim % 8:
        return f"{head_dim=} must be a multiple of 8 up to {_LARGEST_HEAD_DIM}"
    return unindexable(*sizes) or needs_gpu(needed)


def exponential(config: TurboConfig) -> tuple[Callable[..., jax.Array], float]:
    """The softmax's exponential as a kernel computes it, and its units per nat."""
    if isinstance(config.softmax, SAS):
        return config.softmax.in_kernel, config.softmax.unit
    return _exact_exponential, math.log2(math.e)


def _exact_exponential(
    x: jax.Array, *, floor: object, exp2: Callable[[jax.Array], jax.Array], fma: object
) -> jax.Array:
    del floor, fma
    return exp2(x)


def _ids_of_blocks(ids: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """Smallest and largest id of every block of tokens: int32 ``[B, ceil(T / block)]`` twice."""
    batch, tokens = ids.shape
    whole = jnp.pad(ids, ((0, 0), (0, -tokens % block)), mode="edge").reshape(batch, -1, block)
    return jnp.min(whole, axis=-1), jnp.max(whole, axis=-1)


def _meet(query_ids: jax.Array, key_ids: jax.Array, block_q: int, block_kv: int) -> jax.Array:
    """Pairs of blocks whose ranges of ids meet, bool ``[B, query blocks, key blocks]``.

    Others have no segment in common. Where queries and keys have the same ascending ids, as in
    packed sequences, exactly the pairs that meet have one.
    """
    q_least, q_largest = (x[:, :, None] for x in _ids_of_blocks(query_ids, block_q))
    k_least, k_largest = (x[:, None, :] for x in _ids_of_blocks(key_ids, block_kv))
    return (q_least <= k_largest) & (k_least <= q_largest)


def _key_blocks(query_ids: jax.Array, key_ids: jax.Array, block_q: int, block_kv: int) -> jax.Array:
    """Per block of queries the blocks of keys ``first <= j < last`` outside which none meet.

    int32 ``[B, ceil(T / block_q), 2]``; ``first == last`` where none does.
    """
    found = _meet(query_ids, key_ids, block_q, block_kv)
    count = found.shape[2]
    first = jnp.argmax(found, axis=2)
    last = count - jnp.argmax(found[:, :, ::-1], axis=2)
    last = jnp.where(jnp.any(found, axis=2), last, first)
    return jnp.stack([first, last], axis=-1).astype(jnp.int32)
