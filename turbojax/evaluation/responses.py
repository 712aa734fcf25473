"""What a model says of texts through one method's cache: likelihoods, and greedy continuations.

Of every context all tokens but the last are prefilled into the method's cache, as it prefills; the
last one and all that follow go through the cache token by token. So whatever is measured has been
read from the cache, also where an answer is one token. Ragged prompts run in batches.
"""

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks
from turbojax.evaluation.decoding import (
    AnyDecoder,
    AnyModel,
    decoder_of,
    forced_logits,
    greedy_choice,
    start,
    step,
)
from turbojax.evaluation.methods import Method
from turbojax.evaluation.records import Json
from turbojax.models.generation.session import Session
from turbojax.models.generation.stopping import TextStream, check_stops
from turbojax.models.text.tokenizer import NumberTokenizer, Tokenizer


@dataclasses.dataclass(frozen=True)
class Score:
    """A continuation to score, or several that differ only in their last token.

    `prompt` (at least one token) is prefilled, and `tokens` are decoded, of which the last is not
    fed and the first `skipped` still belong to the context. `lasts` has the last token of each
    continuation; `tokens` ends with the first of them.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    skipped: int
    lasts: tuple[int, ...]

    @property
    def size(self) -> int:
        """Tokens that are fed after the prompt."""
        return len(self.tokens) - 1

    @property
    def kind(self) -> Hashable:
        """Rows with equal kinds may be in one batch."""
        return "score"


@dataclasses.dataclass(frozen=True)
class Continue:
    """A context to continue greedily, by at most `limit` tokens.

    `prompt` (at least one token) is prefilled. `last` is the context's last token; empty if that is
    the prompt. `stops` are texts that end a continuation and are no part of it.
    """

    prompt: tuple[int, ...]
    last: tuple[int, ...]
    stops: tuple[str, ...]
    limit: int

    @property
    def size(self) -> int:
        """Tokens that are fed after the prompt, at most."""
        return len(self.last) + self.limit - 1

    @property
    def kind(self) -> Hashable:
        """Rows with equal kinds may be in one batch."""
        return len(self.last), self.stops, self.limit


_Row = TypeVar("_Row", Score, Continue)


def scores_of(
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]], max_length: int
) -> tuple[list[Score], list[tuple[int, int]], int]:
    """What to run for pairs of contexts and continuations, given as tokens, at least one of each.

    Pairs longer than the model's `max_length` lose their beginning, as in lm-eval. Returns the
    rows, each once; for every pair its row and which of the row's `lasts` it is; and how many pairs
    were cut.
    """
    # By prompt, what is decoded but the last token, and how much of that is context.
    found = dict[tuple[tuple[int, ...], tuple[int, ...], int], list[int]]()
    places, cut = list[tuple[int, int]](), 0
    numbers = dict[tuple[tuple[int, ...], tuple[int, ...], int], int]()
    for context, continuation in pairs:
        whole = (*context, *continuation)
        most = max_length + 1  # the last token is not fed
        cut += len(whole) > most
        # If the continuation alone is too long, its first kept token serves as context.
        known = max(len(context) - max(len(whole) - most, 0), 1)
        whole = whole[-most:]
        prompt = whole[: max(known - 1, 1)]
        key = (prompt, whole[len(prompt) : -1], known - len(prompt))
        lasts = found.setdefault(key, [])
        number = numbers.setdefault(key, len(numbers))
        if whole[-1] not in lasts:
            lasts.append(whole[-1])
        places.append((number, lasts.index(whole[-1])))
    rows = [
        Score(prompt, (*before, lasts[0]), skipped, tuple(lasts))
        for (prompt, before, skipped), lasts in found.items()
    ]
    return rows, places, cut


def continuation_of(
    context: Sequence[int], stops: Sequence[str], limit: int, max_length: int
) -> tuple[Continue, bool]:
    """What to run to continue a context of at least one token, and whether its beginning was cut.

    `limit` tokens are added at most. Raises ValueError if nothing of the context would be left.
    """
    room = max_length - limit
    if room < 1:
        raise ValueError(f"{limit} new tokens must be fewer than the model's {max_length=}")
    kept = tuple(context[-room:])
    prompt = kept[: max(len(kept) - 1, 1)]
    row = Continue(prompt, kept[len(prompt) :], tuple(stops), limit)
    return row, len(kept) < len(context)


def batches(rows: Iterable[_Row], batch_size: int, max_length: int) -> Iterator[tuple[_Row, ...]]:
    """Rows that run at once, of like length, that fit the model; the arguments alone decide."""
    groups = dict[Hashable, list[_Row]]()
    for row in rows:
        groups.setdefault(row.kind, []).append(row)
    for group in groups.values():
        batch: list[_Row] = []
        for row in sorted(group, key=_length):
            both = batch + [row]  # noqa: RUF005 - of a type variable mypy knows no other sum
            size = max(len(x.prompt) for x in both) + max(x.size for x in both)
            if batch and (len(batch) == batch_size or size > max_length):
                yield tuple(batch)
                batch = []
            batch.append(row)
        yield tuple(batch)


def score_batch(
    decoder: AnyDecoder, batch: Sequence[Score], method: Method, batch_size: int
) -> list[list[tuple[float, bool]]]:
    """Scores one of `batches`.

    The batch is filled up to `batch_size` with its first row, so that all share programs. Returns,
    for every row and each of its `lasts`, the log-likelihood of the continuation in nats, NaN where
    logits are, and whether it is what greedy decoding writes.
    """
    filled = _filled(batch, batch_size)
    session = _start(decoder, filled, method)
    width = max(len(row.tokens) for row in filled)
    alternatives = _power_of_two(max(len(row.lasts) for row in filled))
    targets = np.zeros((width, len(filled), alternatives), np.int32)
    for i, row in enumerate(filled):
        targets[: len(row.tokens), i] = np.array(row.tokens, np.int32)[:, None]
        targets[row.size, i, : len(row.lasts)] = row.lasts
    found, done = [], 0
    for taken, logits in forced_logits(session, np.ascontiguousarray(targets[..., 0].T)):
        now = targets[done : done + taken]
        # Few sizes, so that few programs are compiled, yet little padding is read.
        size = min(_power_of_two(taken), len(logits))
        full = np.pad(now, ((0, size - taken), (0, 0), (0, 0)))
        found.append([np.asarray(x)[:taken] for x in _look(logits, full)])
        done += taken
    log_p, choices = (np.concatenate(x) for x in zip(*found, strict=True))
    return [
        _scores(row, log_p[:, i].astype(np.float64), choices[:, i], targets[:, i])
        for i, row in enumerate(batch)
    ]


def continue_batch(
    decoder: AnyDecoder,
    batch: Sequence[Continue],
    method: Method,
    batch_size: int,
    tokenizer: Tokenizer,
) -> list[tuple[str, str]]:
    """Continues one of `batches` greedily, filled up as in `score_batch`.

    Tokens that end texts for the tokenizer end continuations. Returns for every row its text, and
    why it ended: ``"stop"``, ``"length"`` or, where logits held NaN, ``"nan"``.
    """
    filled = _filled(batch, batch_size)
    session = _start(decoder, filled, method)
    if filled[0].last:
        session = step(session, np.array([row.last[0] for row in filled], np.int32))
    ends, stops = check_stops(tokenizer.eos_token_ids, filled[0].stops, tokenizer)
    texts = [TextStream(tokenizer.stream((*row.prompt, *row.last)), stops) for row in filled]
    ended: list[str | None] = [None] * len(filled)
    for place in range(filled[0].limit):
        known = np.asarray(_greedy(session.logits))
        for i, text in enumerate(texts):
            if ended[i] is not None:
                continue
            if known[i] < 0:
                ended[i] = "nan"
            elif int(known[i]) in ends:
                ended[i] = "stop"
            else:
                text.add(int(known[i]))
                ended[i] = "stop" if text.stopped else None
        if None not in ended or place + 1 == filled[0].limit:
            break
        # A sequence that has ended has no token; what is fed instead does not count.
        session = step(session, np.maximum(known, 0))
    for text in texts:
        text.add(None)
    found = [(text.text, end or "length") for text, end in zip(texts, ended, strict=True)]
    return found[: len(batch)]


def _length(row: Score | Continue) -> tuple[int, int]:
    return len(row.prompt), row.size


def _filled(batch: Sequence[_Row], batch_size: int) -> list[_Row]:
    return list(batch) + [batch[0]] * (batch_size - len(batch))


def _start(decoder: AnyDecoder, rows: Sequence[_Row], method: Method) -> Session:
    longest = max(len(row.prompt) for row in rows)
    prompts = np.zeros((len(rows), longest), np.int32)
    for i, row in enumerate(rows):
        prompts[i, : len(row.prompt)] = row.prompt
    return start(
        decoder,
        prompts,
        longest + max(row.size for row in rows),
        method,
        lengths=np.array([len(row.prompt) for row in rows], np.int32),
        in_buckets=True,
    )


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _scores(
    row: Score, log_p: np.ndarray, choices: np.ndarray, targets: np.ndarray
) -> list[tuple[float, bool]]:
    """Of one row: float64 and int32 ``[n, K]`` and int32 ``[n]``."""
    known = slice(row.skipped, row.size)
    before = float(log_p[known, 0].sum())
    greedy = bool(np.all(choices[known] == targets[known, 0]))
    return [
        (before + float(log_p[row.size, k]), greedy and int(choices[row.size]) == last)
        for k, last in enumerate(row.lasts)
    ]


_greedy: Callable[[jax.Array], jax.Array] = jax.jit(greedy_choice)


@jax.jit
def _look(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log-likelihoods ``[n, B, K]`` and choices ``[n, B]`` of the first logits ``[more, B, V]``."""
    used = logits[: len(targets)]
    log_p = jax.nn.log_softmax(used, axis=-1)
    return jnp.take_along_axis(log_p, targets, axis=-1), greedy_choice(used)


DEFAULT_NEW_TOKENS = 256
"""Tokens of a continuation, where its task does not say."""

Keep = Callable[[str, Callable[[], Json]], Json]
"""Takes a name and a function that makes a value; gives the value, which may be known already."""


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
        self._progress = progress or (lambda done, total: None)
        self._keep: Keep = keep or (lambda key, make: make())
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
            has_failed = log_p is None or math.isnan(log_p)
            answers.append((-math.inf, False) if has_failed else (log_p, greedy))
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
