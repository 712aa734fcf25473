"""The Triton kernels behind `turbo_attention` and `decode`: what they take, and their launch."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from turbojax._device import ADA, AMPERE, interpreting, needs_gpu, unindexable
from turbojax.attention import segments
from turbojax.attention.optional_arrays import NOTHING, Extras
from turbojax.attention.options import Options
from turbojax.attention.turbo.operands import Operands, Stage1, plain_refusal, quantize_operands
from turbojax.caches.progressive.cache import CacheSide, ProgressiveCache
from turbojax.numerics import rounding as numerics
from turbojax.numerics.config import TurboConfig
from turbojax.numerics.sas import SAS

# Compute capabilities: int8 matrix units with asynchronous copies, and e4m3 conversions.
_LARGEST_HEAD_DIM = 256
_MOST_QUERY_ROWS = 64
_SHORTEST_8_BIT_BLOCK = 32
# Shared memory: one key block at most, and the key and value blocks in flight.
_LARGEST_TILE, _BYTES_IN_FLIGHT = 2**16, 96 * 2**10
# Extras that the prefill kernel supports.
_EXTRAS = (*(field.name for field in dataclasses.fields(Extras)), "output_dtype")


def attention_unsupported(
    *,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    config: TurboConfig,
    options: Options,
    extras: Extras = NOTHING,
) -> str | None:
    """Why `turbo_attention` cannot run this here; None if it can."""
    refusal = plain_refusal(key, value, options, extras, _EXTRAS)
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
    return _unsupported(config, query.shape[-1], sizes, needed)


def _operand_bytes(config: TurboConfig, dtype: jax.typing.DTypeLike) -> int:
    return jnp.dtype(dtype).itemsize if config.mode == "float" else 1


def _tile_bytes(config: TurboConfig, head_dim: int, bytes_each: int) -> int:
    """Shared memory of one key block, the head dim rounded up to a power of two."""
    return config.block_kv * (1 << (head_dim - 1).bit_length()) * bytes_each


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_length: jax.Array,
    key_length: jax.Array,
    *,
    config: TurboConfig,
    options: Options,
    extras: Extras = NOTHING,
    stage1: Stage1 | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`reference.attention` as one kernel; stage 1 runs in XLA unless `stage1` is given."""
    return _attention(
        query,
        key,
        value,
        query_length,
        key_length,
        stage1,
        config=config,
        options=options,
        extras=extras,
        interpret=interpreting(),
    )


@functools.partial(jax.jit, static_argnames=("config", "options", "interpret"))
def _attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_length: jax.Array,
    key_length: jax.Array,
    stage1: Stage1 | None = None,
    *,
    config: TurboConfig,
    options: Options,
    extras: Extras = NOTHING,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    operands = quantize_operands(query, key, value, query_length, key_length, config, stage1)
    return attend_operands(
        operands,
        query_length,
        key_length,
        tokens=query.shape[1],
        dtype=options.dtype_of_output(query),
        config=config,
        options=options,
        extras=extras,
        interpret=interpret,
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
    extras: Extras = NOTHING,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Launches the prefill kernel; see `pallas_kernels.triton.attention.attention`."""
    from pallas_kernels.triton import attention as kernel

    tile, num_warps, num_stages = _ATTENTION_LAUNCH[config.mode]
    bytes_each = _operand_bytes(config, operands.k.dtype)
    block_bytes = 2 * _tile_bytes(config, operands.k.shape[-1], bytes_each)
    num_stages = max(1, min(num_stages, _BYTES_IN_FLIGHT // block_bytes))
    exp, unit = _exponential(config)
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
        interpret=interpret,
    )
    ranges = None
    if extras.query_segment_ids is not None and extras.key_value_segment_ids is not None:
        ids = extras.query_segment_ids, extras.key_value_segment_ids
        ranges = segments.key_blocks(*ids, tile, config.block_kv)
    starts, ends = extras.key_bounds or (None, None)
    return kernel.attention(
        *operands,
        query_length,
        key_length,
        tokens=tokens,
        dtype=dtype,
        settings=settings,
        extras=kernel.Extras(
            extras.shift(),
            extras.query_segment_ids,
            extras.key_value_segment_ids,
            ranges,
            starts,
            ends,
            extras.bias,
            extras.alibi_slopes,
            extras.sinks,
        ),
    )


# Query tile, warps, stages, by mode: the fastest on an H100 at head dim 128.
_ATTENTION_LAUNCH = {
    "int8": (64, 4, 3),
    "int8_fp8": (128, 8, 3),
    "fp8": (128, 8, 3),
    "float": (64, 4, 3),
}


def _unsupported(config: TurboConfig, head_dim: int, sizes: list[int], needed: float) -> str | None:
    """Why kernels cannot run this here; None if they can. `sizes` are the operands' bytes."""
    block = config.block_kv
    if block & (block - 1) or not 16 <= block <= 256:
        return f"block_kv={block} must be a power of two from 16 to 256"
    if head_dim > _LARGEST_HEAD_DIM or head_dim % 8:
        return f"{head_dim=} must be a multiple of 8 up to {_LARGEST_HEAD_DIM}"
    return unindexable(*sizes) or needs_gpu(needed)


def decode_unsupported(
    *,
    query: jax.Array,
    cache: ProgressiveCache,
    options: Options,
    extras: Extras = NOTHING,
) -> str | None:
    """Why `decode` cannot run this here; None if it can."""
    del options
    refusal = extras.refusal()
    if refusal is not None:
        return refusal
    group = query.shape[2] // cache.num_kv_heads
    if query.shape[1] * group > _MOST_QUERY_ROWS:
        return (
            f"{query.shape[1]} query tokens times {group} heads per KV head must be at most "
            f"{_MOST_QUERY_ROWS}"
        )
    sides = (cache.key, cache.value)
    sizes = [math.prod(x.shape) for side in sides for x in (*side.codes, side.buffer)]
    return _unsupported(cache.config, cache.head_dim, sizes, AMPERE)


def decode(
    query: jax.Array,
    cache: ProgressiveCache,
    query_length: jax.Array,
    extras: Extras = NOTHING,
    *,
    options: Options,
) -> tuple[jax.Array, jax.Array]:
    """`decode_reference.decode` as one kernel and a merge."""
    del extras  # see `decode_unsupported`
    return _decode(
        query,
        cache,
        query_length,
        options=options,
        interpret=interpreting(),
    )


@functools.partial(jax.jit, static_argnames=("options", "interpret"))
def _decode(
    query: jax.Array,
    cache: ProgressiveCache,
    query_length: jax.Array,
    *,
    options: Options,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    from pallas_kernels.triton import decode as kernel

    config = cache.config
    exp, unit = _exponential(config)
    pairs = cache.batch_size * cache.num_kv_heads
    settings = kernel.Settings(
        mode=numerics.stored_mode(config.mode),
        exp=exp,
        unit=unit,
        largest=numerics.largest_weight(config),
        key_bits=cache.key.bits,
        value_bits=cache.value.bits,
        block=config.block_kv,
        first_tokens=config.num_first_tokens,
        scale=options.scale,
        window=options.window,
        soft_cap=options.logits_soft_cap,
        out_dtype=options.out_dtype,
        splits=_splits(pairs, cache.key.block_scale.shape[2]),
        num_warps=_DECODE_WARPS,
        num_stages=_DECODE_STAGES,
        interpret=interpret,
    )
    return kernel.decode(
        query,
        _side(kernel.Side, cache.key),
        _side(kernel.Side, cache.value),
        cache.lengths,
        cache.buffer_lengths,
        query_length,
        settings,
    )


# With more warps, they wait for each other; more stages take shared memory from other programs.
_DECODE_WARPS, _DECODE_STAGES = 1, 2
# Programs that fill a large GPU several times over, and blocks that are worth a program.
_ENOUGH_PROGRAMS, _FEWEST_BLOCKS = 1024, 1


def _splits(pairs: int, blocks: int) -> int:
    """Programs per KV head."""
    wanted = math.ceil(_ENOUGH_PROGRAMS / pairs)
    return max(1, min(wanted, blocks // _FEWEST_BLOCKS))


def _exponential(config: TurboConfig) -> tuple[Callable[..., jax.Array], float]:
    """The softmax's exponential as a kernel computes it, and its units per nat."""
    if isinstance(config.softmax, SAS):
        return config.softmax.in_kernel, config.softmax.unit
    return _exact_exponential, math.log2(math.e)


def _exact_exponential(
    x: jax.Array, *, floor: object, exp2: Callable[[jax.Array], jax.Array], fma: object
) -> jax.Array:
    del floor, fma
    return exp2(x)


def _side(make, side: CacheSide):  # type: ignore[no-untyped-def]
    fields = {name: getattr(side, name) for name in make._fields}
    return make(**{**fields, "head_slots": side.places})
