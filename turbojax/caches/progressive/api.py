"""`prefill` and `decode` of a `ProgressiveCache`: checks and the choice of implementation."""

from typing import Any

import jax
import jax.numpy as jnp

from turbojax._gradient import refuse_gradients
from turbojax._registry import Implementation, Registry
from turbojax.attention.options import Options
from turbojax.attention.score_modifiers import NO_MODIFIERS, ScoreModifiers
from turbojax.attention.turbo import unrounded
from turbojax.attention.turbo.api import ATTENTION
from turbojax.caches import checks
from turbojax.caches.base import Attended
from turbojax.caches.progressive import decode_mosaic, decode_reference, decode_triton
from turbojax.caches.progressive.cache import ProgressiveCache
from turbojax.caches.progressive.update import SHARES_CODES, STORE_PROMPT
from turbojax.sharding import tables, together
from turbojax.sharding.per_device import per_device

DECODE = Registry(
    "decode",
    (
        Implementation("mosaic_gpu", decode_mosaic.decode, decode_mosaic.unsupported),
        Implementation("triton", decode_triton.decode, decode_triton.unsupported),
        Implementation("xla", decode_reference.decode),
    ),
)


def prefill(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: ProgressiveCache,
    lengths: jax.Array | None = None,
    *,
    options: Options,
    modifiers: ScoreModifiers = NO_MODIFIERS,
) -> tuple[Attended, ProgressiveCache]:
    """See `turbojax.caches.base.Kind.prefill`.

    Without lengths, sinks and a log-sum-exp, a short prompt's attention is exact, see
    `turbojax.turbo_attention`.
    """
    is_plain = lengths is None and not modifiers.given and not options.residual
    lengths = checks.check_prompt(cache, query, key, value, lengths)
    may_be_exact = options.implementation is None and is_plain
    run = per_device(tables.PREFILL, _attend_and_store, options=options, may_be_exact=may_be_exact)
    return refuse_gradients(run, "prefill")(query, key, value, cache, lengths, modifiers)


def _attend_and_store(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: ProgressiveCache,
    lengths: jax.Array,
    modifiers: ScoreModifiers,
    *,
    options: Options,
    may_be_exact: bool,
) -> tuple[tuple[jax.Array, Any], ProgressiveCache]:
    """`prefill` by the implementation for these arrays."""
    static: dict[str, Any] = {"config": cache.config, "options": options}
    is_exact = may_be_exact and unrounded.is_faster(query, key, **static)
    attend = ATTENTION.select(
        options.implementation, query=query, key=key, value=value, modifiers=modifiers, **static
    )
    store = STORE_PROMPT.select(STORE_PROMPT.beside(options.implementation), cache=cache, key=key)
    attends_to_codes = attend.name != "xla" and cache.config.mode != "float" and not is_exact
    inside = jnp.clip(lengths, 0, key.shape[1])
    # One pass over keys and values serves both, unless first tokens move the cache's blocks.
    if store.name in SHARES_CODES and attends_to_codes:
        permuted = attend.name == "mosaic_gpu"
        store_both = SHARES_CODES[store.name]
        filled, codes = store_both(cache, key, value, lengths, permuted=permuted)
        extra = {"stage1": codes and tuple(codes)}
    else:
        filled, extra = store.run(cache, key, value, lengths), {}
    query, key, value, inside, modifiers = together(query, key, value, inside, modifiers)
    if is_exact:
        return (unrounded.exact(query, key, value, options), None), filled
    out = attend.run(query, key, value, inside, inside, modifiers=modifiers, **static, **extra)
    return out, filled
