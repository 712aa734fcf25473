"""Many texts in, many texts out: what `turbojax serve` does around an engine."""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from turbojax import _garbage
from turbojax.app.serve.requests import TextRequest, longest
from turbojax.app.serve.settings import Models, Pool, Settings, make_engine, plan
from turbojax.app.text_model import FoundModel, TextModel, than_bfloat16
from turbojax.models import Decoder, QuantizedDecoder, TransformerConfig
from turbojax.models.engine import (
    Engine,
    EngineStatistics,
    Event,
    Finished,
    NewToken,
    Replicas,
    Result,
)
from turbojax.models.engine.requests import TokenLogprobs, best_of
from turbojax.models.generation.stopping import TextStream
from turbojax.models.tensor_parallel.layout import parts
from turbojax.models.text.tokenizer import Tokenizer
from turbojax.rotary import LongRopeScaling

_DIGITS = 6


@dataclasses.dataclass(frozen=True)
class ServingReport:
    """What became of requests.

    Attributes:
      requests: how many ran, at most `max_sequences` at a time.
      statistics: of the engine; None where nothing was left to run.
      kept: requests that had a result already.
      skipped: bad lines.
    """

    requests: int
    kv_dtype: str
    page_size: int
    max_sequences: int
    statistics: EngineStatistics | None = None
    kept: int = 0
    skipped: int = 0
    uncompressed_layers: int = 0

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        held = self.statistics
        return {**own, "statistics": None if held is None else held.to_json()}

    def summary(self) -> str:
        """One line: speed, memory, and what the scheduler did."""
        parts = [f"{self.requests} requests"]
        if self.statistics is not None:
            parts = self._of_engine(self.statistics)
        if self.kept:
            parts.append(f"{self.kept} had results already")
        if self.skipped:
            parts.append(f"{self.skipped} bad lines skipped")
        return "; ".join(parts)

    def _of_engine(self, held: EngineStatistics) -> list[str]:
        edges = ""
        if self.uncompressed_layers:
            edges = f" ({self.uncompressed_layers} layers at either end uncompressed)"
        per_step = 1000 * held.host_seconds_per_step
        parts = [
            f"{self.requests} requests, {held.new_tokens:,} tokens, "
            f"{held.tokens_per_second:,.1f} tokens/s",
            f"{held.steps:,} steps, the host worked {per_step:.2f} ms in each",
            f"{self.kv_dtype} pages{edges} for {held.token_capacity:,} tokens, "
            f"{held.pool_bytes:,} bytes ({than_bfloat16(held.compression_ratio)})",
            f"{held.reused_tokens:,} prompt tokens reused ({held.prefix_hit_rate:.0%}), "
            f"{held.preemptions} preemptions",
        ]
        if held.proposed_tokens:
            parts.append(
                f"{held.accepted_tokens:,} of {held.proposed_tokens:,} guesses accepted "
                f"({held.acceptance_rate:.0%})"
            )
        return parts


def serve(
    model: TextModel,
    requests: Sequence[TextRequest],
    settings: Settings | None = None,
    *,
    emit: Callable[[dict[str, Any]], None],
    progress: Callable[[int, int], None] | None = None,
    accepted: Callable[[], None] | None = None,
    done: Collection[str | int] = (),
    draft: Decoder | QuantizedDecoder | None = None,
    free_bytes: int | None = None,
) -> ServingReport:
    """Runs requests through an engine, which is made for all of them, those in `done` included.

    A result's `tokens` are all that were generated, with those of the stop text, which its `text`
    leaves out. `emit` is called with each result as soon as there is one, as plain JSON values;
    `accepted` once, when nothing was wrong with any request and before the first one runs; and
    `progress` after each step of the engine, the first of which compiles, with the number of new
    tokens, and of requests done, since the last call. Requests whose ids are in `done` do not run.
    For `free_bytes` see `plan`.
    """
    chosen = Settings() if settings is None else settings
    running = [request for request in requests if request.id not in done]
    if not running:
        raise ValueError("there must be at least one request")
    decoder = model.decoder
    pool = plan_for(requests, Models.of(decoder, draft), chosen, free_bytes)
    engine = make_engine(decoder, model.tokenizer, chosen, pool, draft)
    texts = dict[int, _Samples]()
    for request in running:
        try:
            numbers = engine.add_samples(request.request, request.samples)
        except ValueError as error:
            raise ValueError(f"line {request.line}: {error}") from error
        texts |= dict.fromkeys(numbers, _Samples(request, model.tokenizer))
    if accepted is not None:
        accepted()
    with _garbage.only_of_new_objects():
        while not engine.idle:
            events = engine.step()
            ended = _follow(events, texts, emit)
            if progress is not None:
                progress(sum(isinstance(event, NewToken) for event in events), ended)
    return report_of(engine, chosen, pool, len(running), kept=len(requests) - len(running))


def report_of(
    engine: Engine | Replicas, settings: Settings, pool: Pool, requests: int, kept: int = 0
) -> ServingReport:
    """What an engine did with so many requests, beside those that had a result before (`kept`)."""
    return ServingReport(
        requests,
        settings.kv_dtype,
        settings.page_size,
        pool.max_sequences,
        engine.statistics(),
        kept=kept,
        uncompressed_layers=settings.uncompressed_layers,
    )


def plan_for(
    requests: Sequence[TextRequest], models: Models, settings: Settings, free_bytes: int | None
) -> Pool:
    """The sizes of an engine for these requests, see `plan`; ValueError if there are none."""
    if not requests:
        raise ValueError("there must be at least one request")
    return plan(
        models,
        settings,
        max_length=max_length_of(requests, models.config),
        requests=sum(request.samples for request in requests),
        free_bytes=free_bytes,
    )


def model_name(found: FoundModel, requests: Sequence[TextRequest], settings: Settings) -> str:
    """A text that differs where the results of equal requests may: for `requests.digest`.

    Models are told apart by shape and size. With LongRoPE it also counts which factors the engine
    takes, which follows from the longest of all requests.
    """
    config = found.config
    name = f"{_shape(config)} {found.dtype} {found.weight_bytes} {settings.kv_dtype}"
    if settings.uncompressed_layers:
        name += f" {settings.uncompressed_layers} uncompressed"
    if (devices := parts(found.axes)) > 1:  # which round in another way than one
        name += f" split over {devices}"
    if not isinstance(config.rope_scaling, LongRopeScaling):
        return name
    long = max_length_of(requests, config) > config.rope_scaling.original_max_length
    return f"{name} {'long' if long else 'short'} factors"


def _shape(config: TransformerConfig) -> str:
    """A model's configuration in words that stay the same from one version to the next.

    Results that an earlier version wrote hold a digest of this text, and --resume must accept them.
    So the configuration keeps the name that it had when the first such file was written.
    """
    return f"LlamaConfig({', '.join(f'{name}={x!r}' for name, x in config.told().items())})"


def max_length_of(requests: Sequence[TextRequest], config: TransformerConfig) -> int:
    """The `max_length` of an engine for these requests."""
    return min(longest(requests), config.max_length)


class _Samples:
    """The results of a request, until there are all."""

    def __init__(self, request: TextRequest, tokenizer: Tokenizer) -> None:
        self._request, self._tokenizer = request, tokenizer
        self._results = dict[int, Result]()

    def add(self, number: int, result: Result) -> dict[str, Any] | None:
        """Adds one; the request's line of results, if it was the last one."""
        self._results[number] = result
        if len(self._results) < self._request.samples:
            return None
        found = [result for _, result in sorted(self._results.items())]
        if self._request.samples > self._request.count:
            found = best_of(found, self._request.count)
        first, *others = map(self._to_json, found)
        line = {"id": self._request.id, **first}
        return line if self._request.count == 1 else {**line, "others": others}

    def _to_json(self, result: Result) -> dict[str, Any]:
        found = {
            "text": self._text(result.tokens),
            "tokens": list(result.tokens),
            "finish_reason": result.finish_reason,
            "seconds": round(result.seconds, _DIGITS),
            "first_token_seconds": _rounded(result.first_token_seconds),
            "prompt_tokens": result.prompt_tokens,
            "reused_tokens": result.reused_tokens,
            "preemptions": result.preemptions,
        }
        if self._request.shows_logprobs and result.logprobs is not None:
            found |= _logprobs(result.logprobs, self._request.request.logprobs or 0)
        return found

    def _text(self, tokens: Iterable[int]) -> str:
        """The text, without stop tokens and stop texts."""
        request = self._request.request
        text = TextStream(self._tokenizer.stream(list(request.tokens)), self._request.stop)
        for token in tokens:
            if token not in request.stop_tokens:
                text.add(token)
        text.add(None)
        return text.text


def _follow(
    events: Iterable[Event],
    texts: dict[int, _Samples],
    emit: Callable[[dict[str, Any]], None],
) -> int:
    """Hands out results of requests that are done; how many."""
    ended = 0
    for event in events:
        if isinstance(event, Finished):
            line = texts.pop(event.request_id).add(event.request_id, event.result)
            if line is not None:
                emit(line)
                ended += 1
    return ended


def _logprobs(given: Sequence[TokenLogprobs], top: int) -> dict[str, Any]:
    """Log-probabilities of each token and, where asked for, of the most likely ones."""
    found: dict[str, Any] = {"logprobs": [_rounded(x.logprob) for x in given]}
    if top:
        found["top_logprobs"] = [[[i, _rounded(value)] for i, value in x.top] for x in given]
    return found


def _rounded(number: float | None) -> float | None:
    # JSON has no infinity: an impossible token's log-probability is null.
    return round(number, _DIGITS) if number is not None and math.isfinite(number) else None
