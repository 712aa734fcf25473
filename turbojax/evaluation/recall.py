"""Recall through a cache: copies, values by key and facts in words, by length and depth."""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbojax.evaluation.decoding import (
    AnyDecoder,
    AnyModel,
    Batches,
    counted,
    decoder_of,
    forced_logits,
    greedy_choice,
    start,
    with_targets,
)
from turbojax.evaluation.methods import Method
from turbojax.evaluation.recall_items import (
    IN_CODE,
    KINDS,
    ROOM,
    Item,
    Kind,
    NoItem,
    Source,
    make_item,
)
from turbojax.evaluation.texts import Text
from turbojax.models import ByteTokenizer, Tokenizer
from turbojax.models.generation.session import Progress

_HALF = 32
"""Tokens of a copy's first half, which is also reported alone."""


@dataclasses.dataclass(frozen=True)
class Answers:
    """What a model made of items, numpy ``[n, A]``, `A` the longest answer's tokens.

    Attributes:
      right: bool, whether the most likely token is the true one, with the true ones before it fed.
        Up to the first that is wrong that is what greedy decoding writes.
      bits: float32, information content of the true tokens.
      there: bool, whether an answer has a token; elsewhere the other arrays mean nothing.
    """

    right: np.ndarray
    bits: np.ndarray
    there: np.ndarray

    def whole(self, count: int | None = None) -> np.ndarray:
        """Whether greedy decoding writes the answer's first `count` tokens, or all: ``[n]``."""
        return np.all((self.right | ~self.there)[:, :count], axis=1)

    @property
    def copied(self) -> np.ndarray:
        """The share of the answer that greedy decoding writes before an error, float64 ``[n]``."""
        before = np.cumprod(self.right | ~self.there, axis=1) * self.there
        return before.sum(axis=1) / self.there.sum(axis=1)

    @property
    def likelihood(self) -> np.ndarray:
        """The probability of the whole answer, float64 ``[n]``."""
        return np.exp2(-np.where(self.there, self.bits, 0).sum(axis=1, dtype=np.float64))

    def part(self, rows: slice) -> "Answers":
        """Those of some items."""
        return Answers(self.right[rows], self.bits[rows], self.there[rows])


def recall(
    model: AnyModel,
    items: Sequence[Item],
    method: Method,
    *,
    batch_size: int = 8,
    progress: Progress | None = None,
) -> Answers:
    """Asks items through a method's cache: prompts prefilled, questions and answers decoded.

    The arguments and errors of `score` are the same here, but that `progress` is called after each
    batch with its items. Raises ValueError, too, if there are no items, or prompts differ in size
    or are too long for the model.
    """
    decoder = decoder_of(model)
    sizes = {len(x.prompt) for x in items}
    if len(sizes) != 1:
        raise ValueError(f"prompts of {sorted(sizes)} tokens must be some, and of one size")
    (prompt,) = sizes
    asked, answer = (np.array([len(getattr(x, y)) for x in items]) for y in ("asked", "answer"))
    longest = int((asked + answer).max())
    # Room for the longest questions, so that those of all kinds share programs.
    room = prompt + max(ROOM, longest)
    rows = np.zeros((len(items), prompt + longest), np.int32)
    for row, item in zip(rows, items, strict=True):
        whole = np.concatenate([item.prompt, item.asked, item.answer])
        row[: len(whole)] = whole
    right, bits = [], []
    for count, batch in Batches(min(batch_size, len(rows))).of(rows):
        session = start(decoder, batch[:, :prompt], room, method)
        forced, found = batch[:, prompt:], []
        for taken, logits, targets in with_targets(forced_logits(session, forced), forced):
            found.append([np.asarray(x)[:taken] for x in _look(logits, targets)])
        choices, costs = (np.concatenate(x).T[:count] for x in zip(*found, strict=True))
        right.append(choices == forced[:count])
        bits.append(costs)
        if progress is not None:
            progress(count)
    # Where each answer's tokens are, after its own question.
    place = np.arange(answer.max())[None]
    there = place < answer[:, None]
    index = np.where(there, asked[:, None] + place, 0)
    rights, costs = (np.take_along_axis(np.concatenate(x), index, axis=1) for x in (right, bits))
    return Answers(rights, costs, there)


@jax.jit
def _look(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Choices and bits of float32 ``[n, B, V]`` and int32 ``[n, B]``."""
    log_p = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]
    return greedy_choice(logits), -chosen / math.log(2)


class RecallMeasure:
    """Items of all lengths and depths, to be asked of one method after the other.

    `texts` are bytes or tokens, by name; `tokenizer` is None for bytes. There are `count` items of
    each kind, length and depth, see `make_item`; `kinds` None are all, or for bytes those in source
    code. `left_out` says which lengths, or kinds of items, are not asked, and why.
    """

    def __init__(
        self,
        texts: Mapping[str, Text],
        tokenizer: Tokenizer | None,
        *,
        kinds: Sequence[Kind] | None = None,
        lengths: Sequence[int],
        depths: Sequence[float],
        count: int,
        seed: int,
        max_length: int,
        batch_size: int,
    ) -> None:
        self._batch_size, self._depths, self._count = batch_size, tuple(depths), count
        self._cells: dict[tuple[Kind, int], list[Item]] = {}
        self.left_out: list[dict[str, Any]] = []
        if tokenizer is None and not all(isinstance(x, bytes) for x in texts.values()):
            self.left_out.append({"why": "the tokens have no tokenizer"})
            return
        source = _source(texts, tokenizer)
        chosen = kinds or (IN_CODE if tokenizer is None else KINDS)
        for length in lengths:
            if length > max_length:
                self.left_out.append({"length": length, "why": f"{max_length=}"})
                continue
            for i, kind in enumerate(KINDS):
                if kind not in chosen:
                    continue
                try:
                    self._cells[kind, length] = [
                        make_item(
                            source,
                            kind,
                            length=length,
                            depth=depth,
                            seed=(seed, i, length, round(1000 * depth), k),
                        )
                        for depth in self._depths
                        for k in range(count)
                    ]
                except NoItem as error:
                    self.left_out.append({"length": length, "kind": kind, "why": str(error)})

    @property
    def identity(self) -> dict[str, Any]:
        """The number of items, and a checksum: items are made of whole texts, not of windows."""
        digest = hashlib.sha256()
        for key, items in self._cells.items():
            for item in items:
                sizes = (*key, len(item.prompt), len(item.asked), len(item.answer))
                digest.update(repr(sizes).encode())
                for part in (item.prompt, item.asked, item.answer):
                    digest.update(part.astype("<i4").tobytes())
        count = sum(map(len, self._cells.values()))
        return {"items": count, "checksum": digest.hexdigest()[:16]}

    def __call__(
        self, decoder: AnyDecoder, method: Method, progress: Callable[[int, int], None]
    ) -> dict[str, Any]:
        """A method's rows: of each kind, by length and depth, and over all."""
        advance = counted(progress, sum(map(len, self._cells.values())))
        row: dict[str, Any] = {}
        for kind in KINDS:
            cells, found = [], []
            for (other, length), items in self._cells.items():
                if other != kind:
                    continue
                answers = recall(
                    decoder, items, method, batch_size=self._batch_size, progress=advance
                )
                found.append(answers)
                for i, depth in enumerate(self._depths):
                    cell = answers.part(slice(i * self._count, (i + 1) * self._count))
                    cells.append({"length": length, "depth": depth, **_summary(kind, cell)})
            if found:
                row[kind] = {**_summary(kind, *found), "cells": cells}
        return {**row, "left_out": self.left_out}


def _summary(kind: Kind, *found: Answers) -> dict[str, Any]:
    """Means over items; bits over all tokens of all answers."""

    def mean(values: list[np.ndarray]) -> float:
        return float(np.concatenate(values).mean(dtype=np.float64))

    halves = {f"whole_{_HALF}": mean([x.whole(_HALF) for x in found])} if kind == "copy" else {}
    return {
        "items": sum(len(x.right) for x in found),
        "whole": mean([x.whole() for x in found]),
        **halves,
        "copied": mean([x.copied for x in found]),
        "likelihood": mean([x.likelihood for x in found]),
        "bits": mean([x.bits[x.there] for x in found]),
    }


def _source(texts: Mapping[str, Text], tokenizer: Tokenizer | None) -> Source:
    """The texts without a token that begins them."""
    first = None if tokenizer is None else tokenizer.bos_token_id
    plain = {}
    for name, text in texts.items():
        if isinstance(text, bytes):
            plain[name] = np.frombuffer(text, np.uint8).astype(np.int32)
        else:
            tokens = np.asarray(text, np.int32)
            plain[name] = tokens[1:] if len(tokens) and tokens[0] == first else tokens
    newline = ord("\n") if tokenizer is None else None
    return Source(plain, ByteTokenizer() if tokenizer is None else tokenizer, newline)
