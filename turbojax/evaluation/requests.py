"""Texts that are scored, or continued, through a cache: ragged prompts in batches.

Of every context all tokens but the last are prefilled into the method's cache, as it prefills; the
last one and all that follow go through the cache token by token. So whatever is measured has been
read from the cache, also where an answer is one token.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from turbojax.evaluation.decoding import AnyDecoder, forced_logits, greedy_choice, start, step
from turbojax.evaluation.methods import Method
from turbojax.models.generation.session import Session
from turbojax.models.generation.stopping import TextStream, check_stops
from turbojax.models.text.tokenizer import Tokenizer


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
