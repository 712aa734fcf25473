"""Training and held-out text of a run."""

import dataclasses
import platform
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from turbojax.finetune import documents
from turbojax.models import held_out_modules
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
    """

    stream: np.ndarray
    held_out: np.ndarray
    description: str = ""
    separator: int | None = None


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

    Args:
      tokenizer: the model's.
      paths: what to train on, see `documents.read_texts`.
      held_out: what to measure with; if not given, the last twentieth of the tokens, which are then
        not trained on.
      separator: a token that stands before every text, in place of those that the tokenizer puts
        around one.

    Raises:
      FileNotFoundError: if a path does not exist.
      ValueError: if a named file is not text, or there is none.
    """

    def encoded(data: bytes) -> np.ndarray:
        tokens = tokenizer.encode(data.decode("utf-8"), add_special_tokens=separator is None)
        return np.asarray(tokens if separator is None else [separator, *tokens], np.int32)

    def read(given: Sequence[Path]) -> np.ndarray:
        texts = [encoded(data) for data in documents.read_texts(given)]
        if not texts:
            raise ValueError(f"data={[str(path) for path in given]} must hold text")
        return np.concatenate(texts)

    stream, description = read(paths), ", ".join(map(str, paths))
    if held_out:
        return TokenCorpus(stream, read(held_out), description, separator)
    cut = stream.size - stream.size // _HELD_OUT_SHARE
    return TokenCorpus(stream[:cut], stream[cut:], description, separator)


def token_windows(tokens: np.ndarray, context: int, most: int) -> np.ndarray:
    """The first windows of a stream, at most `most`: int32 ``[n, context + 1]``.

    The last token of one is the first of the next, so that every token but the first is a target.

    Raises:
      ValueError: if there is none.
    """
    count = min(most, (tokens.size - 1) // context)
    if count < 1:
        raise ValueError(f"{tokens.size} held-out tokens must be more than {context=}")
    places = np.arange(count)[:, None] * context + np.arange(context + 1)[None]
    return tokens[places].astype(np.int32)
