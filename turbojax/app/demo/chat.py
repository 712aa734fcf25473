"""The demo of a model that answers: one question through several KV caches, side by side."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from turbojax import models
from turbojax._environment import environment
from turbojax.app import text_model
from turbojax.app.demo.measure import (
    Progress,
    bits_of,
    cache_kind,
    check_caches,
    count_same,
    footer,
)
from turbojax.models.generation import session as generation

_QUESTION = "What is the capital of France, and what is it known for?"
# Columns of panels, where nothing says how wide a terminal is.
_WIDTH = 96


@dataclasses.dataclass(frozen=True)
class ChatSettings:
    """What to run: the options of the command; the other caches are compared to the first."""

    model: str
    question: str | None
    new_tokens: int = 64
    caches: tuple[str, ...] = ("exact", "4bit", "turbo4")
    uncompressed_layers: int = 0

    def __post_init__(self) -> None:
        if self.new_tokens < 1:
            raise ValueError(f"new_tokens={self.new_tokens} must be at least 1")
        check_caches(self.caches)

    @property
    def prompt(self) -> str:
        """What the user says."""
        return _QUESTION if self.question is None else self.question


@dataclasses.dataclass(frozen=True)
class ChatResult:
    """One cache's row: what the model answers greedily, in `tokens` tokens, and what that takes.

    Attributes:
      same_tokens: how many tokens equal the first cache's, up to the first difference.
      bits_per_token: mean of ``-log2 p(token)`` of the first cache's answer.
      nbytes: bytes of the cache, all layers.
      compression_ratio: bytes of a bfloat16 cache of the same capacity over `nbytes`.
      tokens_per_second: without the first step, which is compiled; None if there were too few.
    """

    name: str
    answer: str
    tokens: int
    same_tokens: int
    bits_per_token: float
    nbytes: int
    compression_ratio: float
    tokens_per_second: float | None


@dataclasses.dataclass(frozen=True)
class ChatReport:
    """Everything that is shown: results in the order asked for, and the whole run's wall time."""

    settings: ChatSettings
    prompt_tokens: int
    results: tuple[ChatResult, ...]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return {**environment(), **dataclasses.asdict(self)}


def answers(model: str) -> bool:
    """Whether a model has a chat template; without one its tokens must be bytes."""
    return models.load_tokenizer(model).chat_template is not None


def run(settings: ChatSettings, progress: Progress | None = None) -> ChatReport:
    """Asks the model once for every cache; `progress` is called as tokens are done."""
    begun = time.perf_counter()
    found = text_model.find_text_model(settings.model, jnp.dtype(jnp.float32))
    prompt = text_model.prompt_tokens(found, settings.prompt, chat=True)
    needed = len(prompt) + settings.new_tokens
    if needed > found.config.max_length:
        raise ValueError(
            f"question and answer need {needed} tokens, must be at most the model's "
            f"{found.config.max_length}"
        )
    model, results, first = found.load(), list[ChatResult](), list[int]()
    for name in settings.caches:
        result, tokens = _ask(model, settings, name, prompt, first, progress)
        first = first or tokens
        results.append(result)
    return ChatReport(settings, len(prompt), tuple(results), time.perf_counter() - begun)


def _ask(
    model: text_model.TextModel,
    settings: ChatSettings,
    name: str,
    prompt: Sequence[int],
    first: Sequence[int],
    progress: Progress | None,
) -> tuple[ChatResult, list[int]]:
    """One cache's row, and the tokens of its answer."""
    tokenizer, ends = model.tokenizer, model.tokenizer.eos_token_ids
    kind = cache_kind(name, model.decoder, settings.uncompressed_layers)

    def begin() -> generation.Session:
        return generation.start_in_bucket(
            model.decoder, [prompt], max_new_tokens=settings.new_tokens, cache=kind
        )

    session = begin()
    nbytes, ratio = session.caches.nbytes, session.caches.compression_ratio
    tokens, times = list[int](), list[float]()
    for new in generation.stream(session, settings.new_tokens, stop_tokens=ends):
        tokens.append(int(new[0]))
        times.append(time.perf_counter())
        if progress is not None:
            progress(name, 1)
    reference = first or tokens
    target = np.array([reference], np.int32)
    logits = generation.score(begin(), target, None if progress is None else _after(progress, name))
    result = ChatResult(
        name=name,
        answer=tokenizer.decode(tokens).strip(),
        tokens=len(tokens),
        same_tokens=count_same(tokens, reference),
        bits_per_token=float(np.mean(bits_of(logits[0], jnp.asarray(target[0])))),
        nbytes=nbytes,
        compression_ratio=ratio,
        tokens_per_second=(len(times) - 2) / (times[-1] - times[1]) if len(times) > 2 else None,
    )
    return result, tokens


def _after(progress: Progress, name: str) -> generation.Progress:
    return lambda count: progress(name, count)


def render(report: ChatReport) -> RenderableType:
    """The report for a terminal."""
    settings, first = report.settings, report.results[0]
    table = Table(
        title=f"{settings.model}: {report.prompt_tokens} tokens prefilled, answers through each "
        "cache",
        pad_edge=False,
    )
    table.add_column("cache")
    for column in (
        "same\ntokens",
        "bits/token of\nfirst answer",
        "cache\nbytes",
        "ratio",
        "tokens/s",
    ):
        table.add_column(column, justify="right")
    for x in report.results:
        table.add_row(
            x.name,
            f"{x.same_tokens} of {x.tokens}",
            f"{x.bits_per_token:.4f}",
            f"{x.nbytes:,}",
            f"{x.compression_ratio:.2f}x",
            "-" if x.tokens_per_second is None else f"{x.tokens_per_second:.1f}",
        )
    question = Panel(
        Text(settings.prompt.strip(), style="dim"), title="asked", title_align="left", width=_WIDTH
    )
    panels = [_panel(x, first) for x in report.results]
    return Group(question, table, *panels, footer(report.seconds, "tokens/s"))


def _panel(result: ChatResult, first: ChatResult) -> Panel:
    """An answer; what differs from the first one's stands out."""
    same = count_same(result.answer, first.answer)
    text = Text(result.answer[:same])
    text.append(result.answer[same:], style="bold yellow")
    title = f"{result.name} answers"
    if result is not first:
        is_same = result.answer == first.answer
        title += f": the same as {first.name}" if is_same else f": as {first.name}, and then"
    return Panel(text, title=title, title_align="left", width=_WIDTH)
