"""`attention` and `decode` of exact keys and values: arguments, checks, XLA, cuDNN or a kernel."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp

from turbojax import _checks
from turbojax.config import TurboConfig
from turbojax.ops import cudnn, turbo_attention
from turbojax.ops.exact_attention import mosaic_gpu, reference
from turbojax.ops.options import Options, require_causal
from turbojax.state import checks, ring
from turbojax.state.exact import ExactCache

IMPLEMENTATIONS = ("xla", "cudnn", "mosaic_gpu")
_FLOAT = TurboConfig(mode="float", softmax="exact")


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    scale: float | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Exact causal attention within prompts.

    Args:
      query: ``[B, T, N, H]``.
      key: ``[B, T, K, H]``.
      value: ``[B, T, K, H]``.
      scale: factor of the scores; ``1 / sqrt(H)`` if not given.
      local_window_size: see `turbojax.turbo_attention`.
      logits_soft_cap: the same; with one, `turbojax.turbo_attention` attends, in mode ``"float"``
        and with the exact softmax.
      implementation: ``"xla"``, ``"cudnn"``, or None for cuDNN where it can; ``"mosaic_gpu"``,
        which only decodes, is None here.

    Returns:
      ``[B, T, N, H]`` in the query's dtype.

    Raises:
      TypeError: if dtypes are not supported or differ.
      ValueError: if a shape, an option or the name does not fit.
      NotImplementedError: if cuDNN is asked for and cannot run this here.
    """
    _checks.check_query_key_value(query, key, value)
    options = Options.complete(
        query.shape[3],
        scale=scale,
        is_causal=True,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
    )
    return _attend(query, key, value, options=options, implementation=implementation)


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    options: Options,
    implementation: str | None = None,
) -> jax.Array:
    """`attention` for callers that have `Options`, causal ones."""
    require_causal(options)
    _checks.check_query_key_value(query, key, value)
    return _attend(query, key, value, options=options, implementation=implementation)


def _attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    options: Options,
    implementation: str | None,
) -> jax.Array:
    """`attention` of checked arguments."""
    chosen = _choose(implementation, query, key, logits_soft_cap=options.logits_soft_cap)
    if options.logits_soft_cap is not None:
        name = "xla" if implementation == "xla" else None
        out, _ = turbo_attention.attend(
            query, key, value, config=_FLOAT, options=options, implementation=name
        )
        return out
    return cudnn.attend(query, key, value, options=options, implementation=chosen)


def decode(
    query: jax.Array,
    cache: ExactCache,
    *,
    scale: float | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Exact attention of the last `T` cached tokens' queries; see `turbojax.decode`.

    Args:
      query: ``[B, T, N, H]``.
      cache: the cache, which already holds the queries' own keys and values.
      scale: factor of the scores; ``1 / sqrt(H)`` if not given.
      local_window_size: see `turbojax.decode`; of a ring (`turbojax.state.ring`) at most its own.
      logits_soft_cap: see `turbojax.decode`.
      implementation: ``"cudnn"`` (one query per sequence, neither window nor cap, at most 128
        channels), ``"mosaic_gpu"`` (compute capability 9.0 or 10.0, bfloat16 or float16, 64, 128 or
        256 channels, at most 64 queries of a KV head; of a window it reads no more than that),
        ``"xla"``, or None for the first of them that can. The kernel's gradient is XLA's.

    Returns:
      ``[B, T, N, H]`` in the query's dtype.

    Raises:
      TypeError: if `cache` is another kind or the query's dtype is not supported.
      ValueError: if a shape, an option or the name does not fit.
      NotImplementedError: if what is asked for cannot run this here.
    """
    _check_newest(query, cache)
    options = Options.complete(
        query.shape[3],
        scale=scale,
        is_causal=True,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
    )
    return _decode(query, cache, options=options, implementation=implementation)


def attend_cache(
    query: jax.Array,
    cache: ExactCache,
    *,
    options: Options,
    implementation: str | None = None,
) -> jax.Array:
    """`decode` for callers that have `Options`, causal ones."""
    require_causal(options)
    _check_newest(query, cache)
    return _decode(query, cache, options=options, implementation=implementation)


def _check_newest(query: jax.Array, cache: ExactCache) -> None:
    """Raises unless the queries fit the cache."""
    checks.check_kind(cache, ExactCache)
    _checks.check_query(query)
    batch, channels = cache.key.shape[0], cache.head_dim
    if (query.shape[0], query.shape[3]) != (batch, channels):
        raise ValueError(
            f"{query.shape=} must be [{batch}, T, N, {channels}], as the cache was made for"
        )
    _checks.check_head_groups(query.shape[2], cache.num_kv_heads)


def _decode(
    query: jax.Array, cache: ExactCache, *, options: Options, implementation: str | None
) -> jax.Array:
    """`decode` of checked arguments."""
    ring.check_visible(cache, options.window, query.shape[1])
    chosen = _choose_decode(implementation, query, cache, options)
    if chosen == "cudnn":
        return cudnn.dot_product_attention(
            query,
            cache.key,
            cache.value,
            scale=options.scale,
            key_value_seq_lengths=cache.lengths,
            implementation="cudnn",
        )
    if chosen == "mosaic_gpu":
        return _by_kernel(options, query, cache)
    return _by_xla(query, cache, options=options)


def _by_xla(query: jax.Array, cache: ExactCache, *, options: Options) -> jax.Array:
    tokens = query.shape[1]
    position = cache.lengths[:, None] - tokens + jnp.arange(tokens)[None]
    if cache.is_ring:
        held = ring.positions_of_rows(cache.lengths, cache.room)
        mask = options.mask(position, held, cache.lengths) & (held >= 0)[:, None]
    else:
        mask = options.mask(position, jnp.arange(cache.room)[None], cache.lengths)
    return reference.masked_attention(
        query,
        cache.key.astype(query.dtype),
        cache.value.astype(query.dtype),
        mask,
        scale=options.scale,
        logits_soft_cap=options.logits_soft_cap,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by_kernel(options: Options, query: jax.Array, cache: ExactCache) -> jax.Array:
    """The kernel, with XLA's gradient; forward mode is `implementation="xla"`'s alone."""
    return mosaic_gpu.attend(query, cache, options=options)


def _forward(
    options: Options, query: jax.Array, cache: ExactCache
) -> tuple[jax.Array, tuple[jax.Array, ExactCache]]:
    return _by_kernel(options, query, cache), (query, cache)


def _backward(
    options: Options, saved: tuple[jax.Array, ExactCache], gradient: jax.Array
) -> tuple[jax.Array, ExactCache]:
    _, pull = jax.vjp(functools.partial(_by_xla, options=options), *saved)
    return pull(gradient)


_by_kernel.defvjp(_forward, _backward)


def _choose_decode(
    implementation: str | None, query: jax.Array, cache: ExactCache, options: Options
) -> str:
    """What decodes: what is asked for, or the first of cuDNN, the kernel and XLA that can."""
    _check_name(implementation)
    refusals = {
        "cudnn": lambda: cudnn.unsupported(
            query,
            cache.key,
            decoding=True,
            windowed=options.window is not None,
            logits_soft_cap=options.logits_soft_cap,
        ),
        "mosaic_gpu": lambda: mosaic_gpu.unsupported(query, cache),
        "xla": lambda: None,
    }
    if implementation is None:
        return next(name for name, refusal in refusals.items() if refusal() is None)
    refusal = refusals[implementation]()
    if refusal is not None:
        raise NotImplementedError(f"exact attention cannot run here: {implementation}: {refusal}")
    return implementation


def _check_name(implementation: str | None) -> None:
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(
            f"{implementation=} must be None or one of {IMPLEMENTATIONS} for an exact cache"
        )


def _choose(
    implementation: str | None,
    query: jax.Array,
    key: jax.Array,
    *,
    logits_soft_cap: float | None = None,
) -> Literal["xla", "cudnn"]:
    """What attends within prompts."""
    _check_name(implementation)
    if implementation == "xla":
        return "xla"
    refusal = cudnn.unsupported(query, key, logits_soft_cap=logits_soft_cap)
    if implementation == "cudnn" and refusal is not None:
        raise NotImplementedError(f"exact attention cannot run here: cudnn: {refusal}")
    return "xla" if refusal is not None else "cudnn"
