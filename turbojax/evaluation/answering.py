"""Tasks answered through a cache: greedy continuations, and the likelihood of choices.

Prompts are prefilled into the method's cache, and everything after them goes through it token by
token, the texts of choices too: that is how the cache is used.
"""

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks
from turbojax.evaluation import identity
from turbojax.evaluation.decoding import greedy_choice, start, step
from turbojax.evaluation.methods import Method
from turbojax.evaluation.records import Records
from turbojax.evaluation.task_scores import task_scores
from turbojax.evaluation.tasks import Task
from turbojax.models.config import TransformerConfig
from turbojax.models.decoder import Decoder
from turbojax.models.generation.session import Session
from turbojax.models.generation.stopping import TextStream, check_stops
from turbojax.models.quantized import QuantizedDecoder
from turbojax.models.text.chat import chat_tokens
from turbojax.models.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Row:
    """One sequence to run: a task in words, or one choice of a task.

    Attributes:
      task: whose.
      prompt: its tokens, at least one.
      choice: the number of the choice, or None.
      tokens: of the choice.
    """

    task: Task
    prompt: tuple[int, ...]
    choice: int | None = None
    tokens: tuple[int, ...] = ()

    @property
    def new_tokens(self) -> int:
        """Tokens after the prompt, at most."""
        return self.task.max_new_tokens if self.choice is None else len(self.tokens)


@dataclasses.dataclass(frozen=True)
class PreparedTasks:
    """Tasks in a model's tokens.

    Attributes:
      tasks: the tasks.
      rows: what is run for them, in their order.
      tokenizer: what reads and writes texts.
      max_length: tokens of a sequence, at most.
    """

    tasks: tuple[Task, ...]
    rows: tuple[Row, ...]
    tokenizer: Tokenizer
    max_length: int

    @functools.cached_property
    def digest(self) -> str:
        """A hexadecimal SHA-256 of the tasks and their tokens."""
        told = [
            [row.task.to_json(), row.prompt, row.choice, row.tokens, self.tokenizer.eos_token_ids]
            for row in self.rows
        ]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()

    def batches(self, batch_size: int) -> tuple[tuple[Row, ...], ...]:
        """What runs at once: sequences of like length, of one way to end.

        They are a function of the tasks and the batch size alone. The longest prompt and the
        longest continuation of a batch fit the model together.

        Args:
          batch_size: sequences of a batch, at most.
        """
        _checks.check_sizes(batch_size=batch_size)
        groups = dict[Any, list[Row]]()
        for row in self.rows:
            key = "choices" if row.choice is not None else (row.new_tokens, row.task.stop)
            groups.setdefault(key, []).append(row)
        return tuple(
            batch
            for rows in groups.values()
            for batch in _cut(sorted(rows, key=_length), batch_size, self.max_length)
        )


def prepare_tasks(
    tasks: Sequence[Task], tokenizer: Tokenizer, config: TransformerConfig
) -> PreparedTasks:
    """Turns tasks into tokens, and checks that the model can take them.

    A choice is read together with its prompt, as in a text, and has the tokens from the first one
    on in which that differs from the prompt alone. After the prompt of a chat it is read by itself.

    Args:
      tasks: the tasks, at least one.
      tokenizer: of the model.
      config: of the model.

    Raises:
      ImportError: if a package is missing that a chat template needs.
      ValueError: naming the line, if a text cannot be read, a token is not in the vocabulary, a
        sequence would be longer than the model takes, or nothing would end a continuation.
    """
    if not tasks:
        raise ValueError("there must be at least one task")
    rows = list[Row]()
    for task in tasks:
        try:
            found = list(_rows(task, tokenizer))
            for row in found:
                _check_row(row, config)
        except ValueError as error:
            raise ValueError(f"line {task.line}: {error}") from error
        rows += found
    return PreparedTasks(tuple(tasks), tuple(rows), tokenizer, config.max_length)


def answer(
    model: Decoder | QuantizedDecoder,
    prepared: PreparedTasks,
    batch: Sequence[Row],
    method: Method,
    batch_size: int,
) -> list[dict[str, Any]]:
    """Runs one of `PreparedTasks.batches`.

    Args:
      model: the model.
      prepared: the tasks.
      batch: the sequences.
      method: the cache, and how prompts attend.
      batch_size: to which a smaller batch is filled up with its first sequence, so that all share
        programs.

    Returns:
      For every sequence plain JSON values. Of one in words ``{"id", "text", "answer", "right",
      "tokens", "ended"}``, with ``"ended"`` ``"stop"``, ``"length"`` or, where logits held NaN,
      ``"nan"``; of a choice ``{"id", "choice", "bits", "bytes"}``: the information content of its
      text, None where that is NaN, and its length in UTF-8.
    """
    longest = max(len(row.prompt) for row in batch)
    filled = [*batch, *[batch[0]] * (batch_size - len(batch))]
    prompts = np.zeros((len(filled), longest), np.int32)
    for i, row in enumerate(filled):
        prompts[i, : len(row.prompt)] = row.prompt
    session = start(
        model,
        prompts,
        longest + max(row.new_tokens for row in batch),
        method,
        lengths=np.array([len(row.prompt) for row in filled], np.int32),
        in_buckets=True,
    )
    run = _continue if batch[0].choice is None else _choose
    return run(session, filled, prepared.tokenizer)[: len(batch)]


class TaskMeasure:
    """Tasks as a measure of `evaluate`.

    Args:
      prepared: the tasks.
      batch_size: sequences that run at once.
      seed: of the intervals.
      partial: a file that keeps answers batch by batch, so that a method which was interrupted goes
        on; None for none. Whoever has all results may remove it.
    """

    def __init__(
        self,
        prepared: PreparedTasks,
        batch_size: int = 8,
        seed: int = 0,
        partial: Path | None = None,
    ) -> None:
        self._prepared, self._batch_size, self._seed = prepared, batch_size, seed
        self._partial = partial
        self._records: Records | None = None

    @property
    def identity(self) -> dict[str, Any]:
        """See `turbojax.evaluation.Further`."""
        prepared = self._prepared
        return {
            "tasks": len(prepared.tasks),
            "checksum": prepared.digest[:16],
            "batch_size": self._batch_size,
        }

    def __call__(
        self,
        decoder: Decoder | QuantizedDecoder,
        method: Method,
        progress: Callable[[int, int], None],
    ) -> dict[str, Any]:
        """A method's row, see `task_scores`."""
        if self._records is None:
            machine, dates = identity.of_machine()
            told = {**machine, "model": identity.of_model(decoder), "tasks": self.identity}
            self._records = Records(self._partial, told, dates)
        prepared, answers, done = self._prepared, list[dict[str, Any]](), 0
        for number, batch in enumerate(prepared.batches(self._batch_size)):
            make = functools.partial(answer, decoder, prepared, batch, method, self._batch_size)
            answers += self._records.row(("methods", method.name, str(number)), make)
            done += len(batch)
            progress(done, len(prepared.rows))
        return task_scores(prepared.tasks, answers, seed=self._seed)


def _length(row: Row) -> tuple[int, int]:
    return len(row.prompt), row.new_tokens


def _cut(rows: Sequence[Row], batch_size: int, max_length: int) -> Iterator[tuple[Row, ...]]:
    batch = list[Row]()
    for row in rows:
        both = [*batch, row]
        size = max(len(x.prompt) for x in both) + max(x.new_tokens for x in both)
        if len(batch) == batch_size or size > max_length:
            yield tuple(batch)
            batch = []
        batch.append(row)
    yield tuple(batch)


def _rows(task: Task, tokenizer: Tokenizer) -> Iterator[Row]:
    if task.chat:
        said = [("system", task.system), ("user", task.prompt)]
        messages = [{"role": role, "content": x} for role, x in said if x is not None]
        prompt = chat_tokens(tokenizer, messages)
    else:
        prompt = tokenizer.encode(task.prompt)
    if not task.choices:
        if not (task.stop or task.pattern or tokenizer.eos_token_ids):
            raise ValueError(
                "nothing ends this answer, since the tokenizer has no token that ends a text: give "
                "'stop' or 'pattern'"
            )
        yield Row(task, tuple(prompt))
        return
    for number, choice in enumerate(task.choices):
        if task.chat:
            tokens = tokenizer.encode(choice, add_special_tokens=False)
            yield Row(task, tuple(prompt), number, tuple(tokens))
            continue
        whole = tokenizer.encode(task.prompt + choice)
        same = next(
            (i for i, pair in enumerate(zip(prompt, whole, strict=False)) if pair[0] != pair[1]),
            min(len(prompt), len(whole)),
        )
        yield Row(task, tuple(whole[:same]), number, tuple(whole[same:]))


def _check_row(row: Row, config: TransformerConfig) -> None:
    if not row.prompt:
        raise ValueError("'prompt' must hold at least one token before the answer")
    if row.choice is not None and not row.tokens:
        raise ValueError(f"choice {row.choice} adds no token to the prompt")
    smallest, largest = (f((*row.prompt, *row.tokens)) for f in (min, max))
    if smallest < 0 or largest >= config.vocab_size:
        raise ValueError(
            f"tokens in {smallest}..{largest} must be within 0..{config.vocab_size - 1}"
        )
    if len(row.prompt) + row.new_tokens > config.max_length:
        raise ValueError(
            f"a prompt of {len(row.prompt)} tokens and {row.new_tokens} after it must be at most "
            f"the model's max_length={config.max_length}"
        )


_greedy = jax.jit(greedy_choice)


@jax.jit
def _bits(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Information content of the targets ``[B]`` under logits ``[B, V]``, float32 ``[B]``."""
    log_p = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(log_p, targets[:, None], axis=-1)[:, 0]
    return chosen * (-1 / math.log(2))


def _choose(session: Session, rows: Sequence[Row], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The bits of each row's choice, which goes through the cache token by token."""
    sizes = np.array([len(row.tokens) for row in rows])
    tokens = np.zeros((len(rows), sizes.max()), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row.tokens)] = row.tokens
    totals = np.zeros(len(rows))
    for place in range(tokens.shape[1]):
        bits = np.asarray(_bits(session.logits, jnp.asarray(tokens[:, place])), np.float64)
        totals += np.where(place < sizes, bits, 0.0)
        if place + 1 < tokens.shape[1]:
            session = step(session, tokens[:, place])
    return [
        {
            "id": row.task.name,
            "choice": row.choice,
            "bits": float(total) if math.isfinite(total) else None,
            "bytes": len(row.task.choices[row.choice or 0].encode()),
        }
        for row, total in zip(rows, totals, strict=True)
    ]


def _continue(session: Session, rows: Sequence[Row], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Greedy continuations, until all have ended."""
    task = rows[0].task
    ends, stops = check_stops(tokenizer.eos_token_ids, task.stop, tokenizer)
    texts = [TextStream(tokenizer.stream(row.prompt), stops) for row in rows]
    ended: list[str | None] = [None] * len(rows)
    counts = [0] * len(rows)
    for place in range(task.max_new_tokens):
        known = np.asarray(_greedy(session.logits))
        for i, text in enumerate(texts):
            if ended[i] is not None:
                continue
            if known[i] < 0:
                ended[i] = "nan"
                continue
            counts[i] += 1
            if int(known[i]) in ends:
                ended[i] = "stop"
            else:
                text.add(int(known[i]))
                ended[i] = "stop" if text.stopped else None
        if None not in ended or place + 1 == task.max_new_tokens:
            break
        # Where there is none, what is fed does not count: the sequence has ended.
        session = step(session, np.maximum(known, 0))
    for text in texts:
        text.add(None)
    found = zip(rows, texts, counts, ended, strict=True)
    return [_said(row.task, text.text, count, end or "length") for row, text, count, end in found]


def _said(task: Task, text: str, count: int, ended: str) -> dict[str, Any]:
    return {
        "id": task.name,
        "text": text,
        "answer": task.answer_in(text),
        # A continuation that broke off may hold its answer: but the model's last word is unknown.
        "right": ended != "nan" and task.is_right(text),
        "tokens": count,
        "ended": ended,
    }
