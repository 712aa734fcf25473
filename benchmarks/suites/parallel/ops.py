"""Attention, caches and collectives on one device and on several: the same arrays, whole or split.

In wall time of programs.
"""

import dataclasses
import functools
import gc
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import turbojax as tj
from benchmarks import timing
from benchmarks.measuring import steps
from benchmarks.shapes import Shape
from benchmarks.suites.pooled.suite import random_levels
from benchmarks.tables import Row
from turbojax import models
from turbojax.caches.kinds import init_layer_cache, kind_for
from turbojax.models.engine import Engine, Replicas, Request, replicate
from turbojax.models.generation.sampling import greedy_rows
from turbojax.models.generation.steps import next_tokens
from turbojax.parallel import Axes

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
"""Of a layer of Llama 3 8B."""
DENSITY = 0.25
"""Of the levels of pooled attention: work over that of dense attention."""

_CACHES: dict[str, Any] = {"4bit": tj.TurboConfig(), "turbo4": "turbo4", "exact": "exact"}
_DTYPE = jnp.dtype(jnp.bfloat16)
_SPLITS = {"batch": "data", "heads": "model", "sequence": "sequence"}


def timed(
    call: Callable[..., Any], *arguments: Any, loops: int = 1, seconds: float = 0.5
) -> dict[str, Any]:
    """Microseconds of one of the `loops` rounds in a call: the best of several measurements.

    The best, because what else the host does only takes time.
    """
    with timing.alone():
        jax.block_until_ready(call(*arguments))
        once = _wall(call, arguments, 1)
        repetitions = max(1, min(50, round(seconds / once)))
        times = [_wall(call, arguments, repetitions) / loops * 1e6 for _ in range(4)]
    return {"us": min(times), "us_of_runs": times, "repetitions": repetitions, "loops": loops}


def _wall(call: Callable[..., Any], arguments: tuple[Any, ...], repetitions: int) -> float:
    start = time.perf_counter()
    for _ in range(repetitions):
        out = call(*arguments)
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / repetitions


def exchanges(compiled: jax.stages.Compiled) -> dict[str, int]:
    """How often a compiled program has each collective."""
    text = compiled.as_text() or ""
    kinds = ("all-gather", "all-reduce", "collective-permute", "all-to-all", "reduce-scatter")
    counts = {kind: text.count(f" {kind}(") + text.count(f" {kind}-start(") for kind in kinds}
    return {kind: count for kind, count in counts.items() if count}


def axes_of(split: str, devices: int) -> Axes:
    mesh = jax.make_mesh((devices,), (_SPLITS[split],), axis_types=(AxisType.Auto,))
    return Axes.of(mesh)


def compared(got: jax.Array, want: jax.Array) -> Row:
    """The largest difference from what one device computes, over its largest output."""
    got, want = (jax.device_get(x).astype("float32") for x in (got, want))
    return {"difference": float(abs(got - want).max() / abs(want).max())}


def _query(batch: int, tokens: int, heads: int = HEADS, seed: int = 0) -> jax.Array:
    shape = (batch, tokens, heads, HEAD_DIM)
    return jax.random.normal(jax.random.key(seed), shape).astype(jnp.bfloat16)


def _cache(name: str, batch: int, tokens: int) -> Any:
    """A full cache, on one device."""
    kind = kind_for(_CACHES[name])
    sizes = {"tokens": tokens, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM}

    @functools.partial(jax.jit, donate_argnums=0)
    def fill(cache: Any, first: jax.Array) -> Any:
        return steps.fill(cache, jnp.int32(0), first, count=1, dtype=_DTYPE, **sizes)

    cache = kind.init(batch, tokens, KV_HEADS, HEAD_DIM, kind=_CACHES[name], dtype=_DTYPE)
    for sequence in range(batch):
        cache = fill(cache, jnp.int32(sequence))
    return cache


def _rounds(step: Callable[..., jax.Array], loops: int) -> Callable[..., jax.Array]:
    """`step` so many times, each with the output of the one before as its query."""

    def run(query: jax.Array, *rest: Any) -> jax.Array:
        return jax.lax.fori_loop(0, loops, lambda _, q: step(q, *rest).astype(q.dtype), query)

    return run


def decode(name: str, split: str, batch: int, tokens: int, loops: int, devices: int) -> Row:
    """One new token of every sequence, arrays split over sequences or heads, plain `jit`."""
    query, cache = _query(batch, 1), _cache(name, batch, tokens)
    step: Any = tj.decode
    want = jax.jit(step)(query, cache)
    if devices > 1:
        axes = axes_of(split, devices)
        query = jax.device_put(query, axes.sharding("BTNH"))
        cache = jax.device_put(cache, tj.parallel.shardings(cache, axes))
    compiled = jax.jit(_rounds(step, loops)).lower(query, cache).compile()
    found = timed(compiled, query, cache, loops=loops)
    return {
        **found,
        **compared(jax.jit(step)(query, cache), want),
        "exchanges": exchanges(compiled),
    }


def decode_sequence(name: str, tokens: int, loops: int, devices: int) -> Row:
    """One new token of one long sequence, whose tokens are split over the devices."""
    asked = _CACHES[name]
    query, whole = _query(1, 1), _cache(name, 1, tokens)
    want = jax.jit(tj.decode)(query, whole)
    if devices == 1:
        compiled = jax.jit(_rounds(tj.decode, loops)).lower(query, whole).compile()
        return {**timed(compiled, query, whole, loops=loops), "exchanges": {}, "difference": 0.0}
    del whole
    axes = axes_of("sequence", devices)

    empty = init_layer_cache(1, tokens, KV_HEADS, HEAD_DIM, kind=asked, axes=axes)

    def fill(cache: Any) -> Any:
        sizes = {"tokens": tokens, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
        key, value = steps.random_tokens(jnp.int32(0), jnp.int32(0), count=1, dtype=_DTYPE, **sizes)
        return tj.parallel.store_prompt(
            cache, key, value, jnp.full(1, tokens, jnp.int32), "sequence"
        )

    def split(run: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        return jax.shard_map(
            run, mesh=axes.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def step(query: jax.Array, cache: Any) -> Any:
        return tj.parallel.decode(query, cache, "sequence")

    specs = tj.parallel.partition_specs(empty, axes)
    cache = jax.jit(split(fill, (specs,), specs), donate_argnums=0)(empty)
    once = jax.jit(split(step, (PartitionSpec(), specs), PartitionSpec()))
    rounds = split(_rounds(step, loops), (PartitionSpec(), specs), PartitionSpec())
    query = jax.device_put(query, NamedSharding(axes.mesh, PartitionSpec()))
    compiled = jax.jit(rounds).lower(query, cache).compile()
    found = timed(compiled, query, cache, loops=loops)
    return {**found, **compared(once(query, cache), want), "exchanges": exchanges(compiled)}


def _split_tokens(
    run: Callable[..., Any], devices: int, specs: tuple[PartitionSpec, ...]
) -> Callable[..., Any]:
    """`run` on each device's tokens."""
    mesh = axes_of("sequence", devices).mesh
    return jax.shard_map(
        run, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(None, "sequence"), check_vma=False
    )


def _put(devices: int, *arrays: tuple[jax.Array, PartitionSpec]) -> tuple[jax.Array, ...]:
    mesh = axes_of("sequence", devices).mesh
    return tuple(jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in arrays)


_TOKENS = PartitionSpec(None, "sequence")


def prefill(tokens: int, devices: int) -> Row:
    """Causal attention within one long prompt, with default arguments."""
    query, *rest = (
        _query(1, tokens, heads, i) for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))
    )
    arrays = (query, *rest)
    whole = functools.partial(tj.turbo_attention, is_causal=True)
    want = jax.jit(whole)(*arrays)
    run: Callable[..., Any] = whole
    if devices > 1:
        ring = functools.partial(tj.parallel.ring_attention, axis_name="sequence", is_causal=True)
        run = _split_tokens(ring, devices, (_TOKENS,) * 3)
        arrays = _put(devices, *((x, _TOKENS) for x in arrays))
    compiled = jax.jit(run).lower(*arrays).compile()
    found = timed(compiled, *arrays)
    operations = 4 * tokens * tokens * HEADS * HEAD_DIM / 2
    return {
        **found,
        "tflops_per_second": operations / found["us"] / 1e6,
        **compared(compiled(*arrays), want),
        "exchanges": exchanges(compiled),
    }


def pooled_training(tokens: int, devices: int) -> Row:
    """Pooled attention of one long sequence, forward and backward."""
    shape = Shape("llama3-8b", 1, tokens, is_causal=True)
    levels = random_levels(shape, DENSITY)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    arrays = tuple(_query(1, tokens, n, i) for i, n in enumerate(heads))

    def whole(query: jax.Array, key: jax.Array, value: jax.Array, levels: jax.Array) -> Any:
        return tj.pooled_attention(query, key, value, levels, is_causal=True)

    def ring(query: jax.Array, key: jax.Array, value: jax.Array, levels: jax.Array) -> Any:
        return tj.parallel.ring_pooled_attention(
            query, key, value, levels, axis_name="sequence", is_causal=True
        )

    attend: Any = whole
    rows = PartitionSpec(None, None, "sequence")
    if devices > 1:
        attend = _split_tokens(ring, devices, (_TOKENS,) * 3 + (rows,))

    def train(
        query: jax.Array, key: jax.Array, value: jax.Array, d_out: jax.Array, levels: jax.Array
    ) -> Any:
        out, pull = jax.vjp(lambda *x: attend(*x, levels), query, key, value)
        return out, *pull(d_out)

    if devices > 1:
        arrays = _put(devices, *((x, _TOKENS) for x in arrays))
        (levels,) = _put(devices, (levels, rows))
    compiled = jax.jit(train).lower(*arrays, levels).compile()
    return {
        **timed(compiled, *arrays, levels),
        "density": DENSITY,
        "exchanges": exchanges(compiled),
    }


# Collectives --------------------------------------------------------------------------------------

_AXIS = "devices"


def _gather(x: jax.Array, n: int) -> jax.Array:
    del n
    return jax.lax.all_gather(x, _AXIS)[-1]


def _sum(x: jax.Array, n: int) -> jax.Array:
    return jax.lax.psum(x, _AXIS) / n


def _permute(x: jax.Array, n: int) -> jax.Array:
    return jax.lax.ppermute(x, _AXIS, [(i, (i + 1) % n) for i in range(n)])


COLLECTIVES: dict[str, Callable[[jax.Array, int], jax.Array]] = {
    "all-gather": _gather,
    "all-reduce": _sum,
    "collective-permute": _permute,
}


def collective(kind: str, size: int, loops: int, devices: int) -> Row:
    """One exchange of float32 arrays of `size` bytes on each device."""
    mesh = jax.make_mesh((devices,), (_AXIS,), axis_types=(AxisType.Auto,))

    def run(x: jax.Array) -> jax.Array:
        def step(_: Any, x: jax.Array) -> jax.Array:
            return COLLECTIVES[kind](x, devices) + 1

        return jax.lax.fori_loop(0, loops, step, x)

    spec = PartitionSpec(_AXIS)
    call = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    x = jnp.zeros((devices, size // 4), jnp.float32, device=jax.NamedSharding(mesh, spec))
    found = timed(call, x, loops=loops)
    return {**found, "gigabytes_per_second": size / found["us"] / 1e3}


# Whole models -------------------------------------------------------------------------------------

_STEPS = 40
_TOGETHER = 4
"""Tokens in a launch, as of `generate`."""
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
    """A token of every sequence through a model whose heads and hidden sizes are split.

    As `generate` makes them, several in a launch; the time is that of one.
    """
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
    fed = jnp.zeros(batch, jnp.int32)
    lengths = jax.device_put(full, caches.layers[0].lengths.sharding)
    rows = greedy_rows(batch)
    arguments = (decoder, caches, fed, lengths, rows)
    launch = next_tokens.lower(
        *arguments, count=_TOGETHER, kind="greedy", implementation=None
    ).compile()

    def run(count: int) -> float:
        nonlocal caches, fed, lengths
        begun = time.perf_counter()
        for _ in range(count // _TOGETHER):
            caches, chosen, fed, lengths = launch(decoder, caches, fed, lengths, rows)
        jax.block_until_ready(chosen)
        return (time.perf_counter() - begun) / count * 1e6

    with timing.alone():
        run(_TOGETHER)
        times = [run(_STEPS) for _ in range(3)]
    return {
        "us": min(times),
        "us_of_runs": times,
        "tokens_per_second": batch / min(times) * 1e6,
        "tokens_together": _TOGETHER,
        "weight_bytes": decoder.nbytes,
        "cache_bytes": caches.nbytes,
        "exchanges": exchanges(launch),
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
    with timing.alone():
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
