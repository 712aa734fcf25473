"""A `tokenizer.json` through the package `tokenizers`, whose Rust code trusts what it reads."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from turbojax import _extras, _json

_MOST_BYTES = 128 * 2**20
"""Of a `tokenizer.json`; the largest ones, of vocabularies of 260,000 tokens, have 35 MB."""

# A prefix that is not empty; or escaped letters, which might spell its key.
_MAY_HAVE_PREFIX = re.compile(rb'continuing_subword_prefix"\s*:\s*"[^"]|\\u00[2-7]')


class Parts(NamedTuple):
    """What a tokenizer consists of; `special_tokens` are by role, several templates by name."""

    tokenizer: Any
    special_tokens: Mapping[str, str]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    chat_template: str | Mapping[str, str] | None


def read(file: Path) -> tuple[Any, Mapping[str, Any] | None]:
    """The file's tokenizer, with padding turned off, and how the file would pad texts.

    Raises ImportError if the package `tokenizers` is missing, and ValueError, naming the file, if
    it cannot be read.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(
            f"{file} needs the package tokenizers: {_extras.install('text')}"
        ) from error
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}")
    content = _json.read_bytes(file, _MOST_BYTES)
    _check_merges(file, content)
    with named(f"{file} is not a readable tokenizer"):
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
        # A file may ask for texts to be cut or padded to one length.
        padding = tokenizer.padding
        tokenizer.no_truncation()
        tokenizer.no_padding()
    return tokenizer, padding


@contextlib.contextmanager
def named(what: str) -> Iterator[None]:
    """Turns what the package `tokenizers` raises into a ValueError that begins with `what`."""
    try:
        yield
    except BaseException as error:
        # The package raises plain Exceptions. A panic in its Rust code raises a BaseException whose
        # class has no public name.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ValueError(f"{what}: {_json.line(str(error))}") from error
        raise


def _check_merges(file: Path, content: bytes) -> None:
    """Raises ValueError where a merge would make the package cut a character in two.

    The package removes as many bytes from a merge's second token as the prefix has characters,
    without looking at them, and ends the process if the rest is not text.
    """
    if not _MAY_HAVE_PREFIX.search(content):
        return
    try:
        model = _json.parse(content)["model"]
        prefix, merges = model.get("continuing_subword_prefix"), model.get("merges") or []
        for merge in merges if prefix else []:
            second = merge.partition(" ")[2] if isinstance(merge, str) else merge[1]
            if not prefix.isascii() or not second.startswith(prefix):
                raise ValueError(
                    f"merge {_json.shown(merge)} must have a second token that begins with "
                    f"continuing_subword_prefix={_json.shown(prefix)}, in ASCII"
                )
    except (AttributeError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{file} is not a readable tokenizer: {error!r}") from error
    except ValueError as error:
        raise ValueError(f"{file} is not a readable tokenizer: {error}") from error
