"""Results that follow a JSON schema, a regular expression or a grammar.

Each function here gives a `Constraint` for `Request.constraint`. The package llguidance compiles
grammars and matches texts: an Earley parser over derivatives of regular expressions, which finds
for every place in a text the tokens that it may go on with.

A token is allowed if the text with it can still become one that the grammar accepts. Special tokens
are allowed where a grammar names them, those that end a text where it may end, and none elsewhere.
So a result that ends with ``"stop"`` is what the grammar asks for, and one that ends with
``"length"`` is a beginning of it.
"""

import concurrent.futures
import functools
import json
import re
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from turbojax import _checks, _extras, _json
from turbojax.models.text.token_bytes import TokenBytes
from turbojax.models.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

_T = TypeVar("_T")

SPACES, MOST_SPACES = 16, 64
"""Spaces and line breaks between two parts of a JSON text, at most: by default, and if asked for.
Without a limit, small models would write them for ever."""

_OPTIONS_KEY = "x-guidance"  # where llguidance looks for its options within a schema
# Without this, where only one text can follow, only the tokens that encoding makes of it would be
# allowed. For text that looks like a special token, that would be the special token itself.
_ALL_TOKENS = '\n%llguidance {"no_forcing": true}\n'
_PLACE = re.compile(r"^at \d+\(\d+\): ")
_WITHIN = re.compile(r"\n +\d+ \| .*", re.DOTALL)
_KEPT = 64  # compiled grammars that are cached per tokenizer
# Compiling time grows with the square of these: some seconds at these limits.
_MOST_BYTES = 2**16
_MOST_SYMBOLS = 50_000
# Stack of the thread that compiles: llguidance recurses as deep as rules are nested, and a stack
# overflow ends the process. A grammar of `_MOST_BYTES` that only nests takes 40 MB.
_STACK_BYTES = 2**28


def json_schema(
    tokenizer: Tokenizer, schema: Mapping[str, Any] | bool, *, whitespace: int = SPACES
) -> "Grammar":
    """Results that are JSON of a schema.

    Properties come in the schema's order. Nearly all of JSON Schema is known; what is not, such as
    ``not`` and ``uniqueItems``, is refused, and so is a ``$ref`` to another document.

    Args:
      tokenizer: of the model.
      schema: a JSON schema.
      whitespace: how many characters may stand between two parts of the text at most; 0 for none.

    Raises:
      ImportError: if the package `llguidance` is not installed.
      NotImplementedError: if the tokenizer's tokens have no bytes.
      TypeError: if the schema is neither a mapping nor true or false.
      ValueError: if it is no schema, has an unknown part, is too large, or nothing fits it; the
        message says what is wrong.
    """
    if not isinstance(schema, Mapping | bool):
        raise TypeError(f"schema={_json.shown(schema)} must be a mapping, true or false")
    _checks.check_integer("whitespace", whitespace)
    if not 0 <= whitespace <= MOST_SPACES:
        raise ValueError(f"{whitespace=} must be within 0..{MOST_SPACES}")
    if schema is False:
        raise ValueError("schema=False fits no JSON, must fit one")
    parts = {} if schema is True else dict(schema)
    if _OPTIONS_KEY in parts:
        raise ValueError(f"{_OPTIONS_KEY!r} in a schema must not be: say whitespace= instead")
    options: dict[str, Any] = {"lenient": False, "whitespace_flexible": bool(whitespace)}
    if whitespace:
        options["whitespace_pattern"] = rf"[ \n\r\t]{{1,{whitespace}}}"
    try:
        text = json.dumps({**parts, _OPTIONS_KEY: options}, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"the JSON schema is no JSON: {error}") from error
    return _vocabulary(tokenizer).grammar("JSON schema", f"start: %json {text}{_ALL_TOKENS}")


def json_object(tokenizer: Tokenizer, *, whitespace: int = SPACES) -> "Grammar":
    """Results that are any JSON object; see `json_schema`."""
    return json_schema(tokenizer, {"type": "object"}, whitespace=whitespace)


def regex(tokenizer: Tokenizer, pattern: str) -> "Grammar":
    r"""Results that match a regular expression as a whole.

    Args:
      tokenizer: of the model.
      pattern: as Rust's crate `regex` writes it, which is much like Python's, without looking ahead
        or back and without references to groups. ``.`` does not match a line break, and ``\d``
        matches a digit of any script.

    Raises:
      ImportError: if the package `llguidance` is not installed.
      NotImplementedError: if the tokenizer's tokens have no bytes.
      TypeError: if the pattern is no text.
      ValueError: if it is no such expression, or nothing matches it.
    """
    _check_text("pattern", pattern)
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:  # llguidance would drop it
        raise ValueError(f"pattern={_json.shown(pattern)} must not end with a single \\")
    vocabulary = _vocabulary(tokenizer)
    from llguidance import regex_to_lark

    text = regex_to_lark(pattern, "")
    return vocabulary.grammar("regular expression", f"start: /{text}/{_ALL_TOKENS}")


def lark(tokenizer: Tokenizer, text: str) -> "Grammar":
    r"""Results that follow a context-free grammar.

    Args:
      tokenizer: of the model.
      text: in Lark's notation as llguidance reads it: rules in small letters, of which ``start`` is
        the text; terminals in capitals; ``"..."``, ``/regular expressions/``,
        ``%json {a JSON schema}``, ``%ignore``, ``<|a special token|>``.

    Raises:
      ImportError: if the package `llguidance` is not installed.
      NotImplementedError: if the tokenizer's tokens have no bytes.
      TypeError: if the grammar is no text.
      ValueError: if it is no grammar, or allows no text; the message says where.
    """
    _check_text("text", text)
    return _vocabulary(tokenizer).grammar("grammar", text + _ALL_TOKENS)


class Grammar:
    """A compiled grammar: a `Constraint`, which any number of texts and threads may share.

    Made by `json_schema`, `json_object`, `regex` and `lark`.
    """

    def __init__(self, matcher: "LLMatcher", known: np.ndarray) -> None:
        self._matcher, self._known = matcher, known

    def begin(self) -> "GrammarText":
        """See `Constraint`. Texts share what depends on the grammar alone."""
        return GrammarText(self._matcher.deep_copy(), self._known)


class GrammarText:
    """The state of a text that follows a grammar: a `ConstraintState`."""

    def __init__(self, matcher: "LLMatcher", known: np.ndarray) -> None:
        self._matcher, self._known = matcher, known

    def allowed(self) -> np.ndarray:
        """The tokens that may come next: uint32 ``[ceil(V / 32)]``, V the tokenizer's vocabulary.

        Where the grammar has come to its end these are the tokenizer's end tokens; if it has none,
        there are none, and then `is_complete` holds. After an `error` there are none either.
        """
        found = np.frombuffer(self._matcher.compute_bitmask(), np.dtype("<u4"))
        if self._matcher.is_error():  # its mask would allow end tokens
            return np.zeros_like(self._known)
        return found[: self._known.size] & self._known

    def accept(self, token: int) -> None:
        """Adds a token; one that is not allowed leads to an `error`."""
        self._matcher.consume_token(int(token))

    @property
    def is_complete(self) -> bool:
        """Whether the grammar accepts the text as it stands."""
        return not self._matcher.is_error() and self._matcher.is_accepting()

    @property
    def error(self) -> str:
        """Why the text cannot go on: a token that was not allowed, or limits; "" if it can."""
        return _message(self._matcher.get_error())


class _Vocabulary:
    """A tokenizer in llguidance's form, and the grammars compiled for it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        try:
            from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper
        except ImportError as error:
            raise ImportError(
                f"a grammar needs the package llguidance: {_extras.install('server')}"
            ) from error
        found: TokenBytes = tokenizer.token_bytes  # type: ignore[attr-defined]
        size, ends = len(found.texts), [x for x in tokenizer.eos_token_ids if x < len(found.texts)]
        special = {number: text.encode() for number, text in found.special.items()}
        # End tokens are special whatever else they are: byte 0 of the embedded model, for one.
        special |= {number: special.get(number, b"<end>") for number in ends}
        texts = [special.get(i, text) for i, text in enumerate(found.texts)]
        # No UTF-8 has the byte 255, with which llguidance marks special tokens.
        texts = [b"" if text.startswith(b"\xff") else text for text in texts]
        if not ends:  # llguidance needs one: a token beyond the existing ones
            texts, ends, special = [*texts, b"<end>"], [size], special | {size: b"<end>"}
        words = np.zeros(-(-size // 32) * 32, np.bool_)
        words[:size] = True
        self._known = np.packbits(words, bitorder="little").view(np.dtype("<u4"))
        tokens = _Tokens(texts, ends, sorted(special))
        self._tokenizer = LLTokenizer(TokenizerWrapper(tokens), eos_token=ends)
        self._limits = LLParserLimits(max_grammar_size=_MOST_SYMBOLS, verbose_errors=False)
        self._compile = functools.lru_cache(_KEPT)(self._compiled)

    def grammar(self, what: str, text: str) -> Grammar:
        """Compiles a grammar, or finds it compiled; error messages call it `what`."""
        if (size := len(text.encode())) > _MOST_BYTES:
            raise ValueError(f"the {what} of {size:,} bytes must have at most {_MOST_BYTES:,}")
        return self._compile(what, text)

    def _compiled(self, what: str, text: str) -> Grammar:
        matcher = _with_a_deep_stack(lambda: self._matcher(text))
        if matcher.is_error():
            error = matcher.get_error()
            # The place means nothing if the text was put into a grammar here.
            error = error if what == "grammar" else _PLACE.sub("", error)
            raise ValueError(f"the {what} cannot be used: {_message(error)}")
        return Grammar(matcher, self._known)

    def _matcher(self, text: str) -> "LLMatcher":
        from llguidance import LLMatcher

        grammar = LLMatcher.grammar_from_lark(text)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # fails here if nothing can be derived
        return matcher


class _Tokens:
    """What llguidance asks of a tokenizer; `ends` are tokens that end a text."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], ends: Sequence[int], special: Sequence[int]):
        self.tokens, self.eos_token_id, self.special_token_ids = tokens, ends[0], special

    def __call__(self, text: bytes | str) -> list[int]:
        """Raises: texts are never encoded, see `_ALL_TOKENS`."""
        raise NotImplementedError


_vocabularies = weakref.WeakKeyDictionary[Tokenizer, _Vocabulary]()
_lock, _stack_lock = threading.Lock(), threading.Lock()


def _vocabulary(tokenizer: Tokenizer) -> _Vocabulary:
    """The tokenizer's `_Vocabulary`, cached because making it takes up to a second."""
    if not hasattr(type(tokenizer), "token_bytes"):
        raise NotImplementedError(
            f"results of a {type(tokenizer).__name__} cannot follow a grammar: its tokens have no "
            "bytes, must be those of a tokenizer.json or bytes"
        )
    with _lock:
        if tokenizer not in _vocabularies:
            _vocabularies[tokenizer] = _Vocabulary(tokenizer)
        return _vocabularies[tokenizer]


def _with_a_deep_stack(call: Callable[[], _T]) -> _T:
    """Runs a call in a thread with a stack of `_STACK_BYTES` and returns what it returns."""
    found: concurrent.futures.Future[_T] = concurrent.futures.Future()

    def run() -> None:
        try:
            found.set_result(call())
        except BaseException as error:
            found.set_exception(error)

    with _stack_lock:
        # A thread that another one starts meanwhile gets as large a stack, and uses little of it.
        before = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=run, name="turbojax-grammar", daemon=True).start()
        finally:
            threading.stack_size(before)
    return found.result()


def _check_text(name: str, text: str) -> None:
    """Raises TypeError unless it is text, ValueError unless it is Unicode."""
    if not isinstance(text, str):
        raise TypeError(f"{name}={_json.shown(text)} must be text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is not Unicode: {error}") from error


def _message(text: str) -> str:
    """An error of llguidance on one line, without the part of the grammar that it quotes."""
    text = _WITHIN.sub("", text).removesuffix("<non-verbose/>").partition("<backtrace>")[0]
    return _json.line(text.removeprefix("failed to compile JSON schema: "))
