"""The kernel of pages for Hopper behind `decode` of an `ExactCache`, which it reads directly."""

import functools

import jax

from turbojax.attention.options import Options
from turbojax.caches.exact.cache import ExactCache
from turbojax.caches.paged import mosaic_gpu as paged

_DTYPES = ("bfloat16", "float16")
# So many rows are read one after the other.
_RUN_OF_ROWS = 16


def unsupported(query: jax.Array | jax.ShapeDtypeStruct, cache: ExactCache) -> str | None:
    """Why `attend` cannot run this here; None if it can."""
    if cache.dtype.name not in _DTYPES:
        return f"cache.dtype={cache.dtype} must be one of {_DTYPES}"
    if query.dtype != cache.dtype:
        return f"query.dtype={query.dtype} must equal cache.dtype={cache.dtype}"
    if cache.is_rolling and cache.room % _RUN_OF_ROWS:
        return f"cache.room={cache.room} of a rolling buffer must be a multiple of {_RUN_OF_ROWS}"
    return paged.refusal(query, cache.num_kv_heads)


@functools.partial(jax.jit, static_argnames=("options", "launch"))
def attend(
    query: jax.Array,
    cache: ExactCache,
    *,
    options: Options,
    launch: paged.Launch | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`decode`: tokens of a contiguous cache are pages of one token, which need no table.

    Returns the output in the options' dtype and the float32 log-sum-exp ``[B, T, N]``; 0 and
    ``-inf`` for a query before its sequence's first token.
    """
    from pallas_kernels.mosaic.hopper.paged import kernel

    batch, tokens, heads, head_dim = query.shape
    kv_heads, room = cache.num_kv_heads, cache.room
    call = paged.Call(
        rows=tokens * heads // kv_heads,
        pairs=batch * kv_heads,
        tokens=cache.max_length,
        head_dim=head_dim,
        window=options.window,
        is_plain=True,
    )
    settings = paged.plain_settings(
        query.dtype.name,
        call.rows,
        head_dim,
        options,
        launch or paged.default_launch(call),
        cache.max_length,
    )
    key, value = (x.reshape(batch * room, kv_heads, 1, head_dim) for x in (cache.key, cache.value))
    pages = kernel.Pages(key, value, None, None, None, None, None)
    settings = paged.fitting(settings, head_dim)
    out, residual = kernel.attend(query, pages, None, cache.lengths, None, settings)
    return out, residual
