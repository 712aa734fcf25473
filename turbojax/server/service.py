"""What all answers of a server share."""

import asyncio
import concurrent.futures
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from turbojax import _checks, _json
from turbojax.models.engine.asynchronous import (
    AsyncEngine,
    EngineClosed,
    EngineEnded,
    QueueFull,
    RequestHandle,
)
from turbojax.models.engine.requests import Request
from turbojax.models.text.tokenizer import Tokenizer
from turbojax.server.fields import ApiError, Fields
from turbojax.server.metrics import Metrics
from turbojax.server.texts import TokenTexts

_T = TypeVar("_T")

_THREADS = 8
"""Threads of each kind that read requests and write answers. Work that takes seconds, such as a
grammar, has its own, so that it waits only for its like and nothing else waits for it."""

SHUTTING_DOWN = "the server is shutting down"


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one request may ask for.

    Attributes:
      body_bytes: of its body.
      prompt_tokens: of each of its prompts; None for what the engine takes.
      choices: texts that are generated for it: prompts times `n`, or `best_of`.
      retry_seconds: after which a client is told to come again where the queue is full.

    Raises:
      TypeError: if one is not an integer.
      ValueError: if one is not positive.
    """

    body_bytes: int = 16 * 2**20
    prompt_tokens: int | None = None
    choices: int = 128
    retry_seconds: int = 1

    def __post_init__(self) -> None:
        sizes = dataclasses.asdict(self)
        if self.prompt_tokens is None:
            del sizes["prompt_tokens"]
        _checks.check_sizes(**sizes)


class Service:
    """A model as a server offers it, under the name that clients ask for.

    A request generates `most_choices` texts at most.
    """

    def __init__(
        self, engine: AsyncEngine, tokenizer: Tokenizer, name: str, limits: Limits
    ) -> None:
        self.engine, self.tokenizer, self.name, self.limits = engine, tokenizer, name, limits
        self.token_texts = TokenTexts(tokenizer)
        self.metrics = Metrics(engine)
        self._quick = concurrent.futures.ThreadPoolExecutor(_THREADS, "turbojax-server")
        self._slow = concurrent.futures.ThreadPoolExecutor(_THREADS, "turbojax-server-slow")
        # The prompts of one request wait together.
        self.most_choices = min(limits.choices, engine.max_waiting)
        # Tokens, with the prompt, of a request that names no limit.
        self._longest = min(engine.max_length, engine.statistics().token_capacity)

    async def beside(self, takes_long: bool, work: Callable[..., _T], *values: Any) -> _T:
        """Calls `work` in a thread beside the event loop.

        Work that `takes_long`, perhaps seconds, has threads of its own.
        """
        pool = self._slow if takes_long else self._quick
        return await asyncio.get_running_loop().run_in_executor(pool, work, *values)

    def close(self) -> None:
        """Ends the threads; nothing is done beside the event loop any more."""
        for pool in (self._quick, self._slow):
            pool.shutdown(cancel_futures=True)

    def check_model(self, fields: Fields) -> None:
        """Raises ApiError if the field `model` is missing or names another model."""
        name = fields.text("model")
        if name is None:
            raise fields.error("model", f"{self.name!r}, the model that is served")
        if name != self.name:
            raise self.unknown_model(name)

    def unknown_model(self, name: str) -> ApiError:
        """Says that there is no such model."""
        return ApiError(
            f"model={_json.shown(name)} is not served here, {self.name!r} is",
            status=404,
            param="model",
            code="model_not_found",
        )

    def new_tokens(self, prompt: Sequence[int], asked: int | None, param: str) -> int:
        """How many tokens a prompt is continued by at most.

        `asked` is None for as many as there is room for; `param` is the field that the prompt came
        in.
        """
        most = self.limits.prompt_tokens
        if not prompt:
            raise ApiError(f"{param} has no tokens, must have at least one", param=param)
        if most is not None and len(prompt) > most:
            raise ApiError(
                f"{param} has {len(prompt)} tokens, must have at most {most}",
                param=param,
                code="context_length_exceeded",
            )
        room = self._longest if asked is None else self.engine.max_length
        wanted = 1 if asked is None else asked
        if len(prompt) + wanted > room:
            raise ApiError(
                f"{param} has {len(prompt)} tokens, which with {wanted} new ones must be at most "
                f"{room}",
                param=param,
                code="context_length_exceeded",
            )
        return room - len(prompt) if asked is None else asked

    def submit(self, requests: Sequence[Request], samples: int) -> list[RequestHandle]:
        """Gives all requests to the engine, or none: ApiError if the queue is full or it closes."""
        handles = list[RequestHandle]()
        try:
            with self.engine_errors():
                for request in requests:
                    handles.append(self.engine.submit(request, samples))
        except ApiError:
            for handle in handles:
                handle.cancel()
            raise
        return handles

    async def accepted(self, handles: Sequence[RequestHandle]) -> list[tuple[int, ...]]:
        """Waits until the engine has the requests; the numbers of each one's samples."""
        found = []
        for handle in handles:
            try:
                with self.engine_errors():
                    found.append(await handle.accepted())
            except (ValueError, TypeError, NotImplementedError) as error:
                raise ApiError(_json.line(str(error))) from error
        return found

    @contextmanager
    def engine_errors(self) -> Iterator[None]:
        """Turns the errors of an `AsyncEngine` into answers."""
        try:
            yield
        except QueueFull as error:
            raise ApiError(
                f"too many requests wait: {error}",
                status=429,
                code="queue_full",
                headers={"Retry-After": str(self.limits.retry_seconds)},
            ) from error
        except EngineClosed as error:
            raise ApiError(SHUTTING_DOWN, status=503, code="shutting_down") from error
        except EngineEnded as error:
            raise ApiError(str(error), status=500, code="engine_ended") from error
