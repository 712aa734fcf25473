"""Which of several engines a request goes to: where it will have to wait least."""

import collections
from collections.abc import Sequence

from turbojax.models.engine.requests import Request

# A new token costs its share of a whole step; tokens of a prompt run by the hundred in one.
_NEW_TOKEN = 8


class Load:
    """What is left to do in one engine, and which beginnings of prompts it has seen.

    `work` is counted in tokens of prompts, at most: texts may stop earlier. Prompts share whole
    pages of `page_size` tokens. The pool cannot hold more beginnings than its `pages`; 0 where none
    are kept.
    """

    def __init__(self, page_size: int, pages: int) -> None:
        self.work = 0
        self._page_size, self._pages = page_size, pages
        self._left: dict[int, int] = {}
        self._seen: collections.OrderedDict[int, None] = collections.OrderedDict()

    def cost(self, request: Request, count: int, beginnings: Sequence[int]) -> int:
        """The work until `count` samples of a request are done here, all earlier work included."""
        known = 0
        for key in beginnings if self._pages else ():
            if key not in self._seen:
                break
            known += self._page_size
        prompt = len(request.tokens) - known
        return self.work + prompt + count * _NEW_TOKEN * request.max_new_tokens

    def add(self, numbers: Sequence[int], request: Request, beginnings: Sequence[int]) -> None:
        """Adds samples of a request, of which the first runs the prompt."""
        for i, number in enumerate(numbers):
            work = _NEW_TOKEN * request.max_new_tokens + (0 if i else len(request.tokens))
            self._left[number] = work
            self.work += work
        for key in beginnings if self._pages else ():
            self._seen[key] = None
            self._seen.move_to_end(key)
        while len(self._seen) > self._pages:
            self._seen.popitem(last=False)

    def got_token(self, number: int, request: Request, index: int) -> None:
        """Notes that a request has its new token of this index, so its prompt has run."""
        left = _NEW_TOKEN * (request.max_new_tokens - index - 1)
        self.work -= self._left[number] - left
        self._left[number] = left

    def ended(self, number: int) -> None:
        """Takes away what was left of a request."""
        self.work -= self._left.pop(number)


def beginnings_of(request: Request, page_size: int) -> list[int]:
    """A number for each beginning of a prompt that is whole pages, the shortest first.

    Where different ones have the same number a prompt runs twice, and nothing else happens.
    """
    found, key = [], 0
    # The last token always runs.
    for end in range(page_size, len(request.tokens), page_size):
        key = hash((key, tuple(request.tokens[end - page_size : end])))
        found.append(key)
    return found
