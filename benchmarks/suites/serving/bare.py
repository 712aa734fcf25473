"""The same work by hand: an engine's kernels without an engine, and `decode_step` in a loop."""

import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.suites.serving.cases import Case, Group
from benchmarks.tables import Row
from turbojax import models, paged
from turbojax.attention.optional_arrays import of_layer
from turbojax.attention.options import PLAIN
from turbojax.caches import causal_attention
from turbojax.caches.paged import attend_pages
from turbojax.models.generation.steps import decode_step

Model = models.Decoder | models.QuantizedDecoder
Pools = tuple[paged.PagedCache, ...]
_WARM_UP_STEPS = 2


@functools.partial(jax.jit, donate_argnames="pools")
def run_prompts(
    model: Model, pools: Pools, tokens: jax.Array, tables: jax.Array
) -> tuple[Pools, jax.Array]:
    """Prompts of one length, which attend to their own keys and values and are written to pages.

    Args:
      model: the weights.
      pools: the layers' pages, donated.
      tokens: int32 ``[B, T]``.
      tables: int32 ``[B, P]``, the sequences' pages.

    Returns:
      The new pools, and the tokens that follow, int32 ``[B]``.
    """
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
    """One token of every sequence.

    Args:
      model: the weights.
      pools: the layers' pages, donated.
      tokens: int32 ``[B]``, the newest ones.
      lengths: int32 ``[B]``, tokens in the pages.
      tables: int32 ``[B, P]``.

    Returns:
      The new pools, the tokens that follow and the new lengths.
    """

    def attend(query, key, value, cache, options=PLAIN, sinks=None):  # type: ignore[no-untyped-def]
        cache = paged.append(cache, key, value, tables, lengths)
        static, extras = options.complete(query.shape[3]), of_layer(query, sinks)
        held = lengths + 1
        out, _ = attend_pages(query, cache, tables, held, options=static, extras=extras)
        return out, cache

    hidden, pools = model.hidden(tokens[:, None], lengths[:, None], attend, pools)
    return pools, _greedy(model.logits(hidden[:, 0])), lengths + 1


@jax.jit
def _greedy(logits: jax.Array) -> jax.Array:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def measure(model: Model, group: Group, case: Case) -> Row:
    """All prompts of a group some at a time, then all results together, without any scheduling.

    Raises:
      ArithmeticError: if a token could not be stored.
    """
    setting, count = group.setting_of(case), min(group.prompts_at_a_time, group.requests)
    if group.requests % count:
        raise ValueError(f"{group.requests=} must be a multiple of prompts_at_a_time={count}")
    begun = time.perf_counter()
    pools, every = _pools(model, group, case), _tables(group, setting.page_size)
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
    if lost := sum(int(pool.lost) for pool in pools):
        raise ArithmeticError(f"{lost} tokens could not be stored")
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


def _pools(model: Model, group: Group, case: Case) -> Pools:
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


def _tables(group: Group, page_size: int) -> np.ndarray:
    """int32 ``[requests, P]``: pages in the order of the sequences."""
    pages = -(-(group.prompt + group.new) // page_size)
    return np.arange(group.requests * pages, dtype=np.int32).reshape(group.requests, pages)


def _compile(*lower: Callable[[], Any]) -> list[Any]:
    """Programs, compiled side by side."""
    lowered = [one() for one in lower]
    with ThreadPoolExecutor(len(lowered)) as threads:
        return list(threads.map(lambda one: one.compile(), lowered))
