"""`PrefixCache`: pages of tokens seen before, to be shared by sequences that begin the same."""

import collections
import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from turbojax.cache.allocator import PageAllocator

_Tokens = tuple[int, ...]


@dataclasses.dataclass(eq=False)
class _Entry:
    """A full page after a certain chain of pages; `children` may follow it."""

    page: int
    tokens: _Tokens
    parent: "_Entry | None"
    children: dict[_Tokens, "_Entry"] = dataclasses.field(default_factory=dict)


class PrefixCache:
    """Remembers which full pages hold which tokens after which others.

    A tree: a page's parent is the page before it, and a parent finds a child by all of the child's
    tokens; hashes only speed this up, and never decide. The cache retains its pages, so they
    outlive the sequences that wrote them, until `evict` lets go of those that nobody else holds.

    What a page holds must depend on the tokens up to its end alone, and on nothing that changes
    between sequences: one model, one set of weights. After a change of weights, `clear`.

    Args:
      allocator: whose pages are remembered.
    """

    def __init__(self, allocator: PageAllocator) -> None:
        self._allocator = allocator
        self._roots: dict[_Tokens, _Entry] = {}
        # From the least to the most recently used. Using a page uses all before it, a parent after
        # its child, so no parent comes before one of its children.
        self._order: collections.OrderedDict[_Entry, None] = collections.OrderedDict()

    def __len__(self) -> int:
        """Pages remembered."""
        return len(self._order)

    def lookup(self, tokens: Sequence[int] | np.ndarray) -> tuple[tuple[int, ...], int]:
        """The longest known beginning of `tokens`, in whole pages.

        The pages are the caller's to share at once (`PageAllocator.allocate`): a later `evict` may
        let go of them.

        Args:
          tokens: integers.

        Returns:
          The pages, in order, and how many tokens they hold, a multiple of the page size. A caller
          that must run at least one token of a prompt looks up all tokens but the last.

        Raises:
          TypeError: if tokens are not integers.
          ValueError: if they are not a sequence.
        """
        chain: list[_Entry] = []
        children = self._roots
        for page_tokens in self._split(tokens):
            entry = children.get(page_tokens)
            if entry is None:
                break
            chain.append(entry)
            children = entry.children
        self._use(chain)
        return tuple(entry.page for entry in chain), len(chain) * self._allocator.page_size

    def insert(self, tokens: Sequence[int] | np.ndarray, pages: Iterable[int]) -> int:
        """Remembers the full pages of a sequence.

        Args:
          tokens: the tokens the sequence holds, from its beginning; a page that they do not fill is
            left out.
          pages: the sequence's pages, in order, at least those that are full.

        Returns:
          How many pages are new. Where the same chain of tokens is known in other pages, those
          stay.

        Raises:
          TypeError: if tokens or pages are not integers.
          ValueError: if there are fewer pages than the tokens fill, or one to be remembered is free
            or not in the pool. Nothing is remembered then.
        """
        full, pages = self._split(tokens), list(pages)
        if len(pages) < len(full):
            raise ValueError(f"{len(pages)} pages must be at least {len(full)}, the full ones")
        for page in pages[: len(full)]:
            if not self._allocator.holders(page):
                raise ValueError(f"{page=} is free: only a page in use can be remembered")
        chain: list[_Entry] = []
        children, parent, new = self._roots, None, 0
        for page_tokens, page in zip(full, pages, strict=False):
            entry = children.get(page_tokens)
            if entry is None:
                entry = _Entry(int(page), page_tokens, parent)
                self._allocator.retain(page)
                children[page_tokens] = entry
                new += 1
            chain.append(entry)
            parent, children = entry, entry.children
        self._use(chain)
        return new

    def evict(self, pages_needed: int) -> int:
        """Frees pages that only the cache holds, the least recently used first, leaves first.

        Args:
          pages_needed: how many to free.

        Returns:
          How many were freed, fewer if there are no more.

        Raises:
          ValueError: if `pages_needed` is negative.
        """
        if pages_needed < 0:
            raise ValueError(f"{pages_needed=} must not be negative")
        victims: list[_Entry] = []
        for entry in self._order:
            if len(victims) >= pages_needed:
                break
            # Its children came before it: those that could go are gone.
            if not entry.children and self._allocator.holders(entry.page) == 1:
                self._unlink(entry)
                victims.append(entry)
        for entry in victims:
            del self._order[entry]
            self._allocator.release(entry.page)
        return len(victims)

    def clear(self) -> None:
        """Forgets everything; pages that sequences hold stay theirs."""
        for entry in self._order:
            self._allocator.release(entry.page)
        self._order.clear()
        self._roots.clear()

    def _split(self, tokens: Sequence[int] | np.ndarray) -> list[_Tokens]:
        """The tokens of each full page."""
        flat = np.asarray(tokens)
        if flat.ndim != 1:
            raise ValueError(f"tokens have shape {flat.shape}, must be a sequence of integers")
        if flat.size and not np.issubdtype(flat.dtype, np.integer):
            raise TypeError(f"tokens have dtype {flat.dtype}, must be integers")
        size = self._allocator.page_size
        return [
            tuple(flat[start : start + size].tolist())
            for start in range(0, flat.size - size + 1, size)
        ]

    def _use(self, chain: list[_Entry]) -> None:
        for entry in reversed(chain):
            self._order[entry] = None
            self._order.move_to_end(entry)

    def _unlink(self, entry: _Entry) -> None:
        siblings = self._roots if entry.parent is None else entry.parent.children
        del siblings[entry.tokens]
