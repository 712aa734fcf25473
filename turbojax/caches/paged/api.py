"""`paged_attention`: arguments, checks and the choice of implementation."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from turbojax import _checks, polar
from turbojax._gradient import refuse_gradients
from turbojax._registry import Implementation, ImplementationName, Registry
from turbojax.attention import score_modifiers as given
from turbojax.attention import sinks as sinks_of_call
from turbojax.attention.options import Options, require_causal
from turbojax.attention.score_modifiers import NO_MODIFIERS, ScoreModifiers
from turbojax.caches import checks, new_tokens
from turbojax.caches.paged import checks as page_checks
from turbojax.caches.paged import hopper, reference, triton
from turbojax.caches.paged.pool import PagedCache
from turbojax.sharding import tables, together
from turbojax.sharding.per_device import per_device


@functools.partial(jax.jit, static_argnames=("attend", "options"))
def _sheltered(
    query: jax.Array,
    cache: PagedCache,
    block_tables: jax.Array,
    lengths: jax.Array,
    query_lengths: jax.Array | None,
    modifiers: ScoreModifiers = NO_MODIFIERS,
    *,
    attend: Callable[..., tuple[jax.Array, jax.Array]],
    options: Options,
) -> tuple[jax.Array, jax.Array]:
    """Runs an implementation: hides sequences that cannot be read from it, and rotates for it."""
    first = _first_seen(query, lengths, query_lengths, modifiers, options)
    if query_lengths is None:
        query_lengths = jnp.full(query.shape[:1], query.shape[1], jnp.int32)
    ok = page_checks.readable(cache, block_tables, lengths, first)
    formats = cache.formats
    seen = polar.rotate(query, cache.rotation) if formats.key.is_rotated else query
    out, residual = attend(
        seen,
        cache,
        jnp.clip(block_tables, 0, cache.num_pages - 1),
        jnp.where(ok, lengths, 0),
        jnp.clip(query_lengths, 0, query.shape[1]),
        modifiers,
        options=options,
    )
    if formats.value.is_rotated:
        out = polar.unrotate(out, cache.rotation)
    out = jnp.where(ok[:, None, None, None], out, jnp.nan)
    out = out.astype(options.dtype_of_output(query))
    return out, jnp.where(ok[:, None, None], residual, jnp.nan)


def _shelter(attend: Callable[..., tuple[jax.Array, jax.Array]]) -> Callable[..., Any]:
    return functools.partial(_sheltered, attend=attend)


PAGED = Registry(
    "paged_attention",
    (
        Implementation("mosaic_gpu", hopper.attend, hopper.unsupported),
        Implementation("triton", _shelter(triton.attend), triton.unsupported),
        Implementation("xla", _shelter(reference.attend)),
    ),
)


def paged_attention(
    query: jax.Array,
    cache: PagedCache,
    block_tables: jax.Array,
    lengths: jax.Array,
    *,
    query_seq_lengths: jax.Array | None = None,
    scale: float | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    query_offset: jax.Array | int | None = None,
    key_offset: jax.Array | int | None = None,
    sinks: jax.Array | None = None,
    output_dtype: jax.typing.DTypeLike | None = None,
    implementation: ImplementationName | None = None,
    return_residual: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attends the newest tokens' queries to the pages of their sequences.

    Serves decoding (`T` = 1), several new tokens, and a prompt chunk by chunk: the queries are
    those of the last tokens of each sequence, which `turbojax.paged.append` has already stored.
    Query `t` of `n` is at position ``length - n + t`` and sees the tokens up to there, its own
    included. A query before the beginning of a sequence shorter than `n` sees nothing.

    Where keys are stored as codes, the queries are rotated, and scores use the codes' centroids
    (those of `turbojax.polar.integer_centroids`) times the tokens' norms. Where values are, so do
    the weighted sums, and the output is rotated back (PolarQuant, Han et al., 2025).

    The online softmax takes tokens in runs at fixed positions, so that a sequence's result depends,
    to the bit, neither on what else is in the batch, nor on where its pages lie, nor on the width
    of the table (of the log-sum-exp up to its last bit). Nor does it depend on how a prompt is cut
    into chunks, among calls whose query rows per KV head, `T` times ``N / K``, are on the same side
    of 64, and of 1,024: ``"mosaic_gpu"`` and ``"triton"`` have one kernel, or launch, for few
    queries and another for many.

    Args:
      query: ``[B, T, N, H]`` in `cache.dtype`, after the rotary embedding.
      cache: the pages.
      block_tables: integer ``[B, max_pages]``, the pages of each sequence in order; entries past
        its length may be anything, usually -1, and so may those of pages all of whose tokens lie
        before the windows of all its queries.
      lengths: integer ``[B]``, tokens held, those of the queries included.
      query_seq_lengths: optional int ``[B]``: how many of the `T` queries are real, the first
        ones, `n` above; padding gives 0 and ``-inf``. Under `jit` values outside ``0..T`` act as
        the nearest bound.
      scale: factor of the scores; ``1 / sqrt(H)`` if not given.
      local_window_size: optional `w` or ``(left, right)``, relative to the query's position.
      logits_soft_cap: optional `c`: scores become ``c * tanh(score / c)``.
      query_offset: optional int ``[B]`` or scalar, the position of the first query, where it is
        not one of the last tokens held: for several tables with parts of a text, see
        `turbojax.merge_attention`. Several queries, or one with a window, then run in plain JAX.
      key_offset: the position of the pages' first token, 0 if not given.
      sinks: optional floating-point ``[N]``, see `turbojax.turbo_attention`.
      output_dtype: float32 for results that will be merged; the query's if not given.
      implementation: ``"mosaic_gpu"`` (compiles for Ampere to Blackwell, run only on Hopper; 8-bit
        floats need Ada or newer, many queries need Hopper. 16-bit pages: weights as sums of two
        numbers of that dtype; 8-bit floats: queries and weights as sums of two float16; codes and
        int8: as integers of 15 bits. With many queries, weights and decoded codes and int8 are in
        the query's dtype; with ``"fp8_e4m3"``, up to 128 channels, queries and weights in e4m3),
        ``"triton"`` (16-bit pages: weights in that dtype; pages in 8 bits or fewer: queries in
        float16 and weights in half precision), ``"xla"`` (float32), or None for the
        first of them that can run this. In float16 weights below ``2**-25`` of the largest
        vanish.
      return_residual: also return the log-sum-exp of the scores.

    Returns:
      ``[B, T, N, H]`` in the query's dtype or `output_dtype`; with `return_residual` also float32
      ``[B, T, N]``. An empty sequence gives 0 and ``-inf``, or the sink. A key, value or query that
      is NaN turns the results it takes part in to NaN, and no others. Under `jit`, all is NaN for a
      sequence whose length or a needed page is out of range, and none of its pages is read.

    Raises:
      TypeError: if `cache` is another kind, the query's dtype is not `cache.dtype`, or tables or
        lengths are not integers.
      ValueError: if a shape, window, cap or name does not fit, or, outside `jit`, a length or a
        needed page is out of range.
      NotImplementedError: if the implementation asked for cannot run this, or when it is
        differentiated.
    """
    _checks.check_query(query)
    options = Options.complete(
        query.shape[3],
        scale=scale,
        is_causal=True,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        output_dtype=output_dtype,
        implementation=implementation,
    )
    modifiers = given.of_cache(query, sinks=sinks, query_offset=query_offset, key_offset=key_offset)
    out, residual = attend(
        query,
        cache,
        block_tables,
        lengths,
        query_seq_lengths,
        options=options,
        modifiers=modifiers,
    )
    return (out, residual) if return_residual else out


def attend(
    query: jax.Array,
    cache: PagedCache,
    block_tables: jax.Array,
    lengths: jax.Array,
    query_lengths: jax.Array | None = None,
    *,
    options: Options,
    modifiers: ScoreModifiers = NO_MODIFIERS,
) -> tuple[jax.Array, jax.Array]:
    """`paged_attention` of `Options`, causal ones; gives the log-sum-exp too."""
    require_causal(options)
    checks.check_kind(cache, PagedCache)
    check_query(cache, query)
    batch, tokens = query.shape[:2]
    block_tables = page_checks.check_block_tables(block_tables, batch)
    lengths = page_checks.check_lengths("lengths", lengths, batch)
    if query_lengths is not None:  # making it an array would take a kernel
        query_lengths = _checks.check_lengths("query_seq_lengths", query_lengths, batch, tokens)
    if _checks.is_concrete(block_tables, lengths):
        first = _first_seen(query, lengths, query_lengths, modifiers, options)
        page_checks.check_readable(cache, block_tables, lengths, first)
    run = per_device(tables.PAGED, _attend, options=options)
    arrays = (query, cache, block_tables, lengths, query_lengths, modifiers)
    results: tuple[jax.Array, jax.Array] = run(*arrays)
    return results


def _first_seen(
    query: jax.Array,
    lengths: jax.Array,
    query_lengths: jax.Array | None,
    modifiers: ScoreModifiers,
    options: Options,
) -> jax.Array | None:
    """The first token of each sequence that a query sees, int32 ``[B]``; None for token 0."""
    tokens = query.shape[1]
    if modifiers.query_offset is None or options.window is None:
        return page_checks.first_seen(lengths, query_lengths, tokens, options.window)
    return jnp.maximum(modifiers.begin(lengths, lengths) - options.window[0], 0)


def _attend(
    query: jax.Array,
    cache: PagedCache,
    block_tables: jax.Array,
    lengths: jax.Array,
    query_lengths: jax.Array | None,
    modifiers: ScoreModifiers,
    *,
    options: Options,
) -> tuple[jax.Array, jax.Array]:
    """`paged_attention` by the implementation for these arrays."""
    if modifiers.query_offset is not None:
        if query_lengths is None:
            query_lengths = jnp.full(query.shape[:1], query.shape[1], jnp.int32)
        query_lengths = jnp.clip(query_lengths, 0, query.shape[1])
        held, capacity = lengths, block_tables.shape[1] * cache.page_size
        lengths, modifiers = new_tokens.as_newest(query, held, query_lengths, modifiers, options)
        lengths = jnp.where(held > capacity, held, lengths)  # so that it is found out of range

    def run(modifiers: ScoreModifiers, options: Options) -> tuple[jax.Array, jax.Array]:
        chosen = select(query, cache, block_tables, options=options, modifiers=modifiers)
        call = refuse_gradients(chosen.run, "paged_attention", options=options)
        arrays = (query, cache, block_tables, lengths, query_lengths, modifiers)
        out, residual = call(*together(*arrays))
        return out, residual

    if _kernel_has_sinks(query, cache, block_tables, modifiers, options):
        return run(modifiers, options)
    return sinks_of_call.after(run, query, query_lengths, modifiers, options)


def _kernel_has_sinks(
    query: jax.Array,
    cache: PagedCache,
    block_tables: jax.Array,
    modifiers: ScoreModifiers,
    options: Options,
) -> bool:
    """Whether there are sinks, and the implementation chosen takes them itself."""
    is_asked = modifiers.sinks is not None and options.implementation in (None, "mosaic_gpu")
    if not is_asked or not hopper.has_sinks(query, cache):
        return False
    arguments: Any = {"query": query, "cache": cache, "block_tables": block_tables}
    return hopper.unsupported(**arguments, options=options, modifiers=modifiers) is None


def select(
    query: jax.Array | jax.ShapeDtypeStruct,
    cache: PagedCache,
    block_tables: jax.Array | jax.ShapeDtypeStruct,
    *,
    options: Options,
    modifiers: ScoreModifiers = NO_MODIFIERS,
) -> Implementation:
    """The implementation for a call of `paged_attention`; only shapes and dtypes are used."""
    rotated = cache.formats.key.is_rotated
    return PAGED.select(
        options.implementation,
        query=jax.ShapeDtypeStruct(query.shape, jnp.float32 if rotated else query.dtype),
        cache=cache,
        block_tables=block_tables,
        options=options,
        modifiers=modifiers,
    )


def check_query(cache: PagedCache, query: jax.Array) -> None:
    """Raises as `paged_attention` unless it is one for these pages."""
    _checks.check_query(query)
    if query.dtype != cache.dtype:
        raise TypeError(f"query.dtype={query.dtype} must equal cache.dtype={cache.dtype}")
    if query.shape[3] != cache.head_dim:
        raise ValueError(
            f"{query.shape=} must be [B, T, N, {cache.head_dim}], as the cache was made for"
        )
    _checks.check_head_groups(query.shape[2], cache.num_kv_heads)
