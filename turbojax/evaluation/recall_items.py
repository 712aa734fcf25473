"""What recall is asked for: passages, values and facts, planted in texts or told in turns."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from turbojax.models import Tokenizer
from turbojax.models.text.chat import render_chat

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


TURNS = 8
"""Messages of a conversation, with their replies, before the one that asks."""

_OF_QUESTION = 96
"""Tokens of a conversation's last message, at most."""

_PLACES = (
    *("harbour", "library", "castle", "bakery", "museum", "station", "garden", "theatre"),
    *("bridge", "market", "school", "hospital", "tower", "factory", "chapel", "island"),
)
_COLOURS = (
    *("amber", "silver", "purple", "golden", "scarlet", "green", "orange", "yellow"),
    *("crimson", "violet", "brown", "white", "black", "pink", "blue", "grey"),
)
_ANIMALS = (
    *("falcon", "tiger", "rabbit", "dolphin", "eagle", "turtle", "panther", "beaver"),
    *("camel", "monkey", "spider", "horse", "salmon", "parrot", "wolf", "lizard"),
)


@dataclasses.dataclass(frozen=True)
class Fact:
    """A password of two words, and the place that it is for; it follows from nothing else."""

    place: str
    password: str

    @property
    def question(self) -> str:
        """What asks for it."""
        return f"What is the password of the {self.place}?"

    @property
    def begun(self) -> str:
        """What the reply begins with: the password is what comes next."""
        return f"The password of the {self.place} is"

    @property
    def statement(self) -> str:
        """The whole."""
        return f"{self.begun} {self.password}."


def needle(source: Source, size: int, depth: float, rng: np.random.Generator) -> Item:
    """A fact in a long text; see `turbojax.evaluation.make_item`."""
    fact = _fact(rng)
    head, tail = _around(source, 1)
    above = source.encode("A password is hidden in the following text. Remember it.\n\n")
    line = source.encode(f"\n{fact.statement}\n")
    below = source.encode(f"\n\n{fact.question}")
    room = size - sum(map(len, (head, above, line, below, tail)))
    if room < 1:
        raise NoItem(f"a prompt of {size} tokens must have room for a fact and its question")
    filler = source.filler(None, 0, 0, room, rng)
    place = round(depth * room)
    parts = (head, above, filler[:place], line, filler[place:], below, tail)
    return Item(np.concatenate(parts), *_reply(source, fact))


def chat(source: Source, size: int, depth: float, rng: np.random.Generator) -> Item:
    """A fact told in a turn of a conversation; see `turbojax.evaluation.make_item`."""
    fact, told = _fact(rng), round(depth * (TURNS - 1))
    around = _around(source, 2 * TURNS + 1)
    said = [source.encode(f"Here is text {i + 1}:\n\n") for i in range(TURNS)]
    said[told] = source.encode(f"Remember this: {fact.statement} Here is text {told + 1}:\n\n")
    reply, question = source.encode("Thank you, I have read it."), source.encode(fact.question)
    rest = size - sum(map(len, around)) - TURNS * len(reply) - len(question)
    # Of one size for all questions: the first turns are prompts of one batch.
    share = (rest + len(question) - _OF_QUESTION) // TURNS
    sizes = [share] * (TURNS - 1) + [rest - share * (TURNS - 1)]
    fillers = [count - len(x) for count, x in zip(sizes, said, strict=True)]
    if min(fillers) < 1 or len(question) > _OF_QUESTION:
        raise NoItem(f"a conversation of {size} tokens must have room for {TURNS} turns")
    text, messages = source.filler(None, 0, 0, sum(fillers), rng), list[np.ndarray]()
    for opening, count in zip(said, fillers, strict=True):
        messages += [np.concatenate([opening, text[:count]]), reply]
        text = text[count:]
    messages.append(question)
    prompt = np.concatenate([around[0], messages[0], around[1]])
    pairs = zip(messages[1:], around[2:], strict=True)
    later = np.concatenate([x for pair in pairs for x in pair])
    asked, answer = _reply(source, fact)
    return Item(prompt, np.concatenate([later, asked]), answer)


def _fact(rng: np.random.Generator) -> Fact:
    place, colour, animal = (
        words[int(rng.integers(len(words)))] for words in (_PLACES, _COLOURS, _ANIMALS)
    )
    return Fact(place, f"{colour} {animal}")


def _reply(source: Source, fact: Fact) -> tuple[np.ndarray, np.ndarray]:
    """How the reply begins, and the password."""
    asked, answer = source.split(fact.begun, f" {fact.password}")
    if len(asked) + len(answer) > ROOM:
        raise NoItem(f"a reply of {len(asked) + len(answer)} tokens must have at most {ROOM}")
    return asked, answer


def _around(source: Source, count: int) -> list[np.ndarray]:
    """What stands before, between and after so many messages: of a user, its reply, and so on.

    By the chat template, where there is one; otherwise as a dialogue is written. The last part ends
    where the assistant's reply begins.
    """
    marks = [f"@@{i}@@" for i in range(count)]
    roles = ("user", "assistant")
    if source.tokenizer.chat_template is None:
        names = ("User", "Assistant")
        turns = [f"{names[i % 2]}:\n{mark}\n\n" for i, mark in enumerate(marks)]
        text, begin = "".join([*turns, "Assistant:\n"]), source.begin
    else:
        messages = [{"role": roles[i % 2], "content": mark} for i, mark in enumerate(marks)]
        try:
            text = render_chat(source.tokenizer, messages)
        except ValueError as error:
            raise NoItem(str(error)) from error
        begin = np.zeros(0, np.int32)
    pieces = list[str]()
    for mark in marks:
        before, found, text = text.partition(mark)
        if not found:
            raise NoItem("the chat template does not write messages as they are")
        pieces.append(before)
    encoded = [source.encode(piece) for piece in (*pieces, text)]
    return [np.concatenate([begin, encoded[0]]), *encoded[1:]]


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
        is told in one of `turbojax.evaluation.recall_items.TURNS` messages, each with a text and a
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
