"""The Triton kernel behind `paged_attention`: what it takes, how it is launched."""

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from turbojax import polar
from turbojax._device import ADA, AMPERE, interpreting, needs_gpu, unindexable
from turbojax.attention.options import Options
from turbojax.attention.score_modifiers import NO_MODIFIERS, ScoreModifiers
from turbojax.caches.paged.formats import Codes, Format
from turbojax.caches.paged.pool import PagedCache

if TYPE_CHECKING:
    from pallas_kernels.triton import paged_attention as kernels

# Compute capabilities: with conversions from e4m3, and with bfloat16 and what else is needed.
_SMALLEST_HEAD_DIM, _LARGEST_HEAD_DIM = 16, 256


def unsupported(
    *,
    query: jax.Array,
    cache: PagedCache,
    block_tables: jax.Array,
    options: Options,
    modifiers: ScoreModifiers = NO_MODIFIERS,
) -> str | None:
    """Why `attend` cannot run this here; None if it can."""
    del query, block_tables, options
    refusal = modifiers.refusal()
    if refusal is not None:
        return refusal
    if not _SMALLEST_HEAD_DIM <= cache.head_dim <= _LARGEST_HEAD_DIM:
        return (
            f"head_dim={cache.head_dim} must be between {_SMALLEST_HEAD_DIM} and "
            f"{_LARGEST_HEAD_DIM}"
        )
    sides = cache.key, cache.value
    sizes = [math.prod(x.shape) for x in sides if x.dtype.itemsize == 1]
    has_e4m3 = any(x.dtype == jnp.float8_e4m3fn for x in sides)
    return unindexable(*sizes) or needs_gpu(ADA if has_e4m3 else AMPERE)


class Launch(NamedTuple):
    """What is tuned; it must depend on no size but the number of query rows.

    Programs take a `part` of the tokens, a `tile` of these at a time, and at most `rows` queries.
    """

    part: int
    tile: int
    rows: int
    num_warps: int


@functools.partial(jax.jit, static_argnames=("options", "launch"))
def attend(
    query: jax.Array,
    cache: PagedCache,
    block_tables: jax.Array,
    lengths: jax.Array,
    query_lengths: jax.Array,
    modifiers: ScoreModifiers = NO_MODIFIERS,
    *,
    options: Options,
    launch: Launch | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`reference.attend` as one kernel and a merge.

    Where keys have 8 bits or fewer, queries are rounded to float16 relative to their largest value.
    Weights are rounded to the values' dtype, for fp8 to float16; multiplied by the norms of codes,
    or by the scales of int8, they are rounded to bfloat16.
    """
    del modifiers  # see `unsupported`
    from pallas_kernels.triton import paged_attention as kernel

    formats = cache.formats
    key_factor = jnp.float32(options.scale) * formats.key.factor(cache.head_dim, cache.key_scale)
    value_factor = formats.value.factor(cache.head_dim, cache.value_scale)
    settings = kernel.Settings(
        window=options.window,
        soft_cap=options.logits_soft_cap,
        key_codec=_codec(formats.key),
        value_codec=_codec(formats.value),
        num_stages=1,
        **(launch or default_launch(query, cache))._asdict(),
        interpret=interpreting(),
    )
    out, residual = kernel.attend(
        query,
        kernel.Side(cache.key, cache.key_norm),
        kernel.Side(cache.value, cache.value_norm),
        block_tables,
        lengths,
        query_lengths,
        key_factor,
        settings,
    )
    return out * value_factor, residual


def _codec(stored: Format) -> "kernels.Codec | None":
    from pallas_kernels.triton import paged_attention as kernel

    if not isinstance(stored, Codes):
        return None
    table, middle, _ = polar.integer_centroids(stored.bits)
    return kernel.Codec(table, middle)


def default_launch(query: jax.Array, cache: PagedCache) -> Launch:
    """How a call is cut up: one way for few query rows of a KV head, another for many.

    Within either, terms are added in the same order whatever the queries.
    """
    is_wide = cache.head_dim > 128
    if query.shape[1] * query.shape[2] // cache.num_kv_heads > MOST_NARROW_ROWS:
        tile = 64 if cache.formats.is_rotated else 128
        return Launch(part=1024, tile=tile // 2 if is_wide else tile, rows=64, num_warps=4)
    if cache.kv_dtype == "auto":
        return Launch(part=512, tile=64 if is_wide else 128, rows=16, num_warps=4)
    tile, num_warps = (32, 2) if is_wide else (64, 1)
    return Launch(part=512, tile=tile, rows=16, num_warps=num_warps)


# Query rows of a KV head up to which a call counts as decoding.
MOST_NARROW_ROWS = 64
