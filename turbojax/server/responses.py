"""From a request's prompts to its answer, at once or as a stream of chunks."""

import abc
import asyncio
import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any, ClassVar

from turbojax.models.engine.asynchronous import RequestHandle
from turbojax.models.engine.requests import (
    MOST_LOGPROBS,
    Event,
    Finished,
    Request,
    Result,
    best_of,
)
from turbojax.server.connections import to_json
from turbojax.server.fields import ApiError, Options
from turbojax.server.service import SHUTTING_DOWN, Service
from turbojax.server.texts import ChoiceText, Piece, TokenTexts

_SHORT = 2**15
"""Tokens, with the likely ones beside them, that are written in well under a second."""

_AT_ONCE = 64
"""Events that a client which has not read for long gets at a time; then others have their turn."""


@dataclasses.dataclass(frozen=True)
class Form(abc.ABC):
    """How an endpoint writes its answers.

    `logprobs` says whether log-probabilities are shown; ids begin with `prefix`, and `whole` and
    `chunk` are the values of `object` in whole answers and in chunks.
    """

    token_texts: TokenTexts
    logprobs: bool
    prefix: ClassVar[str]
    whole: ClassVar[str]
    chunk: ClassVar[str]

    @abc.abstractmethod
    def choice(self, prompt: int, piece: Piece) -> dict[str, Any]:
        """A whole choice, without its index and why it ends."""

    @abc.abstractmethod
    def first(self, prompt: int) -> dict[str, Any] | None:
        """What a stream says of a choice before there is a token."""

    @abc.abstractmethod
    def delta(self, prompt: int, piece: Piece) -> dict[str, Any]:
        """What a choice has more than before."""

    @abc.abstractmethod
    def last(self) -> dict[str, Any]:
        """What stands beside the reason why a choice ends."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A request that was read: one request of the engine for each prompt.

    For each prompt `samples` texts are generated, of which `n` are chosen.
    """

    requests: tuple[Request, ...]
    options: Options
    n: int
    samples: int
    form: Form


class Answer:
    """An answer that is under way."""

    def __init__(self, service: Service, job: Job) -> None:
        self._service, self._job = service, job
        self._head = {
            "id": f"{job.form.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": service.name,
        }
        self._handles = service.submit(job.requests, job.samples)
        self._numbers = list[tuple[int, ...]]()

    async def begin(self) -> None:
        """Waits until the engine has all requests; if it refuses one, cancels all with ApiError."""
        try:
            self._numbers = await self._service.accepted(self._handles)
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Ends what is not done: nobody wants it any more."""
        for handle in self._handles:
            handle.cancel()

    async def whole(self) -> bytes:
        """Waits for all texts: the answer as JSON; ApiError if one could not be generated."""
        results = list[tuple[Result, ...]]()
        try:
            with self._service.engine_errors():
                for handle in self._handles:
                    results.append(await handle.results())
        finally:
            self.cancel()
        tokens = sum(len(result.tokens) for of_prompt in results for result in of_prompt)
        said = 1 + MOST_LOGPROBS * (self._job.requests[0].logprobs is not None)
        # For many tokens, decoding the text and writing the JSON take long.
        return await self._service.beside(tokens * said > _SHORT, self._written, results)

    def _written(self, results: Sequence[tuple[Result, ...]]) -> bytes:
        job, choices = self._job, list[bytes]()
        for prompt, (request, of_prompt) in enumerate(zip(job.requests, results, strict=True)):
            chosen = list(of_prompt)
            for result in chosen:
                _check(result)
            if job.samples > job.n:
                chosen = best_of(chosen, job.n)
            for result in chosen:
                text = ChoiceText(self._service.tokenizer, request.tokens, job.options)
                choice = job.form.choice(prompt, text.whole(result))
                index, reason = len(choices), result.finish_reason
                # One choice at a time: while Python writes JSON no other thread runs.
                choices.append(to_json({"index": index, **choice, "finish_reason": reason}))
        rest = to_json({**self._head, "object": job.form.whole, "usage": _usage(results)})
        return b'{"choices":[' + b",".join(choices) + b"]," + rest.removeprefix(b"{")

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """The answer in chunks, as tokens come; ApiError if a text could not be generated."""
        job, tokenizer = self._job, self._service.tokenizer
        results: list[dict[int, Result]] = [{} for _ in job.requests]
        texts = [
            {n: ChoiceText(tokenizer, request.tokens, job.options) for n in numbers}
            for request, numbers in zip(job.requests, self._numbers, strict=True)
        ]
        try:
            for index in range(len(job.requests) * job.n):
                if (first := job.form.first(index // job.n)) is not None:
                    yield self._chunk(index, first)
            async with aclosing(self._events()) as batches:
                async for prompt, events in batches:
                    for chunk in self._told(prompt, events, texts[prompt], results[prompt]):
                        yield chunk
        finally:
            self.cancel()
        if job.options.include_usage:
            pairs = zip(self._numbers, results, strict=True)
            usage = _usage([tuple(found[n] for n in numbers) for numbers, found in pairs])
            yield {**self._head, "object": job.form.chunk, "choices": [], "usage": usage}

    async def _events(self) -> AsyncGenerator[tuple[int, list[Event]], None]:
        with self._service.engine_errors():
            async with aclosing(merged(self._handles)) as batches:
                async for prompt, events in batches:
                    for begin in range(0, len(events), _AT_ONCE):
                        if begin:
                            await asyncio.sleep(0)
                        yield prompt, events[begin : begin + _AT_ONCE]

    def _told(
        self,
        prompt: int,
        events: Sequence[Event],
        texts: dict[int, ChoiceText],
        results: dict[int, Result],
    ) -> Iterator[dict[str, Any]]:
        """Chunks for what happened to a prompt's choices: one for each, and one for its end."""
        form, numbers = self._job.form, self._numbers[prompt]
        ended = []
        for event in events:
            if isinstance(event, Finished):
                _check(event.result)
                texts[event.request_id].end()
                results[event.request_id] = event.result
                ended.append(event.request_id)
            else:
                texts[event.request_id].add(event.token, event.logprobs)
        for number in dict.fromkeys(event.request_id for event in events):
            index = prompt * self._job.n + numbers.index(number)
            piece = texts[number].take()
            if piece.text or piece.said:
                yield self._chunk(index, form.delta(prompt, piece))
            if number in ended:
                yield self._chunk(index, form.last(), results[number].finish_reason)

    def _chunk(
        self, index: int, choice: dict[str, Any], reason: str | None = None
    ) -> dict[str, Any]:
        told = {"index": index, **choice, "finish_reason": reason}
        chunk = {**self._head, "object": self._job.form.chunk, "choices": [told]}
        return {**chunk, "usage": None} if self._job.options.include_usage else chunk


async def merged(handles: Sequence[RequestHandle]) -> AsyncGenerator[tuple[int, list[Event]], None]:
    """The events of handles as they come, each with its handle's index; raises the first error."""
    if len(handles) == 1:
        async with aclosing(handles[0].batches()) as batches:
            async for events in batches:
                yield 0, events
        return
    queue: asyncio.Queue[tuple[int, list[Event] | Exception]] = asyncio.Queue(len(handles))

    async def read(place: int, handle: RequestHandle) -> None:
        try:
            async for events in handle.batches():
                await queue.put((place, events))
            await queue.put((place, []))
        except Exception as error:
            await queue.put((place, error))

    tasks = [asyncio.ensure_future(read(i, handle)) for i, handle in enumerate(handles)]
    running = len(tasks)
    try:
        while running:
            place, found = await queue.get()
            if isinstance(found, Exception):
                raise found
            if found:
                yield place, found
            else:
                running -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _check(result: Result) -> None:
    """Raises ApiError where a result is no text that somebody asked for."""
    if result.finish_reason == "failed":
        raise ApiError(
            "the text could not go on: the model's logits were NaN, or the constraint allowed no "
            "token",
            status=500,
            code="generation_failed",
        )
    if result.finish_reason == "aborted":
        raise ApiError(SHUTTING_DOWN, status=503, code="shutting_down")


def _usage(results: Sequence[tuple[Result, ...]]) -> dict[str, Any]:
    """Tokens of all prompts and of all that was generated, chosen or not."""
    prompts = [of_prompt[0] for of_prompt in results]
    prompt = sum(result.prompt_tokens for result in prompts)
    new = sum(len(result.tokens) for of_prompt in results for result in of_prompt)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": sum(result.reused_tokens for result in prompts)},
    }
