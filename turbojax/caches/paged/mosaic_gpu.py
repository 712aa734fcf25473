"""The Mosaic GPU kernel behind `paged_attention`: what it takes, how it is launched."""

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from turbojax import polar
from turbojax._device import has_bulk_copies, needs_e4m3, needs_mosaic, shared_memory
from turbojax.attention.options import Options
from turbojax.caches.paged import append_mosaic
from turbojax.caches.paged.formats import Codes, Float8, Format, Int8
from turbojax.caches.paged.pool import PagedCache
from turbojax.numerics.rows import HEAD_DIMS

if TYPE_CHECKING:
    from pallas_kernels.mosaic.hopper.paged.kernel import Pages, Settings, Stored

# Kinds of pages whose keys and values are read alike; in others each side is read in its own way.
_ALIKE = ("turbo4", "fp8_e4m3", "fp8_e5m2", "auto")
_PLAIN_DTYPES = ("bfloat16", "float16")
MOST_QUERY_ROWS = 64
# Where attention that stores new tokens was timed: heads of queries for each of keys, and new keys.
_STORED_HEADS, _STORED_VECTORS = 8, 128
# Where a program takes few tokens, its results are as large as what it reads.
MOST_SPLIT_ROWS = 16
# Query rows that a program with a part of turbo4 pages takes, if there are more than half of it.
_FULL_ROWS = 16
# Fewer programs than this, each with a part, leave half of an H100 idle.
FEW_PROGRAMS = 64


# Bytes of a warp's keys in 16 bits.
_PLAIN_BYTES = 8192
# How many channels' codes, by their bits, are whole words.
_WHOLE_WORDS = {4: 8, 3: 32, 2: 16}
# Bytes of a token's codes up to which a block of 64 tokens is no larger.
_MOST_BYTES_OF_64 = 128
# Bytes of a warp's shared memory with which at most two programs are on a multiprocessor.
_HALF = 19456
_MULTIPROCESSORS = 132
# With 8-bit pages three programs share a multiprocessor. Where each multiprocessor has this many in
# all, the last round would have too few and take as long as any: two run at a time instead.
_IN_PAIRS = (4, 8)
# Most bytes of the results of programs that take few tokens.
_MOST_FOUND = 2**27


class Launch(NamedTuple):
    """What is tuned. Only `part` and `warpgroups` change results: they must not follow the call.

    Attributes:
      is_split: whether a program takes as few tokens as it can, for short calls.
      part: tokens of a program otherwise.
      few: tokens of a program that takes few.
      stages: blocks in flight of a warp.
      rows: queries of a program at most.
      reserve: bytes of shared memory for a warp at least.
    """

    is_split: bool
    part: int = 2048
    few: int = 256
    warpgroups: int = 1
    stages: int = 2
    rows: int = 16
    reserve: int = 0


class Call(NamedTuple):
    """The properties of a call that decide its launch.

    Attributes:
      rows: queries of a KV head.
      pairs: sequences times KV heads.
      tokens: that a sequence may have.
      is_plain: whether keys and values have 16 bits.
      is_fp8: whether they have 8 bits: floats, or int8, which takes as many bytes besides its
        scales.
    """

    rows: int
    pairs: int
    tokens: int
    head_dim: int
    window: tuple[int, int] | None
    is_plain: bool
    is_fp8: bool = False


def default_launch(call: Call) -> Launch:
    """Programs take whole parts, or, where those would be few, a few blocks."""
    launch = Launch(False)
    seen = call.tokens if call.window is None else min(call.tokens, sum(call.window) + call.rows)
    programs = -(-seen // launch.part) * call.pairs
    found = call.tokens // 16 * call.pairs * call.rows * call.head_dim * 4
    is_split = call.rows <= MOST_SPLIT_ROWS and programs < FEW_PROGRAMS and found <= _MOST_FOUND
    launch = launch._replace(is_split=is_split)
    if is_split:
        programs = -(-seen // launch.few) * call.pairs
    programs *= -(-call.rows // launch.rows)
    if not call.is_plain:
        is_in_pairs = call.is_fp8 and not is_split and -(-programs // _MULTIPROCESSORS) in _IN_PAIRS
        return launch._replace(reserve=_HALF if is_in_pairs else 0)
    # One program for each multiprocessor has all of its memory, otherwise two share it.
    is_alone = programs <= _MULTIPROCESSORS
    return launch._replace(
        stages=2 if is_alone else 1,
        reserve=0 if is_split or is_alone else _HALF,
        rows=8 if call.head_dim > 128 else launch.rows,
    )


def call_of(query: jax.Array, cache: PagedCache, block_tables: jax.Array, options: Options) -> Call:
    """The `Call` of the arguments of `attend`."""
    batch, tokens, heads, head_dim = query.shape
    return Call(
        rows=tokens * heads // cache.num_kv_heads,
        pairs=batch * cache.num_kv_heads,
        tokens=block_tables.shape[1] * cache.page_size,
        head_dim=head_dim,
        window=options.window,
        is_plain=cache.kv_dtype == "auto",
        is_fp8=cache.kv_dtype.startswith("fp8") or cache.kv_dtype == "int8",
    )


def unsupported(
    *,
    query: jax.Array,
    cache: PagedCache,
    block_tables: jax.Array,
    options: Options,
) -> str | None:
    """Why `attend` cannot run this here; None if it can."""
    del block_tables, options
    if cache.kv_dtype == "auto" and cache.dtype.name not in _PLAIN_DTYPES:
        return f"with kv_dtype='auto' dtype={cache.dtype} must be one of {_PLAIN_DTYPES}"
    channels = _channels(cache)
    if channels is None:
        step = _step(cache)
        others = f", or a multiple of {step} below {HEAD_DIMS[-1]}" if step else ""
        return f"head_dim={cache.head_dim} must be one of {HEAD_DIMS}{others}"
    given = jax.ShapeDtypeStruct((*query.shape[:3], channels), query.dtype)
    has_float8 = any(isinstance(side, Float8) for side in cache.formats)
    return refusal(given, cache.num_kv_heads) or (needs_e4m3() if has_float8 else None)


def _step(cache: PagedCache) -> int | None:
    """What head dims other than `HEAD_DIMS` must be multiples of; None if there can be no others.

    A vector's codes, and the third bits of 3-bit codes, must begin where words do. With floats,
    what is read in the place of missing channels might be NaN.
    """
    sides = [side for side in cache.formats if isinstance(side, Codes)]
    return max(_WHOLE_WORDS[side.bits] for side in sides) if len(sides) == 2 else None


def _channels(cache: PagedCache) -> int | None:
    """The number of channels with which vectors are multiplied, or None if there is none.

    Where codes have fewer channels, the last ones are multiplied by 0: what is read there belongs
    to other codes.
    """
    step = _step(cache)
    if cache.head_dim not in HEAD_DIMS and (step is None or cache.head_dim % step):
        return None
    return next((n for n in HEAD_DIMS if n >= cache.head_dim), None)


def refusal(query: jax.Array | jax.ShapeDtypeStruct, kv_heads: int) -> str | None:
    """Why the kernel cannot take so many queries or heads of such a size; None if it can."""
    rows, head_dim = query.shape[1] * query.shape[2] // kv_heads, query.shape[3]
    if head_dim not in HEAD_DIMS:
        return f"head_dim={head_dim} must be one of {HEAD_DIMS}"
    if rows > MOST_QUERY_ROWS:
        return f"{rows} queries of a KV head must be at most {MOST_QUERY_ROWS}"
    return needs_mosaic()


@functools.partial(jax.jit, static_argnames=("options", "launch"))
def attend(
    query: jax.Array,
    cache: PagedCache,
    block_tables: jax.Array,
    lengths: jax.Array,
    query_lengths: jax.Array | None,
    *,
    options: Options,
    launch: Launch | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`paged_attention` as one kernel, and a merge. Sequences that cannot be read are NaN."""
    from pallas_kernels.mosaic.hopper.paged import kernel

    launch = launch or default_launch(call_of(query, cache, block_tables, options))
    settings = fitting(
        settings_of(query, cache, options, launch), _channels(cache) or query.shape[3]
    )
    pages, dtype = _pages(cache), query.dtype
    if settings.channels is not None:
        query = _padded(polar.rotate(query, cache.rotation), _channels(cache))
        pages = pages._replace(signs=None)
    out, lse = kernel.attend(query, pages, block_tables, lengths, query_lengths, settings)
    if settings.channels is not None:
        out = polar.unrotate(out[..., : cache.head_dim], cache.rotation)
        out = out.astype(options.out_dtype or dtype)
    return out, lse


def _pages(cache: PagedCache) -> "Pages":
    from pallas_kernels.mosaic.hopper.paged import kernel

    key_scale, value_scale = (
        None if x is None else x[None] for x in (cache.key_scale, cache.value_scale)
    )
    return kernel.Pages(
        cache.key,
        cache.value,
        cache.key_norm,
        cache.value_norm,
        key_scale,
        value_scale,
        cache.rotation.signs if cache.formats.is_rotated else None,
    )


def stores(cache: PagedCache, query: jax.Array) -> bool:
    """Whether `append_and_attend` runs in place of `append_mosaic.append` and `attend`.

    One warp of a sequence and head waits 0.5 to 1.3 us for its token, and an append takes 1.3 to 2:
    with more sequences the warps wait longer. The kernel takes heads of 64 channels and more heads,
    too, but has not been timed with them on a GPU.
    """
    batch, tokens, heads, head_dim = query.shape
    is_stored_alike = cache.kv_dtype in (*_ALIKE, "int8")
    is_timed = heads <= _STORED_HEADS * cache.num_kv_heads and head_dim == 128
    is_small = tokens == 1 and batch * cache.num_kv_heads <= _STORED_VECTORS
    return is_stored_alike and is_timed and is_small


@functools.partial(jax.jit, static_argnames=("options", "max_length", "launch"))
def append_and_attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: PagedCache,
    block_tables: jax.Array,
    lengths: jax.Array,
    new_lengths: jax.Array | None,
    query_lengths: jax.Array | None,
    *,
    options: Options,
    max_length: int | None = None,
    launch: Launch | None = None,
) -> tuple[tuple[jax.Array, jax.Array], PagedCache]:
    """`append_mosaic.append` of a token of each sequence, then `attend`: one kernel, and a merge.

    `lengths` are those before. `max_length` stands for `new_lengths`: 1 for sequences below it.
    """
    from pallas_kernels.mosaic.hopper.paged import kernel

    launch = launch or default_launch(call_of(query, cache, block_tables, options))
    new = append_mosaic.settings(cache, key, block_tables.shape[1])
    new = dataclasses.replace(new, max_length=max_length)
    settings = dataclasses.replace(
        settings_of(query, cache, options, launch), max_length=max_length
    )
    attended, pages, dropped_tokens = kernel.append_and_attend(
        query,
        _pages(cache),
        block_tables,
        lengths,
        query_lengths,
        new_lengths,
        kernel.New(
            key.reshape(-1, cache.head_dim),
            value.reshape(-1, cache.head_dim),
            cache.dropped_tokens.reshape(1),
        ),
        fitting(settings, cache.head_dim),
        new,
    )
    cache = dataclasses.replace(
        cache,
        key=pages.key,
        value=pages.value,
        key_norm=pages.key_norm,
        value_norm=pages.value_norm,
        dropped_tokens=dropped_tokens.reshape(()),
    )
    return attended, cache


def _padded(x: jax.Array, channels: int | None) -> jax.Array:
    assert channels is not None
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, channels - x.shape[-1])])


def settings_of(
    query: jax.Array,
    cache: PagedCache,
    options: Options,
    launch: Launch,
) -> "Settings":
    """The static settings of a call."""
    from pallas_kernels.mosaic.hopper.paged import kernel

    rows = query.shape[1] * query.shape[2] // cache.num_kv_heads
    if cache.kv_dtype == "auto":
        return plain_settings(cache.dtype.name, rows, cache.head_dim, options, launch)
    if cache.kv_dtype not in _ALIKE or cache.head_dim not in HEAD_DIMS:
        return _mixed_settings(cache, rows, options, launch)
    centroids: tuple[int, ...] = ()
    middle, unit = 0.0, 1.0
    if cache.kv_dtype == "turbo4":
        rows = rows if launch.is_split or rows <= _FULL_ROWS // 2 else _FULL_ROWS
        table, middle, step = polar.integer_centroids(4)
        centroids, unit = tuple(table), step / math.sqrt(cache.head_dim)
    return kernel.Settings(
        kind=cache.kv_dtype,
        centroids=centroids,
        middle=middle,
        scale=options.scale * unit,
        value_unit=unit,
        block=_block(2 * cache.key.shape[-1]),
        **_common(rows, options, launch),
    )


def _mixed_settings(cache: PagedCache, rows: int, options: Options, launch: Launch) -> "Settings":
    """The static settings where keys and values are stored differently, or in few bits."""
    from pallas_kernels.mosaic.hopper.paged import kernel

    (key, key_unit), (value, value_unit) = (_stored(x, cache.head_dim) for x in cache.formats)
    token_bytes = (key.bits + value.bits) * cache.head_dim // 8
    return kernel.Settings(
        kind="mixed",
        centroids=(),
        middle=0.0,
        scale=options.scale * key_unit,
        value_unit=value_unit,
        block=_block(token_bytes),
        stored=(key, value),
        channels=None if cache.head_dim in HEAD_DIMS else cache.head_dim,
        **_common(rows, options, launch),
    )


def _block(token_bytes: int) -> int:
    """Tokens of a warp at a time, so many that three programs share the memory."""
    return 64 if token_bytes <= _MOST_BYTES_OF_64 else 32


def _stored(side: Format, head_dim: int) -> tuple["Stored", float]:
    """How a side is stored, and the factor of its numbers besides norms and scales."""
    from pallas_kernels.mosaic.hopper.paged import kernel

    if isinstance(side, Int8):
        return kernel.Stored(8, is_int8=True), 1.0
    if not isinstance(side, Codes):
        return kernel.Stored(8), 1.0
    table, middle, step = polar.integer_centroids(side.bits)
    return kernel.Stored(side.bits, tuple(table), middle), step / math.sqrt(head_dim)


def plain_settings(
    dtype: str, rows: int, head_dim: int, options: Options, launch: Launch, limit: int | None = None
) -> "Settings":
    """The static settings for 16-bit keys and values; `limit` is a contiguous cache's room."""
    from pallas_kernels.mosaic.hopper.paged import kernel

    return kernel.Settings(
        kind=dtype,
        centroids=(),
        middle=0.0,
        scale=options.scale,
        value_unit=1.0,
        block=_PLAIN_BYTES // (2 * head_dim),
        limit=limit,
        **_common(rows, options, launch),
    )


def fitting(s: "Settings", head_dim: int) -> "Settings":
    """The settings with as many blocks in flight as shared memory has room for, at least one."""
    while s.stages > 1 and s.warps * s.warp_bytes(head_dim) > shared_memory():
        s = dataclasses.replace(s, stages=s.stages - 1)
    return s


def _common(rows: int, options: Options, launch: Launch) -> dict[str, Any]:
    """The settings that do not depend on what is stored."""
    return {
        "window": options.window,
        "soft_cap": options.logits_soft_cap,
        "rows": min(launch.rows, -(-rows // 4) * 4),
        "part": launch.part,
        "is_split": launch.is_split,
        "few": launch.few,
        "warpgroups": launch.warpgroups,
        "stages": launch.stages,
        "reserve": launch.reserve,
        "copies_words": not has_bulk_copies(),
        "out_dtype": options.out_dtype,
    }
