"""Tells special tokens that a text mentions from those that are meant.

A chat template writes special tokens between the words of a conversation. Words that look like
one, such as ``"<|im_end|>"``, are text. To tell them apart, the conversation is rendered once more
with other characters in these places: what is still a special token then is the template's.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# Private use areas of Unicode: characters that no text, template or tokenizer should hold.
_HIDDEN = 0x100000
_MEANT = 0xF0000
_AREA = 0xFFFE

Segment = tuple[str, bool]
"""A piece of a text, and whether it is a special token."""


class SpecialTexts:
    """Finds text that looks like one of a tokenizer's special tokens, none of which is empty."""

    def __init__(self, texts: Iterable[str]) -> None:
        # As tokenizers does: of several that begin in one place, the longest.
        self._texts = sorted(set(texts), key=lambda text: (-len(text), text))
        pattern = "|".join(map(re.escape, self._texts)) or "(?!)"
        self._pattern, self._anywhere = re.compile(pattern), re.compile(f"(?={pattern})")
        self._longest = max(map(len, self._texts), default=0)
        firsts = sorted({text[0] for text in self._texts})
        self._hidden = {ord(first): chr(_HIDDEN + i) for i, first in enumerate(firsts)}
        self._shown = {ord(hidden): chr(first) for first, hidden in self._hidden.items()}

    def split(self, text: str) -> list[Segment]:
        """A text in pieces; each piece that looks like a special token counts as one."""
        pieces, end = list[Segment](), 0
        for found in self._pattern.finditer(text):
            pieces += [(text[end : found.start()], False), (found.group(), True)]
            end = found.end()
        return [piece for piece in [*pieces, (text[end:], False)] if piece[0]]

    def hide(self, x: Any, *, all_first: bool) -> Any:
        """The same texts, mappings and lists, with other characters where special tokens may begin.

        With `all_first` every character that begins one is hidden. Otherwise only those that begin
        a whole one, or one that the end of the text cuts, because a template may write the rest.
        Values other than texts, mappings, lists and tuples stay.
        """
        if isinstance(x, str):
            return self._hide(x, all_first)
        if isinstance(x, Mapping):
            return {
                self.hide(key, all_first=all_first): self.hide(value, all_first=all_first)
                for key, value in x.items()
            }
        if isinstance(x, list | tuple):
            hidden = [self.hide(value, all_first=all_first) for value in x]
            return hidden if isinstance(x, list) else tuple(hidden)
        return x

    def split_hidden(self, text: str, hidden: str) -> list[Segment] | None:
        """`text` in pieces, special tokens as in `hidden`; None if the two differ otherwise."""
        if text.translate(self._shown) != text or hidden.translate(self._shown) != text:
            return None
        return [(piece.translate(self._shown), special) for piece, special in self.split(hidden)]

    def _hide(self, text: str, all_first: bool) -> str:
        if all_first:
            return text.translate(self._hidden)
        places = {found.start() for found in self._anywhere.finditer(text)}
        kept = text.rstrip()  # as templates trim it
        places |= {
            place
            for place in range(max(0, len(kept) - self._longest + 1), len(kept))
            if any(special.startswith(kept[place:]) for special in self._texts)
        }
        return "".join(
            char.translate(self._hidden) if place in places else char
            for place, char in enumerate(text)
        )


class SegmentEncoder:
    """Encodes texts whose special tokens are marked; `tokenizer`, of `tokenizers`, is copied."""

    def __init__(self, tokenizer: Any) -> None:
        import tokenizers

        copy = tokenizers.Tokenizer.from_str(tokenizer.to_str())
        added = copy.get_added_tokens_decoder()
        self._special = {number: x.content for number, x in added.items() if x.special}
        # Each meant token gets a token of its own, found in the text just as the original would be.
        names = {number: chr(_MEANT + i) for i, number in enumerate(sorted(self._special))}
        if len(names) > _AREA:
            raise ValueError(f"a tokenizer must not have more than {_AREA} special tokens")
        flags = ("single_word", "lstrip", "rstrip", "normalized")
        copy.add_tokens(
            [
                tokenizers.AddedToken(
                    name, special=False, **{flag: getattr(added[number], flag) for flag in flags}
                )
                for number, name in names.items()
            ]
        )
        copy.encode_special_tokens = True
        self._tokenizer = copy
        self._names = {self._special[number]: name for number, name in names.items()}
        self._numbers = {copy.token_to_id(name): number for number, name in names.items()}

    def encode(self, segments: Sequence[Segment]) -> list[int]:
        """The tokens of a text in pieces; ValueError if a special token's text cannot be text."""
        names = set(self._names.values())
        if any(name in text for text, special in segments if not special for name in names):
            raise ValueError(
                "a message that is written like a special token must not hold characters of "
                f"Unicode's private use area from U+{_MEANT:X} on"
            )
        text = "".join(self._names[piece] if special else piece for piece, special in segments)
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        tokens = [self._numbers.get(token, token) for token in encoded.ids]
        meant = sum(token in self._numbers for token in encoded.ids)
        read = any(
            self._special.get(token) == text[slice(*span)].strip()
            for token, span in zip(encoded.ids, encoded.offsets, strict=True)
        )
        if read or meant != sum(special for _, special in segments):
            raise ValueError(
                "a message is written like a special token, which this tokenizer has no other "
                "tokens for: change the message, or say allow_special=True"
            )
        return tokens
