"""The bytes that each token of a `tokenizer.json` adds to a text; grammars are matched to these."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_PRINTABLE = (*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100))


@dataclasses.dataclass(frozen=True)
class TokenBytes:
    """Tokens as bytes.

    Attributes:
      texts: for each token the bytes that it adds in the middle of a text; empty for special tokens
        and for numbers that no token has.
      special: texts of special tokens, which `Tokenizer.decode` leaves out, by token.
    """

    texts: Sequence[bytes]
    special: Mapping[int, str]


def token_bytes(tokenizer: Any, size: int) -> TokenBytes:
    """The bytes of the tokens of a tokenizer from the package `tokenizers`.

    Two ways of writing bytes as tokens are known: byte-level ones, introduced with GPT-2, whose
    characters each stand for a byte; and those of SentencePiece, whose spaces are U+2581, and where
    the token ``<0x0A>`` is a byte. `size` includes numbers that no token has.
    """
    steps = list(_steps(json.loads(tokenizer.to_str())["decoder"]))
    kinds = {step["type"] for step in steps}
    fallback = "ByteFallback" in kinds
    added = tokenizer.get_added_tokens_decoder()
    special = {number: token.content for number, token in added.items() if token.special}
    if kinds - {"Fuse"} == {"ByteLevel"}:
        byte_level = True
    elif _is_sentencepiece(steps):
        byte_level = False
    else:
        names = ", ".join(sorted(kinds)) or "none"
        raise NotImplementedError(
            f"the tokenizer's decoder ({names}) must be byte-level or that of SentencePiece: the "
            "tokens of others have no bytes of their own"
        )
    texts = [b""] * size
    for number in tokenizer.get_vocab(with_added_tokens=True).values():
        if number in special:
            continue
        # Not the vocabulary's text: decoding uses this one, which for added tokens is normalized.
        text = tokenizer.id_to_token(number)
        if byte_level:
            texts[number] = _of_byte_level(text)
        else:
            texts[number] = _of_sentencepiece(text, fallback)
    return TokenBytes(texts, special)


def _steps(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """The steps of a decoder, in their order."""
    if decoder is not None and decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _steps(step)
    elif decoder is not None:
        yield decoder


def _is_sentencepiece(steps: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a decoder only turns U+2581 to spaces and maybe bytes to characters.

    It may also strip a space from the beginning of the whole text, which changes nothing in its
    middle.
    """
    spaces, fused = False, False
    for step in steps:
        kind = step["type"]
        if kind == "Metaspace":
            spaces = step["replacement"] == _SPACE
        elif kind == "Replace" and step["pattern"] == {"String": _SPACE}:
            spaces = step["content"] == " "
        elif kind == "Fuse":
            fused = True
        elif kind == "Strip":
            if not fused or step["stop"]:
                return False
        elif kind != "ByteFallback":
            return False
    return spaces


def _of_sentencepiece(text: str, fallback: bool) -> bytes:
    if fallback and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        try:
            return bytes([int(text[3:5], 16)])
        except ValueError:
            pass  # looks like a byte and is none
    return text.replace(_SPACE, " ").encode()


def _bytes_of_characters() -> dict[str, int]:
    """GPT-2's characters of bytes: those that print are themselves, the others follow U+00FF."""
    others = [byte for byte in range(256) if byte not in _PRINTABLE]
    found = {chr(byte): byte for byte in _PRINTABLE}
    return found | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTES = _bytes_of_characters()


def _of_byte_level(text: str) -> bytes:
    # Like the package, take a token with any other character as plain text.
    if all(char in _BYTES for char in text):
        return bytes(_BYTES[char] for char in text)
    return text.encode()
