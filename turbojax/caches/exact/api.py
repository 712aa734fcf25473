"""`attention` and `decode` of exact keys and values: arguments, checks, XLA, cuDNN or a kernel."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from turbojax import _checks
from turbojax.attention import cudnn
from turbojax.attention import score_modifiers as given
from turbojax.attention import sinks as sinks_of_call
from turbojax.attention import turbo as turbo_attention
from turbojax.attention.options import Options, require_causal
from turbojax.attention.score_modifiers import NO_MODIFIERS, ScoreModifiers
from turbojax.caches import checks, new_tokens, rolling_buffer
from turbojax.caches.base import Attended
from turbojax.caches.exact import mosaic_gpu, reference
from turbojax.caches.exact.cache import ExactCache, append
from turbojax.numerics import rows
from turbojax.numerics.config import TurboConfig
from turbojax.sharding import tables, together
from turbojax.sharding.notation import Table
from turbojax.sharding.per_device import per_device, per_device_explicit

REPEATABLE = "repeatable"
"""The name of what gives the same bits every time, which cuDNN's decode does not."""
IMPLEMENTATIONS = ("xla", "cudnn", "mosaic_gpu", REPEATABLE)
_FLOAT = TurboConfig(mode="float", softmax="exact")


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    scale: float | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
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
      sinks: the same; with sinks too `turbojax.turbo_attention` attends.
      implementation: ``"xla"``, ``"cudnn"``, or None for cuDNN where it can; ``"mosaic_gpu"``,
        and ``"repeatable"``, which only decode, are None here.

    Returns:
      ``[B, T, N, H]`` in the query's dtype.

    Raises:
      TypeError: if dtypes are not supported or differ.
      ValueError: if a shape, an option or the name does not fit.
      NotImplementedError: if cuDNN is asked for and cannot run this here.
    """
    _checks.check_query(query)
    options = Options.complete(
        query.shape[3],
        scale=scale,
        is_causal=True,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        implementation=implementation,
    )
    return attend(query, key, value, options=options, modifiers=given.of_layer(query, sinks))


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    lengths: jax.Array | None = None,
    *,
    options: Options,
    modifiers: ScoreModifiers = NO_MODIFIERS,
) -> jax.Array:
    """`attention` of `Options`, causal ones.

    What lies past `lengths` (optional int32 ``[B]``) reaches no other token; its own rows of the
    result mean nothing.
    """
    require_causal(options)
    _checks.check_query_key_value(query, key, value)
    if lengths is not None:  # a masked NaN would still be 0 times NaN
        lengths = _checks.check_lengths("key_value_seq_lengths", lengths, *key.shape[:2])
        key, value = (rows.without_padding(x, lengths) for x in (key, value))
    run = per_device_explicit(tables.EXACT, _attend, options=options)
    out: jax.Array = run(query, key, value, modifiers)
    return out


def _attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    modifiers: ScoreModifiers,
    *,
    options: Options,
) -> jax.Array:
    """`attention` by the implementation for these arrays."""
    chosen = _choose(query, key, options, modifiers)
    if options.logits_soft_cap is not None or options.out_dtype is not None or modifiers.given:
        name = "xla" if options.implementation == "xla" else None
        options = dataclasses.replace(options, implementation=name)
        out, _ = turbo_attention.attend(
            query, key, value, config=_FLOAT, options=options, modifiers=modifiers
        )
        return out
    return cudnn.attend(query, key, value, options=options, implementation=chosen)


def prefill(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: ExactCache,
    lengths: jax.Array | None = None,
    *,
    options: Options,
    modifiers: ScoreModifiers = NO_MODIFIERS,
) -> tuple[Attended, ExactCache]:
    """See `turbojax.caches.base.Kind.prefill`; it gives no log-sum-exp."""
    refuse_residual(options)
    out = attend(query, key, value, lengths, options=options, modifiers=modifiers)
    return (out, None), append(cache, key, value, lengths=lengths)


def refuse_residual(options: Options) -> None:
    """Raises NotImplementedError where exact attention is asked for a prompt's log-sum-exp."""
    if options.residual:
        raise NotImplementedError(
            "return_residual=True must be False: exact attention within prompts has no log-sum-exp"
        )


def decode(
    query: jax.Array,
    cache: ExactCache,
    query_lengths: jax.Array | None = None,
    *,
    options: Options,
    modifiers: ScoreModifiers = NO_MODIFIERS,
) -> Attended:
    """See `turbojax.caches.base.Kind.decode`; the log-sum-exp is there where it is wanted.

    Where nothing but an output in the query's dtype is asked for, ``"xla"`` gives queries before
    their sequence's first token no meaning.
    """
    require_causal(options)
    _check_newest(query, cache)
    is_plain = not options.residual and not modifiers.given and options.out_dtype is None
    gives_part = query_lengths is not None or not is_plain
    static: dict[str, Any] = {"options": options, "gives_part": gives_part}
    run = per_device_explicit(tables.EXACT_DECODE, _decode, **static)
    if query_lengths is None:
        out, lse = run(query, cache, modifiers)
        return out, lse
    tokens = query.shape[1]
    real = _checks.check_lengths("query_seq_lengths", query_lengths, query.shape[0], tokens)
    real = jnp.clip(real, 0, tokens)
    moves = tokens > 1 and modifiers.query_offset is None
    if moves:  # the implementations know no padding: real queries go to the end
        query = _moved(query, real - tokens)
    found = run(query, cache, modifiers)
    out, lse = (_moved(x, tokens - real) for x in found) if moves else found
    is_real = jnp.arange(tokens)[None] < real[:, None]
    out = jnp.where(is_real[..., None, None], out, 0)
    return out, jnp.where(is_real[..., None], lse, -jnp.inf)


def _moved(x: jax.Array, by: jax.Array) -> jax.Array:
    """``x [B, T, ...]`` with token ``t + by`` in the place of `t`, or the nearest there is."""
    index = jnp.clip(jnp.arange(x.shape[1])[None] + by[:, None], 0, x.shape[1] - 1)
    return jnp.take_along_axis(x, index.reshape(*index.shape, *(1,) * (x.ndim - 2)), axis=1)


def _check_newest(query: jax.Array, cache: ExactCache) -> None:
    """Raises unless the queries fit the cache; their dtype may be another."""
    checks.check_kind(cache, ExactCache)
    _checks.check_query(query)
    batch, channels = cache.key.shape[0], cache.head_dim
    if (query.shape[0], query.shape[3]) != (batch, channels):
        raise ValueError(
            f"{query.shape=} must be [{batch}, T, N, {channels}], as the cache was made for"
        )
    _checks.check_head_groups(query.shape[2], cache.num_kv_heads)


def _decode(
    query: jax.Array,
    cache: ExactCache,
    modifiers: ScoreModifiers,
    *,
    options: Options,
    gives_part: bool,
) -> tuple[jax.Array, Any]:
    """`decode` of checked arguments; a log-sum-exp only where a part is wanted."""
    rolling_buffer.check_visible(cache, options.window, query.shape[1])
    if gives_part:
        return _decode_part(query, cache, options=options, modifiers=modifiers)
    chosen = _choose_decode(query, cache, options)
    if chosen == "mosaic_gpu":
        return _by_kernel(options, *together(query, cache)), None
    if chosen == "xla":
        return _by_xla(query, cache, options=options), None
    out = cudnn.dot_product_attention(
        query,
        cache.key,
        cache.value,
        scale=options.scale,
        key_value_seq_lengths=cache.lengths,
        implementation="cudnn",
    )
    return out, None


def _decode_part(
    query: jax.Array, cache: ExactCache, *, options: Options, modifiers: ScoreModifiers
) -> tuple[jax.Array, jax.Array]:
    """`decode` of checked arguments with every option, and the log-sum-exp."""
    new_tokens.check_whole(cache, modifiers)
    if modifiers.query_offset is not None:
        real = jnp.full(query.shape[0], query.shape[1], jnp.int32)
        lengths, modifiers = new_tokens.as_newest(query, cache.lengths, real, modifiers, options)
        cache = new_tokens.shortened(cache, lengths)

    def run(modifiers: ScoreModifiers, options: Options) -> tuple[jax.Array, jax.Array]:
        chosen = _choose_decode(query, cache, options, modifiers=modifiers, gives_part=True)
        if chosen == "mosaic_gpu":
            return _part_by_kernel(options, *together(query, cache))
        return _part_by_xla(query, cache, modifiers, options=options)

    return sinks_of_call.after(run, query, None, modifiers, options)


def _by_xla(query: jax.Array, cache: ExactCache, *, options: Options) -> jax.Array:
    return reference.masked_attention(
        query,
        cache.key.astype(query.dtype),
        cache.value.astype(query.dtype),
        _mask(query, cache, options),
        scale=options.scale,
        logits_soft_cap=options.logits_soft_cap,
    )


@functools.partial(jax.jit, static_argnames="options")
def _part_by_xla(
    query: jax.Array,
    cache: ExactCache,
    modifiers: ScoreModifiers = NO_MODIFIERS,
    *,
    options: Options,
) -> tuple[jax.Array, jax.Array]:
    begin = None
    if modifiers.query_offset is not None:
        real = jnp.full(query.shape[0], query.shape[1], jnp.int32)
        begin = modifiers.begin(cache.lengths, real)
    out, residual = reference.masked_part(
        query,
        cache.key,
        cache.value,
        _mask(query, cache, options, begin),
        scale=options.scale,
        logits_soft_cap=options.logits_soft_cap,
    )
    return out.astype(options.dtype_of_output(query)), residual


def _mask(
    query: jax.Array, cache: ExactCache, options: Options, begin: jax.Array | None = None
) -> jax.Array:
    """Which rows of the cache queries see, the first at `begin`: bool ``[B, T, S]``."""
    tokens = query.shape[1]
    first = cache.lengths[:, None] - tokens if begin is None else begin[:, None]
    position = first + jnp.arange(tokens)[None]
    if cache.is_rolling:
        held = rolling_buffer.positions_of_rows(cache.lengths, cache.room)
        return options.mask(position, held, cache.lengths) & (held >= 0)[:, None]
    return options.mask(position, jnp.arange(cache.room)[None], cache.lengths)


def _with_gradient(
    table: Table, kernel: Callable[..., Any], xla: Callable[..., Any]
) -> Callable[..., Any]:
    """The kernel, with XLA's gradient; only ``implementation="xla"`` has forward mode."""

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def call(options: Options, query: jax.Array, cache: ExactCache) -> Any:
        return per_device(table, kernel, options=options)(query, cache)

    def forward(options: Options, *saved: Any) -> tuple[Any, tuple[Any, ...]]:
        return call(options, *saved), saved

    def backward(options: Options, saved: tuple[Any, ...], cotangents: Any) -> Any:
        _, pull = jax.vjp(functools.partial(xla, options=options), *saved)
        return pull(cotangents)

    call.defvjp(forward, backward)
    return call


def _kernel_output(query: jax.Array, cache: ExactCache, *, options: Options) -> jax.Array:
    return mosaic_gpu.attend(query, cache, options=options)[0]


_by_kernel = _with_gradient(tables.EXACT_KERNEL, _kernel_output, _by_xla)
_part_by_kernel = _with_gradient(tables.EXACT_KERNEL_PART, mosaic_gpu.attend, _part_by_xla)


def _choose_decode(
    query: jax.Array,
    cache: ExactCache,
    options: Options,
    *,
    modifiers: ScoreModifiers = NO_MODIFIERS,
    gives_part: bool = False,
) -> str:
    """The name of what decodes: the one asked for, or the first of cuDNN, kernel and XLA that can.

    `gives_part`: more is wanted than an output in the query's dtype. Sinks are not in `modifiers`.
    """
    implementation = options.implementation
    _check_name(implementation)
    refusals = {
        "cudnn": lambda: (
            "it gives no log-sum-exp and no float32 output, and has no sinks and no query_offset"
            if gives_part
            else cudnn.unsupported(
                query,
                cache.key,
                decoding=True,
                windowed=options.window is not None,
                logits_soft_cap=options.logits_soft_cap,
            )
        ),
        "mosaic_gpu": lambda: modifiers.refusal() or mosaic_gpu.unsupported(query, cache),
        "xla": lambda: None,
    }
    if implementation == REPEATABLE:
        del refusals["cudnn"]
    if implementation in (None, REPEATABLE):
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
    query: jax.Array, key: jax.Array, options: Options, modifiers: ScoreModifiers
) -> Literal["xla", "cudnn"]:
    """The name of what attends within prompts."""
    implementation = options.implementation
    _check_name(implementation)
    if implementation == "xla":
        return "xla"
    refusal = modifiers.refusal() or cudnn.unsupported(
        query, key, logits_soft_cap=options.logits_soft_cap
    )
    if options.out_dtype is not None:
        refusal = f"it has no output_dtype={options.out_dtype}"
    if implementation == "cudnn" and refusal is not None:
        raise NotImplementedError(f"exact attention cannot run here: cudnn: {refusal}")
    return "xla" if refusal is not None else "cudnn"
