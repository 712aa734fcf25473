"""Text to tokens and back: bytes, decimal numbers, or a checkpoint's own `tokenizer.json`."""

import codecs
import collections
import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from turbojax import _checks, _json
from turbojax.models.checkpoint import folder as _folder
from turbojax.models.checkpoint.gguf import smollm2
from turbojax.models.families import text_part
from turbojax.models.text import gguf_tokenizer as _gguf_tokenizer
from turbojax.models.text import tokenizer_file as _tokenizer_file
from turbojax.models.text.special_text import Segment, SegmentEncoder, SpecialTexts
from turbojax.models.text.token_bytes import TokenBytes, token_bytes
from turbojax.models.text.tokenizer_file import CHAT_TEMPLATE_NAME as CHAT_TEMPLATE_NAME
from turbojax.models.text.tokenizer_file import CHAT_TEMPLATES_FOLDER as CHAT_TEMPLATES_FOLDER
from turbojax.models.text.tokenizer_file import ChatTemplate as ChatTemplate

TOKENIZER_NAME = "tokenizer.json"
BYTES = 256
BEGINNING_OF_FILE = 0
"""Stands before the first byte of every text of a byte-level model."""

_SENTENCEPIECE_NAME = "tokenizer.model"
# Earlier tokens that new ones are decoded with: a token alone may lose its leading space.
_CONTEXT = 4
# How many tokens before those may be bytes of characters, at most.
_LONGEST_RUN = 64
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"

Decode = Callable[[int | None], str]
"""From each token after a prompt to the text it completes, possibly ""; None ends the text."""


class Tokenizer(Protocol):
    """Translates between text and a model's tokens.

    Attributes:
      vocab_size: the largest token plus one; a model's vocabulary must not be smaller.
      bos_token_id: the token that begins a text, if there is one.
      eos_token_ids: tokens that end a text; none if texts have no end.
      special_tokens: texts of special tokens by role, such as ``{"bos_token": "<s>"}``.
      chat_template: the Jinja template that makes one text of a conversation, or several by their
        names, if there is one; see `render_chat`.
    """

    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    special_tokens: Mapping[str, str]
    chat_template: ChatTemplate | None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text.

        Args:
          text: the text. Bytes that are not UTF-8 come as `str` makes them with the error handler
            ``surrogateescape``; a tokenizer that reads nothing but Unicode refuses them.
          add_special_tokens: whether to add those that stand around every text, such as the one
            that begins it.

        Raises:
          ValueError: if the tokenizer cannot read the text.
        """
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens, without special tokens."""
        ...

    def stream(self, prompt: Sequence[int] = ()) -> Decode:
        """Decodes token by token: the texts together are what `decode` makes of all tokens.

        Args:
          prompt: the tokens before the first. A character that begins in them belongs to the text
            of the token that completes it.
        """
        ...

    def special_token(self, text: str) -> int | None:
        """The special token with this text, which `decode` leaves out, if there is one."""
        ...


class ByteTokenizer:
    """Token i is the byte of value i, and byte 0 begins a text, as in the embedded model.

    Texts are UTF-8; bytes that are not UTF-8 are read as `Tokenizer.encode` says, and shown as
    replacement characters.

    Args:
      eos_token_ids: tokens that end a text.
    """

    def __init__(self, eos_token_ids: Iterable[int] = ()) -> None:
        self.vocab_size = BYTES
        self.bos_token_id: int | None = BEGINNING_OF_FILE
        self.eos_token_ids: tuple[int, ...] = tuple(eos_token_ids)
        self.special_tokens: Mapping[str, str] = {}
        self.chat_template: ChatTemplate | None = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See `Tokenizer`: the beginning of a text, then its bytes."""
        begin = [BEGINNING_OF_FILE] if add_special_tokens else []
        return [*begin, *text.encode("utf-8", "surrogateescape")]

    def decode(self, tokens: Iterable[int]) -> str:
        """See `Tokenizer`; byte 0 is a character like any other."""
        return bytes(int(token) for token in tokens).decode("utf-8", "replace")

    def stream(self, prompt: Sequence[int] = ()) -> Decode:
        """See `Tokenizer`."""
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        # A character has four bytes at most.
        utf8.decode(bytes(int(token) for token in prompt[-3:]))
        begun = bool(utf8.getstate()[0])

        def decode(token: int | None) -> str:
            nonlocal begun
            text = utf8.decode(b"", True) if token is None else utf8.decode(bytes([token]))
            if begun and text:
                # What stays incomplete was shown with the prompt.
                text, begun = text.removeprefix(_INCOMPLETE), False
            return text

        return decode

    def special_token(self, text: str) -> int | None:
        """See `Tokenizer`: None, as every byte is text."""
        del text
        return None

    @property
    def token_bytes(self) -> TokenBytes:
        """What each token adds to a text."""
        return TokenBytes([bytes([byte]) for byte in range(BYTES)], {})


class NumberTokenizer:
    """Tokens as decimal numbers, as in ``"1 17 4"``: for models without a tokenizer.

    Args:
      vocab_size: tokens of the model.
      eos_token_ids: tokens that end a text.
    """

    def __init__(self, vocab_size: int, eos_token_ids: Iterable[int] = ()) -> None:
        _checks.check_sizes(vocab_size=vocab_size)
        self.vocab_size = vocab_size
        self.bos_token_id: int | None = None
        self.eos_token_ids: tuple[int, ...] = tuple(eos_token_ids)
        self.special_tokens: Mapping[str, str] = {}
        self.chat_template: ChatTemplate | None = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See `Tokenizer`; there are no special tokens to add."""
        del add_special_tokens
        try:
            return [int(word) for word in text.split()]
        except ValueError as error:
            raise ValueError(
                f"there is no {TOKENIZER_NAME}, so the text must be token numbers: {error}"
            ) from error

    def decode(self, tokens: Iterable[int]) -> str:
        """See `Tokenizer`: a space after each number."""
        return "".join(f"{token} " for token in tokens)

    def stream(self, prompt: Sequence[int] = ()) -> Decode:
        """See `Tokenizer`."""
        del prompt  # a number means the same wherever it stands
        return lambda token: "" if token is None else f"{token} "

    def special_token(self, text: str) -> int | None:
        """See `Tokenizer`: None, as every number is text."""
        del text
        return None


class JsonTokenizer:
    """A Hugging Face `tokenizer.json` with the files beside it, or the tokenizer of a GGUF file.

    These files are read, if they exist, as transformers reads them: `tokenizer_config.json`
    (special tokens, chat templates, and added tokens, including ones that `tokenizer.json` lacks);
    `special_tokens_map.json`, if the former has no added tokens; `chat_template.jinja` and
    `additional_chat_templates/*.jinja`, which replace all templates of `tokenizer_config.json`;
    `generation_config.json` or else `config.json` (tokens that end a text). All tokens that these
    files name as such end a text.

    Args:
      path: the file, or its folder; or a GGUF file, whose metadata have all of it.

    Raises:
      ImportError: if the package `tokenizers` is not installed.
      FileNotFoundError: if there is no such file.
      NotImplementedError: if the tokenizer of a GGUF file is of a kind that is not supported.
      ValueError: if a file cannot be read or holds something else.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        given = Path(path)
        if _folder.is_gguf(given):
            self._file, parts = given, _gguf_tokenizer.read(given)
        else:
            folder = given if given.is_dir() else given.parent
            self._file = _folder.find(folder, TOKENIZER_NAME) if given.is_dir() else given
            parts = _tokenizer_file.read_folder(self._file, folder)
        self._tokenizer = parts.tokenizer
        known = self._tokenizer.get_vocab(with_added_tokens=True)
        # Some numbers may be unused, so this can be more than there are tokens.
        self.vocab_size = max(known.values(), default=-1) + 1
        self.special_tokens: Mapping[str, str] = parts.special_tokens
        self.bos_token_id: int | None = parts.bos_token_id
        self.eos_token_ids: tuple[int, ...] = parts.eos_token_ids
        self.chat_template: ChatTemplate | None = parts.chat_template

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See `Tokenizer`."""
        _check_unicode(text)
        with _tokenizer_file.named(f"{self._file} cannot read this text"):
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    @functools.cached_property
    def special_texts(self) -> SpecialTexts:
        """The texts that `encode` turns into special tokens, wherever they stand."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        return SpecialTexts(token.content for token in added if token.special and token.content)

    def encode_segments(self, segments: Sequence[Segment]) -> list[int]:
        """The tokens of a text in pieces, some of which are special tokens and the others text.

        Args:
          segments: pieces, each with whether it is meant as the special token of this text.

        Raises:
          ValueError: if the text is not Unicode, or the tokenizer has nothing but the special token
            for a text that looks like one.
        """
        _check_unicode("".join(text for text, _ in segments))
        return self._segments.encode(segments)

    @property
    def token_bytes(self) -> TokenBytes:
        """The bytes that each token adds to a text; `NotImplementedError` if they are not known."""
        return token_bytes(self._tokenizer, self.vocab_size)

    @functools.cached_property
    def _segments(self) -> SegmentEncoder:
        return SegmentEncoder(self._tokenizer)

    def decode(self, tokens: Iterable[int]) -> str:
        """See `Tokenizer`; numbers that no token has give no text."""
        numbers = [int(token) for token in tokens]
        with _tokenizer_file.named(f"{self._file} cannot write these tokens"):
            return self._tokenizer.decode(numbers)

    def stream(self, prompt: Sequence[int] = ()) -> Decode:
        """See `Tokenizer`; text is held back as long as its last character is incomplete."""
        # Each entry holds the tokens of whole characters: decoding that begins inside one, or
        # inside a run of bytes, would change what follows.
        shown: collections.deque[list[int]] = collections.deque([self._end(prompt)], _CONTEXT)
        waiting = list[int]()

        def decode(token: int | None) -> str:
            nonlocal waiting
            waiting += [] if token is None else [int(token)]
            context = [held for tokens in shown for held in tokens]
            before, text = self.decode(context), self.decode(context + waiting)
            if token is not None and text.endswith(_INCOMPLETE):
                return ""
            begun = before.endswith(_INCOMPLETE)
            if len(text) > len(before) and not begun:
                shown.append(waiting)
            else:  # special tokens must not push out tokens that have text
                shown[-1].extend(waiting)
            waiting = []
            # The prompt may have ended inside a character that is complete now.
            if begun and not text.startswith(before):
                before = before.rstrip(_INCOMPLETE)
            return text[len(before) :]

        return decode

    def special_token(self, text: str) -> int | None:
        """See `Tokenizer`."""
        added = self._tokenizer.get_added_tokens_decoder()
        return next((i for i, x in added.items() if x.special and x.content == text), None)

    def _end(self, prompt: Sequence[int]) -> list[int]:
        """The last tokens of a prompt, extended back to the beginning of a character."""
        start = max(len(prompt) - _CONTEXT, 0)
        earliest = max(start - _LONGEST_RUN, 0)
        while start > earliest and self.decode(prompt[start:]).startswith(_INCOMPLETE):
            start -= 1
        return [int(token) for token in prompt[start:]]


def load_tokenizer(
    path_or_name: str | os.PathLike[str] = "embedded", vocab_size: int | None = None
) -> Tokenizer:
    """The tokenizer of a checkpoint.

    Args:
      path_or_name: ``"embedded"`` for the shipped model, ``"smollm2"``, a GGUF file, or a
        checkpoint's folder.
      vocab_size: of the model, by default what the folder's `config.json` says.

    Returns:
      The folder's `tokenizer.json`. Without one, a `ByteTokenizer` if the vocabulary has 256
      tokens, which is how the embedded model reads, and a `NumberTokenizer` otherwise.

    Raises:
      ImportError: if there is a `tokenizer.json` and the package `tokenizers` is missing.
      FileNotFoundError: if there is neither a `tokenizer.json` nor a `config.json`.
      ValueError: if the tokenizer knows tokens that are not in the model's vocabulary, there is
        nothing but a `tokenizer.model`, nothing says how large the vocabulary is, or a file cannot
        be read.
    """
    if vocab_size is not None:
        _checks.check_sizes(vocab_size=vocab_size)
    if path_or_name == "embedded":
        if vocab_size not in (None, BYTES):
            raise ValueError(f"{vocab_size=} of the embedded model must be {BYTES}")
        # A text ends where the next one begins.
        return ByteTokenizer([BEGINNING_OF_FILE])
    folder = smollm2.file() if path_or_name == smollm2.NAME else Path(path_or_name)
    return _folder.steady(folder, lambda place: _load_tokenizer(folder, place, vocab_size))


def _load_tokenizer(folder: Path, place: Path, vocab_size: int | None) -> Tokenizer:
    """See `load_tokenizer`; the checkpoint's own files lie at `place`."""
    if _folder.is_gguf(folder):
        tokenizer = JsonTokenizer(folder)
        return _fitting(tokenizer, vocab_size or _folder.read_config(folder)["vocab_size"], folder)
    if os.path.lexists(file := _folder.find(folder, TOKENIZER_NAME)):
        tokenizer = JsonTokenizer(folder)
        if vocab_size is None:
            vocab_size = _vocab_size(
                place, _tokenizer_file.read_object(place / _folder.CONFIG_NAME)
            )
        return _fitting(tokenizer, vocab_size, f"{file} and {_tokenizer_file.CONFIG_NAME}")
    if (folder / _SENTENCEPIECE_NAME).is_file():
        raise ValueError(
            f"{str(folder)!r} holds {_SENTENCEPIECE_NAME} and no {TOKENIZER_NAME}: "
            f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r}) of "
            "the package transformers writes one"
        )
    if vocab_size is None:
        vocab_size = _vocab_size(place, text_part(_folder.read_config(place)))
    if vocab_size is None:
        raise ValueError(
            f"{str(folder)!r} must hold {TOKENIZER_NAME}, or a vocab_size in its config.json"
        )
    ends = _tokenizer_file.ends(folder, None)
    return ByteTokenizer(ends) if vocab_size == BYTES else NumberTokenizer(vocab_size, ends)


def _fitting(tokenizer: JsonTokenizer, vocab_size: int | None, source: object) -> JsonTokenizer:
    """The tokenizer; ValueError if it has tokens beyond the model's table, which may be larger."""
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"{source} know tokens up to {tokenizer.vocab_size - 1}, which must be below the "
            f"model's {vocab_size=}"
        )
    return tokenizer


def _vocab_size(folder: Path, config: Mapping[str, Any]) -> int | None:
    size = config.get("vocab_size")
    if size is None or (type(size) is int and 0 < size <= _tokenizer_file.LARGEST_TOKEN):
        return size
    raise ValueError(
        f"{folder / _folder.CONFIG_NAME}: vocab_size={_json.shown(size)} must be an integer "
        f"of 1 to {_tokenizer_file.LARGEST_TOKEN}"
    )


def _check_unicode(text: str) -> None:
    """Raises ValueError unless it is Unicode; the package's own message does not say why."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"the text is not Unicode: {error}") from error
