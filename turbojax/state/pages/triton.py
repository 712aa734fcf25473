"""The Triton kernel that writes 4-bit pages: what it takes, how it is launched."""

import dataclasses
import functools
import math
from typing import TYPE_CHECKING

import jax

from turbojax._device import interpreting, needs_gpu, unindexable
from turbojax.polar.codec import level_tables
from turbojax.state.pages.checks import Pool
from turbojax.state.pages.writing import find_places

if TYPE_CHECKING:
    from pallas_kernels.triton.paged_append import Settings

_AMPERE = 8.0
_HEAD_DIMS = (16, 256)
_BITS, _LEVELS = 4, 8


def append_unsupported(*, cache: Pool, key: jax.Array, block_tables: jax.Array) -> str | None:
    """Why `append` cannot run this here; None if it can."""
    if cache.kv_dtype != "turbo4":
        return f"kv_dtype={cache.kv_dtype!r} must be 'turbo4': others need no kernel"
    dim = cache.head_dim
    if dim & (dim - 1) or not _HEAD_DIMS[0] <= dim <= _HEAD_DIMS[1]:
        return f"head_dim={dim} must be a power of two from {_HEAD_DIMS[0]} to {_HEAD_DIMS[1]}"
    if not math.prod(key.shape):
        return f"key.shape={key.shape} is empty"
    sizes = [math.prod(x.shape) * x.dtype.itemsize for x in (key, cache.key, block_tables)]
    return unindexable(*sizes) or needs_gpu(_AMPERE)


def append(
    cache: Pool,
    key: jax.Array,
    value: jax.Array,
    block_tables: jax.Array,
    lengths: jax.Array,
    new_lengths: jax.Array,
) -> tuple[Pool, dict[str, jax.Array]]:
    """`page_writing.append` with one kernel; of what the tokens became, it returns the norms."""
    arguments = cache, key, value, block_tables, lengths, new_lengths
    return _append(*arguments, interpret=interpreting())


@functools.partial(jax.jit, static_argnames="interpret")
def _append(
    cache: Pool,
    key: jax.Array,
    value: jax.Array,
    block_tables: jax.Array,
    lengths: jax.Array,
    new_lengths: jax.Array,
    *,
    interpret: bool,
) -> tuple[Pool, dict[str, jax.Array]]:
    from pallas_kernels.triton.paged_append import Pages, append

    assert cache.key_norm is not None
    assert cache.value_norm is not None
    tokens, channels = key.shape[1], cache.head_dim
    written = append(
        key.reshape(-1, channels),
        value.reshape(-1, channels),
        cache.rotation.signs,
        block_tables,
        lengths,
        new_lengths,
        Pages(cache.key, cache.value, cache.key_norm, cache.value_norm),
        settings(math.prod(key.shape[:-1]), tokens, channels, interpret),
    )
    place = find_places(cache, tokens, block_tables, lengths, new_lengths)
    cache = dataclasses.replace(cache, lost=cache.lost + place.lost, **written._asdict())
    # Read again only for the check outside `jit`. Tokens that were left out have none.
    at = (place.page, slice(None), place.slot)
    norms = {
        name: getattr(written, name).at[at].get(mode="fill", fill_value=0)
        for name in ("key_norm", "value_norm")
    }
    return cache, norms


def settings(vectors: int, tokens: int, channels: int, interpret: bool) -> "Settings":
    """Settings for this number of vectors per side, with `tokens` tokens per sequence."""
    from pallas_kernels.triton.paged_append import Codec, Settings

    tables = level_tables(_BITS, channels)
    rows, pieces, warps = _FEW
    if vectors > _MANY:
        # 64 channels a thread, of which 8 or 16 of a piece.
        rows = min(128, 8192 // channels)
        pieces, warps = min(8, channels // 16), 4
    elif vectors > _SOME:
        rows, warps = 8, 4
    return Settings(
        codec=Codec(tables.thresholds[_LEVELS:], tables.squares[_LEVELS:], tables.unit),
        tokens=tokens,
        rows=rows,
        pieces=pieces,
        num_warps=warps,
        interpret=interpret,
    )


# Vectors of a program, pieces, warps: a warp for each vector, while a GPU holds all of them.
_FEW = (1, 1, 1)
_SOME, _MANY = 2048, 16384
