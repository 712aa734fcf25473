"""What a model says of texts through one method's cache: likelihoods, and greedy continuations."""

import functools
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from turbojax import _checks
from turbojax.evaluation.decoding import AnyModel, decoder_of
from turbojax.evaluation.methods import Method
from turbojax.evaluation.records import Json
from turbojax.evaluation.requests import (
    Continue,
    Score,
    batches,
    continuation_of,
    continue_batch,
    score_batch,
    scores_of,
)
from turbojax.models.text.tokenizer import NumberTokenizer, Tokenizer

DEFAULT_NEW_TOKENS = 256
"""Tokens of a continuation, where its task does not say."""

Keep = Callable[[str, Callable[[], Json]], Json]
"""Takes a name and a function that makes a value; gives the value, which may be known already."""


def _make_it(key: str, make: Callable[[], Json]) -> Json:
    del key
    return make()


def _tell_nobody(done: int, total: int) -> None:
    del done, total


class Answering:
    """A model, its tokenizer and a method, asked in batches.

    Of every context all tokens but the last are prefilled; that one and the continuation go through
    the cache token by token.

    Args:
      model: the model.
      tokenizer: of the model.
      method: the cache, and how prompts attend.
      batch_size: sequences that run at once.
      max_new_tokens: of a continuation, where the call does not say.
      progress: called with how many sequences are done, and how many were asked for so far.
      keep: asked for each batch's answers, plain JSON values.

    Attributes:
      truncated: contexts, so far, whose beginning was left out because the model takes no more.
      nan: answers, so far, that are missing because logits held NaN. Such a likelihood is 0.

    Raises:
      ValueError: if a size is out of range, or the model has no tokenizer for texts.
    """

    def __init__(
        self,
        model: AnyModel,
        tokenizer: Tokenizer,
        method: Method,
        *,
        batch_size: int = 8,
        max_new_tokens: int = DEFAULT_NEW_TOKENS,
        progress: Callable[[int, int], None] | None = None,
        keep: Keep | None = None,
    ) -> None:
        _checks.check_sizes(batch_size=batch_size, max_new_tokens=max_new_tokens)
        if isinstance(tokenizer, NumberTokenizer):
            raise ValueError("tokens are numbers here, there is no tokenizer.json: tasks are texts")
        self.tokenizer, self.method, self.max_new_tokens = tokenizer, method, max_new_tokens
        self.truncated = self.nan = 0
        self._decoder, self._batch_size = decoder_of(model), batch_size
        self._progress, self._keep = progress or _tell_nobody, keep or _make_it
        self._done = self._total = 0

    @property
    def max_length(self) -> int:
        """Of the model."""
        return self._decoder.config.max_length

    @property
    def end(self) -> int:
        """A token that ends a text; of several the first."""
        ends = (*self.tokenizer.eos_token_ids, self.tokenizer.bos_token_id)
        found = next((x for x in ends if x is not None), None)
        if found is None:
            raise ValueError("the tokenizer has no token that begins or ends a text")
        return found

    @property
    def begin(self) -> int:
        """The token that stands before a text without a context."""
        first = self.tokenizer.bos_token_id
        return self.end if first is None else first

    @functools.cached_property
    def tokenizer_digest(self) -> str:
        """A name for the tokenizer and its chat template, from what they are."""
        tokenizer, text = self.tokenizer, "The quick brown fox, 1234: Çafé 你好\n\tdef f(x):"
        told = [
            type(tokenizer).__name__,
            tokenizer.vocab_size,
            tokenizer.encode(text),
            dict(tokenizer.special_tokens),
            tokenizer.chat_template
            if tokenizer.chat_template is None or isinstance(tokenizer.chat_template, str)
            else dict(tokenizer.chat_template),
        ]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]

    def encode(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """Tokens of a text. With None, special tokens are added unless the text begins with one."""
        if add_special_tokens is None:
            first = self.tokenizer.special_tokens.get("bos_token")
            add_special_tokens = not (first and text.startswith(first))
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def score(
        self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> list[tuple[float, bool]]:
        """How likely continuations are after their contexts.

        Args:
          pairs: tokens of contexts and of continuations, at least one of each.

        Returns:
          For each its log-likelihood, in nats, -inf where logits hold NaN, and whether it is what
          greedy decoding writes.

        Raises:
          ValueError: if a context or a continuation has no token.
        """
        for context, continuation in pairs:
            if not context or not continuation:
                raise ValueError("a context and its continuation must have a token each")
        rows, places, cut = scores_of(pairs, self.max_length)
        self.truncated += cut

        def run(batch: Sequence[Score]) -> Json:
            return score_batch(self._decoder, batch, self.method, self._batch_size)

        found = self._run(rows, run)
        answers = list[tuple[float, bool]]()
        for row, k in places:
            log_p, greedy = found[row][k]
            self.nan += log_p is None or math.isnan(log_p)
            lost = log_p is None or math.isnan(log_p)
            answers.append((-math.inf, False) if lost else (log_p, greedy))
        return answers

    def go_on(self, asked: Sequence[tuple[Sequence[int], Sequence[str], int]]) -> list[str]:
        """Greedy continuations.

        Args:
          asked: tokens of contexts, at least one, texts that end a continuation and are no part of
            it, and how many tokens it has at most.

        Raises:
          ValueError: if a continuation leaves no room for its context, or that has no token.
        """
        rows = list[Continue]()
        for context, stops, limit in asked:
            if not context:
                raise ValueError("a context must have at least one token")
            row, cut = continuation_of(context, stops, limit, self.max_length)
            self.truncated += cut
            rows.append(row)

        def run(batch: Sequence[Continue]) -> Json:
            return continue_batch(
                self._decoder, batch, self.method, self._batch_size, self.tokenizer
            )

        # Each once: the same text follows.
        numbers = {row: i for i, row in enumerate(dict.fromkeys(rows))}
        found = self._run(list(numbers), run)
        answers = [found[numbers[row]] for row in rows]
        self.nan += sum(ended == "nan" for _, ended in answers)
        return [text for text, _ in answers]

    def _run(self, rows: Sequence[Any], run: Callable[[Any], Json]) -> list[Any]:
        """Each row's answer."""
        numbers = {row: i for i, row in enumerate(rows)}
        found: list[Any] = [None] * len(rows)
        self._total += len(rows)
        for batch in batches(rows, self._batch_size, self.max_length):
            key = hashlib.sha256(repr(batch).encode()).hexdigest()[:32]
            answers = self._keep(key, functools.partial(run, batch))
            for row, answer in zip(batch, answers, strict=True):
                found[numbers[row]] = answer
            self._done += len(batch)
            self._progress(self._done, self._total)
        return found
