"""`PrefixCache`: pages of tokens seen before, to be shared by sequences that begin the same."""

import dataclasses
import heapq
from collections.abc import Iterable, Sequence

import numpy as np

from turbojax import _checks
from turbojax.caches.paged.allocator import PageAllocator

_Tokens = bytes
"""Those of a page, as int64: compared faster than numbers of Python, and nothing to collect."""


@dataclasses.dataclass(eq=False)
class _Entry:
    """A full page after a certain chain of pages.

    Attributes:
      page: its number; -1 where the tokens are known and their page is not there: with a window, in
        the middle of a chain.
      tokens: in it.
      parent: the page before it.
      children: pages that may follow, by their tokens.
      used: when it was used last.
      queued: whether it is in the queue of those that may be evicted.
    """

    page: int
    tokens: _Tokens
    parent: "_Entry | None"
    children: dict[_Tokens, "_Entry"] = dataclasses.field(default_factory=dict)
    used: int = 0
    queued: bool = False


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
        self._entries: dict[int, _Entry] = {}
        allocator.add_keeper(self._entries)
        # Uses are counted. Using a page also uses the pages before it (with a window, those that
        # are needed), each parent after its child: so no parent was used before its children.
        self._uses = 0
        # A heap of entries that may be evicted, each once, by when they were used, or before. What
        # is in it may have been used or shared since; what could be evicted since `_moment` of the
        # allocator is not in it yet.
        self._queue: list[tuple[int, _Entry]] = []
        self._moment = 0
        # The tree of the same entries. `_unsettled` is True while tree, uses or queue may be wrong,
        # as after a call that was interrupted.
        self._roots: dict[_Tokens, _Entry] = {}
        self._unsettled = False

    def __len__(self) -> int:
        """Pages remembered."""
        return len(self._entries)

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
            is_held = page in self._entries or is_gone or self._allocator.holders(page)
            if not is_held:
                raise ValueError(f"{page=} is free: only a page in use can be remembered")
        chain = self._known(full)
        new = dict[int, int]()  # where in the chain, by page
        for i, page in enumerate(pages[: len(full)]):
            if page == -1 or (i < len(chain) and chain[i].page != -1):
                continue
            if page in self._entries or page in new:
                raise ValueError(f"{page=} must not be remembered already, after other tokens")
            new[page] = i
        self._unsettled = True
        for i, (page_tokens, page) in enumerate(zip(full, pages, strict=False)):
            if i == len(chain):
                chain.append(_Entry(-1, page_tokens, chain[-1] if chain else None))
            entry = chain[i]
            if new.get(page) == i:
                entry.page = int(page)
                self._allocator.keep(self._entries, entry.page, entry)
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
        pages, self._moment = self._allocator.idle_since(self._moment)
        for page in pages:
            self._enqueue(self._entries.get(page))
        victims = list[int]()
        while self._queue and len(victims) < pages_needed:
            used, entry = heapq.heappop(self._queue)
            entry.queued = False
            if used < entry.used:
                self._enqueue(entry)
            elif self._may_go(entry):
                victims.append(entry.page)
                entry.page = -1
                self._prune(entry)
                self._enqueue(entry.parent)
        for page in victims:
            self._allocator.drop(self._entries, page)
        self._unsettled = False
        return len(victims)

    def clear(self) -> None:
        """Forgets everything; pages that sequences hold stay theirs."""
        self._settle()
        self._unsettled = True
        for page in reversed(list(self._entries)):
            self._allocator.drop(self._entries, page)
        self._roots.clear()
        self._queue.clear()
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
        whole = np.ascontiguousarray(flat[: flat.size // size * size], np.int64)
        pages: list[_Tokens] = whole.view(f"V{size * whole.itemsize}").tolist()
        return pages

    def _use(self, chain: list[_Entry]) -> None:
        self._unsettled = True
        for entry in reversed(chain):
            self._uses += 1
            entry.used = self._uses
        self._unsettled = False

    def _enqueue(self, entry: _Entry | None) -> None:
        """Queues an entry that may be evicted, unless it is queued or may not."""
        if entry is not None and not entry.queued and self._may_go(entry):
            heapq.heappush(self._queue, (entry.used, entry))
            entry.queued = True

    def _may_go(self, entry: _Entry) -> bool:
        """Whether an entry has a page to evict: only the cache holds it, and nothing follows it."""
        if entry.page == -1 or (self._window is None and entry.children):
            return False
        return self._allocator.holders(entry.page) == 1

    def _siblings(self, entry: _Entry) -> dict[_Tokens, _Entry]:
        return self._roots if entry.parent is None else entry.parent.children

    def _settle(self) -> None:
        """Rebuilds the tree, and puts uses and queue right, where a call was interrupted."""
        if not self._unsettled:
            return
        # Entries that have a page, and all entries before these.
        entries = dict.fromkeys(self._entries.values())
        for entry in list(entries):
            parent = entry.parent
            while parent is not None and parent not in entries:
                entries[parent] = None
                parent = parent.parent
        self._roots = {}
        for entry in entries:
            entry.page, entry.children, entry.queued = -1, {}, False
        for page, entry in self._entries.items():
            entry.page = page
        for entry in entries:
            self._siblings(entry)[entry.tokens] = entry
        for first in sorted(self._entries.values(), key=lambda entry: entry.used):
            used: _Entry | None = first
            while used is not None:
                self._uses += 1
                used.used, used = self._uses, used.parent
        self._queue, self._moment = [], 0
        self._unsettled = False
