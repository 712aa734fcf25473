"""Writing to a `ProgressiveCache`: a prompt, or new tokens (TurboAttention, section 3.3)."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from turbojax import _checks
from turbojax._gradient import refuse_gradients
from turbojax._registry import Implementation, ImplementationName, Registry
from turbojax.caches import checks
from turbojax.caches.progressive import append_mosaic as mosaic_gpu
from turbojax.caches.progressive import append_reference as reference
from turbojax.caches.progressive import append_triton as triton
from turbojax.caches.progressive.cache import ProgressiveCache
from turbojax.sharding import tables
from turbojax.sharding.per_device import per_device

APPEND = Registry(
    "append",
    (
        Implementation("mosaic_gpu", mosaic_gpu.append, mosaic_gpu.append_unsupported),
        Implementation("triton", triton.append, triton.append_unsupported),
        Implementation("xla", reference.append),
    ),
)
STORE_PROMPT = Registry(
    "store_prompt",
    (
        Implementation("mosaic_gpu", mosaic_gpu.store_prompt, mosaic_gpu.store_prompt_unsupported),
        Implementation("triton", triton.store_prompt, triton.store_prompt_unsupported),
        Implementation("xla", reference.store_prompt),
    ),
)
APPEND_PART = Registry(
    "append",
    (
        Implementation("mosaic_gpu", mosaic_gpu.append, mosaic_gpu.append_part_unsupported),
        Implementation("xla", reference.append),
    ),
)
STORE_PART = Registry(
    "store_prompt",
    (
        Implementation(
            "mosaic_gpu", mosaic_gpu.store_part_of_prompt, mosaic_gpu.store_prompt_unsupported
        ),
        Implementation("xla", reference.store_prompt),
    ),
)
SHARES_CODES: Mapping[str, Callable[..., Any]] = {
    "mosaic_gpu": mosaic_gpu.store_prompt_with_operands,
    "triton": triton.store_prompt_with_operands,
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
    """Adds new tokens, one or many per sequence.

    Tokens go to the int8 buffer with the universal scale, clamped to +-119 codes; when it is full,
    its oldest block is compressed, or all of it (`TurboConfig.flush`). Without a prefill or a given
    scale, a head's universal scale is twice the maximum of its first token that is not all zero,
    over 119. The result does not depend, bit for bit, on how a run of tokens is split into calls.

    Args:
      cache: the cache to extend.
      key: ``[B, T, K, H]`` in `cache.dtype`.
      value: the same shape and dtype.
      lengths: optional int ``[B]``: how many of the `T` tokens belong to each sequence, the first
        ones; all of them if not given. `decode` takes the same as `query_seq_lengths`. Under
        `jit` values outside ``0..T`` act as the nearest bound, and more than `T` as overflow.
      implementation: ``"mosaic_gpu"`` (one token, one kernel), ``"triton"``
        (one token, one kernel for keys and one for values), ``"xla"``, or None to choose. All store
        the same bits. Names that only attend are refused.

    Returns:
      The extended cache. Under `jit`, tokens past `max_length` are left out and `overflowed`
      turns True for their sequence; nothing that was stored changes.

    Raises:
      TypeError: if a dtype differs from `cache.dtype`, or `lengths` are not integers.
      ValueError: if a shape does not fit, or, outside `jit`, a sequence would exceed
        `max_length` or a length is outside ``0..T``.
      NotImplementedError: if the implementation asked for cannot run this, or when it is
        differentiated.
    """
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
    check_prompt(cache, key, value, lengths)
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
    check_prompt(cache, key, value, lengths)
    chosen = STORE_PART.select(STORE_PART.beside(implementation), cache=cache, key=key)
    number = first // cache.config.block_kv
    return refuse_gradients(chosen.run, "prefill")(cache, key, value, lengths, number)


def check_prompt(
    cache: ProgressiveCache, key: jax.Array, value: jax.Array, lengths: jax.Array
) -> None:
    """Raises unless this prompt fits this cache; under `jit`, lengths cannot be seen."""
    check_cache_arguments(cache, key, value)
    checks.check_prompt_lengths(cache, lengths)


def check_cache_arguments(cache: ProgressiveCache, key: jax.Array, value: jax.Array) -> None:
    """Raises unless `key` and `value` are tokens for this cache."""
    checks.check_kind(cache, ProgressiveCache)
    checks.check_tokens(cache, key, value)
