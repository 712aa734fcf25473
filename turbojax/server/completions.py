"""``/v1/completions``: texts or tokens that are continued."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from turbojax.server.errors import ApiError, blamed_on
from turbojax.server.fields import Fields, is_token
from turbojax.server.options import read_options, read_top_logprobs
from turbojax.server.responses import Job
from turbojax.server.service import Service
from turbojax.server.texts import Piece, TokenTexts

_NEW_TOKENS = 16
"""New tokens where a request does not say: OpenAI's default."""

_PROMPTS = (
    "a text, a list of texts, a list of tokens within 0..{} or a list of such lists, none empty"
)


@dataclasses.dataclass(frozen=True)
class CompletionForm:
    """How completions are written, see `Form`.

    `echoes` has for each prompt what stands before its new text; `logprobs` says whether
    log-probabilities are shown.
    """

    token_texts: TokenTexts
    echoes: tuple[str, ...]
    logprobs: bool
    prefix: str = "cmpl"
    whole: str = "text_completion"
    chunk: str = "text_completion"

    def choice(self, prompt: int, piece: Piece) -> dict[str, Any]:
        """See `Form`."""
        found = self.delta(prompt, piece)
        return {**found, "text": self.echoes[prompt] + piece.text}

    def first(self, prompt: int) -> dict[str, Any] | None:
        """See `Form`: the prompt, where it is wanted."""
        echo = self.echoes[prompt]
        return {"text": echo, "logprobs": None} if echo else None

    def delta(self, prompt: int, piece: Piece) -> dict[str, Any]:
        """See `Form`."""
        said = None
        if self.logprobs:
            said = self.token_texts.for_completion(piece.said, len(self.echoes[prompt]))
        return {"text": piece.text, "logprobs": said}

    def last(self) -> dict[str, Any]:
        """See `Form`."""
        return {"text": "", "logprobs": None}


def read_completion(service: Service, body: bytes) -> Job:
    """Reads a request from its JSON; ApiError if a field is wrong."""
    fields = Fields.of_body(body)
    service.check_model(fields)
    prompts = _prompts(fields, service)
    echo = fields.boolean("echo")
    logprobs = read_top_logprobs(fields, "logprobs")
    asked = fields.integer("max_tokens", 0)
    if asked == 0:
        raise fields.error("max_tokens", "at least 1: prompts alone are not scored")
    if echo and logprobs is not None:
        raise fields.error("echo", "false with logprobs: those of prompts are not computed")
    fields.only("suffix", ("",), "text is added at its end only")
    options = read_options(fields, service.tokenizer)
    most = max(service.most_choices // len(prompts), 1)
    n = fields.integer("n", 1, most) or 1
    samples = fields.integer("best_of", n, most) or n
    if samples > n and options.stream:
        raise fields.error("best_of", f"{n}, as n is, with stream=true")
    fields.refuse_others()
    if logprobs is not None:
        service.token_texts.prepare()
    # Samples are chosen by their log-probabilities.
    needed = 0 if logprobs is None and samples > n else logprobs
    count = _NEW_TOKENS if asked is None else asked
    requests = []
    for _, tokens in prompts:
        most = service.new_tokens(tokens, count, "prompt")
        requests.append(options.request(list(tokens), most, needed))
    echoes = tuple(text if echo else "" for text, _ in prompts)
    form = CompletionForm(service.token_texts, echoes, logprobs is not None)
    return Job(tuple(requests), options, n, samples, form)


def _prompts(fields: Fields, service: Service) -> list[tuple[str, Sequence[int]]]:
    """Each prompt as text and as tokens."""
    value, tokenizer = fields.raw("prompt"), service.tokenizer
    found = _as_list(value, tokenizer.vocab_size)
    if not found:
        raise fields.error("prompt", _PROMPTS.format(tokenizer.vocab_size - 1))
    if len(found) > service.most_choices:
        raise ApiError(
            f"prompt has {len(found)} texts, must have at most {service.most_choices}",
            param="prompt",
        )
    with blamed_on("prompt"):
        return [
            (x, tokenizer.encode(x)) if isinstance(x, str) else (tokenizer.decode(x), x)
            for x in found
        ]


def _as_list(value: object, vocab_size: int) -> list[Any]:
    """A list of texts and of lists of tokens; [] for anything else."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        return []

    def are_tokens(x: object) -> bool:
        return isinstance(x, list) and bool(x) and all(is_token(t, vocab_size) for t in x)

    if are_tokens(value):
        return [value]
    same = all(isinstance(x, str) for x in value) or all(are_tokens(x) for x in value)
    return value if same else []
