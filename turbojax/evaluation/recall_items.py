"""What recall is asked for: passages to copy and values to look up, planted in source code."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from turbojax.models import Tokenizer

CUE, ANSWER = 32, 64
"""Tokens of a passage that are shown again, and those that follow, which are to be copied."""

PAIRS = 8
"""Lines that are planted, of which one is asked for."""

Kind = Literal["copy", "key_value"]
KINDS: tuple[Kind, ...] = ("copy", "key_value")

_PASSAGE = 256
"""Tokens of a planted passage, which begins with the cue."""
_ATTEMPTS = 200
_VALUES = range(1000, 10000)


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
    """Where items are taken from: a function of these and of the seed is what they are.

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


def make_item(
    source: Source, kind: Kind, *, length: int, depth: float, seed: Sequence[int]
) -> Item:
    """An item of a given length and depth.

    Args:
      source: the texts.
      kind: ``"copy"``: at `depth` a passage of one text stands among others; at the end its first
        `CUE` tokens come again, and the next `ANSWER` are asked for. ``"key_value"``: `PAIRS` lines
        ``SETTING_0412 = 8375`` stand among texts, that at `depth` is asked for by
        ``assert SETTING_0412 ==``.
      length: tokens of the whole, question and answer of ``"copy"`` included: every item's prompt
        is ``length - CUE - ANSWER``.
      depth: 0 for what comes first, and has to be remembered longest, to 1 for what comes last.
      seed: of the item.

    Raises:
      NoItem: if the texts do not give one.
    """
    rng = np.random.default_rng(list(seed))
    size = length - CUE - ANSWER
    make = _copy if kind == "copy" else _key_value
    return make(source, size, depth, rng)


def _copy(source: Source, size: int, depth: float, rng: np.random.Generator) -> Item:
    line = source.encode("\n")
    room = size - len(source.begin) - _PASSAGE - 3 * len(line)
    if room < 1:
        raise NoItem(f"a prompt of {size} tokens must have room for a passage of {_PASSAGE}")
    long = [name for name, text in source.texts.items() if len(text) > _PASSAGE]
    if not long:
        raise NoItem(f"no text has more than {_PASSAGE} tokens")
    for _ in range(_ATTEMPTS):
        name = long[int(rng.integers(len(long)))]
        start = _passage_start(source.texts[name], source.newline, rng)
        passage = source.texts[name][start : start + _PASSAGE]
        filler = _filler(source, name, start, room, rng)
        place = round(depth * room)
        parts = (filler[:place], line, passage, line, filler[place:], line)
        prompt = np.concatenate([source.begin, *parts])
        cue, answer = passage[:CUE], passage[CUE : CUE + ANSWER]
        if len(set(cue.tolist())) >= CUE // 4 and _occurrences(prompt, cue[: CUE // 2]) == 1:
            return Item(prompt, cue, answer)
    raise NoItem(f"no passage in {_ATTEMPTS} begins with {CUE} tokens that come nowhere else")


def _key_value(source: Source, size: int, depth: float, rng: np.random.Generator) -> Item:
    keys = rng.choice(10000, PAIRS, replace=False)
    values = rng.choice(len(_VALUES), PAIRS, replace=False) + _VALUES.start
    lines = [
        source.encode(f"\nSETTING_{key:04d} = {value}\n")
        for key, value in zip(keys, values, strict=True)
    ]
    # The first is asked for, the others are anywhere.
    depths = np.concatenate([[depth], rng.random(PAIRS - 1)])
    end = source.encode("\n")
    room = size - len(source.begin) - sum(map(len, lines)) - len(end)
    if room < 1:
        raise NoItem(f"a prompt of {size} tokens must have room for {PAIRS} lines")
    filler = _filler(source, None, 0, room, rng)
    parts, last = [source.begin], 0
    for i in np.argsort(depths, kind="stable"):
        place = round(float(depths[i]) * room)
        parts += [filler[last:place], lines[i]]
        last = place
    prompt = np.concatenate([*parts, filler[last:], end])
    # What a tokenizer makes of both at once is what a text has.
    asked = source.encode(f"assert SETTING_{keys[0]:04d} == ")
    whole = source.encode(f"assert SETTING_{keys[0]:04d} == {values[0]}")
    shared = 0
    while shared < min(len(asked), len(whole)) and asked[shared] == whole[shared]:
        shared += 1
    return Item(prompt, whole[:shared], whole[shared:])


def _passage_start(text: np.ndarray, newline: int | None, rng: np.random.Generator) -> int:
    """Where a passage begins: after a line's end, if lines are known."""
    start = int(rng.integers(len(text) - _PASSAGE))
    if newline is None:
        return start
    ends = np.flatnonzero(text[start : len(text) - _PASSAGE] == newline)
    return start + int(ends[0]) + 1 if len(ends) else start


def _filler(
    source: Source, name: str | None, start: int, room: int, rng: np.random.Generator
) -> np.ndarray:
    """So many tokens of other texts than `name`, or, where it is the only one, of its other parts.

    Texts come in any order, each from anywhere to its end and then from its beginning.
    """
    others = [text for other, text in source.texts.items() if other != name]
    if not others:
        assert name is not None
        text = source.texts[name]
        others = [text[:start], text[start + _PASSAGE :]]
    parts = []
    for i in rng.permutation(len(others)):
        if len(others[i]):
            parts.append(np.roll(others[i], -int(rng.integers(len(others[i])))))
    filler = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    if len(filler) < room:
        raise NoItem(f"the texts hold {len(filler)} tokens beside a passage, of {room} needed")
    return filler[:room]


def _occurrences(text: np.ndarray, part: np.ndarray) -> int:
    """How often a part comes in a text."""
    views = np.lib.stride_tricks.sliding_window_view(text, len(part))
    return int(np.sum(np.all(views == part, axis=1)))
