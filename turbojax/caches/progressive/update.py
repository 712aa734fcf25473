"""Writing to a `ProgressiveCache`: a prompt, or new tokens (TurboAttention, section 3.3)."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from turbojax import _checks
from turbojax._gradient import refuse_gradients
from turbojax._registry import Implementation, ImplementationName, Registry
from turbojax.caches import checks
from turbojax.caches.progressive import append_mosaic, append_reference, append_triton
from turbojax.caches.progressive.cache import ProgressiveCache
from turbojax.sharding import tables
from turbojax.sharding.per_device import per_device

APPEND = Registry(
    "append",
    (
        Implementation("mosaic_gpu", append_mosaic.append, append_mosaic.append_unsupported),
        Implementation("triton", append_triton.append, append_triton.append_unsupported),
        Implementation("xla", append_reference.append),
    ),
)
STORE_PROMPT = Registry(
    "store_prompt",
    (
        Implementation(
            "mosaic_gpu", append_mosaic.store_prompt, append_mosaic.store_prompt_unsupported
        ),
        Implementation(
            "triton", append_triton.store_prompt, append_triton.store_prompt_unsupported
        ),
        Implementation("xla", append_reference.store_prompt),
    ),
)
APPEND_PART = Registry(
    "append",
    (
        Implementation("mosaic_gpu", append_mosaic.append, append_mosaic.append_part_unsupported),
        Implementation("xla", append_reference.append),
    ),
)
STORE_PART = Registry(
    "store_prompt",
    (
        Implementation(
            "mosaic_gpu", append_mosaic.store_part_of_prompt, append_mosaic.store_prompt_unsupported
        ),
        Implementation("xla", append_reference.store_prompt),
    ),
)
SHARES_CODES: Mapping[str, Callable[..., Any]] = {
    "mosaic_gpu": append_mosaic.store_prompt_with_operands,
    "triton": append_triton.store_prompt_with_operands,
}
"""Of the implementations of `store_prompt` those that hand out the prompt's codes, too."""


def append(
    cache: ProgressiveCache,
    key: jax.Array,
    value: jax.Array,
    *,
    lengths: jax.Array | None = None,
    implementation: ImplementationName | None = None,
) -> ProgressiveCache:
    """See `turbojax.append`: to the int8 buffer, whose full blocks are compressed."""
    check_cache_arguments(cache, key, value)
    batch, tokens = key.shape[:2]
    lengths = _checks.check_lengths("lengths", lengths, batch, tokens)
    checks.check_room(cache, lengths)
    run = per_device(tables.APPEND, _append, implementation=implementation)
    return refuse_gradients(run, "append")(cache, key, value, lengths)


def _append(
    cache: ProgressiveCache,
    key: jax.Array,
    value: jax.Array,
    lengths: jax.Array,
    *,
    implementation: ImplementationName | None,
) -> ProgressiveCache:
    chosen = APPEND.select(implementation, cache=cache, key=key)
    extended: ProgressiveCache = chosen.run(cache, key, value, lengths)
    return extended


def store_prompt(
    cache: ProgressiveCache,
    key: jax.Array,
    value: jax.Array,
    lengths: jax.Array,
    *,
    implementation: ImplementationName | None = None,
) -> ProgressiveCache:
    """Stores a prompt in empty sequences: the cache's half of `prefill`, whose errors it raises.

    The buffer gets as much of the prompt as its tokens would leave there one by one (with
    ``flush="all"`` what fills no block), the blocks get the rest. All implementations store the
    same bits. Sequences that are not empty stay as they are and turn `overflowed`.
    """
    check_cache_arguments(cache, key, value)
    checks.check_prompt_lengths(cache, lengths)
    run = per_device(tables.STORE_PROMPT, _store_prompt, implementation=implementation)
    return refuse_gradients(run, "prefill")(cache, key, value, lengths)


def _store_prompt(
    cache: ProgressiveCache,
    key: jax.Array,
    value: jax.Array,
    lengths: jax.Array,
    *,
    implementation: ImplementationName | None,
) -> ProgressiveCache:
    chosen = STORE_PROMPT.select(implementation, cache=cache, key=key)
    filled: ProgressiveCache = chosen.run(cache, key, value, lengths)
    return filled


def append_part(
    cache: ProgressiveCache,
    key: jax.Array,
    value: jax.Array,
    lengths: jax.Array,
    first: jax.Array,
    *,
    implementation: str | None = None,
) -> ProgressiveCache:
    """`append` to a part of a cache: one device's, where blocks are split over several.

    The part has lengths and buffers of whole sequences, and some of their blocks; `first` (int32
    ``[]``) is the token that its first block begins with. `implementation` is the name that
    `decode` is asked for at the same time; ``"mosaic_gpu"`` appends one token.
    """
    check_cache_arguments(cache, key, value)
    name = APPEND_PART.beside(implementation)
    if name == "mosaic_gpu" and key.shape[1] > 1:  # it attends to several tokens, appends one
        name = None
    chosen = APPEND_PART.select(name, cache=cache, key=key)
    number = first // cache.config.block_kv
    return refuse_gradients(chosen.run, "append")(cache, key, value, lengths, number)


def store_prompt_part(
    cache: ProgressiveCache,
    key: jax.Array,
    value: jax.Array,
    lengths: jax.Array,
    first: jax.Array,
    *,
    implementation: str | None = None,
) -> ProgressiveCache:
    """`store_prompt` of a part of a cache, see `append_part`."""
    check_cache_arguments(cache, key, value)
    checks.check_prompt_lengths(cache, lengths)
    chosen = STORE_PART.select(STORE_PART.beside(implementation), cache=cache, key=key)
    number = first // cache.config.block_kv
    return refuse_gradients(chosen.run, "prefill")(cache, key, value, lengths, number)


def check_cache_arguments(cache: ProgressiveCache, key: jax.Array, value: jax.Array) -> None:
    """Raises unless `key` and `value` are tokens for this cache."""
    checks.check_kind(cache, ProgressiveCache)
    checks.check_tokens(cache, key, value)
