"""Paged KV caches as a layer's cache: one pool, in which each sequence has its own pages."""

import dataclasses
import math
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks
from turbojax._registry import ImplementationName
from turbojax.ops.options import PLAIN, AttentionOptions
from turbojax.ops.paged_attention import paged_attention
from turbojax.state.pages.pool import PagedCache, init_paged_cache
from turbojax.state.pages.pool import append as append_to_pages

PagedKind = Literal["paged", "fp8_e4m3", "fp8_e5m2", "turbo4"]
"""Names of caches that are kept in pages; ``"paged"`` stores keys and values as they are."""

PAGED_KINDS: tuple[PagedKind, ...] = get_args(PagedKind)

PAGE_SIZE = 64
"""Tokens of a page."""

QUERY_CHUNK = 512
"""Queries of all sequences together that attend at a time, see `query_chunk`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedLayer:
    """A layer's KV cache in pages, for `B` sequences that come and go together.

    Every sequence has pages for `max_length` tokens from the start, so nothing is allocated on the
    way. Where requests come and go, an engine shares one pool between them instead.

    Made by `init_layer`; `append` takes it and never changes it in place (donate it to `jit` to
    reuse its memory).

    Attributes:
      pages: the pool, ``B * max_pages`` pages.
      block_tables: int32 ``[B, max_pages]``, the pages of each sequence. No page has two owners.
      lengths: int32 ``[B]``, tokens held, at most `max_length`.
      overflowed: bool ``[B]``, True where a call under `jit` had to leave tokens out.
      max_length: tokens each sequence can hold.
    """

    pages: PagedCache
    block_tables: jax.Array
    lengths: jax.Array
    overflowed: jax.Array
    max_length: int = dataclasses.field(metadata={"static": True})

    @property
    def batch_size(self) -> int:
        """Number of sequences, `B`."""
        return self.block_tables.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays held, tables included."""
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(self))

    @property
    def compression_ratio(self) -> float:
        """Bytes of a bfloat16 cache of `max_length` tokens over `nbytes`."""
        values = self.batch_size * self.max_length * self.pages.num_kv_heads * self.pages.head_dim
        return 4 * values / self.nbytes


def init_layer(
    batch_size: int,
    max_length: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    kind: PagedKind,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    page_size: int = PAGE_SIZE,
) -> PagedLayer:
    """An empty cache of one layer.

    Args:
      batch_size: sequences, `B`.
      max_length: tokens each can hold; pages are whole, so there is memory for a few more.
      num_kv_heads: key/value heads, `K`.
      head_dim: channels, `H`.
      kind: how pages store a token: as it is, in an 8-bit float (with scale 1), or as `turbo4`.
      dtype: of queries, keys and values.
      page_size: tokens of a page.

    Raises:
      TypeError: if a size is not an integer or the dtype is not supported.
      ValueError: if a size is not positive or not supported, or there is no such kind.
    """
    _checks.check_sizes(batch_size=batch_size, max_length=max_length, page_size=page_size)
    if kind not in PAGED_KINDS:
        raise ValueError(f"{kind=} must be one of {', '.join(PAGED_KINDS)}")
    max_pages = -(-max_length // page_size)
    pages = init_paged_cache(
        batch_size * max_pages,
        page_size,
        num_kv_heads,
        head_dim,
        kv_dtype="auto" if kind == "paged" else kind,
        dtype=dtype,
    )
    return PagedLayer(
        pages=pages,
        block_tables=jnp.arange(batch_size * max_pages, dtype=jnp.int32).reshape(batch_size, -1),
        lengths=jnp.zeros(batch_size, jnp.int32),
        overflowed=jnp.zeros(batch_size, jnp.bool_),
        max_length=max_length,
    )


def append(
    layer: PagedLayer, key: jax.Array, value: jax.Array, *, lengths: jax.Array | None = None
) -> PagedLayer:
    """Adds new tokens, one or many per sequence; see `turbojax.append`.

    Args:
      layer: the cache to extend.
      key: ``[B, T, K, H]`` in the layer's dtype, after the rotary embedding.
      value: the same.
      lengths: optional int ``[B]``, how many of the `T` tokens are real, the first ones.

    Returns:
      The extended cache. Under `jit`, tokens past `max_length` are left out and `overflowed` turns
      True for their sequence; nothing that was stored changes.

    Raises:
      TypeError: if dtypes do not fit.
      ValueError: if a shape does not fit, or, outside `jit`, a sequence would exceed `max_length`.
    """
    _checks.check_key_value(key, value)
    if key.shape[0] != layer.batch_size:
        raise ValueError(f"{key.shape=} must have {layer.batch_size} sequences, as the cache has")
    lengths = _checks.check_lengths("lengths", lengths, layer.batch_size, key.shape[1])
    total = layer.lengths + jnp.clip(lengths, 0, key.shape[1])
    if _checks.is_concrete(total) and np.any(np.asarray(total) > layer.max_length):
        raise ValueError(
            f"appending would give lengths {np.asarray(total).tolist()}, "
            f"which must be at most max_length={layer.max_length}"
        )
    kept = jnp.minimum(total, layer.max_length)
    pages = append_to_pages(
        layer.pages,
        key,
        value,
        layer.block_tables,
        layer.lengths,
        new_lengths=kept - layer.lengths,
    )
    return dataclasses.replace(
        layer, pages=pages, lengths=kept, overflowed=layer.overflowed | (total > kept)
    )


def attend(
    query: jax.Array,
    layer: PagedLayer,
    *,
    query_lengths: jax.Array | None = None,
    options: AttentionOptions = PLAIN,
    implementation: ImplementationName | None = None,
) -> jax.Array:
    """Causal attention of the newest tokens to all that is held, themselves included.

    They attend to the pages, in the precision these are kept in, whether they come as a prompt or
    one by one. Long prompts are taken in chunks, see `query_chunk`.

    Args:
      query: ``[B, T, N, H]`` in the layer's dtype.
      layer: the cache, which holds the queries' own keys and values.
      query_lengths: optional int32 ``[B]``, how many of the `T` queries are real, the first ones.
      options: of the layer.
      implementation: of `turbojax.paged_attention`; None to choose.

    Returns:
      ``[B, T, N, H]`` in the query's dtype, zero for queries that are padding.

    Raises:
      TypeError, ValueError, NotImplementedError: see `turbojax.paged_attention`.
    """
    batch, tokens, heads, channels = query.shape

    def run(queries: jax.Array, lengths: jax.Array, real: jax.Array | None) -> Any:
        return paged_attention(
            queries,
            layer.pages,
            layer.block_tables,
            lengths,
            query_seq_lengths=real,
            implementation=implementation,
            **options.arguments(),
        )

    size = query_chunk(batch, heads // layer.pages.num_kv_heads)
    if tokens <= size:
        return run(query, layer.lengths, query_lengths)
    if query_lengths is None:
        query_lengths = jnp.full(batch, tokens, jnp.int32)
    before = layer.lengths - query_lengths

    def chunk(item: tuple[jax.Array, jax.Array]) -> Any:
        first, queries = item
        held = before + jnp.minimum(query_lengths, first + size)
        return run(queries, held, jnp.clip(query_lengths - first, 0, size))

    count = -(-tokens // size)
    padding = count * size - tokens
    parts = jnp.pad(query, ((0, 0), (0, padding), (0, 0), (0, 0)))
    parts = jnp.moveaxis(parts.reshape(batch, count, size, heads, channels), 1, 0)
    firsts = size * jnp.arange(count, dtype=jnp.int32)
    out = jnp.moveaxis(jax.lax.map(chunk, (firsts, parts)), 0, 1)
    return out.reshape(batch, -1, heads, channels)[:, :tokens]


def query_chunk(batch_size: int, group: int) -> int:
    """Queries per sequence that attend at a time; more are taken one chunk after the other.

    Fewer for more sequences, because kernels keep results of every 1,024 tokens of the table's
    width until they are merged, 4 bytes for each channel of each query and head. But always enough
    that a KV head has more than 64 rows of queries: all prompts longer than a chunk then run in the
    kernel made for many rows, whatever the batch, and no bit depends on where they are cut.

    Args:
      batch_size: sequences.
      group: query heads of a KV head.
    """
    least = 64 // group + 1
    return max(QUERY_CHUNK // batch_size // 16, -(-least // 16)) * 16


def take_sequences(layer: PagedLayer, first: jax.Array | int, count: int) -> PagedLayer:
    """Sequences ``first`` to ``first + count - 1``, with the whole pool: no page is copied."""
    tables, lengths, overflowed = (
        jax.lax.dynamic_slice_in_dim(x, first, count)
        for x in (layer.block_tables, layer.lengths, layer.overflowed)
    )
    return dataclasses.replace(layer, block_tables=tables, lengths=lengths, overflowed=overflowed)


def put_sequences(layer: PagedLayer, part: PagedLayer, first: jax.Array | int) -> PagedLayer:
    """The layer with the sequences of `part`, which `take_sequences` and `append` made from it."""
    lengths, overflowed = (
        jax.lax.dynamic_update_slice_in_dim(x, new, first, 0)
        for x, new in ((layer.lengths, part.lengths), (layer.overflowed, part.overflowed))
    )
    return dataclasses.replace(layer, pages=part.pages, lengths=lengths, overflowed=overflowed)
