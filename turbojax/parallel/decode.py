"""Decoding where the tokens of a cache are split over an axis of a mesh.

For calls inside of `jax.shard_map`. Every device attends to what is in its slots with the kernel
of the cache's kind, and the parts are merged by their log-sum-exp (`merged`): one collective for
each call, whose size does not depend on the context.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from turbojax import _checks
from turbojax.attention.options import PLAIN, Options
from turbojax.attention.score_modifiers import of_cache, of_layer
from turbojax.attention.sinks import with_sinks
from turbojax.caches import latent as latent_op
from turbojax.caches import paged as paged_op
from turbojax.caches.base import Attend
from turbojax.caches.exact import REPEATABLE
from turbojax.caches.kinds import kind_of
from turbojax.caches.latent.cache import LatentCache
from turbojax.caches.latent.kind import split_query
from turbojax.caches.paged.layer import PagedLayer
from turbojax.caches.paged.pool import PagedCache
from turbojax.caches.progressive.cache import ProgressiveCache
from turbojax.parallel.appending import AxisName, Run, append, of_run, run_of_cache


def merged(
    out: jax.Array,
    residual: jax.Array,
    axis: AxisName,
    *,
    sinks: jax.Array | None = None,
    real: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention to all devices' keys, from what each found of its own, by one all-gather.

    Its size is that of the results, whatever the context. Every device adds the parts in the order
    of the devices, so that all have the same bits.

    `out` (float32 ``[B, T, N, H]``) and `residual` (the log-sum-exp, float32 ``[B, T, N]``,
    ``-inf`` where nothing was seen) are this device's, without `sinks` (float32 ``[N]``, see
    `turbojax.decode`). Queries that are not `real` (bool ``[B, T]``) give 0 and ``-inf``. Returns
    both for all keys, the same on every device.
    """
    packed = jnp.concatenate([out.reshape(-1), residual.reshape(-1)])
    parts = jax.lax.all_gather(packed, axis, to="invarying")
    outs = [part[: out.size].reshape(out.shape) for part in parts]
    residuals = [part[out.size :].reshape(residual.shape) for part in parts]
    # A chain, not a reduction, so that XLA makes one kernel of all that follows.
    largest = functools.reduce(jnp.maximum, residuals)
    shift = jnp.where(jnp.isneginf(largest), 0, largest)
    weights = [jnp.exp(x - shift) for x in residuals]
    total = functools.reduce(jnp.add, weights)
    summed = functools.reduce(
        jnp.add, (x * w[..., None] for x, w in zip(outs, weights, strict=True))
    )
    nothing = total == 0
    safe = jnp.where(nothing, 1, total)
    whole, found = summed / safe[..., None], jnp.where(nothing, -jnp.inf, shift + jnp.log(safe))
    if real is not None:
        whole = jnp.where(real[..., None, None], whole, 0)
        found = jnp.where(real[..., None], found, -jnp.inf)
    return (whole, found) if sinks is None else with_sinks(whole, found, sinks, real)


Part = tuple[jax.Array, jax.Array]
"""Float32 ``[B, T, N, H]`` and the log-sum-exp ``[B, T, N]`` of a device's own tokens."""


def decode(
    query: jax.Array,
    cache: Any,
    axis: AxisName,
    *,
    scale: float | None = None,
    query_seq_lengths: jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    output_dtype: jax.typing.DTypeLike | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attends the newest tokens' queries to a cache whose tokens are split over `axis`.

    Queries are those of the last `T` tokens of each sequence, which `append` has stored on the
    devices whose they are; all devices of the axis have all of them. Query `t` is at position
    ``length - T + t`` and sees the tokens up to there, on whichever device.

    Args:
      query: ``[B, T, N, H]``, the same on all devices of the axis; for a `LatentCache` ``[B, T, N,
        C + R]``, the part of the latent first.
      cache: the device's part of one of a layer's caches, of any kind; see
        `turbojax.parallel.partition_specs`.
      axis: of the mesh, or several.
      scale: factor of the scores; ``1 / sqrt(H)`` if not given. There is no default for latents.
      query_seq_lengths: optional int ``[B]``, the real queries, the first ones; padding gives 0 and
        ``-inf``.
      local_window_size: optional `w` or ``(left, right)``, relative to the query's position.
      logits_soft_cap: optional `c`: scores become ``c * tanh(score / c)``.
      sinks: optional floating-point ``[N]``, see `turbojax.turbo_attention`.
      output_dtype: float32, or None for the query's.
      implementation: of the op that attends on each device; None to choose.
      return_residual: also return the log-sum-exp of the scores.

    Returns:
      ``[B, T, N, H]`` (of latents ``[B, T, N, C]``) in the query's dtype or `output_dtype`, with
      `return_residual` also float32 ``[B, T, N]``; to the bit the same on all devices of the axis.
      An empty sequence gives 0 and ``-inf``, or the sink.

    Raises:
      TypeError: if `cache` is no cache of a layer, a dtype does not fit, or a scale is missing.
      ValueError: if a shape, window or cap does not fit, or the cache keeps a window alone.
      NotImplementedError: if the implementation asked for cannot run this, when it is
        differentiated, or if a `ProgressiveCache` keeps first tokens (`TurboConfig.first_tokens`)
        and there is a window, or more queries than its buffer has room for beside a block and them.
    """
    kind_of(cache)
    _checks.check_query(query)
    if scale is None and isinstance(cache, LatentCache):
        raise TypeError("scale is None, must be a number: that of the latents' expanded form")
    options = Options.complete(
        query.shape[3],
        scale=scale,
        is_causal=True,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        output_dtype=output_dtype,
        implementation=implementation,
    )
    out, residual = attend_cache(
        query, cache, axis, query_seq_lengths, options=options, sinks=sinks
    )
    return (out, residual) if return_residual else out


def attend_cache(
    query: jax.Array,
    cache: Any,
    axis: AxisName,
    query_lengths: jax.Array | None = None,
    *,
    options: Options,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`decode` of `Options`, causal ones; also gives the log-sum-exp."""
    if isinstance(cache, ProgressiveCache):  # whose places must tell what so many queries see
        refusal = cache.why_not_in_order(query.shape[1], options.window)
        if refusal is not None:
            raise NotImplementedError(f"a cache split over {axis=}: {refusal}")
    run = run_of_cache(cache, axis)
    local = of_run(cache, run)
    attend = _attention_to(local, _of_part(options))
    return _merge(query, cache.lengths, query_lengths, run, axis, attend, options, sinks)


def paged_attention(  # noqa: D417
    query: jax.Array,
    cache: PagedCache,
    block_tables: jax.Array,
    lengths: jax.Array,
    axis: AxisName,
    *,
    query_seq_lengths: jax.Array | None = None,
    scale: float | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    output_dtype: jax.typing.DTypeLike | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attends to pages, of which each device has its own pool: `turbojax.paged_attention`.

    Every device has a part of each sequence's table, of `max_pages` entries: those of tokens
    ``d * max_pages * page_size`` on, for device `d`. They are numbers of pages of the device's own
    pool.

    The arguments of `decode` mean the same here; errors are `turbojax.paged_attention`'s.

    Args:
      query: ``[B, T, N, H]``, the same on all devices of the axis.
      cache: the device's pool.
      block_tables: integer ``[B, max_pages]``, the device's part.
      lengths: integer ``[B]``, tokens held on all devices together.
      axis: of the mesh, or several.
      implementation: of `turbojax.paged_attention`.

    Returns:
      As `decode`; NaN for a sequence a needed page of which is not in its device's pool.
    """
    options = Options.complete(
        query.shape[3],
        scale=scale,
        is_causal=True,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        output_dtype=output_dtype,
        implementation=implementation,
    )
    run = Run.of(block_tables.shape[1] * cache.page_size, axis)
    lengths = _checks.as_int32("lengths", lengths)
    attend = _to_pages(cache, block_tables, run.held(lengths), _of_part(options))
    out, residual = _merge(query, lengths, query_seq_lengths, run, axis, attend, options, sinks)
    return (out, residual) if return_residual else out


def attend_new_tokens(axis: AxisName, implementation: str | None = None) -> Attend:
    """How a layer attends new tokens to a cache whose tokens are split: stores, then attends.

    Args:
      axis: of the mesh, or several.
      implementation: of `decode`, and of `append` if it can write caches. None chooses, and so does
        ``"repeatable"``: parts with a log-sum-exp are never cuDNN's.
    """
    if implementation == REPEATABLE:
        implementation = None

    def attend(query, key, value, cache, options=PLAIN, sinks=None):  # type: ignore[no-untyped-def]
        cache = append(cache, key, value, axis, implementation=implementation)
        static = options.complete(query.shape[3], implementation)
        out, _ = attend_cache(query, cache, axis, options=static, sinks=sinks)
        return out, cache

    return attend


# A device's part ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Attention:
    """Attention to a device's own tokens.

    It is called as ``run(query, query_lengths, is_needed, **offsets)``, where sequences that are
    not needed (bool ``[B]``, None for all) count as empty. `kv_heads` is `K`; `lengths` are tokens
    on this device, int32 ``[B]``: with a buffer there may be more than slots.
    """

    run: Callable[..., Part]
    kv_heads: int
    lengths: jax.Array


def _merge(
    query: jax.Array,
    lengths: jax.Array,
    query_lengths: jax.Array | None,
    run: Run,
    axis: AxisName,
    attend: _Attention,
    options: Options,
    sinks: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Attends on every device, then merges; `lengths` int32 ``[B]`` are of whole sequences."""
    batch, tokens = query.shape[:2]
    real = None
    if query_lengths is not None:
        query_lengths = _checks.check_lengths(
            "query_seq_lengths", query_lengths, batch, tokens
        ).clip(0, tokens)
        real = jnp.arange(tokens)[None] < query_lengths[:, None]
    count = jnp.full(batch, tokens, jnp.int32) if query_lengths is None else query_lengths
    if tokens == 1 and options.window is None:
        # The query sees all tokens here, as a query at the last one does.
        out, residual = attend.run(query, query_lengths, None)
    elif options.window is None:
        out, residual = _within_and_behind(query, lengths - count, count, run, axis, attend)
    else:
        first = jnp.broadcast_to(run.first, (batch,))
        offsets = {"query_offset": lengths - count, "key_offset": first}
        out, residual = attend.run(query, query_lengths, None, **offsets)
    dtype = options.dtype_of_output(query)
    given = of_layer(query, sinks).sinks
    out, residual = merged(out, residual, axis, sinks=given, real=real)
    return out.astype(dtype), residual


def _within_and_behind(
    query: jax.Array,
    begin: jax.Array,
    count: jax.Array,
    run: Run,
    axis: AxisName,
    attend: _Attention,
) -> Part:
    """Several queries without a window, by ops whose queries are always a cache's newest tokens.

    Of each sequence, the queries at positions of this device's tokens attend as its newest ones.
    The later ones see all of these tokens, whatever their positions, so they are given to the op as
    more heads of a single token. Mostly a device has only one of the two sorts in a sequence, so
    that it reads the cache once.

    `query` is ``[B, T, N, H]``; `begin` (the first query's position) and `count` (real queries) are
    int32 ``[B]``.
    """
    batch, tokens, heads, channels = query.shape
    within = jnp.clip(attend.lengths - (begin - run.first), 0, count)
    last = attend.run(query, within, within > 0)
    if jax.lax.axis_size(axis) == 1:
        return last
    kv_heads = attend.kv_heads
    rows = (batch, tokens, kv_heads, heads // kv_heads)

    def to_heads(x: jax.Array) -> jax.Array:
        return jnp.swapaxes(x.reshape(*rows, channels), 1, 2).reshape(batch, 1, -1, channels)

    def to_tokens(x: jax.Array) -> jax.Array:
        x = x.reshape(batch, kv_heads, tokens, heads // kv_heads, *x.shape[3:])
        return jnp.swapaxes(x, 1, 2).reshape(batch, tokens, heads, *x.shape[4:])

    behind = attend.run(to_heads(query), None, within < count)
    is_within = (jnp.arange(tokens)[None] < within[:, None])[:, :, None]
    out, residual = (to_tokens(x) for x in behind)
    out = jnp.where(is_within[..., None], last[0], out)
    return out, jnp.where(is_within, last[1], residual)


def _attention_to(cache: Any, options: Options) -> _Attention:
    """Attention to a cache of the device's own tokens, as `of_run` gives it."""
    if isinstance(cache, PagedLayer):
        return _to_pages(cache.pages, cache.block_tables, cache.lengths, options)
    kind = kind_of(cache)

    def run(
        query: jax.Array, real: jax.Array | None, is_needed: jax.Array | None, **offsets: Any
    ) -> Part:
        needed = cache if is_needed is None else _needed(cache, is_needed)
        if kind.has_latents:
            return _to_latents(query, needed, real, options, **offsets)
        modifiers = of_cache(query, **offsets)
        part: Any = kind.decode(query, needed, real, options=options, modifiers=modifiers)
        return part

    return _Attention(run, cache.num_kv_heads, cache.lengths)


def _of_part(options: Options) -> Options:
    """The options of a device's part, which stays in float32 until it is merged."""
    return dataclasses.replace(options, out_dtype="float32", residual=True)


def _needed(cache: Any, is_needed: jax.Array) -> Any:
    """A cache in which the other sequences are empty."""
    counts = [x for x in ("lengths", "buffer_lengths") if hasattr(cache, x)]
    return dataclasses.replace(
        cache, **{name: jnp.where(is_needed, getattr(cache, name), 0) for name in counts}
    )


def _to_pages(
    cache: PagedCache,
    block_tables: jax.Array,
    lengths: jax.Array,
    options: Options,
) -> _Attention:
    def run(
        query: jax.Array, real: jax.Array | None, is_needed: jax.Array | None, **offsets: Any
    ) -> Part:
        held = lengths if is_needed is None else jnp.where(is_needed, lengths, 0)
        modifiers = of_cache(query, **offsets)
        return paged_op.attend(
            query, cache, block_tables, held, real, options=options, modifiers=modifiers
        )

    return _Attention(run, cache.num_kv_heads, lengths)


def _to_latents(
    query: jax.Array,
    cache: LatentCache,
    real: jax.Array | None,
    options: Options,
    **offsets: Any,
) -> Part:
    channels = cache.latent_dim + cache.rope_dim
    if query.shape[3] != channels:
        raise ValueError(
            f"{query.shape=} must be [B, T, N, {channels}]: the parts of latent and rotary key"
        )
    latent, rope = split_query(query, cache.latent_dim)
    modifiers = of_cache(query, **offsets)
    return latent_op.attend(latent, rope, cache, real, options=options, modifiers=modifiers)
