"""Facts in words: planted in a long text, or told in a conversation, and asked for at its end."""

import dataclasses

import numpy as np

from turbojax.evaluation.recall_source import ROOM, Item, NoItem, Source
from turbojax.models.text.chat import render_chat

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
