"""`prefill` and `decode` of token-scaled caches: checks and the choice of implementation."""

from typing import Any

import jax
import jax.numpy as jnp

from turbojax._gradient import refuse_gradients
from turbojax._registry import Implementation, Registry
from turbojax.attention.options import Options
from turbojax.attention.score_modifiers import NO_MODIFIERS, ScoreModifiers
from turbojax.attention.turbo.api import ATTENTION
from turbojax.caches import checks
from turbojax.caches.base import Attended
from turbojax.caches.token_scaled import cache as kv4
from turbojax.caches.token_scaled import mosaic_gpu, reference, triton
from turbojax.caches.token_scaled.cache import CacheT
from turbojax.numerics.config import TurboConfig
from turbojax.sharding import tables, together
from turbojax.sharding.per_device import per_device

DECODE = Registry(
    "fireq.decode",
    (
        Implementation("mosaic_gpu", mosaic_gpu.decode, mosaic_gpu.decode_unsupported),
        Implementation("triton", triton.decode, triton.decode_unsupported),
        Implementation("xla", reference.decode),
    ),
)
PREFILL = TurboConfig(mode="fp8", softmax="exact", block_q=128, block_kv=128, buffer_size=128)
"""Numerics of attention within a prompt: e4m3 products and the exact exponential."""


def prefill(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: CacheT,
    lengths: jax.Array | None = None,
    *,
    options: Options,
    modifiers: ScoreModifiers = NO_MODIFIERS,
) -> tuple[Attended, CacheT]:
    """See `turbojax.caches.base.Kind.prefill`: attends in e4m3, and stores codes (FireQ, 2025).

    Attention does not see the cache's codes: it is `turbojax.turbo_attention` in mode ``"fp8"``
    with the exact softmax and blocks of 128. The log-sum-exp is always there.
    """
    lengths = checks.check_prompt(cache, query, key, value, lengths)
    run = per_device(tables.FIREQ_PREFILL, _attend_and_store, options=options)
    return refuse_gradients(run, "fireq.prefill")(query, key, value, cache, lengths, modifiers)


def _attend_and_store(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: CacheT,
    lengths: jax.Array,
    modifiers: ScoreModifiers,
    *,
    options: Options,
) -> tuple[Attended, CacheT]:
    """`prefill` by the implementation for these arrays."""
    inside = jnp.clip(lengths, 0, key.shape[1])
    query, key, value, inside, modifiers = together(query, key, value, inside, modifiers)
    static: dict[str, Any] = {"config": PREFILL, "options": options, "modifiers": modifiers}
    chosen = ATTENTION.select(options.implementation, query=query, key=key, value=value, **static)
    out = chosen.run(query, key, value, inside, inside, **static)
    return out, kv4.store_prompt(cache, key, value, lengths)
