"""Where items of recall are taken from: texts, their tokens, and what writes further ones."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from turbojax.models import Tokenizer

CUE, ANSWER = 32, 64
"""Tokens of a passage that are shown again, and those that follow, which are to be copied."""

ROOM = CUE + ANSWER
"""Tokens that an item has after its context, at most."""


@dataclasses.dataclass(frozen=True)
class Item:
    """One question.

    Attributes:
      prompt: int32 ``[P]``, to be prefilled.
      asked: int32 ``[Q]``, the question, to be decoded token by token after it.
      answer: int32 ``[A]``, what is to come then.
    """

    prompt: np.ndarray
    asked: np.ndarray
    answer: np.ndarray


class NoItem(ValueError):
    """The texts are too short, or too much alike, for an item."""


@dataclasses.dataclass(frozen=True)
class Source:
    """Where items are taken from; an item is a function of these attributes and its seed.

    Attributes:
      texts: int32 ``[m]`` by name, without a token that begins a text.
      tokenizer: writes lines, and names the token that begins a text.
      newline: the token after which a passage may begin; None for anywhere.
    """

    texts: Mapping[str, np.ndarray]
    tokenizer: Tokenizer
    newline: int | None = None

    def encode(self, text: str) -> np.ndarray:
        """Tokens of a text within another."""
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=False), np.int32)

    @property
    def begin(self) -> np.ndarray:
        """What begins a text: one token or none."""
        first = self.tokenizer.bos_token_id
        return np.asarray([] if first is None else [first], np.int32)

    def split(self, begun: str, rest: str) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of both texts together, split before the first that has a part of `rest`."""
        # Tokenized together, as in a text: a token may span the border.
        asked, whole = self.encode(begun), self.encode(begun + rest)
        shared = 0
        while shared < min(len(asked), len(whole)) and asked[shared] == whole[shared]:
            shared += 1
        return whole[:shared], whole[shared:]

    def filler(
        self, name: str | None, start: int, skipped: int, room: int, rng: np.random.Generator
    ) -> np.ndarray:
        """`room` tokens of texts other than `name`, or of its other parts if it is the only text.

        Texts come in any order, each from anywhere to its end and then from its beginning.

        Args:
          name: a text to leave out; None for none.
          start: where a passage of that text begins.
          skipped: the passage's tokens. If there is no other text, what comes before and after the
            passage is taken.
          room: tokens.
          rng: what draws.

        Raises:
          NoItem: if there are fewer.
        """
        others = [text for other, text in self.texts.items() if other != name]
        if not others:
            assert name is not None
            text = self.texts[name]
            others = [text[:start], text[start + skipped :]]
        parts = []
        for i in rng.permutation(len(others)):
            if len(others[i]):
                parts.append(np.roll(others[i], -int(rng.integers(len(others[i])))))
        filler = np.concatenate(parts) if parts else np.zeros(0, np.int32)
        if len(filler) < room:
            raise NoItem(f"the texts hold {len(filler)} tokens beside a passage, of {room} needed")
        return filler[:room]
