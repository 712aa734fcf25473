"""Whole models on one device and on several: a step of decoding, requests through an engine."""

import dataclasses
import gc
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from benchmarks.suites.parallel.ops import exchanges
from benchmarks.tables import Row
from turbojax import models
from turbojax.models.engine import Engine, Replicas, Request, replicate
from turbojax.models.generation.steps import decode_step
from turbojax.parallel import Axes

_STEPS = 40
_PAGE_SIZE = 64
_ENGINE = {"requests": 512, "prompt": 512, "new": 256, "sequences": 256}
_TINY = {"requests": 16, "prompt": 32, "new": 8, "sequences": 8}
"""Of requests, and of those that an engine has at a time."""


def _axes(devices: int, name: str = "model") -> Axes | None:
    if devices == 1:
        return None
    return Axes.of(jax.make_mesh((devices,), (name,), axis_types=(AxisType.Auto,)))


def _weights(model: str, kind: str, axes: Axes | None) -> Any:
    config = models.SHAPES[model]
    make = models.random_quantized_decoder if kind == "int4" else models.random_decoder
    return jax.block_until_ready(make(config, axes=axes))


def step(model: str, weights: str, cache: str, batch: int, tokens: int, devices: int) -> Row:
    """One token of every sequence through a model whose heads and hidden sizes are split."""
    axes = _axes(devices)
    decoder = _weights(model, weights, axes)
    caches = models.init_caches(decoder, batch, tokens + 4 * _STEPS, cache)
    # Of what is attended to, only how much it is counts.
    full = np.full(batch, tokens, np.int32)
    layers = tuple(
        dataclasses.replace(c, lengths=jax.device_put(full, c.lengths.sharding))
        for c in caches.layers
    )
    caches = dataclasses.replace(caches, layers=layers)
    chosen = jnp.zeros(batch, jnp.int32)
    lengths = jax.device_put(full, caches.layers[0].lengths.sharding)
    arguments = (decoder, caches, chosen, lengths)
    compiled = decode_step.lower(*arguments, implementation=None).compile()

    def run(count: int) -> float:
        nonlocal caches, lengths
        begun = time.perf_counter()
        for _ in range(count):
            caches, logits, lengths = decode_step(
                decoder, caches, chosen, lengths, implementation=None
            )
        jax.block_until_ready(logits)
        return (time.perf_counter() - begun) / count * 1e6

    run(2)
    times = [run(_STEPS) for _ in range(3)]
    return {
        "us": min(times),
        "us_of_runs": times,
        "tokens_per_second": batch / min(times) * 1e6,
        "weight_bytes": decoder.nbytes,
        "cache_bytes": caches.nbytes,
        "exchanges": exchanges(compiled),
    }


def engine(model: str, how: str, devices: int) -> Row:
    """Requests of one length through an engine, or through one engine on each device."""
    sizes = _TINY if model == "tiny" else _ENGINE
    config = models.SHAPES[model]
    length = sizes["prompt"] + sizes["new"]
    pages = -(-length // _PAGE_SIZE)
    slots = sizes["sequences"]
    settings: dict[str, Any] = {
        "page_size": _PAGE_SIZE,
        "kv_dtype": "turbo4",
        "max_sequences": slots,
        "max_length": length,
        "num_pages": slots * (pages + 1),
    }
    made: Any
    if how == "tensor" or devices == 1:
        made = Engine(_weights(model, "bf16", _axes(devices)), **settings)
    else:
        parts = replicate(_weights(model, "bf16", None), _axes(devices, "data"))
        made = Replicas(Engine(part, **settings) for part in parts)
    made.compile(only_greedy=True)
    rng = np.random.default_rng(0)
    prompts = rng.integers(config.vocab_size, size=(sizes["requests"], sizes["prompt"]))
    made.add(Request(prompts[0, :8].tolist(), 2))
    made.run()
    begun = time.perf_counter()
    for prompt in prompts.tolist():
        made.add(Request(prompt, sizes["new"]))
    results = made.run()
    seconds = time.perf_counter() - begun
    new = sum(len(result.tokens) for result in results.values())
    del made
    gc.collect()
    return {
        "us": seconds * 1e6,
        "seconds": seconds,
        "generated_per_second": sizes["requests"] * sizes["new"] / seconds,
        "new_tokens": new,
        **sizes,
    }
