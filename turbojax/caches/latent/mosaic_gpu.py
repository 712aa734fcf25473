"""The Mosaic GPU kernel behind `latent_attention` on Hopper: what it takes, how it is launched."""

import functools
import importlib.util
import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import polar
from turbojax._device import multiprocessors, needs_hopper
from turbojax.attention.options import Options
from turbojax.attention.score_modifiers import NO_MODIFIERS, ScoreModifiers
from turbojax.caches.latent.pages import LatentPages
from turbojax.caches.paged.formats import Codes
from turbojax.polar.rotation import hadamard

if TYPE_CHECKING:
    from pallas_kernels.mosaic.hopper.paged_prompt.expand import Codec

_KERNEL = "pallas_kernels.mosaic.hopper.latent"
_DTYPES = ("bfloat16", "float16")
_LATENT_DIM, _ROPE_DIM = 512, 64


@functools.cache
def _has_kernel() -> bool:
    return importlib.util.find_spec(_KERNEL) is not None


def unsupported(
    *,
    query_latent: jax.Array,
    query_rope: jax.Array,
    cache: LatentPages,
    block_tables: jax.Array,
    options: Options,
    modifiers: ScoreModifiers = NO_MODIFIERS,
) -> str | None:
    """Why `attend` cannot run this here; None if it can."""
    del query_latent, query_rope, block_tables
    if options.out_dtype is not None or modifiers.given:
        return modifiers.refusal() or f"it has no output_dtype={options.out_dtype}"
    if not _has_kernel():
        return "this version has no such kernel"
    if (cache.latent_dim, cache.rope_dim) != (_LATENT_DIM, _ROPE_DIM):
        return (
            f"latent_dim={cache.latent_dim} and rope_dim={cache.rope_dim} must be {_LATENT_DIM} "
            f"and {_ROPE_DIM}"
        )
    if cache.dtype.name not in _DTYPES:
        return f"cache.dtype={cache.dtype} must be bfloat16 or float16"
    return needs_hopper()


def attend(
    query_latent: jax.Array,
    query_rope: jax.Array,
    cache: LatentPages,
    block_tables: jax.Array,
    lengths: jax.Array,
    query_lengths: jax.Array | None,
    *,
    options: Options,
    modifiers: ScoreModifiers = NO_MODIFIERS,
) -> tuple[jax.Array, jax.Array]:
    """`reference.attend` as a kernel; queries and weights are rounded to `cache.dtype`.

    So are rotary keys over their token's factor, where the cache has factors. A token is NaN if its
    factor is, whatever its codes.
    """
    from pallas_kernels.mosaic.hopper.latent import kernel

    del modifiers  # see `unsupported`
    settings = kernel.settings(
        options.scale,
        *query_latent.shape[:3],
        window=None if options.window is None else options.window[0],
        codec=codec_of(cache),
        programs=multiprocessors(),
    )
    is_rotated = cache.format.is_rotated
    out, lse = kernel.attend(
        _rotated(query_latent, cache.rotation) if is_rotated else query_latent,
        query_rope,
        cache.latent,
        cache.scale,
        cache.rope,
        block_tables,
        lengths,
        query_lengths,
        settings,
    )
    return _unrotated(out, cache.rotation) if is_rotated else out, lse


# Rotations are products with a matrix of 1 and -1 times 2**-5, exact but for their sums in float32:
# butterflies read and write all rows several times, 76 us for 64 sequences of 128 heads. What the
# matrix lacks of a rotation's factor, 2**-4.5, is the codec's.


def _rotated(x: jax.Array, rotation: polar.Rotation) -> jax.Array:
    return jnp.einsum("...c,dc->...d", x, _matrix(rotation, x.dtype))


def _unrotated(x: jax.Array, rotation: polar.Rotation) -> jax.Array:
    return jnp.einsum("...c,cd->...d", x, _matrix(rotation, x.dtype))


def _matrix(rotation: polar.Rotation, dtype: jax.typing.DTypeLike) -> jax.Array:
    matrix = hadamard(_LATENT_DIM).astype(np.float32) * 2.0**-5
    return jnp.asarray(matrix * rotation.signs[None], dtype)


def codec_of(cache: LatentPages) -> "Codec | None":
    """How the kernel expands what is stored; None for latents in their own dtype."""
    from pallas_kernels.mosaic.hopper.paged_prompt.expand import Codec

    if cache.scale is None:
        return None
    if not isinstance(cache.format, Codes):
        return Codec()
    table, middle, step = polar.integer_centroids(cache.format.bits)
    return Codec(tuple(table), middle, step / math.sqrt(cache.latent_dim) * math.sqrt(2))
