"""Two hundred clients, half of whom hang up: nothing of them is left, all texts are right."""

import asyncio
import gc
import itertools
import json
import threading
import tracemalloc

import httpx
import pytest
from flax import nnx

from tests.serving.server_helpers import NAME, real_engine, running, tokenizer_with_chats, until
from turbojax import models
from turbojax.models import Request, Sampling
from turbojax.models.engine.asynchronous import RequestHandle

CLIENTS, ROUNDS, NEW = 200, 4, 20
TINY = models.TransformerConfig(
    vocab_size=256,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_length=128,
)
SIZES = {"max_length": 96, "max_sequences": 8, "step_tokens": 32, "num_pages": 20}
# More than ever wait at a time would be refused: clients come again.
WAITING = 60


def prompt(i: int) -> list[int]:
    """Some begin with the same page, so that prefixes are shared."""
    return [*b"def shared_begin", *f"{'ab'[i % 2]} client number {i}".encode()]


def options(i: int) -> dict:
    return {"temperature": float(i % 3 > 0), "seed": i}


async def ask(http: httpx.AsyncClient, i: int, leave: bool) -> str | None:
    """The text that a client got, if it stayed."""
    body = {
        "model": NAME,
        "prompt": prompt(i),
        "max_tokens": NEW,
        "stream": True,
        "logprobs": None if i % 5 else 2,
        **options(i),
    }
    while True:
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code == 429:
                await answer.aread()
                await asyncio.sleep(0.25)
                continue
            assert answer.status_code == 200
            return await read(answer, i % NEW if leave else None)


async def read(answer: httpx.Response, leave_after: int | None) -> str | None:
    text, ended = "", False
    async for line in answer.aiter_lines():
        if line.startswith("data: {"):
            text += "".join(x["text"] for x in json.loads(line[len("data: ") :])["choices"])
        ended = ended or line == "data: [DONE]"
        if leave_after is not None and len(text) >= leave_after:
            return None
    assert ended
    return text


async def one_round(url: str, number: int) -> dict[int, str | None]:
    # Connections that nobody uses for a while are closed, maybe just as somebody wants to.
    limits = httpx.Limits(max_connections=CLIENTS, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
        clients = range(CLIENTS)
        # Others leave in each round; one in eight of these before there is an answer.
        leaving = {i for i in clients if (i + number) % 2}
        tasks = {i: asyncio.ensure_future(ask(http, i, i in leaving)) for i in clients}
        await asyncio.sleep(0.3)
        for i in leaving:
            if i % 8 == 1:
                tasks[i].cancel()
        found = await asyncio.gather(*tasks.values(), return_exceptions=True)
    for got in found:
        if isinstance(got, Exception):
            raise got
    return {i: got for i, got in zip(clients, found, strict=True) if i not in leaving}


@pytest.mark.fuzz
def test_nothing_is_left_of_clients_and_everybody_gets_their_own(count):
    tokenizer = tokenizer_with_chats()
    model = models.unstack(models.Transformer(TINY, rngs=nnx.Rngs(0)))
    alone = real_engine(model, **SIZES)
    numbers = [
        alone.add(Request(prompt(i), NEW, [3], Sampling(**options(i)))) for i in range(CLIENTS)
    ]
    results = alone.run()
    wanted = [tokenizer.decode(x for x in results[n].tokens if x != 3) for n in numbers]
    before = set(threading.enumerate())
    engine = real_engine(model, **SIZES)
    memory = []
    with running(engine, tokenizer, max_waiting=WAITING) as served:
        inside = served.server.engine
        tracemalloc.start()
        for number in range(ROUNDS):
            for i, text in asyncio.run(one_round(served.url, number)).items():
                assert text == wanted[i], f"client {i} of round {number}"
            until(lambda: not inside._live)
            held = inside.statistics()
            assert (held.waiting, held.running, held.swapped, held.tokens_held) == (0, 0, 0, 0)
            assert held.free_pages + held.cached_pages == held.pages
            assert inside.waiting == 0
            assert not inside._handles
            assert not inside._untouched
            gc.collect()
            # Of their own type: others' objects may warn when they are asked for theirs.
            assert not [x for x in gc.get_objects() if issubclass(type(x), RequestHandle)]
            memory.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        with served.http() as http:
            told = http.get("/metrics").text
        finished = inside.statistics().finished
        ends = [float(x.split()[-1]) for x in told.splitlines() if "jax_requests_total{" in x]
        assert sum(ends) == finished
        assert 'outcome="aborted"' in told
    assert set(threading.enumerate()) == before
    assert served.errors == []
    # The first rounds fill caches of Python's; a handle that stays would have some kilobytes.
    # What grows from round to round does so in each; what others allocate once does not.
    growth = min(after - before for before, after in itertools.pairwise(memory[1:]))
    assert growth < CLIENTS * 256, memory
    count(f"{finished} requests of {CLIENTS * ROUNDS} clients; memory after each round: {memory}")
