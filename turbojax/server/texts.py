"""The text of one choice as its tokens come, and what is said of each token."""

import collections
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from turbojax.models.engine.requests import Result, TokenLogprobs
from turbojax.models.generation.stopping import TextStream
from turbojax.models.text.token_bytes import TokenBytes
from turbojax.models.text.tokenizer import Tokenizer
from turbojax.server.fields import Options

_UNLIKELY = -9999.0
"""The log-probability of an impossible token in JSON, which has no infinity."""


@dataclasses.dataclass(frozen=True)
class Said:
    """What is said of a token; `offset` is how many characters of the choice come before it."""

    token: int
    offset: int
    logprobs: TokenLogprobs


@dataclasses.dataclass(frozen=True)
class Piece:
    """What a choice has more than before; `said` only where log-probabilities were asked for."""

    text: str
    said: tuple[Said, ...]


class ChoiceText:
    """The text of one result, without the stop text or stop token that ended it.

    What is not certain yet, such as half a character or the beginning of a stop text, is held back
    together with what is said of its tokens. `prompt` has the tokens before the first.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], options: Options) -> None:
        self._stream = TextStream(tokenizer.stream(prompt), options.stop)
        self._stop_tokens = options.stop_tokens
        self._pieces = list[str]()
        self._shown = 0
        self._said: collections.deque[Said] = collections.deque()

    @property
    def text(self) -> str:
        """The whole text so far, with what is held back."""
        return self._stream.text

    def add(self, token: int, logprobs: TokenLogprobs | None) -> None:
        """Adds a token, unless it stops the text."""
        if token in self._stop_tokens or self._stream.stopped:
            return
        if logprobs is not None:
            self._said.append(Said(token, len(self._stream.text), logprobs))
        self._show(self._stream.add(token))

    def end(self) -> None:
        """There are no more tokens."""
        self._show(self._stream.add(None))
        if not self._stream.stopped:
            self._shown += 1  # of tokens without a text, too, is said what there is

    def take(self) -> Piece:
        """The certain text that was not taken before."""
        text = "".join(self._pieces)
        self._pieces.clear()
        said = []
        while self._said and self._said[0].offset < self._shown:
            said.append(self._said.popleft())
        return Piece(text, tuple(said))

    def whole(self, result: Result) -> Piece:
        """Everything, of a result that nobody has read before."""
        for i, token in enumerate(result.tokens):
            self.add(token, None if result.logprobs is None else result.logprobs[i])
        self.end()
        return self.take()

    def _show(self, text: str) -> None:
        self._pieces.append(text)
        self._shown += len(text)


class TokenTexts:
    """The text of each token alone, as answers name it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def prepare(self) -> None:
        """Does in advance what takes a second for a large vocabulary."""
        _ = self._known

    @functools.cached_property
    def _known(self) -> TokenBytes | None:
        """The bytes of all tokens; None where they have none of their own."""
        try:
            return self._tokenizer.token_bytes  # type: ignore[attr-defined]
        except (AttributeError, NotImplementedError):
            return None

    def bytes(self, token: int) -> bytes | None:
        """What a token adds to a text, or a special token's name; None where that is not known."""
        if self._known is not None and token in self._known.special:
            return self._known.special[token].encode()
        if self._known is not None and token < len(self._known.texts):
            return self._known.texts[token]
        text = self._tokenizer.decode([token])
        return None if "\N{REPLACEMENT CHARACTER}" in text else text.encode()

    def text(self, token: int) -> str:
        r"""The same as text; an incomplete character is shown as in ``"bytes:\xe2\x82"``."""
        found = self.bytes(token)
        if found is None:
            return self._tokenizer.decode([token])
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)

    def for_chat(self, said: Sequence[Said]) -> dict[str, Any]:
        """Log-probabilities as chats have them."""
        content = [
            {
                **self._entry(x.token, x.logprobs.logprob),
                "top_logprobs": [self._entry(*pair) for pair in x.logprobs.top],
            }
            for x in said
        ]
        return {"content": content, "refusal": None}

    def for_completion(self, said: Sequence[Said], start: int) -> dict[str, Any]:
        """As completions have them; the choice's new text begins after `start` characters."""
        return {
            "tokens": [self.text(x.token) for x in said],
            "token_logprobs": [_sendable(x.logprobs.logprob) for x in said],
            "top_logprobs": [
                {self.text(token): _sendable(value) for token, value in x.logprobs.top}
                for x in said
            ],
            "text_offset": [start + x.offset for x in said],
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        found = self.bytes(token)
        return {
            "token": self.text(token),
            "logprob": _sendable(logprob),
            "bytes": None if found is None else list(found),
        }


def _sendable(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _UNLIKELY
