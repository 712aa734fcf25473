"""The Triton kernel behind `decode`: what it takes, and its launch."""

import functools
import math

import jax

from turbojax import _checks
from turbojax._device import AMPERE, interpreting
from turbojax.attention.options import Options
from turbojax.attention.score_modifiers import NO_MODIFIERS, ScoreModifiers
from turbojax.attention.turbo.triton import exponential
from turbojax.attention.turbo.triton import unsupported as kernels_unsupported
from turbojax.caches.progressive.cache import ProgressiveCache
from turbojax.numerics import rounding

_MOST_QUERY_ROWS = 64


def unsupported(
    *,
    query: jax.Array,
    cache: ProgressiveCache,
    options: Options,
    modifiers: ScoreModifiers = NO_MODIFIERS,
) -> str | None:
    """Why `decode` cannot run this here; None if it can."""
    del options
    refusal = modifiers.refusal()
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
    return kernels_unsupported(cache.config, cache.head_dim, sizes, AMPERE)


@functools.partial(jax.jit, static_argnames="options")
def decode(
    query: jax.Array,
    cache: ProgressiveCache,
    query_length: jax.Array | None,
    modifiers: ScoreModifiers = NO_MODIFIERS,
    *,
    options: Options,
) -> tuple[jax.Array, jax.Array]:
    """`decode_reference.decode` as one kernel and a merge."""
    del modifiers  # see `unsupported`
    from pallas_kernels.triton import decode as kernel

    query_length = _checks.check_lengths("query_seq_lengths", query_length, *query.shape[:2])
    config = cache.config
    exp, unit = exponential(config)
    pairs = cache.batch_size * cache.num_kv_heads
    settings = kernel.Settings(
        mode=rounding.stored_mode(config.mode),
        exp=exp,
        unit=unit,
        largest=rounding.largest_weight(config),
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
        interpret=interpreting(),
    )
    return kernel.decode(
        query,
        cache.key.for_kernels(),
        cache.value.for_kernels(),
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
