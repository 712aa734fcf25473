"""The kinds ``"paged"``, ``"fp8_e4m3"``, ``"turbo4"`` ..: a layer's cache in pages.

One pool, in which each sequence has its own pages.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks
from turbojax._registry import ImplementationName
from turbojax.kv.base import Description, Grows, Kind, Stored, dtype_of, sizes_of
from turbojax.ops.options import PLAIN, AttentionOptions
from turbojax.ops.paged_attention import attend_pages
from turbojax.state.pages.pool import KV_DTYPES, PagedCache, init_paged_cache, page_arrays
from turbojax.state.pages.pool import append as append_to_pages

PagedKind = str
"""One of `PAGED_KINDS`."""

_NAMES = {"auto": "paged", "k8v4": "paged_k8v4"}
_KV_DTYPES = {_NAMES.get(kv_dtype, kv_dtype): kv_dtype for kv_dtype in KV_DTYPES}

PAGED_KINDS = tuple(_KV_DTYPES)
"""Names of caches that are kept in pages: the `KV_DTYPES`, but for two. ``"paged"`` stores keys and
values as they are, and ``"k8v4"``, which is a cache without pages, is ``"paged_k8v4"``."""

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
    def num_kv_heads(self) -> int:
        """Number of key/value heads, `K`."""
        return self.pages.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Channels of a head, `H`."""
        return self.pages.head_dim

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the keys and values it takes."""
        return self.pages.dtype

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
      kind: how pages store a token, see `PagedCache`; 8-bit floats have scale 1.
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
        kv_dtype=_KV_DTYPES[kind],
        dtype=dtype,
    )
    return _empty_layer(pages, batch_size, max_length)


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
    static = options.complete(channels)

    def run(queries: jax.Array, lengths: jax.Array, real: jax.Array | None) -> jax.Array:
        out, _ = attend_pages(
            queries,
            layer.pages,
            layer.block_tables,
            lengths,
            real,
            options=static,
            implementation=implementation,
        )
        return out

    size = query_chunk(batch, heads // layer.pages.num_kv_heads)
    if tokens <= size:
        return run(query, layer.lengths, query_lengths)
    if query_lengths is None:
        query_lengths = jnp.full(batch, tokens, jnp.int32)
    before = layer.lengths - query_lengths

    def chunk(item: tuple[jax.Array, jax.Array]) -> jax.Array:
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


class Pages(Kind[PagedLayer]):
    """`PagedLayer`. Prompts too attend to what the pages hold, as later tokens will."""

    cls = PagedLayer
    names = PAGED_KINDS
    takes = PAGED_KINDS
    stored_as = "paged_layer"
    grows: ClassVar[Mapping[str, Grows]] = {
        "key": Grows(-2),
        "value": Grows(-2),
        "key_norm": Grows(-1),
        "value_norm": Grows(-1),
    }

    def init(
        self,
        batch_size: int,
        max_length: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        kind: PagedKind,
        dtype: np.dtype,
    ) -> PagedLayer:
        """See `Kind.init`."""
        return init_layer(batch_size, max_length, num_kv_heads, head_dim, kind=kind, dtype=dtype)

    def append(
        self,
        cache: PagedLayer,
        key: jax.Array,
        value: jax.Array,
        *,
        lengths: jax.Array | None = None,
        implementation: Any = None,
    ) -> PagedLayer:
        """See `Kind.append`."""
        del implementation  # what writes pages is always chosen
        return append(cache, key, value, lengths=lengths)

    def prefill(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        cache: PagedLayer,
        lengths: jax.Array,
        *,
        options: AttentionOptions = PLAIN,
        implementation: Any = None,
    ) -> tuple[jax.Array, PagedLayer]:
        """See `Kind.prefill`."""
        cache = append(cache, key, value, lengths=lengths)
        out = attend(
            query, cache, query_lengths=lengths, options=options, implementation=implementation
        )
        return out, cache

    def decode(
        self,
        query: jax.Array,
        cache: PagedLayer,
        *,
        options: AttentionOptions = PLAIN,
        implementation: Any = None,
    ) -> jax.Array:
        """See `Kind.decode`."""
        return attend(query, cache, options=options, implementation=implementation)

    def take(self, cache: PagedLayer, first: jax.Array | int, count: int) -> PagedLayer:
        """See `take_sequences`."""
        return take_sequences(cache, first, count)

    def put(self, cache: PagedLayer, part: PagedLayer, first: jax.Array | int) -> PagedLayer:
        """See `put_sequences`."""
        return put_sequences(cache, part, first)

    def why_nan(self, cache: PagedLayer) -> str | None:
        """See `Kind.why_nan`."""
        if cache.pages.kv_dtype == "auto":
            return None
        return f"keys or values beyond the range of {cache.pages.kv_dtype} pages become NaN"

    def describe(self, cache: PagedLayer) -> dict[str, Any]:
        """See `Stored.describe`."""
        return {**super().describe(cache), **_describe_pages(cache.pages)}

    def make(self, description: Description) -> PagedLayer:
        """See `Stored.make`."""
        batch, max_length, *_ = sizes_of(description)
        max_pages = -(-max_length // description["page_size"])
        pages = _make_pool(batch * max_pages, description)
        return self.to_rows(_empty_layer(pages, batch, max_length))

    def to_rows(self, cache: PagedLayer) -> PagedLayer:
        """A layer whose page arrays are ``[B, K, S, ...]``, in the order of tokens, without tables.

        Only to be stored: where its pages lay does not matter.
        """
        if cache.lengths.ndim > 1:
            raise ValueError("stacked layers of pages cannot be stored together, only one by one")
        pages, (batch, entries) = cache.pages, cache.block_tables.shape
        # Entries past a sequence's pages may be anything; what is read there is not used.
        tables = jnp.clip(cache.block_tables, 0, pages.num_pages - 1)

        def rows(x: jax.Array) -> jax.Array:
            x = jnp.moveaxis(x[tables], 1, 2)  # [B, K, entries, page_size, ...]
            return x.reshape(batch, x.shape[1], entries * pages.page_size, *x.shape[4:])

        return dataclasses.replace(cache, pages=_map_pages(rows, pages), block_tables=tables[:, :0])

    def from_rows(self, cache: PagedLayer, description: Description) -> PagedLayer:
        """See `Stored.from_rows`: the pages of each sequence come in order."""
        batch, entries = cache.batch_size, cache.pages.key.shape[2] // description["page_size"]
        tables = jnp.arange(batch * entries, dtype=jnp.int32).reshape(batch, entries)

        def split(x: jax.Array) -> jax.Array:
            x = x.reshape(batch, x.shape[1], entries, -1, *x.shape[3:])
            return jnp.moveaxis(x, 2, 1).reshape(batch * entries, *x.shape[1:2], *x.shape[3:])

        return dataclasses.replace(cache, pages=_map_pages(split, cache.pages), block_tables=tables)


class Pool(Stored[PagedCache]):
    """A bare pool, which does not know who holds what: all its pages are stored."""

    cls = PagedCache
    stored_as = "paged_pool"
    counting = ()

    def describe(self, cache: PagedCache) -> dict[str, Any]:
        """See `Stored.describe`."""
        return {
            "num_pages": cache.num_pages,
            "num_kv_heads": cache.num_kv_heads,
            "head_dim": cache.head_dim,
            "dtype": cache.dtype.name,
            **_describe_pages(cache),
        }

    def make(self, description: Description) -> PagedCache:
        """See `Stored.make`."""
        return _make_pool(description["num_pages"], description)

    def validate(self, cache: PagedCache) -> None:
        """See `Stored.validate`."""
        cache.validate()


def _empty_layer(pages: PagedCache, batch_size: int, max_length: int) -> PagedLayer:
    """A layer of these pages, dealt out in order."""
    tables = jnp.arange(pages.num_pages, dtype=jnp.int32).reshape(batch_size, -1)
    return PagedLayer(
        pages=pages,
        block_tables=tables,
        lengths=jnp.zeros(batch_size, jnp.int32),
        overflowed=jnp.zeros(batch_size, jnp.bool_),
        max_length=max_length,
    )


def _describe_pages(pages: PagedCache) -> dict[str, Any]:
    return {"page_size": pages.page_size, "kv_dtype": pages.kv_dtype, "seed": pages.seed}


def _make_pool(num_pages: int, description: Description) -> PagedCache:
    return init_paged_cache(
        num_pages,
        description["page_size"],
        description["num_kv_heads"],
        description["head_dim"],
        kv_dtype=description["kv_dtype"],
        dtype=dtype_of(description),
        seed=description["seed"],
    )


def _map_pages(change: Callable[[jax.Array], jax.Array], pages: PagedCache) -> PagedCache:
    changed: dict[str, Any] = {name: change(x) for name, x in page_arrays(pages).items()}
    return dataclasses.replace(pages, **changed)


PAGES, POOL = Pages(), Pool()
