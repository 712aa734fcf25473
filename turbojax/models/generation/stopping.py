"""When a text ends: at a token, or at a text that may begin in one token and end in another."""

from collections.abc import Iterable, Sequence

import numpy as np

from turbojax import _checks
from turbojax.models.text.tokenizer import Decode, Tokenizer


class TextStream:
    """The text of one sequence as its tokens come, up to the first stop text.

    `decode` is that of the tokens after the prompt, see `Tokenizer.stream`. `text` is all of it so
    far, including what `add` still holds back; `stopped` says that a stop text, no part of it, has
    come.
    """

    def __init__(self, decode: Decode, stop_strings: Iterable[str] = ()) -> None:
        self.text = ""
        self.stopped = False
        self._decode = decode
        self._stops = check_stop_strings(stop_strings)
        self._shown = 0

    def add(self, token: int | None) -> str:
        """Adds a token; None ends the text. After a stop text nothing is added.

        Returns what has become certain: a beginning of a stop text is held back as long as the rest
        may come.
        """
        if self.stopped:
            return ""
        # A stop text may have begun in the tokens before.
        start = max(len(self.text) - max(map(len, self._stops), default=0), 0)
        self.text += self._decode(token)
        found = [at for stop in self._stops if (at := self.text.find(stop, start)) >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True
        held = 0 if self.stopped or token is None else self._held_back()
        piece = self.text[self._shown : len(self.text) - held]
        self._shown += len(piece)
        return piece

    def _held_back(self) -> int:
        """Characters at the end of the text that a stop text begins with."""
        held = 0
        for stop in self._stops:
            end = self.text[max(len(self.text) - len(stop) + 1, 0) :]
            # Only where its first character is, since this is asked after every token.
            at = end.find(stop[0])
            while 0 <= at < len(end) - held:
                if stop.startswith(end[at:]):
                    held = len(end) - at
                at = end.find(stop[0], at + 1)
        return held


class Endings:
    """Which sequences of a batch have ended: `ended`, bool ``[B]``.

    `prompts` are the tokens of every sequence so far; the tokenizer is for `stop_strings` only.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        stop_tokens: Iterable[int] = (),
        stop_strings: Iterable[str] = (),
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.ended = np.zeros(len(prompts), bool)
        self._tokens, strings = check_stops(stop_tokens, stop_strings, tokenizer)
        self._texts = list[TextStream]()
        if strings and tokenizer is not None:
            self._texts = [TextStream(tokenizer.stream(prompt), strings) for prompt in prompts]

    def add(self, tokens: np.ndarray) -> None:
        """Adds every sequence's next token, int ``[B]``; those of ended sequences are ignored."""
        for row in np.flatnonzero(~self.ended):
            token = int(tokens[row])
            self.ended[row] = token in self._tokens
            if self._texts:
                self._texts[row].add(token)
                self.ended[row] |= self._texts[row].stopped


def check_stops(
    stop_tokens: Iterable[int], stop_strings: Iterable[str], tokenizer: Tokenizer | None
) -> tuple[frozenset[int], tuple[str, ...]]:
    """The stop tokens as Python integers, and the stop texts.

    A text that is written like a special token also adds that token, because decoded text does not
    show it.
    """
    tokens, strings = tuple(stop_tokens), check_stop_strings(stop_strings)
    for token in tokens:
        _checks.check_integer("a member of stop_tokens", token)
    if strings and tokenizer is None:
        raise ValueError(f"stop_strings={strings!r} need a tokenizer")
    special = [] if tokenizer is None else [tokenizer.special_token(text) for text in strings]
    return frozenset(int(x) for x in (*tokens, *special) if x is not None), strings


def check_stop_strings(stop_strings: Iterable[str]) -> tuple[str, ...]:
    """The texts; TypeError unless they are several texts, ValueError if one is empty."""
    if isinstance(stop_strings, str):
        raise TypeError(f"{stop_strings=} must be several texts, not one: [{stop_strings!r}]")
    strings = tuple(stop_strings)
    for string in strings:
        if not isinstance(string, str):
            raise TypeError(f"a member of stop_strings={string!r} must be a text")
        if not string:
            raise ValueError(f"stop_strings={strings!r} must not hold an empty text")
    return strings
