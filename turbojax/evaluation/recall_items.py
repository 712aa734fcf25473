"""What recall is asked for: passages, values and facts, planted in texts or told in turns."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from turbojax.evaluation.recall_source import ANSWER, CUE, Item, NoItem, Source
from turbojax.evaluation.recall_words import chat, needle

Kind = Literal["copy", "key_value", "needle", "chat"]
KINDS: tuple[Kind, ...] = ("copy", "key_value", "needle", "chat")

IN_CODE: tuple[Kind, ...] = ("copy", "key_value")
"""The kinds that make sense for a model that reads the bytes of source code."""

PAIRS = 8
"""Lines that are planted, of which one is asked for."""

_PASSAGE = 256
"""Tokens of a planted passage, which begins with the cue."""
_ATTEMPTS = 200
_VALUES = range(1000, 10000)


def make_item(
    source: Source, kind: Kind, *, length: int, depth: float, seed: Sequence[int]
) -> Item:
    """An item of a given length and depth.

    Args:
      source: the texts.
      kind: ``"copy"``: at `depth` a passage of one text stands among others; at the end its first
        `CUE` tokens come again, and the next `ANSWER` are asked for. ``"key_value"``: `PAIRS` lines
        ``SETTING_0412 = 8375`` stand among texts, and the one at `depth` is asked for by
        ``assert SETTING_0412 ==``. ``"needle"``: a sentence, ``The password of the harbour is amber
        falcon.``, stands in a text, and a question after it asks for it. ``"chat"``: the sentence
        is told in one of `turbojax.evaluation.recall_words.TURNS` messages, each with a text and a
        reply; the first of them is the prompt, and all others go through the cache token by token,
        as in a session that goes on. The latter two are written by the tokenizer's chat template,
        if it has one; the reply begins ``The password of the harbour is``.
      length: tokens of the whole. For ``"copy"`` that is with question and answer; the others
        have a context of ``length - CUE - ANSWER`` tokens, and fewer than `length` in all. The
        context is the prompt, except for ``"chat"``.
      depth: 0 for what comes first, and has to be remembered longest, to 1 for what comes last.
      seed: of the item.

    Raises:
      NoItem: if the texts do not give one.
    """
    rng = np.random.default_rng(list(seed))
    size = length - CUE - ANSWER
    return _MAKE[kind](source, size, depth, rng)


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
        filler = source.filler(name, start, _PASSAGE, room, rng)
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
    filler = source.filler(None, 0, 0, room, rng)
    parts, last = [source.begin], 0
    for i in np.argsort(depths, kind="stable"):
        place = round(float(depths[i]) * room)
        parts += [filler[last:place], lines[i]]
        last = place
    prompt = np.concatenate([*parts, filler[last:], end])
    asked, answer = source.split(f"assert SETTING_{keys[0]:04d} == ", str(values[0]))
    return Item(prompt, asked, answer)


def _passage_start(text: np.ndarray, newline: int | None, rng: np.random.Generator) -> int:
    """Where a passage begins: after a line's end, if lines are known."""
    start = int(rng.integers(len(text) - _PASSAGE))
    if newline is None:
        return start
    ends = np.flatnonzero(text[start : len(text) - _PASSAGE] == newline)
    return start + int(ends[0]) + 1 if len(ends) else start


def _occurrences(text: np.ndarray, part: np.ndarray) -> int:
    views = np.lib.stride_tricks.sliding_window_view(text, len(part))
    return int(np.sum(np.all(views == part, axis=1)))


_MAKE = {"copy": _copy, "key_value": _key_value, "needle": needle, "chat": chat}
