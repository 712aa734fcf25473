"""The kinds ``"paged"``, ``"fp8_e4m3"``, ``"turbo4"`` ..: a layer's cache in pages.

One pool, in which each sequence has its own pages.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks
from turbojax.attention.options import Options, require_causal
from turbojax.attention.score_modifiers import NO_MODIFIERS, ScoreModifiers
from turbojax.caches import new_tokens, rolling_buffer
from turbojax.caches.base import (
    ROWS,
    Attended,
    Counts,
    Description,
    Grows,
    Kind,
    Stored,
    dtype_of,
    is_split,
    rows_in_use,
    sizes_of,
)
from turbojax.caches.paged import api
from turbojax.caches.paged.decoding import store_and_attend
from turbojax.caches.paged.layer import (
    PAGE_SIZE,
    before,
    check_room,
    empty_layer,
    extended,
    rolling_pages,
    rolling_tables,
)
from turbojax.caches.paged.layer import PAGED_KINDS as PAGED_KINDS
from turbojax.caches.paged.layer import PagedKind as PagedKind
from turbojax.caches.paged.layer import PagedLayer as PagedLayer
from turbojax.caches.paged.layer import append as append
from turbojax.caches.paged.layer import init_layer as init_layer
from turbojax.caches.paged.pool import PagedCache, gather, init_paged_cache, page_arrays
from turbojax.sharding import as_carried

QUERY_CHUNK = 512
"""Queries of all sequences together that attend at a time, see `query_chunk`."""


def attend(
    query: jax.Array,
    layer: PagedLayer,
    *,
    query_lengths: jax.Array | None = None,
    options: Options,
    modifiers: ScoreModifiers = NO_MODIFIERS,
) -> Attended:
    """Causal attention of the newest tokens to all that is held, with the log-sum-exp.

    They attend to the pages, in the precision in which these are kept, whether they come as a
    prompt or one by one. Long prompts are taken in chunks, see `query_chunk`. Queries past
    `query_lengths` are padding and give zero.
    """
    batch, tokens, heads, _ = query.shape
    rolling_buffer.check_visible(layer, options.window, tokens)
    new_tokens.check_whole(layer, modifiers)

    def run(queries: jax.Array, lengths: jax.Array, real: jax.Array | None) -> Any:
        arrays = (queries, layer.pages, layer.block_tables, lengths, real)
        return api.attend(*arrays, options=options, modifiers=modifiers)

    size = query_chunk(batch, heads // layer.pages.num_kv_heads)
    if modifiers.query_offset is not None:  # of all queries together
        size = tokens
    found: Attended = new_tokens.in_chunks(run, query, layer.lengths, query_lengths, size)
    return found


def append_and_attend_in_parts(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    layer: PagedLayer,
    lengths: jax.Array,
    *,
    options: Options,
    modifiers: ScoreModifiers = NO_MODIFIERS,
) -> tuple[Attended, PagedLayer]:
    """Stores tokens and attends to all that is held; in parts if the layer keeps too little."""
    batch, tokens, heads, _ = query.shape
    attend_to = functools.partial(attend, options=options, modifiers=modifiers)
    most = rolling_buffer.most_new_tokens(layer, rolling_buffer.window_of(options.window))
    if most is None or tokens <= most:
        layer = append(layer, key, value, lengths=lengths)
        return attend_to(query, layer, query_lengths=lengths), layer
    check_room(layer, key, value, lengths)
    size = min(query_chunk(batch, heads // layer.pages.num_kv_heads), most // 16 * 16)

    def chunk(layer: PagedLayer, item: tuple[jax.Array, ...]) -> tuple[PagedLayer, Attended]:
        first, q, k, v = item
        new = jnp.clip(lengths - first, 0, size)
        layer = append(layer, k, v, lengths=new)
        return layer, attend_to(q, layer, query_lengths=new)

    parts = (new_tokens.split_tokens(x, size) for x in (query, key, value))
    items = (new_tokens.first_tokens(tokens, size), *parts)
    layer = as_carried(chunk, layer, jax.tree.map(lambda x: x[0], items))
    layer, chunks = jax.lax.scan(chunk, layer, items)
    return jax.tree.map(lambda x: new_tokens.joined_tokens(x, tokens), chunks), layer


def dequantize(
    cache: PagedLayer, *, dtype: jax.typing.DTypeLike | None = None
) -> tuple[jax.Array, jax.Array]:
    """See `turbojax.dequantize`; of codes what attention works with, see `gather`."""
    held, _ = rolling_buffer.held(cache)
    sides = gather(cache.pages, cache.block_tables, cache.lengths, dtype=dtype)
    key, value = (jnp.where(held[:, :, None, None], x[:, : cache.max_length], 0) for x in sides)
    return key, value


def query_chunk(batch_size: int, group: int) -> int:
    """Queries per sequence that attend at a time; more are taken one chunk after the other.

    Fewer for more sequences, because kernels keep results of every 1,024 tokens of the table's
    width until they are merged, 4 bytes for each channel of each query and head. But always enough
    that a KV head has more than 64 rows of queries (`group` for each query): all prompts longer
    than a chunk then run in the kernel made for many rows, whatever the batch, and no bit depends
    on where they are cut.
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
    """The layer with the sequences of `part`, made from it by `take_sequences` and `append`."""
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
        "key": Grows(-2, ROWS),
        "value": Grows(-2, ROWS),
        "key_norm": Grows(-1, ROWS),
        "value_norm": Grows(-1, ROWS),
    }
    has_rolling_buffers = True

    def init(
        self,
        batch_size: int,
        max_length: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        kind: PagedKind,
        dtype: np.dtype,
        local_window_size: int | None = None,
    ) -> PagedLayer:
        """See `Kind.init`."""
        return init_layer(
            batch_size,
            max_length,
            num_kv_heads,
            head_dim,
            kind=kind,
            dtype=dtype,
            local_window_size=local_window_size,
        )

    def slots(self, kind: Any, max_length: int) -> tuple[int, int]:
        """See `Kind.slots`: pages."""
        del kind
        return PAGE_SIZE, -(-max_length // PAGE_SIZE)

    append = staticmethod(append)

    def prefill(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        cache: PagedLayer,
        lengths: jax.Array | None = None,
        *,
        options: Options,
        modifiers: ScoreModifiers = NO_MODIFIERS,
    ) -> tuple[Attended, PagedLayer]:
        """See `Kind.prefill`."""
        require_causal(options)
        _checks.check_query_key_value(query, key, value)
        lengths = _checks.check_lengths("key_value_seq_lengths", lengths, *key.shape[:2])
        given: Any = {"options": options, "modifiers": modifiers}
        return append_and_attend_in_parts(query, key, value, cache, lengths, **given)

    def decode(
        self,
        query: jax.Array,
        cache: PagedLayer,
        query_lengths: jax.Array | None = None,
        *,
        options: Options,
        modifiers: ScoreModifiers = NO_MODIFIERS,
    ) -> Attended:
        """See `Kind.decode`."""
        _checks.check_query(query)
        if query_lengths is not None:
            shape = query.shape[:2]
            query_lengths = _checks.check_lengths("query_seq_lengths", query_lengths, *shape)
            query_lengths = jnp.clip(query_lengths, 0, query.shape[1])
        given: Any = {"options": options, "modifiers": modifiers}
        return attend(query, cache, query_lengths=query_lengths, **given)

    def append_and_decode(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        cache: PagedLayer,
        lengths: jax.Array | None = None,
        query_lengths: jax.Array | None = None,
        *,
        options: Options,
        modifiers: ScoreModifiers = NO_MODIFIERS,
    ) -> tuple[Attended, PagedLayer]:
        """See `Kind.append_and_decode`: of one token in one kernel, where there is one."""
        given: Any = {"options": options, "modifiers": modifiers}
        if query.shape[1] != 1:
            arrays = (query, key, value, cache, lengths, query_lengths)
            return super().append_and_decode(*arrays, **given)
        _checks.check_query(query)
        rolling_buffer.check_visible(cache, options.window, 1)
        new_tokens.check_whole(cache, modifiers)
        total = check_room(cache, key, value, lengths)
        given["max_length"], new = cache.max_length, None
        if lengths is not None:
            new = jnp.minimum(total, cache.max_length) - cache.lengths
        where = cache.block_tables, before(cache), new, query_lengths
        attended, pages = store_and_attend(query, key, value, cache.pages, *where, **given)
        return attended, extended(cache, pages, total)

    dequantize = staticmethod(dequantize)

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
        window = description.get("local_window_size")
        count = rolling_pages(max_length, window, description["page_size"])
        pages = _make_pool(batch * count, description)
        return self.to_rows(empty_layer(pages, batch, max_length, window))

    def counts(self, lengths: Counts, cache: PagedLayer) -> Counts:
        """See `Stored.counts`."""
        if cache.block_tables.shape[1]:
            return rows_in_use(lengths, cache.rolling_pages * cache.pages.page_size)
        return rows_in_use(lengths, cache.pages.key.shape[2])  # as `to_rows` gives it

    def to_rows(self, cache: PagedLayer) -> PagedLayer:
        """See `Stored.to_rows`: page arrays become ``[B, K, S, ...]``, in the order of tokens.

        Tables are dropped: where pages lay does not matter. Raises ValueError if layers are
        stacked, or tables count each device's own pages.
        """
        if is_split(cache.block_tables):
            raise ValueError(
                f"tables split over {cache.block_tables.sharding} count each device's own pages: "
                "such a cache is stored by save_session alone"
            )
        if cache.lengths.ndim > 1:
            raise ValueError("stacked layers of pages cannot be stored together, only one by one")
        pages, batch, entries = cache.pages, cache.batch_size, cache.rolling_pages
        # Entries past a sequence's pages may be anything; what is read there is not used.
        tables = jnp.clip(cache.block_tables[:, :entries], 0, pages.num_pages - 1)

        def rows(x: jax.Array) -> jax.Array:
            x = jnp.moveaxis(x[tables], 1, 2)  # [B, K, entries, page_size, ...]
            return x.reshape(batch, x.shape[1], entries * pages.page_size, *x.shape[4:])

        return dataclasses.replace(cache, pages=_map_pages(rows, pages), block_tables=tables[:, :0])

    def from_rows(self, cache: PagedLayer, description: Description) -> PagedLayer:
        """See `Stored.from_rows`: the pages of each sequence come in order."""
        batch, entries = cache.batch_size, cache.pages.key.shape[2] // description["page_size"]
        size = description["page_size"]
        tables = rolling_tables(batch, entries, cache.max_length, size)

        def split(x: jax.Array) -> jax.Array:
            x = x.reshape(batch, x.shape[1], entries, -1, *x.shape[3:])
            return jnp.moveaxis(x, 2, 1).reshape(batch * entries, *x.shape[1:2], *x.shape[3:])

        return dataclasses.replace(cache, pages=_map_pages(split, cache.pages), block_tables=tables)


class Pool(Stored[PagedCache]):
    """A bare pool, without tables and lengths: all its pages are stored."""

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
