"""The Triton kernel behind `fireq.decode`: what it takes, how it is launched."""

import functools
import math

import jax

from turbojax import _checks
from turbojax._device import ADA, interpreting, needs_gpu, unindexable
from turbojax.attention.options import Options
from turbojax.attention.score_modifiers import NO_MODIFIERS, ScoreModifiers
from turbojax.caches.token_scaled.cache import ALLOCATION, TokenScaledCache

# Compute capability with conversions to e4m3.
_LARGEST_HEAD_DIM = 256
_MOST_QUERY_ROWS = 64


def decode_unsupported(
    *,
    query: jax.Array,
    cache: TokenScaledCache,
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
    if cache.head_dim > _LARGEST_HEAD_DIM:
        return f"head_dim={cache.head_dim} must be at most {_LARGEST_HEAD_DIM}"
    return unindexable(math.prod(cache.key_codes.shape)) or needs_gpu(ADA)


@functools.partial(jax.jit, static_argnames="options")
def decode(
    query: jax.Array,
    cache: TokenScaledCache,
    query_length: jax.Array | None,
    modifiers: ScoreModifiers = NO_MODIFIERS,
    *,
    options: Options,
) -> tuple[jax.Array, jax.Array]:
    """`reference.decode` as one kernel and a merge; weights are rounded to bfloat16."""
    del modifiers  # see `decode_unsupported`
    from pallas_kernels.triton import kv4_decode as kernel

    query_length = _checks.check_lengths("query_seq_lengths", query_length, *query.shape[:2])
    tile, num_warps, num_stages = _LAUNCH[cache.head_dim > 128]
    assert ALLOCATION % tile == 0
    settings = kernel.Settings(
        scale=options.scale,
        window=options.window,
        soft_cap=options.logits_soft_cap,
        out_dtype=options.out_dtype,
        tile=tile,
        splits=_splits(cache.batch_size * cache.num_kv_heads, cache.key_scale.shape[2] // tile),
        num_warps=num_warps,
        num_stages=num_stages,
        interpret=interpreting(),
    )
    return kernel.decode(
        query,
        kernel.Side(cache.key_codes, cache.key_scale),
        kernel.Side(cache.value_codes, cache.value_scale),
        cache.lengths,
        query_length,
        settings,
    )


# Tokens at a time, warps, stages: for head dims up to 128, and for larger ones. With two stages
# Triton carries values from one step to the next byte by byte: a quarter more instructions.
_LAUNCH = ((64, 1, 1), (64, 2, 1))
# Programs that fill a large GPU several times over.
_ENOUGH_PROGRAMS = 1024


def _splits(pairs: int, tiles: int) -> int:
    """Programs per KV head."""
    return max(1, min(math.ceil(_ENOUGH_PROGRAMS / pairs), tiles))
