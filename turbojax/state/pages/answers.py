"""What a `PageAllocator` answers: pages to copy, what is held, or that there is no room."""

import dataclasses


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
