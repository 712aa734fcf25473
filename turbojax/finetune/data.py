"""Training and held-out text of a run."""

import dataclasses
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from turbojax import _json
from turbojax.finetune import documents
from turbojax.finetune.losses import with_marks
from turbojax.models import held_out_modules
from turbojax.models.text.chat import chat_tokens
from turbojax.models.text.tokenizer import Tokenizer

# Share of the user's own text that is held out where no other is named.
_HELD_OUT_SHARE = 20


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Text to train on, and text to measure with.

    Attributes:
      stream: ``[bytes]`` uint8, byte 0 before every document and after the last one.
      held_out: documents that are not in it, separated by byte 0.
      description: where it came from.
    """

    stream: np.ndarray
    held_out: bytes
    description: str


@dataclasses.dataclass(frozen=True)
class TokenCorpus:
    """Tokens to train on, and tokens to measure with.

    Attributes:
      stream: int32 ``[n]``, one text after the other.
      held_out: the same of other text.
      description: where they came from.
      separator: the token before every text; None if each begins as its tokenizer begins it.
      learn: bool ``[n]``, which tokens of `stream` count in the loss; None for all.
      held_out_learn: the same of `held_out`.
    """

    stream: np.ndarray
    held_out: np.ndarray
    description: str = ""
    separator: int | None = None
    learn: np.ndarray | None = None
    held_out_learn: np.ndarray | None = None

    def held_out_windows(self, context: int, most: int) -> np.ndarray:
        """The first windows of the held-out tokens, at most `most`: int32 ``[n, context + 1]``.

        The last token of one is the first of the next, so that every token but the first is a
        target. Those that do not count stand as their complement, see `losses.marked`.

        Raises:
          ValueError: if there is none, or no token in them counts.
        """
        tokens = with_marks(self.held_out, self.held_out_learn)
        count = min(most, (tokens.size - 1) // context)
        if count < 1:
            raise ValueError(f"{tokens.size} held-out tokens must be more than {context=}")
        places = np.arange(count)[:, None] * context + np.arange(context + 1)[None]
        windows = tokens[places].astype(np.int32)
        if (windows[:, 1:] < 0).all():
            raise ValueError(f"the first {count} held-out windows hold no token that counts")
        return windows


def standard_library_corpus() -> Corpus:
    """The `*.py` files of this interpreter's standard library, tests of Python included.

    Held out are the modules that the embedded model was not trained on, and what resembles them;
    copies, generated tables and files under another licence are left out. In order of their paths,
    so that the files of a package are neighbours.

    Raises:
      FileNotFoundError: if this interpreter comes without source files.
    """
    library = Path(sysconfig.get_path("stdlib"))
    names = [name for name in held_out_modules() if (library / name).is_file()]
    if not names:
        raise FileNotFoundError(f"{library} holds no source files: name some with --data")
    modules = documents.read_held_out(names)
    kept, _, _ = documents.select(documents.standard_library(), documents.HeldOut(modules))
    stream = documents.join(document.data for document in kept)
    description = f"standard library of Python {platform.python_version()}, {len(kept)} files"
    return Corpus(stream, b"\0".join(modules.values()), description)


def corpus_of(paths: Sequence[Path], held_out: Sequence[Path] = ()) -> Corpus:
    """The text of given files and folders.

    Args:
      paths: what to train on, see `documents.read_texts`.
      held_out: what to measure with; if not given, the last twentieth of the text, which is then
        not trained on.

    Raises:
      FileNotFoundError: if a path does not exist.
      ValueError: if a named file is not text, or there is none.
    """
    contents = documents.read_texts(paths)
    if not contents:
        raise ValueError(f"data={[str(path) for path in paths]} must hold text")
    description = f"{', '.join(map(str, paths))}: {len(contents)} files"
    if held_out:
        return Corpus(
            documents.join(contents), b"\0".join(documents.read_texts(held_out)), description
        )
    stream = documents.join(contents)
    cut = stream.size - stream.size // _HELD_OUT_SHARE
    return Corpus(stream[:cut], stream[cut:].tobytes(), description)


def tokens_of(
    tokenizer: Tokenizer,
    paths: Sequence[Path],
    held_out: Sequence[Path] = (),
    *,
    separator: int | None = None,
) -> TokenCorpus:
    """The tokens of given files and folders.

    A named file that ends in ``.jsonl`` has an object in each line: ``{"text": ...}``, or
    ``{"messages": [...]}``, a conversation, of which the assistant's answers alone count in the
    loss, with the tokens that end them.

    Args:
      tokenizer: the model's.
      paths: what to train on, see `documents.read_texts`.
      held_out: what to measure with; if not given, the last twentieth of the tokens, which are then
        not trained on.
      separator: a token that stands before every text, in place of those that the tokenizer puts
        around one.

    Raises:
      FileNotFoundError: if a path does not exist.
      ValueError: if a named file is not text, there is none, or a line of a ``.jsonl`` file is
        something else; file and line are named.
      ImportError: if there are conversations and the package `jinja2` is not installed.
    """

    def read(given: Sequence[Path]) -> tuple[np.ndarray, np.ndarray | None]:
        found = [x for path in given for x in _examples(tokenizer, path, separator)]
        if not found:
            raise ValueError(f"data={[str(path) for path in given]} must hold text")
        tokens, learn = (np.concatenate(x) for x in zip(*found, strict=True))
        return tokens, None if learn.all() else learn

    (stream, learn), description = read(paths), ", ".join(map(str, paths))
    if held_out:
        other, other_learn = read(held_out)
        return TokenCorpus(stream, other, description, separator, learn, other_learn)
    cut = stream.size - stream.size // _HELD_OUT_SHARE
    marks = (None, None) if learn is None else (learn[:cut], learn[cut:])
    return TokenCorpus(stream[:cut], stream[cut:], description, separator, *marks)


Example = tuple[np.ndarray, np.ndarray]
"""Tokens, int32 ``[n]``, and which of them count in the loss, bool ``[n]``."""


def _examples(tokenizer: Tokenizer, path: Path, separator: int | None) -> Iterator[Example]:
    """What a path holds: texts, or the lines of a ``.jsonl`` file."""

    def of_text(text: str) -> Example:
        tokens = tokenizer.encode(text, add_special_tokens=separator is None)
        tokens = tokens if separator is None else [separator, *tokens]
        return np.asarray(tokens, np.int32), np.ones(len(tokens), np.bool_)

    if path.suffix != ".jsonl":
        yield from (of_text(data.decode("utf-8")) for data in documents.read_texts([path]))
        return
    # Not `splitlines`: JSON's strings may hold what else ends lines, such as U+2028.
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = _json.parse(line)
            if not isinstance(row, dict) or len(row.keys() & {"text", "messages"}) != 1:
                raise ValueError('must be an object with "text" or "messages"')
            if "text" in row:
                if not isinstance(row["text"], str):
                    raise ValueError(f"text={_json.shown(row['text'])} must be a string")
                yield of_text(row["text"])
            else:
                yield _of_chat(tokenizer, row["messages"], separator)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from error


def _of_chat(tokenizer: Tokenizer, messages: Any, separator: int | None) -> Example:
    """A conversation as the chat template writes it; what the assistant says counts.

    Raises:
      ValueError: if there is no answer, or the template does not write messages one after the
        other, so that an answer's tokens are not known.
    """
    if not isinstance(messages, list) or not all(isinstance(x, dict) for x in messages):
        raise ValueError(f"messages={_json.shown(messages)} must be a list of objects")

    def tokens_of_first(count: int, *, begin_answer: bool) -> list[int]:
        return chat_tokens(tokenizer, messages[:count], add_generation_prompt=begin_answer)

    whole = tokens_of_first(len(messages), begin_answer=False)
    learn = np.zeros(len(whole), np.bool_)
    for i, message in enumerate(messages):
        if message.get("role") != "assistant" or i == 0:
            continue
        before = tokens_of_first(i, begin_answer=True)
        after = tokens_of_first(i + 1, begin_answer=False)
        if after[: len(before)] != before or whole[: len(after)] != after:
            raise ValueError(
                f"message {i}: the chat template does not write it as it writes the messages "
                "before it alone, so that its tokens are not known"
            )
        learn[len(before) : len(after)] = True
    if not learn.any():
        raise ValueError("messages must hold an assistant's answer to another message")
    if separator is not None:
        whole, learn = [separator, *whole], np.concatenate([[False], learn])
    return np.asarray(whole, np.int32), learn
