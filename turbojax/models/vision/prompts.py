"""Texts with images: the places of their soft tokens among the tokens of a prompt."""

from turbojax.models.text.tokenizer import Tokenizer
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

    Each ``"<start_of_image>"`` in the text, which is what chat templates write for an image,
    becomes two line breaks, that token, `tokens_per_image` soft tokens, ``"<end_of_image>"`` and
    two line breaks. What a user says may hold these texts, too.

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
    begin, soft, end = (tokenizer.special_tokens.get(x, usual) for x, usual in _TEXTS.items())
    if wrong := next((x for x in (soft, end) if x in text), None):
        raise ValueError(f"text must not hold {wrong!r}: it is written for each {begin!r}")
    count = text.count(begin)
    image = f"\n\n{begin}{soft * config.tokens_per_image}{end}\n\n"
    tokens = tokenizer.encode(text.replace(begin, image), add_special_tokens=add_special_tokens)
    wanted = {
        begin: (config.begin_token_id, count),
        soft: (config.image_token_id, count * config.tokens_per_image),
        end: (config.end_token_id, count),
    }
    for name, (token, number) in wanted.items():
        if tokens.count(token) != number:
            raise ValueError(
                f"the tokenizer must have the token {token}, as config.json says, for {name!r}: "
                f"the prompt holds {tokens.count(token)} of them, must hold {number}"
            )
    return tokens
