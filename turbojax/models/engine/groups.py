"""Groups of layers that see equally far back: a table, an allocator and pools for each.

Layers without a window need all tokens of a sequence, those with a window only the last ones. So
each kind has pages of its own, and a model whose layers are all alike has one group.
"""

import dataclasses
from collections.abc import Sequence

from turbojax import _checks, paged
from turbojax.models.config import TransformerConfig
from turbojax.models.engine.requests import Request

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

    def pages_of_request(self, window: int | None, tokens: int | None = None) -> int:
        """Pages that a request, by default the longest, needs at most while its prompt runs."""
        tokens = self.max_length if tokens is None else tokens
        piece = min(self.step_tokens, tokens)
        return pages_at_most(tokens, piece, self.page_size, window)

    def pages_of_all(self, window: int | None) -> int:
        """Pages that all running requests need at most, where one of them is in a long prompt."""
        each = pages_at_most(self.max_length, 1, self.page_size, window)
        return self.pages_of_request(window) + (self.max_sequences - 1) * each


def pages_of_groups(
    windows: Windows, num_pages: int, sizes: Sizes, window_pages: int | None = None
) -> tuple[int, ...]:
    """Pages of each group's pools: `num_pages` for the first group, `window_pages` for the others.

    By default the others have what `max_sequences` requests need at most, but no more than
    `num_pages`. Raises TypeError or ValueError as `check_sizes` does, and ValueError for
    `window_pages` with one group.
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
        held = {page for handle in allocator.sequences for page in self.held(handle)}
        return allocator.num_pages - allocator.num_free - len(held)


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
    groups: Sequence[Group], tokens: Sequence[int]
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
