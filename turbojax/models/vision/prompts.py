"""Texts with images: the places of their soft tokens among the tokens of a prompt."""

from collections.abc import Sequence

from turbojax.models.text.special_text import Segment
from turbojax.models.text.tokenizer import JsonTokenizer, Tokenizer
from turbojax.models.vision.config import VisionConfig

_TEXTS = {
    "boi_token": "<start_of_image>",
    "image_token": "<image_soft_token>",
    "eoi_token": "<end_of_image>",
}
"""Special tokens of Gemma 3, for tokenizers that do not name them: before an image, one of its soft
tokens, after it."""


def image_prompt(
    tokenizer: Tokenizer, text: str, config: VisionConfig, *, add_special_tokens: bool = True
) -> list[int]:
    """The tokens of a text with images, as Gemma 3's processor in transformers makes them.

    Each ``"<start_of_image>"`` in the text becomes two line breaks, that token, `tokens_per_image`
    soft tokens, ``"<end_of_image>"`` and two line breaks. All that is written like a special token
    is one; for conversations `chat_tokens` takes `images`, and tells them apart.

    Args:
      tokenizer: of the checkpoint; names of its own for the three tokens count.
      text: a text, or what `render_chat` returns.
      config: `VisionModel.config`.
      add_special_tokens: see `Tokenizer.encode`; False for what `render_chat` returns.

    Returns:
      The tokens; with ``images=vision.images([...])`` of as many images `generate` takes them.

    Raises:
      ValueError: if the text holds one of the other two, or the tokenizer has other tokens for
        these texts than `config` says.
    """
    begin, soft, end = _texts(tokenizer)
    if wrong := next((x for x in (soft, end) if x in text), None):
        raise ValueError(f"text must not hold {wrong!r}: it is written for each {begin!r}")
    whole = "".join(piece for piece, _ in _image(tokenizer, config))
    written = text.replace(begin, whole)
    tokens = tokenizer.encode(written, add_special_tokens=add_special_tokens)
    _check_tokens(tokenizer, tokens, text.count(begin), config)
    return tokens


def encode_with_images(
    tokenizer: JsonTokenizer, segments: Sequence[Segment], config: VisionConfig
) -> list[int]:
    """The tokens of a text in pieces, see `JsonTokenizer.encode_segments`.

    Each special token ``"<start_of_image>"`` becomes what `image_prompt` makes of it.
    """
    meant = _texts(tokenizer)[0], True
    image = _image(tokenizer, config)
    whole = [new for piece in segments for new in (image if piece == meant else [piece])]
    tokens = tokenizer.encode_segments(whole)
    _check_tokens(tokenizer, tokens, segments.count(meant), config)
    return tokens


def _check_tokens(
    tokenizer: Tokenizer, tokens: Sequence[int], count: int, config: VisionConfig
) -> None:
    """Raises ValueError unless these are tokens of a text with so many images."""
    numbers = config.begin_token_id, config.image_token_id, config.end_token_id
    sizes = 1, config.tokens_per_image, 1
    for name, token, size in zip(_texts(tokenizer), numbers, sizes, strict=True):
        if tokens.count(token) != count * size:
            raise ValueError(
                f"the tokenizer must have the token {token}, as config.json says, for {name!r}: "
                f"the prompt holds {tokens.count(token)} of them, must hold {count * size}"
            )


def _texts(tokenizer: Tokenizer) -> tuple[str, str, str]:
    begin, soft, end = (tokenizer.special_tokens.get(x, usual) for x, usual in _TEXTS.items())
    return begin, soft, end


def _image(tokenizer: Tokenizer, config: VisionConfig) -> list[Segment]:
    """What stands for an image, in pieces."""
    begin, soft, end = _texts(tokenizer)
    special = [(begin, True), *[(soft, True)] * config.tokens_per_image, (end, True)]
    return [("\n\n", False), *special, ("\n\n", False)]
