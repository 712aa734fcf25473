"""`PrefixCache`: pages of tokens seen before, to be shared by sequences that begin the same."""

import collections
import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from turbojax import _checks
from turbojax.caches.paged.allocator import PageAllocator

_Tokens = tuple[int, ...]


@dataclasses.dataclass(eq=False)
class _Entry:
    """A full page after a certain chain of pages.

    Attributes:
      page: its number; -1 where the tokens are known and their page is not there: with a window, in
        the middle of a chain.
      tokens: in it.
      parent: the page before it.
      children: pages that may follow, by their tokens.
    """

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

    Of layers with a sliding window, what follows a beginning needs only the pages that the window
    reaches back to. So such a beginning is found where these are there, whether or not those
    before them are; they may be evicted in any order.

    Not thread-safe. An exception from outside, such as Ctrl-C, leaves some of the pages of a call
    remembered, or forgotten, and the others not; a page is remembered and retained or neither.

    Args:
      allocator: whose pages are remembered.
      window: of the layers that they are of: tokens that a query sees, its own included; None
        where it sees all.

    Raises:
      TypeError: if the window is no integer.
      ValueError: if it is less than 1.
    """

    def __init__(self, allocator: PageAllocator, window: int | None = None) -> None:
        if window is not None:
            _checks.check_sizes(window=window)
        self._allocator = allocator
        self._window = window
        # What is remembered, by page: the allocator holds these pages. A page is remembered after
        # the one before it and forgotten before it.
        #
        # From the least to the most recently used. Using a page also uses the pages before it (with
        # a window, those that are needed), each parent after its child: so no parent comes before
        # one of its children.
        self._order: collections.OrderedDict[int, _Entry] = collections.OrderedDict()
        allocator.add_keeper(self._order)
        # The tree of the same entries. `_unsettled` is True while tree or order may be wrong, as
        # after a call that was interrupted.
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
          The pages, in order, and how many tokens they hold, a multiple of the page size. With a
          window there is -1 for those that the next token does not see, as `allocate` takes them.
          A caller that must run at least one token of a prompt looks up all tokens but the last.

        Raises:
          TypeError: if tokens are not integers.
          ValueError: if they are not a sequence.
        """
        self._settle()
        chain = self._known(self._split(tokens))
        count = max(self._complete(chain), default=0)
        first = self._first_needed(count)
        self._use(chain[first:count])
        pages = (-1,) * first + tuple(entry.page for entry in chain[first:count])
        return pages, count * self._allocator.page_size

    def lengths(self, tokens: Sequence[int] | np.ndarray) -> set[int]:
        """How many tokens the beginnings of `tokens` have that `lookup` could find.

        For pools whose sequences share their tokens: of a length that all of them know, `lookup`
        finds exactly that.

        Args:
          tokens: integers.

        Returns:
          Multiples of the page size.

        Raises:
          TypeError, ValueError: see `lookup`.
        """
        self._settle()
        size = self._allocator.page_size
        return {count * size for count in self._complete(self._known(self._split(tokens)))}

    def insert(self, tokens: Sequence[int] | np.ndarray, pages: Iterable[int]) -> int:
        """Remembers the full pages of a sequence.

        Args:
          tokens: the tokens the sequence holds, from its beginning; a page that they do not fill is
            left out.
          pages: the sequence's pages, in order, at least those that are full; with a window, -1
            for those that are released.

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
            is_gone = page == -1 and self._window is not None
            if not is_gone and not self._allocator.holders(page):
                raise ValueError(f"{page=} is free: only a page in use can be remembered")
        chain = self._known(full)
        new = dict[int, int]()  # where in the chain, by page
        for i, page in enumerate(pages[: len(full)]):
            if page == -1 or (i < len(chain) and chain[i].page != -1):
                continue
            if page in self._order or page in new:
                raise ValueError(f"{page=} must not be remembered already, after other tokens")
            new[page] = i
        self._unsettled = True
        for i, (page_tokens, page) in enumerate(zip(full, pages, strict=False)):
            if i == len(chain):
                chain.append(_Entry(-1, page_tokens, chain[-1] if chain else None))
            entry = chain[i]
            if new.get(page) == i:
                entry.page = int(page)
                self._allocator.keep(self._order, entry.page, entry)
            self._siblings(entry)[page_tokens] = entry
        if chain:
            self._prune(chain[-1])
        self._use(chain)
        return len(new)

    def evict(self, pages_needed: int) -> int:
        """Frees pages that only the cache holds, the least recently used first.

        Leaves go first; with a window, any page may go.

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
        victims: list[int] = []
        for page, entry in self._order.items():
            if len(victims) >= pages_needed:
                break
            # Its children came first in the order: those that could be freed are gone.
            may_go = self._window is not None or not entry.children
            if may_go and self._allocator.holders(page) == 1:
                entry.page = -1
                self._prune(entry)
                victims.append(page)
        for page in victims:
            self._allocator.drop(self._order, page)
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

    def _first_needed(self, count: int) -> int:
        """The first of `count` pages that a token after them sees; `count` if it sees none."""
        if self._window is None:
            return 0
        size = self._allocator.page_size
        return max(count * size - self._window + 1, 0) // size

    def _complete(self, chain: list[_Entry]) -> list[int]:
        """The lengths of beginnings of a chain whose needed pages are all there."""
        found, run = [], 0
        for count, entry in enumerate(chain, start=1):
            run = run + 1 if entry.page != -1 else 0
            if run >= count - self._first_needed(count):
                found.append(count)
        return found

    def _prune(self, entry: _Entry | None) -> None:
        """Removes an entry without page and children from the tree, then its parents likewise."""
        while entry is not None and entry.page == -1 and not entry.children:
            del self._siblings(entry)[entry.tokens]
            entry = entry.parent

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
            if entry.page != -1:
                self._order.move_to_end(entry.page)
        self._unsettled = False

    def _siblings(self, entry: _Entry) -> dict[_Tokens, _Entry]:
        return self._roots if entry.parent is None else entry.parent.children

    def _settle(self) -> None:
        """Rebuilds the tree, and puts the order right, where a call was interrupted."""
        if not self._unsettled:
            return
        # Entries that have a page, and all entries before these.
        entries = dict.fromkeys(self._order.values())
        for entry in list(entries):
            parent = entry.parent
            while parent is not None and parent not in entries:
                entries[parent] = None
                parent = parent.parent
        self._roots = {}
        for entry in entries:
            entry.page, entry.children = -1, {}
        for page, entry in self._order.items():
            entry.page = page
        for entry in entries:
            self._siblings(entry)[entry.tokens] = entry
        for first in list(self._order.values()):
            used: _Entry | None = first
            while used is not None:
                if used.page != -1:
                    self._order.move_to_end(used.page)
                used = used.parent
        self._unsettled = False
