"""A `tokenizer.json`, and the files beside it: special tokens, added ones, templates, ends.

The Rust code of the package `tokenizers` trusts what it reads, so that is checked first.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from turbojax import _extras, _json
from turbojax.models.checkpoint import folder as _folder

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
    """The file's tokenizer, with padding turned off, and how the file would pad texts."""
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


CONFIG_NAME, ADDED = "tokenizer_config.json", "added_tokens_decoder"
LARGEST_TOKEN = 2**31 - 1

ChatTemplate = str | Mapping[str, str]
"""A Jinja template, or several by name: ``"default"``, ``"tool_use"``, ..."""

CHAT_TEMPLATE_NAME = "chat_template.jinja"
CHAT_TEMPLATES_FOLDER = "additional_chat_templates"
"""Where templates with other names than ``"default"`` lie, ``NAME.jinja``."""

_SPECIAL = (
    *("bos_token", "eos_token", "unk_token", "sep_token"),
    *("pad_token", "cls_token", "mask_token"),
)
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def read_folder(file: Path, folder: Path) -> Parts:
    """The tokenizer in `file`, with the files in `folder` that go with it; see `JsonTokenizer`."""
    tokenizer, padding = read(file)
    config = _folder.find(folder, CONFIG_NAME)
    settings = read_object(config)
    if ADDED not in settings:
        settings = {**settings, **read_object(_folder.find(folder, "special_tokens_map.json"))}
    # A file that pads texts names the token for it.
    settings = {**({} if padding is None else {"pad_token": padding["pad_token"]}), **settings}
    special = _special_tokens(settings)
    _add_tokens(tokenizer, settings, special.values(), config)

    def number(role: str) -> int | None:
        return None if role not in special else tokenizer.token_to_id(special[role])

    return Parts(
        tokenizer,
        special,
        number("bos_token"),
        ends(folder, number("eos_token")),
        _templates(folder, settings),
    )


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Texts of special tokens by role: the usual roles, and a model's own."""
    extra = settings.get("extra_special_tokens")
    own = [key for key in settings if key.endswith("_token") and key not in _SPECIAL]
    given = [(key, settings.get(key)) for key in (*_SPECIAL, *own)]
    given += extra.items() if isinstance(extra, Mapping) else []
    return {key: text for key, value in given if (text := _content(value)) is not None}


def _add_tokens(
    tokenizer: Any, settings: Mapping[str, Any], special: Iterable[str], path: Path
) -> None:
    """Adds the tokens of `added_tokens_decoder`, which `tokenizer.json` may lack.

    As in transformers, new ones get the next free numbers, in the order of their numbers here; for
    those that exist already, what is said here replaces what was said before.
    """
    import tokenizers

    found, meant, tokens = settings.get(ADDED) or {}, set(special), []
    if not isinstance(found, Mapping):
        raise ValueError(f"{path}: {ADDED} must be an object")
    for number, token in found.items():
        flags = {key: token[key] for key in _FLAGS if key in token} if _content(token) else {}
        if not (
            number.isdecimal()
            and len(number) < 11
            and isinstance(token, Mapping)
            and _content(token)
            and all(isinstance(flag, bool) for flag in flags.values())
        ):
            raise ValueError(
                f"{path}: {ADDED}, {_json.shown(number)}: {_json.shown(token)} must be an object "
                "with a content and flags, under a number"
            )
        text = token["content"]
        flags["special"] = flags.get("special", False) or text in meant
        tokens.append((int(number), tokenizers.AddedToken(text, **flags)))
    with named(f"{path}: {ADDED} cannot be added"):
        tokenizer.add_tokens([token for _, token in sorted(tokens, key=lambda pair: pair[0])])


def read_object(path: Path) -> Mapping[str, Any]:
    """A file's JSON object; an empty one if nothing is there."""
    return _json.read_object(path) if os.path.lexists(path) else {}


def _content(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def ends(folder: Path, eos: int | None) -> tuple[int, ...]:
    """Tokens that end a text: those of the generation's settings, and the tokenizer's own."""
    path = _folder.find(folder, "generation_config.json")
    path = path if os.path.lexists(path) else _folder.find(folder, _folder.CONFIG_NAME)
    found = read_object(path).get("eos_token_id")
    numbers = [] if found is None else found if isinstance(found, list) else [found]
    for number in numbers:
        if type(number) is not int or not 0 <= number <= LARGEST_TOKEN:
            raise ValueError(
                f"{path}: eos_token_id={_json.shown(found)} must be one token or a list of them"
            )
    return tuple(sorted({*numbers, *([] if eos is None else [eos])}))


def _templates(folder: Path, settings: Mapping[str, Any]) -> ChatTemplate | None:
    """The chat template, or several by their names."""
    files = {"default": _folder.find(folder, CHAT_TEMPLATE_NAME)}
    others = _folder.find_all(folder, f"{CHAT_TEMPLATES_FOLDER}/*.jinja")
    files |= {path.stem: path for path in others.values()}
    texts = {name: _read_text(path) for name, path in files.items() if os.path.lexists(path)}
    if texts:
        return texts["default"] if list(texts) == ["default"] else texts
    found = settings.get("chat_template")
    if found is None or isinstance(found, str):
        return found
    for entry in found if isinstance(found, list) else [None]:
        if not isinstance(entry, Mapping) or not all(
            isinstance(entry.get(key), str) for key in ("name", "template")
        ):
            raise ValueError(
                f"{_folder.find(folder, CONFIG_NAME)}: chat_template must be a text, or a list of "
                "objects with a name and a template"
            )
    return {entry["name"]: entry["template"] for entry in found}


def _read_text(path: Path) -> str:
    try:
        return _json.read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8: {error}") from error
