"""The kernels for many queries to pages on Hopper: what they take, how they are launched."""

import functools
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from turbojax import polar
from turbojax._device import multiprocessors, needs_hopper
from turbojax.attention.options import Options
from turbojax.caches.paged import checks as page_checks
from turbojax.caches.paged.formats import Codes, Float8, Format, Int8
from turbojax.caches.paged.pool import PagedCache
from turbojax.numerics import rows
from turbojax.numerics.rows import HEAD_DIMS

if TYPE_CHECKING:
    from pallas_kernels.mosaic.hopper.paged_prompt import expand

# Copies move queries in multiples of eight.
_COPY = 8
_MOST_E4M3_CHANNELS = 128
# Tokens of a part, and query rows of a KV head up to which there are parts.
_PART, _MOST_ROWS_IN_PARTS = 2048, 1024
_LOG2_E = 1.4426950408889634
# Bytes that expanded pages may take; beyond it sequences are processed one after the other.
_MOST_EXPANDED = 2**30


class Launch(NamedTuple):
    """What is tuned. Results depend on `part` only, so it must follow from the query rows alone.

    Programs take a `part` of the tokens, or all if it is None. `registers` are those of a thread
    that attends and of one that copies.
    """

    part: int | None
    stages: int
    registers: tuple[int, int] = (232, 40)


def default_launch(query: jax.Array, cache: PagedCache) -> Launch:
    """As many tiles as fit, at most four; parts for chunks that would give few programs."""
    few = cache.head_dim > 64 and not _is_multiplied_in_8_bits(cache)
    rows = query.shape[1] * query.shape[2] // cache.num_kv_heads
    return Launch(_PART if rows <= _MOST_ROWS_IN_PARTS else None, 2 if few else 4)


def unsupported(
    query: jax.Array | jax.ShapeDtypeStruct, cache: PagedCache, options: Options
) -> str | None:
    """Why `attend` cannot read these pages here; None if it can."""
    rows = query.shape[1] * query.shape[2] // cache.num_kv_heads
    if options.out_dtype is not None and rows > _MOST_ROWS_IN_PARTS:
        return (
            f"{rows} queries of a KV head must be at most {_MOST_ROWS_IN_PARTS} for float32 outputs"
        )
    if cache.dtype.itemsize != 2:
        return f"dtype={cache.dtype} must be bfloat16 or float16"
    if cache.head_dim not in HEAD_DIMS:
        return f"head_dim={cache.head_dim} must be one of {HEAD_DIMS}"
    return needs_hopper()


def has_sinks(query: jax.Array | jax.ShapeDtypeStruct, cache: PagedCache) -> bool:
    """Whether the kernel itself takes sinks: where a program takes all that its rows see."""
    return query.shape[1] * query.shape[2] // cache.num_kv_heads > _MOST_ROWS_IN_PARTS


@functools.partial(jax.jit, static_argnames=("options", "launch"))
def attend(
    query: jax.Array,
    cache: PagedCache,
    block_tables: jax.Array,
    lengths: jax.Array,
    query_lengths: jax.Array | None,
    sinks: jax.Array | None = None,
    *,
    options: Options,
    launch: Launch | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`paged_attention` of many queries as one kernel. Sequences that cannot be read are NaN.

    Pages that are not in 16 bits are expanded before. Weights are rounded to the values' 16 bits
    before they multiply them. `query_lengths` may be None; for `sinks` see `has_sinks`.
    """
    if query_lengths is None:
        query_lengths = jnp.full(len(query), query.shape[1], jnp.int32)
    first = page_checks.first_seen(lengths, query_lengths, query.shape[1], options.window)
    ok = page_checks.readable(cache, block_tables, lengths, first)
    arrays = (
        query,
        jnp.clip(block_tables, 0, cache.num_pages - 1),
        jnp.where(ok, lengths, -1),
        jnp.clip(query_lengths, 0, query.shape[1]),
    )
    run = functools.partial(
        _attend,
        cache=cache,
        sinks=sinks,
        options=options,
        launch=launch or default_launch(query, cache),
    )
    if _expanded_bytes(cache, block_tables) <= _MOST_EXPANDED:
        return run(*arrays)
    one = jax.tree.map(lambda x: x[:, None], arrays)
    out, lse = jax.lax.map(lambda x: run(*x), one)
    return out[:, 0], lse[:, 0]


def _is_multiplied_in_8_bits(cache: PagedCache) -> bool:
    """Whether e4m3 pages are multiplied as stored; 256 channels leave no room for the sums."""
    return cache.kv_dtype == "fp8_e4m3" and cache.head_dim <= _MOST_E4M3_CHANNELS


def _expanded_bytes(cache: PagedCache, block_tables: jax.Array) -> int:
    """Bytes of the expanded pages that tables may name: both sides in 16 bits, or e4m3 values."""
    if cache.kv_dtype == "auto":
        return 0
    each = 1 if _is_multiplied_in_8_bits(cache) else 4
    return block_tables.size * cache.page_size * cache.num_kv_heads * cache.head_dim * each


def _attend(
    query: jax.Array,
    block_tables: jax.Array,
    lengths: jax.Array,
    query_lengths: jax.Array,
    *,
    cache: PagedCache,
    sinks: jax.Array | None,
    options: Options,
    launch: Launch,
) -> tuple[jax.Array, jax.Array]:
    """`attend` with tables within the pool; sequences of negative length cannot be read."""
    from pallas_kernels.mosaic.hopper.paged_prompt import kernel, transpose

    tokens = query.shape[1]
    window = None if options.window is None else options.window[0]
    settings = kernel.Settings(
        window=window,
        soft_cap=options.logits_soft_cap,
        stages=launch.stages,
        part=launch.part,
        registers=launch.registers,
        programs=multiprocessors(),
        out_dtype=options.out_dtype,
    )
    keys, values, nonfinite = cache.key, cache.value, None
    starts = jnp.zeros_like(lengths) if window is None else lengths - query_lengths - window
    if _is_multiplied_in_8_bits(cache):
        values, nonfinite = transpose.transpose(values, block_tables, lengths, starts)
    elif cache.kv_dtype != "auto":
        keys, values, block_tables = _expand(cache, block_tables, lengths, starts)
    factors = [_score_factor(options) * _scale_of(cache.key_scale), _scale_of(cache.value_scale)]
    out, lse = kernel.attention(
        rows.pad_axis(_signed(query, options.scale), 1, -(-tokens // _COPY) * _COPY),
        keys,
        values,
        block_tables,
        lengths,
        query_lengths,
        jnp.stack(factors),
        nonfinite,
        sinks,
        settings=settings,
    )
    return out[:, :tokens], lse[:, :tokens]


def _scale_of(x: jax.Array | None) -> jax.Array:
    return jnp.float32(1) if x is None else x


def _expand(
    cache: PagedCache, block_tables: jax.Array, lengths: jax.Array, starts: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Keys and values in the queries' 16 bits, and their tables."""
    from pallas_kernels.mosaic.hopper.paged_prompt import expand

    key, value = (_codec(side, cache.head_dim) for side in cache.formats)
    return expand.expand(
        cache.key,
        cache.value,
        (cache.key_norm, cache.value_norm),
        cache.rotation.signs if cache.formats.is_rotated else None,
        block_tables,
        lengths,
        starts,
        head_dim=cache.head_dim,
        settings=expand.Settings((key, value), cache.dtype.name),
    )


def _codec(stored: Format, head_dim: int) -> "expand.Codec":
    from pallas_kernels.mosaic.hopper.paged_prompt import expand

    if isinstance(stored, Codes):
        table, middle, step = polar.integer_centroids(stored.bits)
        # The centroids' unit and the rotation each have the factor 1 / sqrt(channels).
        return expand.Codec(tuple(table), middle, step / head_dim)
    if isinstance(stored, Int8):
        return expand.Codec(is_int8=True)
    assert isinstance(stored, Float8)
    return expand.Codec(is_e5m2=stored.name == "float8_e5m2")


def _signed(query: jax.Array, scale: float) -> jax.Array:
    """The query with the scale's sign: maxima are taken of products that are not scaled yet."""
    return query if scale > 0 else query * jnp.asarray(-1 if scale < 0 else 0, query.dtype)


def _score_factor(options: Options) -> jax.Array:
    """The factor from products to scores in powers of two; with a cap, to twice its argument."""
    scale = abs(options.scale) or 1.0
    if options.logits_soft_cap is not None:
        scale = scale * 2 / options.logits_soft_cap
    return jnp.float32(scale * _LOG2_E)
