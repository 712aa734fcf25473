"""An engine without a model, for tests of what stands around one."""

import dataclasses
import threading
import time

from turbojax.models.engine import EngineStatistics, Finished, NewToken, Request, Result
from turbojax.models.engine.requests import TokenLogprobs
from turbojax.models.generation.stopping import TextStream, check_stops


def answer(request: Request) -> list[int]:
    """Bytes that name the prompt, and the seed of what is drawn, again and again."""
    seed = f"#{request.sampling.seed}" if request.sampling.temperature else ""
    text = f"[{bytes(request.tokens).decode(errors='replace')}{seed}] "
    return list(text.encode())


class FakeEngine:
    """Behaves as `Engine` does, and keeps every request that it was given.

    Attributes:
      gate: steps wait until it is set.
      seen: all requests, samples one by one.
      fail: an exception that the next step raises.
      thread: the one that may call.
    """

    def __init__(
        self, *, tokenizer=None, max_sequences=4, max_length=4096, delay=0.0, texts=answer
    ) -> None:
        self.tokenizer, self.max_sequences, self.max_length = tokenizer, max_sequences, max_length
        self.delay, self.texts = delay, texts
        self.vocab_size = 256 if tokenizer is None else tokenizer.vocab_size
        self.gate = threading.Event()
        self.gate.set()
        self.seen: list[Request] = []
        self.fail: BaseException | None = None
        self.thread: int | None = None
        self.live: dict[int, tuple] = {}
        self.events: list = []
        self.steps = self.finished = self.new_tokens = self.prompt_tokens = 0

    def _check(self) -> None:
        self.thread = self.thread or threading.get_ident()
        assert threading.get_ident() == self.thread, "an engine is for one thread"

    @property
    def idle(self) -> bool:
        self._check()
        return not self.live and not self.events

    def add(self, request: Request) -> int:
        self._check()
        if request.total > self.max_length:
            raise ValueError(f"{request.total} tokens must be at most {self.max_length}")
        if max(request.tokens) >= self.vocab_size:
            raise ValueError(f"token={max(request.tokens)} must be within 0..{self.vocab_size - 1}")
        tokens, strings = check_stops(request.stop_tokens, request.stop_strings, self.tokenizer)
        stream = TextStream(self.tokenizer.stream(request.tokens), strings) if strings else None
        number = len(self.seen)
        self.seen.append(request)
        self.live[number] = (request, [], [], tokens, stream, time.monotonic())
        return number

    def add_samples(self, request: Request, count: int) -> tuple[int, ...]:
        numbers = []
        for i in range(count):
            seed = (request.sampling.seed + i) % 2**32
            sampling = dataclasses.replace(request.sampling, seed=seed)
            numbers.append(self.add(dataclasses.replace(request, sampling=sampling)))
        return tuple(numbers)

    def abort(self, request_id: int, *, reason="aborted") -> None:
        self._check()
        if request_id not in self.live:
            raise KeyError(f"request {request_id} is not known, or is done")
        self._finish(request_id, reason)

    def step(self) -> list:
        self._check()
        assert self.gate.wait(30)
        time.sleep(self.delay)
        self.steps += 1
        if self.fail is not None:
            raise self.fail
        for number in list(self.live)[: self.max_sequences]:
            self._advance(number)
        events, self.events = self.events, []
        return events

    def statistics(self) -> EngineStatistics:
        self._check()
        values = dict.fromkeys((x.name for x in dataclasses.fields(EngineStatistics)), 0)
        values |= {
            "steps": self.steps,
            "new_tokens": self.new_tokens,
            "prompt_tokens": self.prompt_tokens,
            "finished": self.finished,
            "waiting": max(len(self.live) - self.max_sequences, 0),
            "running": min(len(self.live), self.max_sequences),
            "pages": 100,
            "free_pages": 100 - len(self.live),
            "token_capacity": 100 * 64,
            "groups": (),
        }
        return EngineStatistics(**values)

    def _advance(self, number: int) -> None:
        request, tokens, logprobs, stops, stream, added = self.live[number]
        if request.timeout is not None and time.monotonic() - added > request.timeout:
            self._finish(number, "timeout")
            return
        if not tokens:
            self.prompt_tokens += len(request.tokens)
        text = self.texts(request)
        token = text[len(tokens) % len(text)]
        if token < 0:
            self._finish(number, "failed")
            return
        said = None
        if request.logprobs is not None:
            top = ((token, -0.5), *((other, -2.0 - other / 100) for other in range(65, 90)))
            said = TokenLogprobs(-0.5, top[: request.logprobs])
            logprobs.append(said)
        self.events.append(NewToken(number, len(tokens), token, said))
        tokens.append(token)
        self.new_tokens += 1
        if stream is not None:
            stream.add(token)
        if token in stops or (stream is not None and stream.stopped):
            self._finish(number, "stop")
        elif len(tokens) == request.max_new_tokens:
            self._finish(number, "length")

    def _finish(self, number: int, reason: str) -> None:
        request, tokens, logprobs, _, _, added = self.live.pop(number)
        self.finished += 1
        seconds = time.monotonic() - added
        said = None if request.logprobs is None else tuple(logprobs)
        first = seconds / 2 if tokens else None
        result = Result(
            tuple(tokens), reason, len(request.tokens), 0, 0, 0.0, first, seconds, logprobs=said
        )
        self.events.append(Finished(number, result))
