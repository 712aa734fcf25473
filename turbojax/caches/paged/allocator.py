"""`PageAllocator`: which pages of a pool each sequence holds. Host code, no arrays of jax."""

import array
import dataclasses
import itertools
from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any

import numpy as np

from turbojax import _checks


class PoolExhausted(RuntimeError):
    """Too few pages are free for what was asked; nothing has changed.

    Attributes:
      needed: pages that the call needs.
      free: pages that are free.
    """

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed} pages are needed and {free} are free")
        self.needed = needed
        self.free = free


@dataclasses.dataclass(frozen=True)
class PageCopy:
    """A page to copy before its sequence writes on: it was shared and partially filled.

    Attributes:
      source: page to read.
      destination: page to write, which is already in the sequence's table.
    """

    source: int
    destination: int


@dataclasses.dataclass(frozen=True)
class PoolStatistics:
    """What a `PageAllocator` has handed out.

    Attributes:
      num_pages: pages of the pool.
      free: pages that nobody holds.
      shared: pages with more than one holder, a prefix cache counted as one.
      sequences: sequences alive.
      tokens: tokens in the pages that they hold; one in a shared page counts for each sequence.
      bytes: bytes of the pages held, None where the size of a page was not given.
    """

    num_pages: int
    free: int
    shared: int
    sequences: int
    tokens: int
    bytes: int | None

    @property
    def used(self) -> int:
        """Pages held by someone."""
        return self.num_pages - self.free


# Stands in a table for a page that was released.
_RELEASED = -1


@dataclasses.dataclass
class _Sequence:
    """One sequence; immutable, a change replaces it.

    `pages` are in order, -1 for the first `released` ones, whose tokens `length` includes.
    """

    pages: array.array
    length: int
    released: int = 0

    @property
    def held(self) -> array.array:
        """The pages it holds."""
        return self.pages[self.released :]


class PageAllocator:
    """Hands out the pages of a pool to sequences, with shared pages and copy on write.

    A sequence holds just the pages its tokens need, in order. All pages are alike, and a block
    table takes any of them in any order, so nothing fragments and there is nothing to defragment.

    A page may have several holders: sequences (after `fork`, or when allocated with a prefix), and
    callers of `retain`. It is free again when the last of them releases it. Full pages are never
    written again, so they are shared directly; a page partially filled is copied when one of
    several holders extends it. For layers with a sliding window, a sequence's pages before the
    window may be released while it goes on (`release_before`).

    Not thread-safe. A call that fails changes nothing. An exception from outside, such as Ctrl-C,
    leaves a call either not done at all or done: one last assignment changes who holds what, and
    the next call recounts everything that follows from this.

    Args:
      num_pages: pages of the pool.
      page_size: tokens a page.

    Raises:
      TypeError: if one is not an integer.
      ValueError: if one is less than 1.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        _checks.check_sizes(num_pages=num_pages, page_size=page_size)
        self._page_size = int(page_size)
        # Who holds what: sequences, callers of `retain` by page, mappings whose keys are pages.
        self._sequences: dict[int, _Sequence] = {}
        self._retained = [0] * int(num_pages)
        self._keepers: list[MutableMapping[int, Any]] = []
        # Derived from these. `_unsettled` is True while they may disagree, as after a call that
        # was interrupted.
        self._unsettled = False
        # How many sequences hold each page.
        self._shares = [0] * int(num_pages)
        # A stack: a page used a moment ago is taken first. Page 0 comes first of all.
        self._free = list(range(int(num_pages) - 1, -1, -1))
        # Pages that only others hold, by when the last holder let go, counted in `_moment`.
        self._idle: dict[int, int] = {}
        self._moment = 0
        self._next_id = 0

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return len(self._shares)

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self._page_size

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        self._settle()
        return len(self._free)

    @property
    def occupancy(self) -> float:
        """The part of the pages that someone holds, 0 to 1."""
        return 1 - self.num_free / self.num_pages

    @property
    def sequences(self) -> tuple[int, ...]:
        """The sequences alive, oldest first."""
        return tuple(self._sequences)

    def allocate(self, tokens: int = 0, prefix_pages: Iterable[int] = ()) -> int:
        """A new sequence.

        Args:
          tokens: tokens it holds, those of the prefix not counted.
          prefix_pages: full pages in use that it begins with and shares, from a `PrefixCache` or
            another sequence; -1 at their beginning for pages that are released already, see
            `release_before`. Its length is then ``len(prefix_pages) * page_size + tokens``.

        Returns:
          Its id, never used before.

        Raises:
          PoolExhausted: if too few pages are free.
          TypeError: if `tokens` or a page is not an integer.
          ValueError: if `tokens` is negative, a page of the prefix is free or not in the pool, or
            -1 stands after a page.
        """
        self._settle()
        _check_tokens(tokens)
        prefix = list(prefix_pages)
        released = next((i for i, page in enumerate(prefix) if page != _RELEASED), len(prefix))
        shared = [self._in_use(page) for page in prefix[released:]]
        count = self._pages_for(tokens)
        self._check_free(count)
        self._unsettled = True
        fresh = self._take(count)
        self._share(shared)
        length = len(prefix) * self.page_size + int(tokens)
        pages = array.array("i", [_RELEASED] * released + shared + fresh)
        return self._add(_Sequence(pages, length, released))

    def extend(self, sequence: int, tokens: int) -> list[PageCopy]:
        """Makes room for more tokens, all of them or none.

        Args:
          sequence: its id.
          tokens: how many more it will hold.

        Returns:
          What to copy (`turbojax.paged.copy_pages`) before any page is written, forked or freed:
          the last page, if it was partially filled and has other holders, who keep the old one.

        Raises:
          PoolExhausted: if too few pages are free.
          KeyError: if there is no such sequence.
          TypeError: if `tokens` is not an integer.
          ValueError: if `tokens` is negative.
        """
        self._settle()
        state = self._find(sequence)
        _check_tokens(tokens)
        pages, length = state.pages, state.length + int(tokens)
        is_partial = tokens > 0 and state.length % self.page_size > 0
        replaces = is_partial and self.holders(pages[-1]) > 1
        count = self._pages_for(length) - len(pages) + int(replaces)
        self._check_free(count)
        copies = list[PageCopy]()
        if count:
            self._unsettled = True
            fresh, pages = self._take(count), pages[:]
            if replaces:
                copies.append(PageCopy(source=pages[-1], destination=fresh[0]))
                self._unshare(pages.pop())
            pages.extend(fresh)
        state = _Sequence(pages, length, state.released)
        # Python looks for signals after calls, so nothing can interrupt between these two.
        self._sequences[sequence], self._unsettled = state, False; return copies  # fmt: skip  # noqa: E702

    def fork(self, sequence: int) -> int:
        """A new sequence with the same tokens, sharing all pages.

        Args:
          sequence: id of the one to fork.

        Returns:
          The new one's id.

        Raises:
          KeyError: if there is no such sequence.
        """
        self._settle()
        state = self._find(sequence)
        self._unsettled = True
        self._share(state.held)
        return self._add(state)

    def release_before(self, sequence: int, tokens: int) -> int:
        """Lets go of pages whose tokens are never read again, as those before a sliding window.

        The sequence keeps its length. Its block table has -1 where such a page was; they cannot be
        recovered.

        Args:
          sequence: its id.
          tokens: how many of its first tokens are not needed; pages that hold only these go.

        Returns:
          How many pages it let go, which are free unless they have other holders.

        Raises:
          KeyError: if there is no such sequence.
          TypeError: if `tokens` is not an integer.
          ValueError: if `tokens` is negative or more than the sequence's length.
        """
        self._settle()
        state = self._find(sequence)
        _check_tokens(tokens)
        if tokens > state.length:
            raise ValueError(f"{tokens=} must be at most {state.length}, the sequence's length")
        released = max(int(tokens) // self.page_size, state.released)
        gone = state.pages[state.released : released]
        if not gone:
            return 0
        self._unsettled = True
        for page in reversed(gone):
            self._unshare(page)
        pages = array.array("i", [_RELEASED] * released) + state.pages[released:]
        state = _Sequence(pages, state.length, released)
        self._sequences[sequence], self._unsettled = state, False; return len(gone)  # fmt: skip  # noqa: E702

    def free(self, sequence: int) -> None:
        """Ends a sequence: pages without another holder are free.

        Args:
          sequence: its id.

        Raises:
          KeyError: if there is no such sequence, as when it was freed before.
        """
        self._settle()
        state = self._find(sequence)
        self._unsettled = True
        # The first page is to be on top of the stack.
        for page in reversed(state.held):
            self._unshare(page)
        del self._sequences[sequence]; self._unsettled = False  # fmt: skip  # noqa: E702

    def length(self, sequence: int) -> int:
        """A sequence's tokens, those in released pages too; KeyError if there is none such."""
        return self._find(sequence).length

    def released(self, sequence: int) -> int:
        """How many of its first pages a sequence let go; KeyError if there is none such."""
        return self._find(sequence).released

    def pages(self, sequence: int) -> tuple[int, ...]:
        """A sequence's pages in order, -1 for those released; KeyError if there is none such."""
        return tuple(self._find(sequence).pages)

    def block_tables(self, sequences: Sequence[int | None], max_pages: int) -> np.ndarray:
        """The block tables of several sequences.

        Args:
          sequences: ids; None gives a row without pages.
          max_pages: columns.

        Returns:
          int32 ``[B, max_pages]``, -1 past each sequence's pages and for those released.

        Raises:
          KeyError: if there is no such sequence.
          TypeError: if `max_pages` is not an integer.
          ValueError: if `max_pages` is less than 1 or than what a sequence holds.
        """
        _checks.check_sizes(max_pages=max_pages)
        tables = np.full((len(sequences), max_pages), -1, np.int32)
        for row, sequence in zip(tables, sequences, strict=True):
            if sequence is None:
                continue
            pages = self._find(sequence).pages
            if len(pages) > max_pages:
                raise ValueError(
                    f"{max_pages=} must be at least {len(pages)}, what sequence {sequence} holds"
                )
            row[: len(pages)] = pages
        return tables

    def holders(self, page: int) -> int:
        """How many sequences and retainers hold a page; ValueError if it is not in the pool."""
        self._settle()
        page = self._in_pool(page)
        return self._shares[page] + self._kept(page)

    def pages_of_sequences(self) -> int:
        """How many pages sequences hold; one that several share counts once."""
        self._settle()
        return self.num_pages - len(self._free) - len(self._idle)

    def idle_since(self, moment: int) -> tuple[list[int], int]:
        """Pages in use by no sequence that a holder has let go of since then.

        So a keeper learns which of its pages nobody else may hold any more.

        Args:
          moment: what an earlier call returned; 0 for all pages in use by no sequence.

        Returns:
          The pages, the last one first, and the present moment.
        """
        self._settle()
        latest = reversed(self._idle)
        pages = itertools.takewhile(lambda page: self._idle[page] > moment, latest)
        return list(pages), self._moment

    def retain(self, page: int) -> None:
        """Holds a page in use on behalf of no sequence, as a prefix cache does.

        Args:
          page: its number.

        Raises:
          TypeError: if it is not an integer.
          ValueError: if it is free or not in the pool.
        """
        self._settle()
        page = self._in_use(page)
        self._retained[page] += 1

    def release(self, page: int) -> None:
        """Takes one `retain` back; without another holder the page is free.

        Args:
          page: its number.

        Raises:
          TypeError: if it is not an integer.
          ValueError: if it is not in the pool or not retained.
        """
        self._settle()
        page = self._in_pool(page)
        if not self._retained[page]:
            raise ValueError(f"{page=} must be retained before it is released")
        self._unsettled = True
        self._let_go(page, self._kept(page) - 1)
        self._retained[page], self._unsettled = self._retained[page] - 1, False

    def add_keeper(self, pages: MutableMapping[int, Any]) -> None:
        """Lets a mapping hold the pages that are its keys; `keep` and `drop` change it.

        The mapping tells which pages it holds even after a call that was interrupted; a caller of
        `retain` would not know.

        Args:
          pages: a mapping of no page.

        Raises:
          ValueError: if it has pages.
        """
        if pages:
            raise ValueError(f"pages={list(pages)} must be none")
        self._keepers.append(pages)

    def keep(self, pages: MutableMapping[int, Any], page: int, value: object) -> None:
        """Puts a page in use into a mapping of `add_keeper`.

        Args:
          pages: the mapping.
          page: the page, not in it.
          value: what the page is mapped to.

        Raises:
          TypeError: if the page is not an integer.
          ValueError: if it is free, not in the pool, or in the mapping.
        """
        self._settle()
        page = self._in_use(page)
        if page in pages:
            raise ValueError(f"{page=} must not be kept already")
        pages[page] = value

    def drop(self, pages: MutableMapping[int, Any], page: int) -> None:
        """Takes a page out of a mapping of `add_keeper`.

        Args:
          pages: the mapping.
          page: a page that is in it.

        Raises:
          KeyError: if it is not.
        """
        self._settle()
        if page not in pages:
            raise KeyError(f"{page=} must be kept before it is dropped")
        self._unsettled = True
        self._let_go(page, self._kept(page) - 1)
        del pages[page]; self._unsettled = False  # fmt: skip  # noqa: E702

    def statistics(self, page_bytes: int | None = None) -> PoolStatistics:
        """Counts of pages, sequences and tokens, and of bytes if the size of a page is given.

        Args:
          page_bytes: as `PagedCache.page_bytes`, which is of one layer; a model whose layers' pools
            share this allocator has a page in each.
        """
        used = self.num_pages - self.num_free
        return PoolStatistics(
            num_pages=self.num_pages,
            free=self.num_free,
            shared=sum(self.holders(page) > 1 for page in range(self.num_pages)),
            sequences=len(self._sequences),
            tokens=sum(
                state.length - state.released * self.page_size for state in self._sequences.values()
            ),
            bytes=None if page_bytes is None else used * page_bytes,
        )

    def validate(self) -> None:
        """Checks the recorded holders against tables and retainers, and the list of free pages.

        Raises:
          ValueError: naming what is broken.
        """
        self._settle()
        for sequence, state in self._sequences.items():
            if len(state.pages) != self._pages_for(state.length):
                raise ValueError(
                    f"sequence {sequence} has {len(state.pages)} pages for {state.length} tokens"
                )
            missing = [i for i, page in enumerate(state.pages) if page == _RELEASED]
            if missing != list(range(state.released)):
                raise ValueError(
                    f"sequence {sequence} misses pages {missing}, {state.released} are released"
                )
        shares = self._count_shares()
        for page, (counted, noted) in enumerate(zip(shares, self._shares, strict=True)):
            if counted != noted:
                raise ValueError(f"page {page} has {counted} sequences, {noted} are on record")
        others = [page for page, count in enumerate(shares) if count == 0]
        free = [page for page in others if not self._kept(page)]
        if sorted(self._free) != free:
            raise ValueError(f"pages {sorted(self._free)} are listed as free, must be {free}")
        idle = [page for page in others if self._kept(page)]
        if sorted(self._idle) != idle:
            raise ValueError(f"pages {sorted(self._idle)} are listed as idle, must be {idle}")

    def _settle(self) -> None:
        """Recounts who shares pages, free and idle ones, where a call was interrupted."""
        if self._unsettled:
            self._shares = self._count_shares()
            self._free, self._idle = [], {}
            for page in range(self.num_pages - 1, -1, -1):
                if not self._shares[page]:
                    self._let_go(page, self._kept(page))
            self._unsettled = False

    def _count_shares(self) -> list[int]:
        shares = [0] * self.num_pages
        for state in self._sequences.values():
            for page in state.held:
                shares[page] += 1
        return shares

    def _kept(self, page: int) -> int:
        """How many hold a page beside sequences."""
        kept = self._retained[page]
        for pages in self._keepers:
            kept += page in pages
        return kept

    def _add(self, state: _Sequence) -> int:
        sequence, self._next_id = self._next_id, self._next_id + 1
        self._sequences[sequence], self._unsettled = state, False; return sequence  # fmt: skip  # noqa: E702

    def _find(self, sequence: int) -> _Sequence:
        state = self._sequences.get(sequence)
        if state is None:
            raise KeyError(f"there is no sequence {sequence!r}: it was freed or never allocated")
        return state

    def _pages_for(self, tokens: int) -> int:
        return -(-int(tokens) // self.page_size)

    def _check_free(self, count: int) -> None:
        if count > len(self._free):
            raise PoolExhausted(count, len(self._free))

    def _take(self, count: int) -> list[int]:
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._shares[page] = 1
        return taken

    def _share(self, pages: Iterable[int]) -> None:
        """Counts one more sequence of pages in use."""
        for page in pages:
            self._shares[page] += 1
            self._idle.pop(page, None)

    def _unshare(self, page: int) -> None:
        """Counts one sequence less."""
        self._shares[page] -= 1
        self._let_go(page, self._kept(page))

    def _let_go(self, page: int, kept: int) -> None:
        """A holder leaves a page, beside sequences to `kept` others."""
        if self._shares[page]:
            return
        self._idle.pop(page, None)
        if kept:
            self._moment += 1
            self._idle[page] = self._moment
        else:
            self._free.append(page)

    def _in_pool(self, page: int) -> int:
        _checks.check_integer("page", page)
        if not 0 <= page < self.num_pages:
            raise ValueError(f"{page=} must be within 0..{self.num_pages - 1}")
        return int(page)

    def _in_use(self, page: int) -> int:
        page = self._in_pool(page)
        if not self._shares[page] and not self._kept(page):
            raise ValueError(f"{page=} is free: only a page in use can be shared")
        return page


def _check_tokens(tokens: int) -> None:
    _checks.check_integer("tokens", tokens)
    if tokens < 0:
        raise ValueError(f"{tokens=} must not be negative")
