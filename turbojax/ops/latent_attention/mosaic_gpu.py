"""The Mosaic GPU kernel behind `latent_attention` on Hopper: what it takes, how it is launched."""

import importlib.util

import jax

from turbojax._device import needs_hopper
from turbojax.ops.options import Options
from turbojax.state.latent.pages import LatentPages

_KERNEL = "pallas_kernels.mosaic.hopper.latent"


def unsupported(
    *,
    query_latent: jax.Array,
    query_rope: jax.Array,
    cache: LatentPages,
    block_tables: jax.Array,
    options: Options,
) -> str | None:
    """Why `attend` cannot run this here; None if it can."""
    del query_latent, query_rope, cache, block_tables, options
    if importlib.util.find_spec(_KERNEL) is None:
        return "this version has no such kernel"
    return needs_hopper()


def attend(
    query_latent: jax.Array,
    query_rope: jax.Array,
    cache: LatentPages,
    block_tables: jax.Array,
    lengths: jax.Array,
    query_lengths: jax.Array,
    *,
    options: Options,
) -> tuple[jax.Array, jax.Array]:
    """`reference.attend` as a kernel."""
    raise NotImplementedError("latent_attention: this version has no such kernel")
