"""`PrefixCache`: pages of tokens seen before, to be shared by sequences that begin the same."""

import collections
import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from turbojax.state.pages.allocator import PageAllocator

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

    Not thread-safe. An exception from outside, such as Ctrl-C, leaves some of the pages of a call
    remembered, or forgotten, and the others not; a page is remembered and retained or neither.

    Args:
      allocator: whose pages are remembered.
    """

    def __init__(self, allocator: PageAllocator) -> None:
        self._allocator = allocator
        # What is remembered, by page: the allocator holds these pages. A page is remembered after
        # the one before it and forgotten before it.
        #
        # From the least to the most recently used. Using a page uses all before it, a parent after
        # its child, so no parent comes before one of its children.
        self._order: collections.OrderedDict[int, _Entry] = collections.OrderedDict()
        allocator.add_keeper(self._order)
        # The tree of the same entries. `_unsettled` while tree or order may not be as said: a call
        # that was interrupted leaves it so.
        self._roots: dict[_Tokens, _Entry] = {}
        self._unsettled = False

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
        self._settle()
        chain = self._known(self._split(tokens))
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
          ValueError: if there are fewer pages than the tokens fill, or one to be remembered is
            free, not in the pool, or remembered after other tokens. Nothing is remembered then.
        """
        self._settle()
        full, pages = self._split(tokens), list(pages)
        if len(pages) < len(full):
            raise ValueError(f"{len(pages)} pages must be at least {len(full)}, the full ones")
        for page in pages[: len(full)]:
            if not self._allocator.holders(page):
                raise ValueError(f"{page=} is free: only a page in use can be remembered")
        chain = self._known(full)
        new = list(zip(full, pages, strict=False))[len(chain) :]
        seen = set[int]()
        for _, page in new:
            if page in self._order or page in seen:
                raise ValueError(f"{page=} must not be remembered already, after other tokens")
            seen.add(page)
        self._unsettled = True
        for page_tokens, page in new:
            entry = _Entry(int(page), page_tokens, chain[-1] if chain else None)
            self._allocator.keep(self._order, entry.page, entry)
            self._siblings(entry)[page_tokens] = entry
            chain.append(entry)
        self._use(chain)
        return len(new)

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
        self._settle()
        self._unsettled = True
        victims: list[_Entry] = []
        for entry in self._order.values():
            if len(victims) >= pages_needed:
                break
            # Its children came before it: those that could go are gone.
            if not entry.children and self._allocator.holders(entry.page) == 1:
                del self._siblings(entry)[entry.tokens]
                victims.append(entry)
        for entry in victims:
            self._allocator.drop(self._order, entry.page)
        self._unsettled = False
        return len(victims)

    def clear(self) -> None:
        """Forgets everything; pages that sequences hold stay theirs."""
        self._settle()
        self._unsettled = True
        for page in list(self._order):
            self._allocator.drop(self._order, page)
        self._roots.clear()
        self._unsettled = False

    def _known(self, pages: Iterable[_Tokens]) -> list[_Entry]:
        """The longest known beginning."""
        chain: list[_Entry] = []
        children = self._roots
        for page_tokens in pages:
            entry = children.get(page_tokens)
            if entry is None:
                break
            chain.append(entry)
            children = entry.children
        return chain

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
        self._unsettled = True
        for entry in reversed(chain):
            self._order.move_to_end(entry.page)
        self._unsettled = False

    def _siblings(self, entry: _Entry) -> dict[_Tokens, _Entry]:
        return self._roots if entry.parent is None else entry.parent.children

    def _settle(self) -> None:
        """Makes the tree anew, and the order one, where a call was interrupted."""
        if not self._unsettled:
            return
        entries = list(self._order.values())
        self._roots = {}
        for entry in entries:
            entry.children = {}
        for entry in entries:
            self._siblings(entry)[entry.tokens] = entry
        for entry in entries:
            used: _Entry | None = entry
            while used is not None:
                self._order.move_to_end(used.page)
                used = used.parent
        self._unsettled = False
