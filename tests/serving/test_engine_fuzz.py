"""The whole engine, on a tiny model, against the same engine with one request at a time.

Pools that are too small, equal beginnings, every kind of sampling, requests that come late, twice
or are ended while a step of theirs is under way.
"""

import dataclasses
import random

import jax.numpy as jnp
import pytest

from tests.serving.engine_helpers import TINY, make, run_one
from turbojax import models
from turbojax.models import Engine, NewToken, Request, Sampling

LENGTH, SLOTS, REQUESTS = 96, 3, 900
TOKENIZER = models.NumberTokenizer(97)
OPTIONS = {
    "max_length": LENGTH,
    "max_sequences": SLOTS,
    "step_tokens": 5,
    "reproducible": True,
    "tokenizer": TOKENIZER,
}
SAMPLINGS = (
    Sampling(),
    Sampling(),
    Sampling(0.8, seed=1),
    Sampling(0.8, seed=2),
    Sampling(1.0, top_k=5, seed=1),
    Sampling(1.0, top_p=0.7, seed=2),
)


class Fuzz:
    """Requests and their results alone, each run once."""

    def __init__(self, model: models.Decoder, kv_dtype: str, seed: int) -> None:
        self.model, self.kv_dtype = model, kv_dtype
        self.rng = random.Random(seed)
        self.single = make(model, **OPTIONS, kv_dtype=kv_dtype, num_pages=6, prefix_caching=False)
        self.texts = [[self.rng.randrange(97) for _ in range(90)] for _ in range(3)]
        self.known: dict[Request, tuple[int, ...]] = {}
        self.preemptions = self.hits = self.aborted = self.ended = 0

    def alone(self, request: Request) -> tuple[int, ...]:
        if request not in self.known:
            self.known[request] = run_one(self.single, request)
        return self.known[request]

    def request(self) -> Request:
        rng = self.rng
        # Where pages end, one before and one after.
        size = rng.choice([1, 5, 15, 16, 17, 31, 32, 33, 48, 49, 80])
        prompt = rng.choice(self.texts)[:size]
        if rng.random() < 0.3:
            prompt = [*prompt[:-1], rng.randrange(97)]
        count = min(rng.choice([1, 2, 16, 17, 30, 48, 64]), LENGTH - size)
        request = Request(prompt, count, sampling=rng.choice(SAMPLINGS))
        if rng.random() < 0.3:
            stop = rng.choice(self.alone(request))
            return Request(prompt, count, (stop,), request.sampling)
        if rng.random() < 0.2:
            # The end of a token's text, and the beginning of a later one's.
            text = TOKENIZER.decode(self.alone(request)[-4:])
            stop = text[rng.randrange(3) : -rng.randrange(1, 3)] or text
            return dataclasses.replace(request, stop_strings=[stop])
        return request

    def round(self) -> None:
        """One engine, until it is idle."""
        rng = self.rng
        pages = rng.choice([6, 6, 9])  # every number compiles a program
        made = make(
            self.model,
            **OPTIONS,
            kv_dtype=self.kv_dtype,
            num_pages=pages,
            cache_results=rng.random() < 0.3,
        )
        live: dict[int, Request] = {}
        tokens: dict[int, list[int]] = {}
        todo = rng.randrange(3, 12)
        while todo or not made.idle:
            while todo and rng.random() < 0.5:
                request = self.request()
                for _ in range(rng.choice([1, 1, 1, 2])):
                    number = made.add(request)
                    live[number], tokens[number] = request, []
                todo -= 1
            pending = [number for number in live if number in made._tracker.sequences]
            if pending and rng.random() < 0.02:
                made.abort(rng.choice(pending))
            self.step(made, live, tokens)
        self.check_empty(made, pages)

    def step(self, made: Engine, live: dict, tokens: dict) -> None:
        for event in made.step():
            if isinstance(event, NewToken):
                assert event.index == len(tokens[event.request_id])
                tokens[event.request_id].append(event.token)
                continue
            result, want = event.result, self.alone(live.pop(event.request_id))
            assert result.tokens == tuple(tokens[event.request_id])
            if result.finish_reason == "aborted":
                self.aborted += 1
                want = want[: len(result.tokens)]
            assert result.tokens == want
            self.ended += 1
        made._groups[0].allocator.validate()
        assert made.statistics().tokens_held <= made.statistics().token_capacity
        assert made.statistics().steps < 3000

    def check_empty(self, made: Engine, pages: int) -> None:
        left = (
            made._tracker.sequences,
            made._tracker._times,
            made._tracker.swapped,
            made._groups[0].allocator.sequences,
        )
        assert not any(left)
        after = made.statistics()
        assert after.free_pages + after.cached_pages == pages
        assert len(made._scheduler._free_slots) == SLOTS
        self.preemptions += after.preemptions
        self.hits += after.prefix_hits


@pytest.mark.fuzz
def test_results_are_those_of_requests_that_run_alone(record_property):
    config = dataclasses.replace(TINY, num_layers=1)
    fuzz = Fuzz(models.random_decoder(config, dtype=jnp.float32), "turbo4", seed=11)
    while fuzz.ended < REQUESTS:
        fuzz.round()
    assert fuzz.preemptions > 25
    assert fuzz.hits > 100
    assert fuzz.aborted > 15
    record_property(
        "counted",
        f"engine: {fuzz.ended} requests as alone, {fuzz.preemptions} preemptions, "
        f"{fuzz.hits} prefixes found, {fuzz.aborted} aborted",
    )
