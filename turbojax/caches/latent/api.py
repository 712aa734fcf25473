"""`latent_attention`: arguments, checks and the choice of implementation."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from turbojax import _checks
from turbojax._gradient import refuse_gradients
from turbojax._registry import Implementation, ImplementationName, Registry
from turbojax.attention.options import Options, require_causal
from turbojax.attention.score_modifiers import NO_MODIFIERS, ScoreModifiers, of_cache
from turbojax.attention.sinks import with_sinks
from turbojax.caches import checks
from turbojax.caches.latent import mosaic_gpu, reference
from turbojax.caches.latent.cache import LatentCache, as_pages
from turbojax.caches.latent.pages import LatentPages
from turbojax.caches.paged import checks as page_checks
from turbojax.sharding import tables, together
from turbojax.sharding.per_device import per_device

Attention = Callable[..., Any]
"""Attention of queries ``[B, T, N, H]``, keys and values ``[B, S, K, H]``."""


def expanded_latent_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *arguments: Any,
    attention: Attention,
    **options: Any,
) -> Any:
    """Attention whose values have fewer channels than its keys, by an op that needs as many.

    Latent attention has such values in prompts and training: 192 channels of queries and keys, 128
    of values (DeepSeek-V2). Values are padded with zeros and the output is cut. Differentiable
    where `attention` is. `turbojax.turbo_attention` takes such values directly.

    Args:
      query: ``[B, T, N, H]``.
      key: ``[B, S, K, H]``.
      value: ``[B, S, K, V]``, `V` at most `H`.
      *arguments: handed on after these three.
      attention: such as `turbojax.pooled_attention`; its first result, or only one, is
        ``[B, T, N, H]``.
      **options: handed on. The scale is that of `H` if not given.

    Returns:
      What `attention` does, its output ``[B, T, N, V]``.

    Raises:
      ValueError: if a shape does not fit.
      TypeError, ValueError, NotImplementedError: whatever `attention` does.
    """
    _checks.check_query(query)
    if key.ndim != 4 or value.ndim != 4 or value.shape[:3] != key.shape[:3]:
        raise ValueError(f"{value.shape=} must be {key.shape=} but for the last axis")
    channels, width = query.shape[3], value.shape[3]
    if not 0 < width <= channels:
        raise ValueError(f"{value.shape=} must have 1 to {channels} channels, those of queries")
    padding = ((0, 0), (0, 0), (0, 0), (0, channels - width))
    out = attention(query, key, jnp.pad(value, padding), *arguments, **options)
    if isinstance(out, tuple):
        return (out[0][..., :width], *out[1:])
    return out[..., :width]


LATENT = Registry(
    "latent_attention",
    (
        Implementation("mosaic_gpu", mosaic_gpu.attend, mosaic_gpu.unsupported),
        Implementation("xla", reference.attend),
    ),
)


def latent_attention(
    query_latent: jax.Array,
    query_rope: jax.Array,
    cache: LatentCache,
    *,
    scale: float,
    query_seq_lengths: jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    query_offset: jax.Array | int | None = None,
    key_offset: jax.Array | int | None = None,
    sinks: jax.Array | None = None,
    output_dtype: jax.typing.DTypeLike | None = None,
    implementation: ImplementationName | None = None,
    return_residual: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attends the newest tokens' queries to all that a `LatentCache` holds, in absorbed form.

    Latent attention (MLA, DeepSeek-V2, 2024) keeps one latent of `C` channels per token for all
    heads, and a rotary key of `R` channels. Each head makes its key and value from the latent by
    matrices of its own, ``W_UK`` and ``W_UV``. As ``q . (W_UK c) = (W_UK^T q) . c``, these matrices
    can be applied to the query and the output instead: then the latent itself is key and value,

    ``score = scale * (q_latent . latent + q_rope . rope)``, ``out = softmax(score) @ latent``,

    and the caller multiplies queries by ``W_UK^T`` before and the output by ``W_UV`` after.

    Queries are those of each sequence's last tokens, which the cache already holds: query `t` of
    `n` is at position ``length - n + t`` and sees the tokens up to there, its own included.

    Args:
      query_latent: ``[B, T, N, C]`` in `cache.dtype`, queries times ``W_UK^T``.
      query_rope: ``[B, T, N, R]`` in `cache.dtype`, after the rotary embedding.
      cache: what it attends to.
      scale: factor of the scores, that of the expanded form: there is no default, since it depends
        on the head dim before ``W_UK`` (``1 / sqrt(192)`` in DeepSeek-V2, without YaRN's factor).
      query_seq_lengths: optional int ``[B]``: how many of the `T` queries are real, the first
        ones, `n` above; padding gives 0 and ``-inf``. Under `jit` values outside ``0..T`` act as
        the nearest bound.
      local_window_size: optional `w` or ``(left, right)``, relative to the query's position.
      query_offset: optional int ``[B]`` or scalar, the position of the first query, where the cache
        holds a part of a text.
      key_offset: beside it, the position of the cache's first token; 0 if not given.
      sinks: optional floating-point ``[N]``, see `turbojax.decode`.
      output_dtype: float32 for parts that `turbojax.merge_attention` joins; the queries' dtype if
        not given.
      implementation: ``"mosaic_gpu"`` (Hopper, without the four arguments before this one),
        ``"xla"`` (float32), or None to choose.
      return_residual: also return the log-sum-exp of the scores.

    Returns:
      ``[B, T, N, C]`` in the queries' dtype or `output_dtype`; with `return_residual` also float32
      ``[B, T, N]``. An empty sequence gives 0 and ``-inf``, or the sink. A latent, rotary key or
      query that is not finite turns the results it takes part in to NaN, and no others.

    Raises:
      TypeError: if `cache` is another kind or a dtype is not `cache.dtype`.
      ValueError: if a shape, scale, window or name does not fit.
      NotImplementedError: if the implementation asked for cannot run this, or when it is
        differentiated: `expanded_latent_attention` has a gradient.
    """
    out, residual = attend(
        query_latent,
        query_rope,
        cache,
        query_seq_lengths,
        options=_options(scale, local_window_size, output_dtype, implementation),
        modifiers=of_cache(
            query_latent, sinks=sinks, query_offset=query_offset, key_offset=key_offset
        ),
    )
    return (out, residual) if return_residual else out


def attend(
    query_latent: jax.Array,
    query_rope: jax.Array,
    cache: LatentCache,
    query_lengths: jax.Array | None = None,
    *,
    options: Options,
    modifiers: ScoreModifiers = NO_MODIFIERS,
) -> tuple[jax.Array, jax.Array]:
    """`latent_attention` of `Options`: causal, without a cap; gives the log-sum-exp too."""
    checks.check_kind(cache, LatentCache)
    if query_latent.ndim == 4 and query_latent.shape[0] != cache.batch_size:
        raise ValueError(
            f"{query_latent.shape=} must have {cache.batch_size} sequences, as the cache has"
        )
    run = per_device(tables.LATENT, _attend, options=options)
    out, residual = run(query_latent, query_rope, cache, query_lengths, modifiers)
    return out, residual


def _attend(
    query_latent: jax.Array,
    query_rope: jax.Array,
    cache: LatentCache,
    query_lengths: jax.Array | None,
    modifiers: ScoreModifiers,
    *,
    options: Options,
) -> tuple[jax.Array, jax.Array]:
    """`attend` to a cache, or a device's part of it, seen as pages."""
    pages, block_tables = as_pages(cache)
    arrays = (query_latent, query_rope, pages, block_tables, cache.lengths, query_lengths)
    return attend_pages(*arrays, options=options, modifiers=modifiers)


def paged_latent_attention(
    query_latent: jax.Array,
    query_rope: jax.Array,
    cache: LatentPages,
    block_tables: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    query_seq_lengths: jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    query_offset: jax.Array | int | None = None,
    key_offset: jax.Array | int | None = None,
    sinks: jax.Array | None = None,
    output_dtype: jax.typing.DTypeLike | None = None,
    implementation: ImplementationName | None = None,
    return_residual: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`turbojax.latent_attention` to pages; see there for what is not said here.

    Args:
      query_latent: ``[B, T, N, C]`` in `cache.dtype`.
      query_rope: ``[B, T, N, R]`` in `cache.dtype`.
      cache: the pages; the queries' own tokens are in them.
      block_tables: integer ``[B, max_pages]``, the pages of each sequence in order; entries past
        its length may be anything, and so may those of pages all of whose tokens lie before the
        windows of all its queries.
      lengths: integer ``[B]``, tokens held, those of the queries included.
      scale: factor of the scores.
      query_seq_lengths: optional int ``[B]``, the real queries.
      local_window_size: optional window.
      query_offset: optional position of the first query.
      key_offset: optional position of the pages' first token.
      sinks: optional logits ``[N]``.
      output_dtype: optional, float32.
      implementation: ``"mosaic_gpu"``, ``"xla"``, or None to choose.
      return_residual: also return the log-sum-exp of the scores.

    Returns:
      ``[B, T, N, C]`` as there; with `return_residual` also float32 ``[B, T, N]``. Under `jit`, all
      is NaN for a sequence whose length or a needed page is out of range, and none of its pages is
      read.

    Raises:
      TypeError: if `cache` is another kind, a dtype is not `cache.dtype`, or tables or lengths are
        not integers.
      ValueError: if a shape, scale, window or name does not fit, or, outside `jit`, a length or a
        needed page is out of range.
      NotImplementedError: if the implementation asked for cannot run this, or when it is
        differentiated.
    """
    out, residual = attend_pages(
        query_latent,
        query_rope,
        cache,
        block_tables,
        lengths,
        query_seq_lengths,
        options=_options(scale, local_window_size, output_dtype, implementation),
        modifiers=of_cache(
            query_latent, sinks=sinks, query_offset=query_offset, key_offset=key_offset
        ),
    )
    return (out, residual) if return_residual else out


def attend_pages(
    query_latent: jax.Array,
    query_rope: jax.Array,
    cache: LatentPages,
    block_tables: jax.Array,
    lengths: jax.Array,
    query_lengths: jax.Array | None = None,
    *,
    options: Options,
    modifiers: ScoreModifiers = NO_MODIFIERS,
) -> tuple[jax.Array, jax.Array]:
    """`paged_latent_attention` of `Options`: causal, without a cap; gives the log-sum-exp too."""
    require_causal(options)
    if options.logits_soft_cap is not None:
        raise NotImplementedError(f"{options.logits_soft_cap=} must be None in latent_attention")
    checks.check_kind(cache, LatentPages)
    _check_queries(cache, query_latent, query_rope)
    batch, tokens = query_latent.shape[:2]
    block_tables = page_checks.check_block_tables(block_tables, batch)
    lengths = page_checks.check_lengths("lengths", lengths, batch)
    if query_lengths is not None:  # making it an array would take a kernel
        query_lengths = _checks.check_lengths("query_seq_lengths", query_lengths, batch, tokens)
    if _checks.is_concrete(block_tables, lengths):
        first = _first_seen(lengths, query_lengths, tokens, options, modifiers)
        page_checks.check_readable(cache, block_tables, lengths, first)
    run = per_device(tables.PAGED_LATENT, _attend_pages, options=options)
    arrays = (query_latent, query_rope, cache, block_tables, lengths, query_lengths, modifiers)
    out, residual = run(*arrays)
    return out, residual


def _attend_pages(
    query_latent: jax.Array,
    query_rope: jax.Array,
    cache: LatentPages,
    block_tables: jax.Array,
    lengths: jax.Array,
    query_lengths: jax.Array | None,
    modifiers: ScoreModifiers,
    *,
    options: Options,
) -> tuple[jax.Array, jax.Array]:
    """`attend_pages` by the implementation for these arrays."""
    queries = query_latent, query_rope
    static: dict[str, Any] = {"options": options, "modifiers": modifiers}
    chosen = select(*queries, cache, block_tables, **static)
    run = functools.partial(_run, attend=chosen.run)
    call = refuse_gradients(run, "latent_attention", options=options)
    arrays = (query_latent, query_rope, cache, block_tables, lengths, query_lengths, modifiers)
    out, residual = call(*together(*arrays))
    return out, residual


def select(
    query_latent: jax.Array | jax.ShapeDtypeStruct,
    query_rope: jax.Array | jax.ShapeDtypeStruct,
    cache: LatentPages,
    block_tables: jax.Array | jax.ShapeDtypeStruct,
    *,
    options: Options,
    modifiers: ScoreModifiers = NO_MODIFIERS,
) -> Implementation:
    """The implementation for a call with these arguments; only shapes and dtypes are used."""
    return LATENT.select(
        options.implementation,
        query_latent=query_latent,
        query_rope=query_rope,
        cache=cache,
        block_tables=block_tables,
        options=options,
        modifiers=modifiers,
    )


def _options(
    scale: float,
    local_window_size: int | tuple[int, int] | None,
    output_dtype: Any,
    implementation: str | None,
) -> Options:
    if scale is None:
        raise TypeError("scale is None, must be a number: the expanded form's")
    window: Any = local_window_size  # brought into one form by `Options`
    given: dict[str, Any] = {"out_dtype": output_dtype, "implementation": implementation}
    return Options(is_causal=True, scale=scale, window=window, **given)


def _first_seen(
    lengths: jax.Array,
    query_lengths: jax.Array | None,
    tokens: int,
    options: Options,
    modifiers: ScoreModifiers,
) -> jax.Array | None:
    """The first token that a query may see; with an offset, or without a window, None: any."""
    window = None if modifiers.query_offset is not None else options.window
    return page_checks.first_seen(lengths, query_lengths, tokens, window)


def _check_queries(cache: LatentPages, query_latent: jax.Array, query_rope: jax.Array) -> None:
    for name, x, channels in (
        ("query_latent", query_latent, cache.latent_dim),
        ("query_rope", query_rope, cache.rope_dim),
    ):
        if x.ndim != 4 or 0 in x.shape or x.shape[3] != channels:
            raise ValueError(
                f"{name}.shape={x.shape} must be [B, T, N, {channels}], as the cache was made for, "
                "no axis empty"
            )
        if x.dtype != cache.dtype:
            raise TypeError(f"{name}.dtype={x.dtype} must equal cache.dtype={cache.dtype}")
    if query_latent.shape[:3] != query_rope.shape[:3]:
        raise ValueError(f"{query_latent.shape=} and {query_rope.shape=} must have the same BTN")


@functools.partial(jax.jit, static_argnames=("attend", "options"))
def _run(
    query_latent: jax.Array,
    query_rope: jax.Array,
    cache: LatentPages,
    block_tables: jax.Array,
    lengths: jax.Array,
    query_lengths: jax.Array | None,
    modifiers: ScoreModifiers,
    *,
    attend: Callable[..., tuple[jax.Array, jax.Array]],
    options: Options,
) -> tuple[jax.Array, jax.Array]:
    """Runs an implementation; a sequence that cannot be read has the length -1."""
    tokens, dtype = query_latent.shape[1], options.dtype_of_output(query_latent)
    first = _first_seen(lengths, query_lengths, tokens, options, modifiers)
    out, residual = attend(
        query_latent,
        query_rope,
        cache,
        jnp.clip(block_tables, 0, cache.num_pages - 1),
        page_checks.lengths_of_readable(cache, block_tables, lengths, first),
        None if query_lengths is None else jnp.clip(query_lengths, 0, tokens),
        options=options,
        modifiers=modifiers,
    )
    if modifiers.sinks is not None:
        count = _checks.check_lengths("query_seq_lengths", query_lengths, *query_latent.shape[:2])
        real = jnp.arange(tokens)[None] < count[:, None]
        out, residual = with_sinks(out, residual, modifiers.sinks, real)
    return out.astype(dtype), residual
