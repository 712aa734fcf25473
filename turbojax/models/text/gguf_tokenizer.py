"""The tokenizer of a GGUF file, built with the package `tokenizers` from the file's metadata.

Two kinds are known, by ``tokenizer.ggml.model``: ``"gpt2"``, byte-level BPE, whose way of splitting
texts first has a name (``tokenizer.ggml.pre``); and ``"llama"``, SentencePiece's BPE, whose merges
follow from scores.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from turbojax import _extras
from turbojax._json import shown
from turbojax.models.checkpoint.gguf import header as _header
from turbojax.models.text import tokenizer_file as _tokenizer_file
from turbojax.models.text.tokenizer_file import Parts

_PREFIX = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"

# Roles of special tokens, and the keys of their numbers.
_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",
    "mask_token": "mask_token_id",
}
# Further tokens that end a turn: keys, and texts of control tokens, as llama.cpp knows them.
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_TEXTS = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>"),
    *("<|end_of_text|>", "<EOT>", "_<EOT>"),
}

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*",
)
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = "|".join(_WORDS) + r"|\p{N}" + _REST
_GPT4O = "|".join(x + r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?" for x in _WORDS) + r"|\p{N}{1,3}" + _REST
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"


class _Split(NamedTuple):
    """How texts are split before they are merged to tokens.

    Attributes:
      patterns: applied one after the other; both matches and what lies between them are pieces.
      by_bytes: whether pieces are finally split as GPT-2's are.
      adds_bos: whether a text begins with a BOS token if the file does not say.
      ignores_merges: whether a piece that is a token becomes that token without merges.
      normalizes: whether texts are brought to Unicode's form NFC, as the model's authors do.
    """

    patterns: tuple[str, ...] = ()
    by_bytes: bool = False
    adds_bos: bool = False
    ignores_merges: bool = False
    normalizes: bool = False


_LLAMA3_SPLIT = _Split((_LLAMA3,), adds_bos=True, ignores_merges=True)
_SPLITS: Mapping[str, _Split] = {
    "default": _Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _Split(by_bytes=True),
    "smollm": _Split((r"\p{N}",), by_bytes=True),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), _LLAMA3_SPLIT),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _Split((_LLAMA3,))),
    "qwen2": _Split((_QWEN2,), normalizes=True),
    "deepseek-r1-qwen": _Split((_QWEN2,)),
    "gpt-4o": _Split((_GPT4O,)),
    "tekken": _Split((_TEKKEN,), adds_bos=True, ignores_merges=True),
}


def read(file: Path) -> Parts:
    """The tokenizer of a GGUF file."""
    try:
        import tokenizers  # noqa: F401 - asked for before anything is read
    except ImportError as error:
        raise ImportError(
            f"{file} needs the package tokenizers: {_extras.install('gguf')}"
        ) from error
    source = _Source(file, _header.read(file).metadata)
    kinds = {"gpt2": _byte_level, "llama": _sentencepiece}
    kind = source.metadata.get(f"{_PREFIX}model")
    if kind not in tuple(kinds):
        raise NotImplementedError(
            f"{file}: {_PREFIX}model={shown(kind)} is not supported: must be one of "
            f"{', '.join(kinds)}"
        )
    with _tokenizer_file.named(f"{file}: the metadata hold no tokenizer that can be read"):
        tokenizer = kinds[kind](source)
        _add_tokens(tokenizer, source)
        _surround(tokenizer, source)
    special = {
        role: source.tokens[number]
        for role, key in _ROLES.items()
        if (number := source.number(key)) is not None
    }
    ends = {source.number(key) for key in _END_KEYS} - {None}
    ends |= {i for i in source.of_type(_CONTROL) if source.tokens[i] in _END_TEXTS}
    return Parts(
        tokenizer,
        special,
        source.number("bos_token_id"),
        tuple(sorted(x for x in ends if x is not None)),
        _templates(source),
    )


def companions(file: Path) -> dict[str, bytes]:
    """The files of a folder in Hugging Face's layout that stand for a GGUF file's tokenizer."""
    parts = read(file)
    template = parts.chat_template
    if isinstance(template, Mapping):
        found: Any = [{"name": name, "template": text} for name, text in template.items()]
    else:
        found = template
    settings = {**parts.special_tokens, **({} if found is None else {"chat_template": found})}
    texts = {
        "tokenizer.json": parts.tokenizer.to_str(),
        "tokenizer_config.json": json.dumps(settings, indent=2),
        "generation_config.json": json.dumps({"eos_token_id": list(parts.eos_token_ids)}),
    }
    return {name: text.encode() for name, text in texts.items()}


class _Source:
    """The metadata of a tokenizer, checked; `tokens` are texts and `types` kinds, by number."""

    def __init__(self, file: Path, metadata: Mapping[str, Any]) -> None:
        self.file, self.metadata = file, metadata
        self.tokens: list[str] = self.strings("tokens")
        types = metadata.get(f"{_PREFIX}token_type")
        if types is None:
            types = np.ones(len(self.tokens), np.int32)
        self.types = self._numbers("token_type", types, "iu")

    def strings(self, key: str) -> list[str]:
        """The strings of a key."""
        found = self.metadata.get(_PREFIX + key)
        if not isinstance(found, list):
            raise ValueError(f"{self.file}: {_PREFIX}{key} must be there, as a list of strings")
        return found

    def scores(self) -> np.ndarray:
        """The score of each token."""
        return self._numbers("scores", self.metadata.get(f"{_PREFIX}scores"), "f")

    def number(self, key: str) -> int | None:
        """A token's number, or None."""
        found = self.metadata.get(_PREFIX + key)
        if found is None:
            return None
        if type(found) is not int or not 0 <= found < len(self.tokens):
            raise ValueError(
                f"{self.file}: {_PREFIX}{key}={shown(found)} must be one of "
                f"{len(self.tokens)} tokens"
            )
        return found

    def flag(self, key: str, default: bool) -> bool:
        """The value of a switch."""
        found = self.metadata.get(_PREFIX + key, default)
        if not isinstance(found, bool):
            raise ValueError(f"{self.file}: {_PREFIX}{key}={shown(found)} must be true or false")
        return found

    def of_type(self, *types: int) -> Iterator[int]:
        """Numbers of the tokens of some types."""
        return (int(i) for i in np.flatnonzero(np.isin(self.types, types)))

    def split(self) -> _Split:
        """How texts are split."""
        name = self.metadata.get(f"{_PREFIX}pre")
        if name not in tuple(_SPLITS):
            raise NotImplementedError(
                f"{self.file}: {_PREFIX}pre={shown(name)} is not supported: must be one of "
                f"{', '.join(_SPLITS)}"
            )
        return _SPLITS[name]

    def _numbers(self, key: str, found: Any, kinds: str) -> np.ndarray:
        if (
            not isinstance(found, np.ndarray)
            or found.dtype.kind not in kinds
            or len(found) != len(self.tokens)
        ):
            raise ValueError(
                f"{self.file}: {_PREFIX}{key} must be there, a number for each of "
                f"{len(self.tokens)} tokens"
            )
        return found


def _byte_level(source: _Source) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    split = source.split()
    unused = set(source.of_type(_UNUSED))
    vocab = {text: i for i, text in enumerate(source.tokens) if i not in unused}
    merges = []
    for merge in source.strings("merges"):
        first, space, second = merge.partition(" ")
        if not space or not first or not second or " " in second:
            raise ValueError(
                f"{source.file}: {_PREFIX}merges: {shown(merge)} must be two texts with a space "
                "between them"
            )
        merges.append((first, second))
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, ignore_merges=split.ignores_merges)
    )
    if split.normalizes:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Split(Regex(x), "isolated") for x in split.patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.by_bytes))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(source: _Source) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens = source.tokens
    scores: Sequence[float] = source.scores().tolist()
    if str(source.metadata.get("general.architecture")).startswith("gemma"):
        # Its scores mean nothing; the tokens are in the order in which they were learned.
        scores = [-float(i) for i in range(len(tokens))]
    vocab = {text: i for i, text in enumerate(tokens)}
    apart = set(source.of_type(_UNKNOWN, _CONTROL, _UNUSED, _BYTE))
    merged = {text: i for text, i in vocab.items() if i not in apart}
    unknown = source.number("unknown_token_id")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges(merged, scores),
            unk_token=tokens[0 if unknown is None else unknown] if tokens else None,
            fuse_unk=True,
            byte_fallback=any(source.of_type(_BYTE)) or "<0x0A>" in vocab,
        )
    )
    prefix = source.flag("add_space_prefix", True)
    before = [normalizers.Prepend(_SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", _SPACE)])
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(
        [*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])]
    )
    return tokenizer


def _merges(vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Pairs of tokens that together are a token, the best first."""
    found = []
    for text, number in vocab.items():
        for i in range(1, len(text)):
            one, other = text[:i], text[i:]
            if one in vocab and other in vocab:
                order = (-scores[number], -len(one), -len(other), vocab[one], vocab[other])
                found.append((order, one, other))
    found.sort()
    return [(one, other) for _, one, other in found]


def _add_tokens(tokenizer: Any, source: _Source) -> None:
    """Adds the tokens that are found in a text before anything else."""
    from tokenizers import AddedToken

    # As in llama.cpp, though files do not say it: Phi-3's swallow the space that follows.
    swallows = source.metadata.get("general.architecture") == "phi3" and (
        source.metadata.get(f"{_PREFIX}model") == "llama"
    )
    kept = {"<unk>", "<s>", "<|endoftext|>"}
    special = [
        AddedToken(text, special=True, normalized=False, rstrip=swallows and text not in kept)
        for i in source.of_type(_UNKNOWN, _CONTROL)
        if (text := source.tokens[i])
    ]
    tokenizer.add_special_tokens(special)
    users = [source.tokens[i] for i in source.of_type(_USER_DEFINED)]
    tokenizer.add_tokens([AddedToken(x, special=False, normalized=False) for x in users if x])


def _surround(tokenizer: Any, source: _Source) -> None:
    """Adds the tokens that stand around every text."""
    from tokenizers import processors

    is_llama = source.metadata[f"{_PREFIX}model"] == "llama"
    begins = source.flag("add_bos_token", is_llama or source.split().adds_bos)
    roles = {"bos": begins, "eos": source.flag("add_eos_token", False)}
    numbers = {role: source.number(f"{role}_token_id") for role, is_on in roles.items() if is_on}
    for role, number in numbers.items():
        if number is None:
            raise ValueError(
                f"{source.file}: {_PREFIX}{role}_token_id must be there, since "
                f"{_PREFIX}add_{role}_token says that it stands around texts"
            )
    texts = {role: source.tokens[i] for role, i in numbers.items() if i is not None}
    if not texts:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
        return
    template = [*([texts["bos"]] if "bos" in texts else []), "$A"]
    template += [texts["eos"]] if "eos" in texts else []
    pairs = [(source.tokens[i], i) for i in numbers.values() if i is not None]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=pairs)


def _templates(source: _Source) -> str | Mapping[str, str] | None:
    """The chat template, or several by their names."""
    found: dict[str, str] = {}
    for key, text in source.metadata.items():
        name = key.removeprefix(_TEMPLATE)
        if name == key or not (name == "" or name.startswith(".")):
            continue
        if not isinstance(text, str):
            raise ValueError(f"{source.file}: {key} must be a text")
        found[name[1:] or "default"] = text
    return found.get("default") if list(found) in ([], ["default"]) else found
