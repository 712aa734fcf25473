"""The Triton kernel that writes codes and int8 into pages: what it takes, how it is launched."""

import dataclasses
import math
from typing import TYPE_CHECKING

import jax

from turbojax._device import AMPERE, interpreting, needs_gpu, unindexable
from turbojax.caches.paged import append_kernels, writing
from turbojax.caches.paged.checks import Pool
from turbojax.caches.paged.formats import Codes, Int8

if TYPE_CHECKING:
    from pallas_kernels.triton.paged_append import Settings


def append_unsupported(*, cache: Pool, key: jax.Array, block_tables: jax.Array) -> str | None:
    """Why `append` cannot run this here; None if it can."""
    sides = _bits(cache)
    if not sides:
        return f"kv_dtype={cache.kv_dtype!r} must store keys or values as codes or int8"
    arrays = [key, block_tables, *(getattr(cache, side) for side in sides)]
    sizes = [math.prod(x.shape) * x.dtype.itemsize for x in arrays]
    return append_kernels.unsupported(cache, key) or unindexable(*sizes) or needs_gpu(AMPERE)


@jax.jit
def append(
    cache: Pool,
    key: jax.Array,
    value: jax.Array,
    block_tables: jax.Array,
    lengths: jax.Array,
    new_lengths: jax.Array,
) -> tuple[Pool, dict[str, jax.Array]]:
    """`writing.append`: codes and int8 by one kernel, the other side if there is one by XLA.

    The second result shows whether the tokens fit: norms, and sides that have none.
    """
    from pallas_kernels.triton.paged_append import Pages, append

    vectors, bits = {"key": key, "value": value}, _bits(cache)
    content = writing.encode(cache, **{side: vectors[side] for side in vectors if side not in bits})
    place = writing.find_places(cache, key.shape[1], block_tables, lengths, new_lengths)
    cache = writing.store(cache, content, place)
    written = append(
        tuple(vectors[side].reshape(-1, cache.head_dim) for side in bits),
        cache.rotation.signs if cache.formats.is_rotated else None,
        block_tables,
        lengths,
        new_lengths,
        tuple(Pages(getattr(cache, side), getattr(cache, f"{side}_norm")) for side in bits),
        settings(
            math.prod(key.shape[:-1]),
            key.shape[1],
            cache.head_dim,
            tuple(bits.values()),
        ),
    )
    for side, pages in zip(bits, written, strict=True):
        cache = dataclasses.replace(cache, **{side: pages.codes, f"{side}_norm": pages.norms})
        # Only for the check outside `jit`.
        content[f"{side}_norm"] = writing.read(pages.norms, place)
    return cache, content


def _bits(cache: Pool) -> dict[str, int]:
    """The sides that the kernel writes, and their bits: 4, 3 or 2 of codes, 8 of int8."""
    sides = cache.formats._asdict().items()
    found = {name: side.bits for name, side in sides if isinstance(side, Codes)}
    return found | {name: 8 for name, side in sides if isinstance(side, Int8)}


def settings(vectors: int, tokens: int, channels: int, bits: tuple[int, ...]) -> "Settings":
    """Settings for so many vectors of a side; `bits` are the sides' codes', 8 of int8."""
    from pallas_kernels.triton.paged_append import Settings

    rows, pieces, warps = _FEW
    if vectors > _MANY:
        # 64 channels a thread, 8 or 16 of them in a piece.
        rows = min(128, 8192 // channels)
        pieces, warps = min(8, channels // 16), 4
    elif vectors > _SOME:
        rows, warps = 8, 4
    return Settings(
        codecs=tuple(None if n == 8 else append_kernels.codec(n, channels) for n in bits),
        tokens=tokens,
        rows=rows,
        pieces=pieces,
        num_warps=warps,
        interpret=interpreting(),
    )


# Vectors of a program, pieces, warps: a warp for each vector, as long as the GPU holds them all.
_FEW = (1, 1, 1)
_SOME, _MANY = 2048, 16384
