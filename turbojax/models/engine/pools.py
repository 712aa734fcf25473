"""Pools of pages, one for each layer, and groups of layers that see equally far back.

Layers without a window need all tokens of a sequence, those with a window only the last ones. So
each kind has pages of its own, a table and an allocator; a model whose layers are all alike has one
group.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from turbojax import _checks, paged
from turbojax.attention.options import PLAIN, Options
from turbojax.attention.score_modifiers import NO_MODIFIERS, ScoreModifiers
from turbojax.caches import holds_latents
from turbojax.caches import latent as latent_attention
from turbojax.caches import paged as paged_attention
from turbojax.caches.latent.formats import LATENT_DTYPES
from turbojax.caches.latent.kind import split_query, tokens_of
from turbojax.models.config import LatentConfig, TransformerConfig
from turbojax.models.engine.requests import Request
from turbojax.models.generation.caching import with_edges

Windows = tuple[int | None, ...]
"""How far the layers of each group see, the group that sees furthest first; None for all tokens."""


def windows_of(config: TransformerConfig, max_length: int) -> Windows:
    """The windows of a model's layers, widest first; one of `max_length` or more counts as None."""
    windows = {window_of(config, layer, max_length) for layer in range(config.num_layers)}
    return tuple(sorted(windows, key=lambda window: -(max_length if window is None else window)))


def window_of(config: TransformerConfig, layer: int, max_length: int) -> int | None:
    """How far a layer sees; None for all tokens, also where no sequence is longer."""
    window = config.attention_options(layer).local_window_size
    return None if window is None or window >= max_length else window


def group_of(window: int | None, windows: Windows) -> int:
    """The number of a layer's group; a window that is not among `windows` counts as None."""
    return windows.index(window if window in windows else None)


def layers_of(config: TransformerConfig, windows: Windows) -> tuple[tuple[int, ...], ...]:
    """The layers of each group."""
    groups: list[list[int]] = [[] for _ in windows]
    for layer in range(config.num_layers):
        groups[group_of(config.attention_options(layer).local_window_size, windows)].append(layer)
    return tuple(tuple(layers) for layers in groups)


def pages_at_most(tokens: int, piece: int, page_size: int, window: int | None) -> int:
    """Pages that a sequence has at most, if `piece` of its tokens come at a time.

    With a window these are the pages over which a piece, and what its first token sees, may be
    spread.
    """
    whole = -(-tokens // page_size)
    if window is None:
        return whole
    return min(whole, (window - 1 + piece + page_size - 2) // page_size + 1)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the numbers of an engine's pages follow from; raises as `check_sizes` does."""

    page_size: int
    max_sequences: int
    max_length: int
    step_tokens: int

    def __post_init__(self) -> None:
        _checks.check_sizes(**dataclasses.asdict(self))

    def pages_of_request(self, window: int | None) -> int:
        """Pages that the longest request needs at most while its prompt runs."""
        piece = min(self.step_tokens, self.max_length)
        return pages_at_most(self.max_length, piece, self.page_size, window)

    def pages_of_all(self, window: int | None) -> int:
        """Pages that all running requests need at most, where one of them is in a long prompt."""
        each = pages_at_most(self.max_length, 1, self.page_size, window)
        return self.pages_of_request(window) + (self.max_sequences - 1) * each


def pages_of_groups(
    windows: Windows, num_pages: int, sizes: Sizes, window_pages: int | None = None
) -> tuple[int, ...]:
    """Pages of each group's pools: `num_pages` for the first group, `window_pages` for the others.

    By default the others have what `max_sequences` requests need at most, but no more than
    `num_pages`.
    """
    _checks.check_sizes(num_pages=num_pages)
    if window_pages is not None:
        _checks.check_sizes(window_pages=window_pages)
        if len(windows) == 1:
            raise ValueError(f"{window_pages=} has no use: all layers see equally far back")
    others = (
        min(num_pages, sizes.pages_of_all(window)) if window_pages is None else window_pages
        for window in windows[1:]
    )
    return (num_pages, *others)


def most_first_pages(nbytes: int, page_bytes: Sequence[int], windows: Windows, sizes: Sizes) -> int:
    """The largest `num_pages` of `pages_of_groups` with which all pools take at most `nbytes`.

    `page_bytes` has each group's bytes of a page in all its layers. Returns 0 if not even one fits.
    """

    def total(count: int) -> int:
        pages = pages_of_groups(windows, count, sizes)
        return sum(n * size for n, size in zip(pages, page_bytes, strict=True))

    low, high = 0, nbytes // page_bytes[0] + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if total(middle) <= nbytes else (low, middle)
    return low


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """Layers that share tables, and the pages of their pools.

    `window` is how many tokens a query sees, its own included; None for all. `prefixes` finds pages
    of earlier prompts; None for no reuse.
    """

    window: int | None
    layers: tuple[int, ...]
    allocator: paged.PageAllocator
    prefixes: paged.PrefixCache | None

    def pages_before(self, tokens: int) -> int:
        """Pages that no later token sees once a sequence has so many tokens."""
        if self.window is None:
            return 0
        return max(tokens - self.window + 1, 0) // self.allocator.page_size

    def at_most(self, tokens: int, piece: int) -> int:
        """See `pages_at_most`."""
        return pages_at_most(tokens, piece, self.allocator.page_size, self.window)

    def pages_of(self, request: Request, step_tokens: int) -> int:
        """Pages that a request needs at most; its last token is never fed, so it needs no place."""
        return self.at_most(request.total - 1, min(step_tokens, len(request.tokens)))

    def pages_for(self, tokens: int) -> int:
        """Pages of so many tokens."""
        return -(-tokens // self.allocator.page_size)

    def held(self, handle: int) -> tuple[int, ...]:
        """The pages of a sequence that are not released."""
        return tuple(page for page in self.allocator.pages(handle) if page >= 0)

    def cached_pages(self) -> int:
        """Pages that only the prefix cache holds."""
        allocator = self.allocator
        return allocator.num_pages - allocator.num_free - allocator.pages_of_sequences()


def new_groups(
    config: TransformerConfig,
    windows: Windows,
    num_pages: Sequence[int],
    page_size: int,
    *,
    prefix_caching: bool,
) -> tuple[Group, ...]:
    """Groups of these windows and pages, all of which are free."""
    groups = list[Group]()
    for window, layers, count in zip(windows, layers_of(config, windows), num_pages, strict=True):
        allocator = paged.PageAllocator(count, page_size)
        prefixes = paged.PrefixCache(allocator, window) if prefix_caching else None
        groups.append(Group(window, layers, allocator, prefixes))
    return tuple(groups)


def known_beginning(
    groups: Sequence[Group], tokens: np.ndarray
) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """How many of the first tokens have pages that all groups remember, and each group's pages.

    Pages that no later token sees are -1.
    """
    caches = [group.prefixes for group in groups if group.prefixes is not None]
    if len(caches) < len(groups):
        return 0, ((),) * len(groups)
    if len(caches) == 1:
        pages, count = caches[0].lookup(tokens)
        return count, (pages,)
    count = max(set.intersection(*(cache.lengths(tokens) for cache in caches)), default=0)
    return count, tuple(cache.lookup(tokens[:count])[0] for cache in caches)


# Writing and reading pages ------------------------------------------------------------------------


Pool = paged.PagedCache | paged.LatentPages
"""The pages of a layer."""

_Function = Callable[..., Any]


def append_and_attend(pool: Pool) -> tuple[_Function, _Function]:
    """What appends to such a pool, and what attends to it.

    Their arguments are those of `turbojax.paged.append` and
    `turbojax.caches.paged.attend`; queries, keys and values of latents are as
    `turbojax.caches.latent.kind` says.
    """
    if holds_latents(pool):
        return _append_latents, _attend_latents
    return paged.append, paged_attention.attend


def decode(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    pool: Pool,
    block_tables: jax.Array,
    lengths: jax.Array,
    new_lengths: jax.Array,
    **given: Any,
) -> tuple[jax.Array, Pool]:
    """Stores a token of each sequence, or none, and lets its query attend.

    Arguments are those of `turbojax.caches.paged.store_and_attend`; `lengths` are those before.
    """
    if isinstance(pool, paged.LatentPages):
        pool = _append_latents(pool, key, value, block_tables, lengths, new_lengths=new_lengths)
        held = lengths + new_lengths
        return _attend_latents(query, pool, block_tables, held, new_lengths, **given)[0], pool
    where = block_tables, lengths, new_lengths, new_lengths
    (out, _), pool = paged_attention.store_and_attend(query, key, value, pool, *where, **given)
    return out, pool


def check_call(
    implementation: str | None,
    pool: Pool,
    block_tables: jax.Array | jax.ShapeDtypeStruct,
    rows: int,
    tokens: int,
    num_heads: int,
) -> None:
    """Checks attention to a layer's pages, with `tokens` queries in each row; compiles nothing."""

    def query(channels: int) -> Any:
        return jax.ShapeDtypeStruct((rows, tokens, num_heads, channels), pool.dtype)

    if isinstance(pool, paged.LatentPages):
        options = PLAIN.complete(pool.latent_dim + pool.rope_dim, implementation)
        queries = query(pool.latent_dim), query(pool.rope_dim)
        latent_attention.select(*queries, pool, block_tables, options=options)
        return
    options = PLAIN.complete(pool.head_dim, implementation)
    queries = query(pool.head_dim)
    paged_attention.select(queries, pool, block_tables, options=options)


def _append_latents(
    pool: paged.LatentPages,
    key: jax.Array,
    value: jax.Array,
    block_tables: jax.Array,
    lengths: jax.Array,
    *,
    new_lengths: jax.Array | None = None,
) -> paged.LatentPages:
    latent, rope = tokens_of(key, value)
    return paged.append_latents(pool, latent, rope, block_tables, lengths, new_lengths=new_lengths)


def _attend_latents(
    query: jax.Array,
    pool: paged.LatentPages,
    block_tables: jax.Array,
    lengths: jax.Array,
    query_lengths: jax.Array | None = None,
    *,
    options: Options,
    modifiers: ScoreModifiers = NO_MODIFIERS,
) -> tuple[jax.Array, jax.Array]:
    if refusal := modifiers.refusal():
        raise NotImplementedError(f"latent_attention cannot run here: {refusal}")
    return latent_attention.attend_pages(
        *split_query(query, pool.latent_dim),
        pool,
        block_tables,
        lengths,
        query_lengths,
        options=options,
    )


# Pools of all layers ------------------------------------------------------------------------------


Pools = tuple[Pool, ...]


def kv_dtypes(num_layers: int, kv_dtype: str, uncompressed_layers: int) -> tuple[str, ...]:
    """How the pages of every layer are stored, see `Engine`."""
    _checks.check_integer("uncompressed_layers", uncompressed_layers)
    if uncompressed_layers < 0:
        raise ValueError(f"{uncompressed_layers=} must be at least 0")
    if uncompressed_layers and kv_dtype == "auto":
        raise ValueError(f"{uncompressed_layers=} has no use with {kv_dtype=}: none is compressed")
    return with_edges(kv_dtype, "auto", uncompressed_layers, num_layers)


def pages_of_layers(
    config: TransformerConfig, windows: Windows, num_pages: Sequence[int]
) -> tuple[int, ...]:
    """Pages of every layer's pool, from those of the groups."""
    pages = dict[int, int]()
    for layers, count in zip(layers_of(config, windows), num_pages, strict=True):
        pages |= dict.fromkeys(layers, count)
    return tuple(pages[layer] for layer in range(config.num_layers))


def init_pools(
    config: TransformerConfig,
    dtype: np.dtype,
    num_pages: Sequence[int],
    page_size: int,
    *,
    kv_dtype: str,
    uncompressed_layers: int,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    seed: int = 0,
) -> Pools:
    """Empty pools, one for each layer; pools of latents for a model with latent attention.

    `num_pages` is per layer.
    """
    given: dict[str, Any] = {"key_scale": key_scale, "value_scale": value_scale, "seed": seed}
    kinds = kv_dtypes(config.num_layers, kv_dtype, uncompressed_layers)
    if config.latent is not None:
        _check_no_scales(key_scale=key_scale, value_scale=value_scale)
        seeds = [seed if kind == kv_dtype else 0 for kind in kinds]
        sizes_of_all = zip(num_pages, kinds, seeds, strict=True)
        return tuple(_latent_pool(config.latent, dtype, page_size, *x) for x in sizes_of_all)
    sizes = (page_size, config.num_kv_heads, config.head_dim)
    return tuple(
        paged.init_cache(
            count, *sizes, kv_dtype=kind, dtype=dtype, **(given if kind == kv_dtype else {})
        )
        for count, kind in zip(num_pages, kinds, strict=True)
    )


def _check_no_scales(**scales: float) -> None:
    for name, scale in scales.items():
        if scale != 1:
            raise ValueError(
                f"{name}={scale} has no use with latents: tokens have their own scales"
            )


def _latent_pool(
    latent: LatentConfig, dtype: np.dtype, page_size: int, count: int, kind: str, seed: int
) -> paged.LatentPages:
    """A pool of latents; its kind ``"auto"`` is what `LatentPages` calls ``"bfloat16"``.

    That one keeps the model's dtype. The name ``"bfloat16"`` raises ValueError as unknown names do:
    pages that are not compressed have one name in an engine, for which `kv_dtypes` looks.
    """
    names = ["auto" if x == "bfloat16" else x for x in LATENT_DTYPES]
    if kind not in names:
        raise ValueError(f"kv_dtype={kind!r} must be one of {', '.join(names)}")
    return paged.init_latent_pages(
        count,
        page_size,
        latent.rank,
        latent.rope_dim,
        kv_dtype="bfloat16" if kind == "auto" else kind,
        dtype=dtype,
        seed=seed,
    )


def page_bytes(
    config: TransformerConfig,
    dtype: np.dtype,
    page_size: int,
    *,
    kv_dtype: str,
    uncompressed_layers: int,
    layers: Sequence[int] | None = None,
) -> int:
    """Bytes of one page of these layers, by default of all, without making one."""
    one = jax.eval_shape(
        lambda: init_pools(
            config,
            dtype,
            (1,) * config.num_layers,
            page_size,
            kv_dtype=kv_dtype,
            uncompressed_layers=uncompressed_layers,
        )
    )
    return sum(one[i].page_bytes for i in (range(len(one)) if layers is None else layers))


def token_bytes(pools: Pools) -> int:
    """Bytes of one token, in all layers."""
    return sum(pool.token_bytes for pool in pools)


def compression_ratio(pools: Pools) -> float:
    """Bytes of a token in bfloat16, in all layers, over `token_bytes`."""
    # Whole numbers, as the ratio of one pool is one over another.
    plain = sum(round(pool.compression_ratio * pool.token_bytes) for pool in pools)
    return plain / token_bytes(pools)
