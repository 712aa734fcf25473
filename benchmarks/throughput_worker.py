"""The measuring half of `benchmarks.throughput`: one process, jobs in, rows out.

Reads jobs from standard input and writes answers to standard output, one JSON object a line. The
first answer describes the machine. A process ends after a job that ran out of memory: whether the
next one fits must not depend on what is left of the last.
"""

import argparse
import functools
import json
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import models
from turbojax._environment import environment
from turbojax.caches import LayerCache, kind_of
from turbojax.caches.progressive import append_reference as reference
from turbojax.models.generation import session as generation
from turbojax.models.generation.caching import init_caches
from turbojax.numerics.config import TurboConfig

WARM_UP_STEPS = 2


def main() -> None:
    """Builds the model once, then answers jobs until there are no more."""
    settings = argparse.Namespace(**json.loads(sys.argv[1]))
    decoder = models.random_decoder(models.SHAPES[settings.model])
    jax.block_until_ready(decoder)
    memory = jax.devices()[0].memory_stats() or {}
    _answer({**environment(), "weight_bytes": decoder.nbytes, **_limits(memory)})
    for line in sys.stdin:
        row = _try(decoder, json.loads(line), settings)
        _answer(row)
        if row["status"] == "out of memory":
            return


def _limits(memory: dict[str, int]) -> dict[str, int | None]:
    """Bytes that this process may use, and those in use with the weights loaded."""
    return {
        "memory_limit": memory.get("bytes_limit"),
        "memory_used_by_weights": memory.get("bytes_in_use"),
    }


def _answer(content: dict[str, Any]) -> None:
    print(json.dumps(content), flush=True)


def _try(
    decoder: models.Decoder, job: dict[str, Any], settings: argparse.Namespace
) -> dict[str, Any]:
    """A row, also if it fails: that a batch does not fit is a result."""
    row = {
        "cache": job["cache"],
        "batch": job["batch"],
        "prompt": settings.prompt,
        "new": settings.new,
        "tokens_per_second": None,
        "step_ms": None,
        "prefill_ms_per_sequence": None,
        "cache_bytes": None,
        "status": "ok",
        "note": "",
    }
    try:
        kind = models.cache_by_name(job["cache"], decoder.config.num_kv_heads)
        row |= measure_steps(decoder, job["batch"], kind, settings)
    except Exception as error:  # the row says what it was
        full = "RESOURCE_EXHAUSTED" in str(error) or "out of memory" in str(error).lower()
        return row | {"status": "out of memory" if full else "error", "note": _words(error)}
    if job["prefill"]:
        try:
            row |= measure_prefill(decoder, kind, settings)
        except Exception as error:  # the steps have been measured all the same
            row["note"] = f"the prefill was not timed: {_words(error)}"
    return row


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


def measure_steps(
    decoder: models.Decoder, batch: int, kind: models.CacheKind, settings: argparse.Namespace
) -> dict[str, Any]:
    """Fills caches and times decoding steps: dispatched one after the other, waited for once."""
    steps = settings.measure_steps or settings.new
    # All of the continuation, or the steps around its middle, whose length is the average one.
    skipped = (settings.new - steps) // 2
    length = settings.prompt + skipped - WARM_UP_STEPS
    if length < 1:
        raise ValueError(f"prompt={settings.prompt} must be longer than {WARM_UP_STEPS} tokens")
    capacity = settings.prompt + settings.new
    fill = _prefilled if settings.fill == "prefill" else _synthetic
    tokens, lengths, caches = fill(decoder, batch, kind, length, capacity, settings)
    cache_bytes = caches.nbytes
    step = generation.decode_step.lower(
        decoder, caches, tokens, lengths, implementation=settings.implementation
    ).compile()
    for i in range(WARM_UP_STEPS + steps):
        if i == WARM_UP_STEPS:
            jax.block_until_ready(tokens)
            begun = time.perf_counter()
        caches, logits, lengths = step(decoder, caches, tokens, lengths)
        tokens = _greedy(logits)
    jax.block_until_ready(tokens)
    seconds = (time.perf_counter() - begun) / steps
    analysis = step.memory_analysis()
    return {
        "tokens_per_second": batch / seconds,
        "step_ms": 1e3 * seconds,
        "cache_bytes": cache_bytes,
        "temporary_bytes": analysis.temp_size_in_bytes,
        "measured_steps": steps,
        "first_length": length + WARM_UP_STEPS,
        # The compressed caches compress a full buffer in some steps and not in others.
        "buffers_compressed": _flushes(kind, length, steps),
    }


def _flushes(kind: models.CacheKind, length: int, steps: int) -> int | None:
    """How often the measured steps compressed a part of the buffer; None of a cache without one."""
    if not isinstance(kind, TurboConfig):
        return None
    kept = length - int(reference.stored_blocks(kind, length)) * kind.block_kv
    before, after = (
        int(reference.flushes(kind, kept + taken))
        for taken in (WARM_UP_STEPS, WARM_UP_STEPS + steps)
    )
    return after - before


def measure_prefill(
    decoder: models.Decoder, kind: models.CacheKind, settings: argparse.Namespace
) -> dict[str, Any]:
    """Times the prefill of one microbatch; the first run compiles."""
    count = settings.prefill_batch_size
    tokens = _random_tokens(decoder, count, settings.prompt)
    for _ in range(2):
        begun = time.perf_counter()
        session = models.start(
            decoder,
            tokens,
            max_length=settings.prompt + settings.new,
            cache=kind,
            implementation=settings.implementation,
        )
        jax.block_until_ready(session.logits)
        seconds = time.perf_counter() - begun
        del session
    return {"prefill_ms_per_sequence": 1e3 * seconds / count}


_Filled = tuple[jax.Array, jax.Array, models.ModelCaches]


def _prefilled(
    decoder: models.Decoder,
    batch: int,
    kind: models.CacheKind,
    length: int,
    capacity: int,
    settings: argparse.Namespace,
) -> _Filled:
    """Next tokens, lengths and caches after real prompts."""
    session = models.start(
        decoder,
        _random_tokens(decoder, batch, length),
        max_length=capacity,
        cache=kind,
        prefill_batch_size=settings.prefill_batch_size,
        implementation=settings.implementation,
    )
    return _greedy(session.logits), session.lengths, session.caches


def _synthetic(
    decoder: models.Decoder,
    batch: int,
    kind: models.CacheKind,
    length: int,
    capacity: int,
    settings: argparse.Namespace,
) -> _Filled:
    """The same, with random keys and values stored in place of a prefill's: as fast to read."""
    caches, count = init_caches(decoder, batch, capacity, kind), settings.prefill_batch_size
    layers = []
    for i, layer in enumerate(caches.layers):
        for first in range(0, batch, count):
            key = jax.random.fold_in(jax.random.key(i), first)
            part = min(count, batch - first)
            layer = _store_random(layer, key, np.int32(first), part, length)
        layers.append(layer)
    tokens = _random_tokens(decoder, batch, 1)[:, 0]
    return tokens, jnp.full(batch, length, jnp.int32), models.ModelCaches(tuple(layers))


@functools.partial(jax.jit, static_argnums=(3, 4), donate_argnums=0)
def _store_random(
    cache: LayerCache, key: jax.Array, first: jax.Array, count: int, length: int
) -> LayerCache:
    """Stores `length` random tokens in each of `count` sequences."""
    kind = kind_of(cache)
    part = kind.take(cache, first, count)
    lengths = jnp.full(count, length, jnp.int32)
    shape, dtype = (count, length, part.num_kv_heads, part.head_dim), part.dtype
    # Sampled in float32: bfloat16 samples have few distinct values.
    k, v = (jax.random.normal(i, shape, jnp.float32).astype(dtype) for i in jax.random.split(key))
    return kind.put(cache, kind.store_prompt(part, k, v, lengths), first)


@jax.jit
def _greedy(logits: jax.Array) -> jax.Array:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _random_tokens(decoder: models.Decoder, batch: int, length: int) -> jax.Array:
    rng = np.random.default_rng(0)
    size = (batch, length)
    return jnp.asarray(rng.integers(decoder.config.vocab_size, size=size, dtype=np.int32))


if __name__ == "__main__":
    main()
