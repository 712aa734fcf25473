"""The Mosaic GPU kernel that writes pages: what it takes, how it is launched."""

import dataclasses
import math
from typing import TYPE_CHECKING

import jax

from turbojax._device import needs_e4m3, needs_updates
from turbojax.caches.paged import append_kernels, writing
from turbojax.caches.paged.checks import Pool
from turbojax.caches.paged.formats import Codes, Float8, Format, Int8

if TYPE_CHECKING:
    from pallas_kernels.mosaic.hopper.paged.append import Settings, Stored

# From this many vectors of a side on, more than a GPU holds at once, a warp takes several rounds.
_MANY = 16384
_ROUNDS = 2


def append_unsupported(*, cache: Pool, key: jax.Array, block_tables: jax.Array) -> str | None:
    """Why `append` cannot run this here; None if it can."""
    refusal = append_kernels.unsupported(cache, key)
    if refusal is not None:
        return refusal
    for name, vectors in (("pool", cache.key.shape[:3]), ("call", key.shape[:3])):
        if math.prod(vectors) >= 2**31:
            return f"{math.prod(vectors)} vectors of the {name} must be fewer than {2**31}"
    has_float8 = any(isinstance(side, Float8) for side in cache.formats)
    return needs_updates(cache, key) or (needs_e4m3() if has_float8 else None)


@jax.jit
def append(
    cache: Pool,
    key: jax.Array,
    value: jax.Array,
    block_tables: jax.Array,
    lengths: jax.Array,
    new_lengths: jax.Array,
) -> tuple[Pool, dict[str, jax.Array]]:
    """`writing.append` by one kernel.

    Whether the tokens fit is read again from the pool; under `jit` nobody reads it.
    """
    from pallas_kernels.mosaic.hopper.paged import append as kernel

    data, norms, dropped_tokens = kernel.append(
        (key.reshape(-1, cache.head_dim), value.reshape(-1, cache.head_dim)),
        cache.rotation.signs if cache.formats.is_rotated else None,
        (_array(cache.key_scale), _array(cache.value_scale)),
        block_tables,
        lengths,
        new_lengths,
        (cache.key, cache.value),
        (cache.key_norm, cache.value_norm),
        cache.dropped_tokens.reshape(1),
        settings(cache, key, block_tables.shape[1]),
    )
    place = writing.find_places(cache, key.shape[1], block_tables, lengths, new_lengths)
    cache = dataclasses.replace(
        cache,
        key=data[0],
        value=data[1],
        key_norm=norms[0],
        value_norm=norms[1],
        dropped_tokens=dropped_tokens.reshape(()),
    )
    stored = writing.page_arrays(cache)
    return cache, {name: writing.read(pages, place) for name, pages in stored.items()}


def _array(scale: jax.Array | None) -> jax.Array | None:
    return None if scale is None else scale.reshape(1)


def settings(cache: Pool, key: jax.Array, entries: int) -> "Settings":
    """Settings for these tokens, with block tables of `entries`."""
    from pallas_kernels.mosaic.hopper.paged.append import Settings

    vectors = math.prod(key.shape[:3])
    return Settings(
        sides=(
            _stored(cache.formats.key, cache.head_dim),
            _stored(cache.formats.value, cache.head_dim),
        ),
        dtype=key.dtype.name,
        vectors=vectors,
        tokens=key.shape[1],
        heads=key.shape[2],
        head_dim=cache.head_dim,
        page_size=cache.page_size,
        num_pages=cache.num_pages,
        entries=entries,
        rounds=_ROUNDS if vectors > _MANY else 1,
    )


def _stored(side: Format, channels: int) -> "Stored":
    from pallas_kernels.mosaic.hopper.paged import append as kernel

    if isinstance(side, Codes):
        return append_kernels.codec(side.bits, channels)
    if isinstance(side, Int8):
        return kernel.Int8()
    if isinstance(side, Float8):
        return kernel.Float8(is_e5m2=side.name == "float8_e5m2")
    return None
