"""The kernel for many queries to pages on Hopper: what it takes, how it is launched."""

import functools

import jax
import jax.numpy as jnp

from turbojax._device import multiprocessors, needs_hopper
from turbojax.ops import rows
from turbojax.ops.options import Options
from turbojax.state.pages import checks as page_checks
from turbojax.state.pages.pool import PagedCache

_HEAD_DIMS = (64, 128, 256)
_KV_DTYPES = ("auto",)
# Copies move queries in multiples of eight.
_COPY = 8
_LOG2_E = 1.4426950408889634
# Tiles of keys and values in shared memory: what fits.
_STAGES = {64: 4, 128: 2, 256: 2}


def unsupported(cache: PagedCache) -> str | None:
    """Why `attend` cannot read these pages here; None if it can."""
    if cache.kv_dtype not in _KV_DTYPES:
        return f"kv_dtype={cache.kv_dtype!r} must be one of {_KV_DTYPES} for so many queries"
    if cache.dtype.itemsize != 2:
        return f"dtype={cache.dtype} must be bfloat16 or float16"
    if cache.head_dim not in _HEAD_DIMS:
        return f"head_dim={cache.head_dim} must be one of {_HEAD_DIMS}"
    return needs_hopper()


@functools.partial(jax.jit, static_argnames="options")
def attend(
    query: jax.Array,
    cache: PagedCache,
    block_tables: jax.Array,
    lengths: jax.Array,
    query_lengths: jax.Array,
    *,
    options: Options,
) -> tuple[jax.Array, jax.Array]:
    """`paged_attention` of many queries as one kernel.

    Weights are rounded to the values' 16 bits before they multiply them.

    Args:
      query: ``[B, T, N, H]``.
      cache: the pages.
      block_tables: int32 ``[B, max_pages]``.
      lengths: int32 ``[B]``.
      query_lengths: int32 ``[B]``.
      options: of the call.

    Returns:
      What `paged_attention` returns: sequences that cannot be read are NaN.
    """
    from pallas_kernels.mosaic.hopper.paged_prompt import kernel

    tokens = query.shape[1]
    settings = kernel.Settings(
        window=None if options.window is None else options.window[0],
        soft_cap=options.logits_soft_cap,
        stages=_STAGES[cache.head_dim],
        programs=multiprocessors(),
    )
    ok = page_checks.readable(cache, block_tables, lengths)
    out, lse = kernel.attention(
        rows.pad_axis(_signed(query, options.scale), 1, -(-tokens // _COPY) * _COPY),
        cache.key,
        cache.value,
        jnp.clip(block_tables, 0, cache.num_pages - 1),
        jnp.where(ok, lengths, -1),
        jnp.clip(query_lengths, 0, tokens),
        jnp.stack([_score_factor(options), jnp.float32(1)]),
        settings=settings,
    )
    return out[:, :tokens], lse[:, :tokens]


def _signed(query: jax.Array, scale: float) -> jax.Array:
    """The query with the scale's sign: maxima are taken of products that are not scaled yet."""
    return query if scale > 0 else query * jnp.asarray(-1 if scale < 0 else 0, query.dtype)


def _score_factor(options: Options) -> jax.Array:
    """From products to scores in powers of two, or with a cap to twice its argument in them."""
    scale = abs(options.scale) or 1.0
    if options.logits_soft_cap is not None:
        scale = scale * 2 / options.logits_soft_cap
    return jnp.float32(scale * _LOG2_E)
