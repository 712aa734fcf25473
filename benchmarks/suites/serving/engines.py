"""Models and engines of the rows; what an engine does with requests, by itself or behind HTTP."""

import contextlib
import dataclasses
import functools
import gc
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import tables as shared
from benchmarks import timing
from benchmarks.suites.serving.cases import LOOP, STOPPED, Case, Group, Setting, Weights, engine_key
from benchmarks.suites.serving.client import Load
from benchmarks.tables import Row
from turbojax import _garbage, models, paged
from turbojax.attention.options import PLAIN
from turbojax.attention.score_modifiers import of_layer
from turbojax.caches import causal_attention
from turbojax.caches import paged as paged_attention
from turbojax.models.engine import Engine, Finished, NGram, Request, Result
from turbojax.models.generation.steps import decode_step
from turbojax.models.text.tokenizer import NumberTokenizer

Model = models.Decoder | models.QuantizedDecoder
COUNTED = (
    "steps",
    "steps_of_prompts",
    "steps_of_decoding",
    "steps_of_speculation",
    "new_tokens",
    "prompt_tokens",
    "reused_tokens",
    "preemptions",
    "swaps",
    "recomputations",
    "proposed_tokens",
    "accepted_tokens",
    "host_seconds",
    "wait_seconds",
    "idle_seconds",
    "late_steps",
    "first_step_seconds",
)
"""Figures of `EngineStatistics` that only grow: a row has by how much."""


@dataclasses.dataclass
class Made:
    """A compiled engine, and the seconds that took; 0 once it has served a row."""

    engine: Engine
    compile_seconds: float
    programs: int


class Stock:
    """The weights and the engine of a row: those of the last one, if they are the same."""

    def __init__(self) -> None:
        self._model: Model | None = None
        self._made: Made | None = None
        self._model_key: Any = None
        self._engine_key: Any = None

    def model(self, group: Group, case: Case) -> Model:
        """The weights of a row, with its model's config."""
        # Shapes that differ in context and RoPE alone have the same weights.
        shape = dataclasses.replace(group.config, max_length=1, rope_scaling=None)
        if self._model is None or (case.weights, shape) != self._model_key:
            self.drop()
            self._model = None
            gc.collect()
            self._model = _make_weights(case.weights, group.config)
            self._model_key = case.weights, shape
        return dataclasses.replace(self._model, config=group.config)

    def engine(self, group: Group, case: Case) -> Made:
        model, setting = self.model(group, case), group.setting_of(case)
        key = engine_key(group, case)
        if self._made is None or key != self._engine_key:
            self.drop()
            begun = time.perf_counter()
            engine = new_engine(model, setting, case.kv_dtype, speculates=case.speculates)
            engine.compile(only_greedy=True)
            programs = engine.statistics().programs_compiled
            self._made = Made(engine, time.perf_counter() - begun, programs)
            self._engine_key = key
        return self._made

    def drop(self) -> None:
        """Frees the engine: other arrays need its memory, or it is of no use any more."""
        self._made = None
        gc.collect()


def new_engine(model: Any, setting: Setting, kv_dtype: str, *, speculates: bool) -> Engine:
    return Engine(
        model,
        num_pages=setting.pages(model.config, kv_dtype),
        page_size=setting.page_size,
        kv_dtype=kv_dtype,
        max_sequences=setting.slots,
        max_length=setting.max_length,
        step_tokens=setting.step_tokens,
        speculation=NGram() if speculates else None,
    )


def _make_weights(kind: Weights, config: models.TransformerConfig) -> Model:
    if kind == "int4":
        return jax.block_until_ready(models.random_quantized_decoder(config))
    model = models.random_decoder(config)
    return jax.block_until_ready(looping(model) if kind == "looping" else model)


def looping(model: models.Decoder) -> models.Decoder:
    """The model, but what follows a token depends on nothing else, see `following`.

    The layers do all their work, and what they add is small beside the embedding.
    """
    config = model.config
    follows = following(config.vocab_size)
    before = np.empty_like(follows)
    before[follows] = np.arange(config.vocab_size)
    gain = jnp.asarray(8 * config.hidden_size**0.5, model.dtype)
    return dataclasses.replace(
        model, embedding=model.embedding * gain, lm_head=model.embedding[jnp.asarray(before)]
    )


def following(vocab_size: int) -> np.ndarray:
    """int ``[V]``, the token after each: the next of its `LOOP`, in the upper half the next of all.

    Where the vocabulary is no multiple of it, the last loop of the lower half is shorter.
    """
    token, half = np.arange(vocab_size), vocab_size // 2
    first = np.where(token < half, token // LOOP * LOOP, half)
    last = np.where(token < half, np.minimum(first + LOOP, half), vocab_size) - 1
    return np.where(token == last, first, token + 1)


def measure(made: Made, group: Group, case: Case, deadline: float) -> Row:
    """All requests of a group through an engine, or as many steps as there is time for.

    Where the weights say what follows each token, every result is compared with that.
    """
    engine, requests = made.engine, group.make()
    with timing.alone():
        begun = time.perf_counter()
        for request in group.warm_up():
            engine.add(request)
        engine.run()
        warm = time.perf_counter() - begun
        before = engine.statistics().to_json()
        begun = time.perf_counter()
        with _garbage.only_of_new_objects():  # as `turbojax serve`
            done = dict(serve(engine, requests, group.clients, deadline))
        seconds = time.perf_counter() - begun
    after = engine.statistics().to_json()
    follows = following(group.config.vocab_size) if case.weights == "looping" else None
    for number, result in done.items():
        _check(number, requests[number], result, follows)
    counts = {name: after[name] - before[name] for name in COUNTED}
    if not counts["steps"]:
        return {"status": "not run", "reason": shared.OUT_OF_TIME}
    row = {
        **status_of(len(done), group.requests),
        "finished": len(done),
        "us": 1e6 * seconds,
        "seconds": seconds,
        "compile_seconds": made.compile_seconds,
        "warm_up_seconds": warm,
        "programs": made.programs,
        **counts,
        **rates(counts, seconds),
        **latencies(list(done.values())),
        "pool_bytes": after["pool_bytes"],
        "token_capacity": after["token_capacity"],
    }
    made.compile_seconds = 0.0
    return row


def _check(number: int, request: Request, result: Result, follows: np.ndarray | None) -> None:
    if len(result.tokens) != request.max_new_tokens:
        raise ArithmeticError(f"request {number} ended: {result.finish_reason}")
    if follows is None:
        return
    token = request.tokens[-1]
    for place, found in enumerate(result.tokens):
        token = int(follows[token])
        if found != token:
            raise ArithmeticError(f"token {place} of request {number} is {found}, not {token}")


def serve(
    engine: Engine, requests: list[Request], clients: int | None, deadline: float
) -> Iterator[tuple[int, Result]]:
    """Runs requests, so many at a time; no step is begun after the deadline."""
    waiting = enumerate(requests)
    places = {engine.add(request): i for i, request in itertools.islice(waiting, clients)}
    while not engine.idle and time.monotonic() < deadline:
        for event in engine.step():
            if isinstance(event, Finished):
                yield places[event.request_id], event.result
                for i, request in itertools.islice(waiting, 1):
                    places[engine.add(request)] = i


def rates(counts: Row, seconds: float) -> Row:
    """What follows from the counts of an engine's steps."""
    steps, new, prompts = counts["steps"], counts["new_tokens"], counts["prompt_tokens"]
    proposed = counts["proposed_tokens"]
    return {
        "generated_per_second": new / seconds,
        "tokens_per_second": (new + prompts) / seconds,
        "tokens_per_step": new / steps,
        "host_ms": 1e3 * counts["host_seconds"] / steps,
        "idle_ms": 1e3 * counts["idle_seconds"] / steps,
        "acceptance": counts["accepted_tokens"] / proposed if proposed else None,
    }


def latencies(results: list[Result]) -> Row:
    """Time to the first token, and per token after it, of requests that are done."""
    first = [r.first_token_seconds for r in results if r.first_token_seconds is not None]
    if not first:
        return {"first_token_seconds": None, "last_first_token_seconds": None, "token_ms": None}
    after = [
        1e3 * (r.seconds - r.first_token_seconds) / (len(r.tokens) - 1)
        for r in results
        if r.first_token_seconds is not None and len(r.tokens) > 1
    ]
    return {
        "first_token_seconds": float(np.median(first)),
        "last_first_token_seconds": max(first),
        "token_ms": float(np.median(after)) if after else None,
    }


def memory() -> Row:
    """Bytes of the device in use, and at most so far in this process; None without a count."""
    found = jax.devices()[0].memory_stats() or {}
    return {
        "memory_bytes": found.get("bytes_in_use"),
        "peak_bytes": found.get("peak_bytes_in_use"),
    }


def status_of(done: int, requests: int) -> Row:
    if done == requests:
        return {"status": "ok"}
    return {
        "status": STOPPED,
        "reason": f"{done} of {requests} requests done: {shared.OUT_OF_TIME}",
    }


# Over HTTP, with clients in another process -------------------------------------------------------

NAME = "benchmark"
_START_SECONDS = 60.0


def measure_http(made: Made, group: Group, deadline: float) -> Row:
    """All requests of a group from its clients, after a few that nobody counts."""
    vocabulary, clients = group.config.vocab_size, group.clients or group.requests
    load = Load(NAME, clients, clients, group.prompt, 4, vocabulary, seed=1)
    with running(made.engine, vocabulary) as port:
        _clients(load, port, deadline)
    # While a server has the engine nobody else may ask it.
    before = made.engine.statistics().to_json()
    load = dataclasses.replace(load, requests=group.requests, new=group.new, seed=2)
    with running(made.engine, vocabulary) as port:
        found = _clients(load, port, deadline)
    after = made.engine.statistics().to_json()
    short = [answer["tokens"] for answer in found["answers"] if answer["tokens"] != group.new]
    if short or len(found["answers"]) != group.requests:
        raise ArithmeticError(f"{len(found['answers'])} answers, of wrong lengths {short[:5]}")
    counts = {name: after[name] - before[name] for name in COUNTED}
    first = [answer["first"] for answer in found["answers"]]
    times = [1e3 * (x["seconds"] - x["first"]) / (group.new - 1) for x in found["answers"]]
    return {
        "status": "ok",
        "finished": len(found["answers"]),
        "us": 1e6 * found["seconds"],
        "seconds": found["seconds"],
        "compile_seconds": 0.0,
        **counts,
        **rates(counts, found["seconds"]),
        "first_token_seconds": float(np.median(first)),
        "last_first_token_seconds": max(first),
        "token_ms": float(np.median(times)),
        "events": sum(answer["events"] for answer in found["answers"]),
        "pool_bytes": after["pool_bytes"],
        "token_capacity": after["token_capacity"],
    }


@contextlib.contextmanager
def running(engine: Engine, vocab_size: int) -> Iterator[int]:
    """A server of the engine in a thread; gives its port. Afterwards the engine is free again."""
    from turbojax.server import Server, listen

    listening = listen("127.0.0.1", 0)
    port = int(listening.getsockname()[1])
    server = Server(engine, NumberTokenizer(vocab_size), NAME, listening)
    ready = threading.Event()
    arguments = {"ready": lambda address: ready.set()}
    thread = threading.Thread(target=server.run, kwargs=arguments, name="benchmark server")
    thread.start()
    try:
        if not ready.wait(_START_SECONDS):
            raise RuntimeError(f"the server did not start within {_START_SECONDS:.0f} s")
        yield port
    finally:
        server.stop()
        thread.join()


def _clients(load: Load, port: int, deadline: float) -> dict[str, Any]:
    """What the clients found, in a process of their own."""
    command = [sys.executable, "-m", "benchmarks.suites.serving.client", str(port)]
    left = deadline - time.monotonic()
    done = subprocess.run(
        command,
        input=json.dumps(dataclasses.asdict(load)),
        capture_output=True,
        text=True,
        timeout=None if left == float("inf") else max(left, 1.0),
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the clients failed: {done.stderr.strip().splitlines()[-1][:300]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# The same work by hand ----------------------------------------------------------------------------

Model = models.Decoder | models.QuantizedDecoder
Pools = tuple[paged.PagedCache, ...]
_WARM_UP_STEPS = 2


@functools.partial(jax.jit, donate_argnames="pools")
def run_prompts(
    model: Model, pools: Pools, tokens: jax.Array, tables: jax.Array
) -> tuple[Pools, jax.Array]:
    """Prompts ``[B, T]``, which attend to themselves and are written to pages."""
    nothing = jnp.zeros(tokens.shape[0], jnp.int32)

    def attend(query, key, value, cache, options=PLAIN, sinks=None):  # type: ignore[no-untyped-def]
        out, _ = causal_attention(query, key, value, None, options, sinks)
        return out, paged.append(cache, key, value, tables, nothing)

    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    hidden, pools = model.hidden(tokens, positions, attend, pools)
    return pools, _greedy(model.logits(hidden[:, -1]))


@functools.partial(jax.jit, donate_argnames="pools")
def decode(
    model: Model, pools: Pools, tokens: jax.Array, lengths: jax.Array, tables: jax.Array
) -> tuple[Pools, jax.Array, jax.Array]:
    """One token of every sequence: the pools, the tokens that follow and the new lengths."""

    def attend(query, key, value, cache, options=PLAIN, sinks=None):  # type: ignore[no-untyped-def]
        cache = paged.append(cache, key, value, tables, lengths)
        static, modifiers = options.complete(query.shape[3]), of_layer(query, sinks)
        held = lengths + 1
        out, _ = paged_attention.attend(
            query, cache, tables, held, options=static, modifiers=modifiers
        )
        return out, cache

    hidden, pools = model.hidden(tokens[:, None], lengths[:, None], attend, pools)
    return pools, _greedy(model.logits(hidden[:, 0])), lengths + 1


@jax.jit
def _greedy(logits: jax.Array) -> jax.Array:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def measure_bare(model: Model, group: Group, case: Case) -> Row:
    """All prompts of a group some at a time, then all results together, without any scheduling."""
    setting, count = group.setting_of(case), min(group.prompts_at_a_time, group.requests)
    if group.requests % count:
        raise ValueError(f"{group.requests=} must be a multiple of prompts_at_a_time={count}")
    begun = time.perf_counter()
    pools, every = _bare_pools(model, group, case), _block_tables(group, setting.page_size)
    prompts, tables = group.prompts(), jnp.asarray(every)
    batch = jnp.zeros(group.requests, jnp.int32)
    prefill, step = _compile(
        functools.partial(run_prompts.lower, model, pools, prompts[:count], every[:count]),
        functools.partial(decode.lower, model, pools, batch, batch, tables),
    )
    parts = [slice(i, i + count) for i in range(0, group.requests, count)]
    placed = [(jnp.asarray(prompts[part]), jnp.asarray(every[part])) for part in parts]
    # What the first runs write is written again.
    pools, _ = prefill(model, pools, *placed[0])
    first = jnp.full(group.requests, group.prompt, jnp.int32)
    pools, _, _ = jax.block_until_ready(step(model, pools, batch, first, tables))
    compiled = time.perf_counter() - begun

    begun = time.perf_counter()
    following = []
    for tokens, rows in placed:
        pools, found = prefill(model, pools, tokens, rows)
        following.append(found)
    jax.block_until_ready(following)
    prompt_seconds = time.perf_counter() - begun

    tokens, lengths = jax.block_until_ready(jnp.concatenate(following)), first
    begun = time.perf_counter()
    for _ in range(group.new - 1):
        pools, tokens, lengths = step(model, pools, tokens, lengths, tables)
    jax.block_until_ready((pools, tokens))
    decode_seconds = time.perf_counter() - begun
    if dropped_tokens := sum(int(pool.dropped_tokens) for pool in pools):
        raise ArithmeticError(f"{dropped_tokens} tokens could not be stored")
    seconds, new = prompt_seconds + decode_seconds, group.requests * group.new
    return {
        "status": "ok",
        "us": 1e6 * seconds,
        "seconds": seconds,
        "prompt_seconds": prompt_seconds,
        "decode_seconds": decode_seconds,
        "compile_seconds": compiled,
        "new_tokens": new,
        "prompt_tokens": group.requests * group.prompt,
        "generated_per_second": new / seconds,
        "tokens_per_second": (new + group.requests * group.prompt) / seconds,
        "token_ms": 1e3 * decode_seconds / (group.new - 1),
        "steps": len(parts) + group.new - 1,
        "pool_bytes": sum(pool.nbytes for pool in pools),
        "weight_bytes": model.nbytes,
    }


def measure_steps(model: Model, group: Group, case: Case) -> Row:
    """`decode_step` after `models.start`, each given to the device before the last one is done."""
    begun = time.perf_counter()
    session = models.start(
        model,
        group.prompts(),
        max_length=group.prompt + group.new + _WARM_UP_STEPS,
        cache=case.kv_dtype,
    )
    caches, lengths, tokens = session.caches, session.lengths, _greedy(session.logits)
    weights, held = session.decoder, caches.nbytes
    del session
    step = decode_step.lower(weights, caches, tokens, lengths, implementation=None).compile()
    for i in range(_WARM_UP_STEPS + group.new - 1):
        if i == _WARM_UP_STEPS:
            jax.block_until_ready(tokens)
            compiled = time.perf_counter() - begun
            begun = time.perf_counter()
        caches, logits, lengths = step(weights, caches, tokens, lengths)
        tokens = _greedy(logits)
    jax.block_until_ready((caches, tokens))
    seconds, steps = time.perf_counter() - begun, group.new - 1
    return {
        "status": "ok",
        "us": 1e6 * seconds,
        "seconds": seconds,
        "compile_seconds": compiled,
        "new_tokens": steps * group.requests,
        "prompt_tokens": 0,
        "generated_per_second": steps * group.requests / seconds,
        "tokens_per_second": steps * group.requests / seconds,
        "token_ms": 1e3 * seconds / steps,
        "steps": steps,
        "pool_bytes": held,
        "weight_bytes": model.nbytes,
    }


def _bare_pools(model: Model, group: Group, case: Case) -> Pools:
    config, setting = model.config, group.setting_of(case)
    count = -(-(group.prompt + group.new) // setting.page_size) * group.requests
    make = functools.partial(
        paged.init_cache,
        count,
        setting.page_size,
        config.num_kv_heads,
        config.head_dim,
        kv_dtype=case.kv_dtype,
        dtype=model.dtype,
    )
    return tuple(make() for _ in range(config.num_layers))


def _block_tables(group: Group, page_size: int) -> np.ndarray:
    """int32 ``[requests, P]``: pages in the order of the sequences."""
    pages = -(-(group.prompt + group.new) // page_size)
    return np.arange(group.requests * pages, dtype=np.int32).reshape(group.requests, pages)


def _compile(*lower: Callable[[], Any]) -> list[Any]:
    lowered = [one() for one in lower]
    with ThreadPoolExecutor(len(lowered)) as threads:
        return list(threads.map(lambda one: one.compile(), lowered))
