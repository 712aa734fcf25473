"""The Mosaic GPU kernels behind the gradient of `turbo_attention` on Hopper."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from turbojax._device import multiprocessors, needs_hopper
from turbojax.attention.options import Options
from turbojax.attention.score_modifiers import NO_MODIFIERS, ScoreModifiers
from turbojax.attention.sinks import sees_only_sink
from turbojax.attention.turbo import gradient_reference
from turbojax.attention.turbo.operands import (
    Backward,
    bias_of_hopper,
    hopper_refusal,
    prepare_rows,
    quantize_queries,
    quantize_values,
)
from turbojax.numerics import rounding, rows
from turbojax.numerics.config import TurboConfig

# Queries of a program.
_TILE = 128
_ROWS = 64


class Launch(NamedTuple):
    """How the two kernels, of queries and of keys, are laid out.

    Their numbers are the steps whose operands are in shared memory; for the others see
    `pallas_kernels.mosaic.hopper.gradient.tiles.Settings`.
    """

    queries: int
    keys: int
    ping_pong: bool = False
    is_wide: bool = False


def unsupported(
    *,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    config: TurboConfig,
    options: Options,
    modifiers: ScoreModifiers = NO_MODIFIERS,
) -> str | None:
    """Why the gradient cannot be computed by these kernels here; None if it can."""
    head_dim = query.shape[-1]
    refusal = hopper_refusal(key, value, options, modifiers)
    if refusal is not None:
        return refusal
    if config.mode == "float" and query.dtype == jnp.float32:
        return "config.mode='float' in float32 must be an 8-bit mode: its products have 16 bits"
    for name in ("block_q", "block_kv"):
        if getattr(config, name) % _ROWS:
            return f"config.{name}={getattr(config, name)} must be a multiple of {_ROWS}"
    _, narrower, widest = rows.HEAD_DIMS
    if head_dim > widest:
        return f"{head_dim=} must be at most {widest}"
    if config.mode == "float" and head_dim > narrower:
        return f"{head_dim=} must be at most {narrower} where config.mode='float'"
    if head_dim > narrower and config.gradient != "8bit":
        given = {"segments": modifiers.query_segment_ids, "key_bounds": modifiers.key_bounds}
        for name in (name for name, x in given.items() if x is not None):
            return f"{head_dim=} must be at most {narrower} with {name}, or gradient='8bit'"
    return needs_hopper()


@functools.partial(jax.jit, static_argnames=("config", "options", "is_ragged", "dtype", "launch"))
def gradient(
    arrays: Backward,
    *,
    config: TurboConfig,
    options: Options,
    is_ragged: bool = True,
    modifiers: ScoreModifiers = NO_MODIFIERS,
    dtype: str | None = None,
    launch: Launch | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, ScoreModifiers]:
    """`gradient_reference.gradient` as two kernels: of the queries, and of keys and values.

    Weights and the scores' gradients are rounded to the operands' 16 bits before they multiply;
    float32 operands are rounded to bfloat16, except those that become codes. E4m3 products are
    accumulated as in the forward pass. Gradients of float16 outputs are scaled by a power of two on
    the way. Every sum has one order: equal bits in every run. Values have at most as many channels
    as keys: zeros are added.
    """
    from pallas_kernels.mosaic.hopper.gradient import keys, queries, tiles

    query, key, value, query_length, key_length, out, residual, d_out, d_residual = arrays
    (_, tokens, _, head_dim), size = query.shape, key.shape[1]
    padded = -(-tokens // _TILE) * _TILE
    of_values = value.shape[3]
    value, out, d_out = (rows.pad_axis(x, 3, head_dim) for x in (value, out, d_out))
    # A window may end before the last query, where there are fewer keys.
    may_hide = is_ragged or set(modifiers.given) - {"sinks"}
    all_see = not may_hide and (options.window is None or tokens <= size)
    d_out = d_out if all_see else _of_seeing(d_out, out, residual, modifiers)
    unit = None
    if query.dtype == jnp.float16:
        unit = _unit(d_out)
        d_out = (d_out.astype(jnp.float32) * unit).astype(jnp.float16)
        d_residual = d_residual * unit[..., 0]
    if is_ragged:
        # The kernels load padding, too, and weight it with 0, which does not remove a NaN.
        query = rows.without_padding(query, query_length)
        key, value = (rows.without_padding(x, key_length) for x in (key, value))
    q, k, v, d_o = (rows.padded(x) for x in (query, key, value, d_out))
    of_rows = (out, residual, d_residual, query_length)
    # Operands without codes are multiplied in 16 bits; `delta` is computed from the same numbers.
    d_weighed = d_o if config.gradient == "8bit" else _in_16_bits(d_o)
    q8, d8, lse, delta = _row_operands(q, d_weighed, *of_rows, config, padded)
    k8 = _codes(k, key_length, config.block_kv, config)
    v8 = _value_codes(v, key_length, config)
    q, k, d_o = (_in_16_bits(x) for x in (q, k, d_o))
    d8 = d8 or _as_it_is(d_o)
    x = tiles.Operands(*q8, *k8, *d8, *v8, q, k, d_o, lse, delta, query_length, key_length)
    x = x._replace(
        shifts=modifiers.shift(), **_of_segments(modifiers, query_length, key_length, options)
    )
    x = x._replace(**_of_key_bounds(modifiers, query_length, size, options))
    x = x._replace(bias=bias_of_hopper(modifiers))
    if modifiers.alibi_slopes is not None:
        x = x._replace(slopes=modifiers.alibi_slopes * math.log2(math.e))
    launch = launch or default_launch(
        q.shape[-1],
        config,
        is_plain=x.query_order is None and x.slopes is None,
        changes_scores=options.logits_soft_cap is not None or x.bias is not None,
    )
    settings = functools.partial(_settings, config, options)
    wanted = dtype or query.dtype
    computed = wanted if unit is None else jnp.float32
    d_q = queries.query_gradient(x, computed, settings(launch.queries, is_wide=launch.is_wide))
    d_q = d_q[:, :tokens, :, :head_dim]
    d_k, d_v = keys.key_gradient(x, computed, settings(launch.keys, ping_pong=launch.ping_pong))
    d_k, d_v = d_k[:, :size, :, :head_dim], d_v[:, :size, :, :of_values]
    if unit is not None:
        d_q, d_k, d_v = ((y / unit).astype(wanted) for y in (d_q, d_k, d_v))
    # Slopes and biases are usually constants: under `jit` a gradient that is not used is not
    # computed, neither in plain JAX nor by a kernel.
    d_bias = None
    if modifiers.bias is not None:
        gains = None if unit is None else 1 / unit[:, 0, 0, 0]
        d_bias = _of_bias(x._replace(gains=gains), modifiers.bias, settings)
    if modifiers.alibi_slopes is None:
        return d_q, d_k, d_v, ScoreModifiers(bias=d_bias)
    *_, of_modifiers = gradient_reference.gradient(
        arrays, config=config, options=options, modifiers=modifiers
    )
    return d_q, d_k, d_v, ScoreModifiers(alibi_slopes=of_modifiers.alibi_slopes, bias=d_bias)


def _of_bias(x: Any, bias: jax.Array, settings: Callable[..., Any]) -> jax.Array:
    """The gradient of a bias, in its shape and dtype, from the operands of the other kernels."""
    from pallas_kernels.mosaic.hopper.gradient.bias import bias_gradient, stages_of

    found = bias_gradient(x, settings(stages_of(x)))
    if bias.shape[2] == 1:  # a tile's rows are left
        found = jnp.sum(found, axis=2, keepdims=True).astype(bias.dtype)
    return found[..., : bias.shape[3]]


def _of_seeing(
    d_out: jax.Array, out: jax.Array, residual: jax.Array, modifiers: ScoreModifiers
) -> jax.Array:
    """Cotangents with zeros for queries that saw no key, whether or not there is a sink."""
    d_out = rows.without_blind(d_out, residual)
    if modifiers.sinks is None:
        return d_out
    no_key = sees_only_sink(out, residual, modifiers.sinks)
    return jnp.where(no_key[..., None], jnp.zeros((), d_out.dtype), d_out)


def _of_segments(
    modifiers: ScoreModifiers, query_length: jax.Array, key_length: jax.Array, options: Options
) -> dict[str, jax.Array]:
    """The kernels' arguments about segments; none without segments."""
    from pallas_kernels.mosaic.hopper.segments import bounds, padded

    queries, keys = modifiers.query_segment_ids, modifiers.key_value_segment_ids
    if queries is None or keys is None:
        return {}
    of_queries, of_keys = (queries, query_length), (keys, key_length)
    query_bounds = bounds(*of_queries, _TILE, *of_keys, _ROWS)
    key_bounds = bounds(*of_keys, _TILE, *of_queries, _ROWS)
    return {
        "query_ids": padded(queries, _TILE),
        "key_ids": padded(keys, _TILE),
        **_in_order(query_bounds, key_bounds, modifiers.shift(), options),
    }


def _of_key_bounds(
    modifiers: ScoreModifiers, query_length: jax.Array, size: int, options: Options
) -> dict[str, jax.Array]:
    """The kernels' arguments about bounds of each query's keys; none without these."""
    from pallas_kernels.mosaic.hopper.segments import of_bound_keys, of_key_bounds, padded

    if modifiers.key_bounds is None:
        return {}
    x = modifiers.key_bounds, query_length
    query_bounds = of_key_bounds(*x, _TILE, size, _ROWS)
    key_bounds = of_bound_keys(*x, _ROWS, size, _TILE)
    return {
        "own": jnp.stack([padded(a, _TILE) for a in modifiers.key_bounds], axis=1),
        **_in_order(query_bounds, key_bounds, modifiers.shift(), options),
    }


def _in_order(
    query_bounds: jax.Array, key_bounds: jax.Array, shift: jax.Array | None, options: Options
) -> dict[str, jax.Array]:
    """Bounds of tiles as the kernels take them, with the order in which these do the tiles."""
    from pallas_kernels.mosaic.hopper.segments import order

    left, right = options.window or (None, None)
    right, back = 0 if options.is_causal else right, None if shift is None else -shift
    return {
        "query_bounds": query_bounds,
        "key_bounds": key_bounds,
        "query_order": order(query_bounds, _TILE, shift, left, right),
        "key_order": order(key_bounds, _TILE, back, right, left),
    }


def _unit(d_out: jax.Array) -> jax.Array:
    """The power of two by which a sequence's float16 gradients become about 1: ``[B, 1, 1, 1]``.

    Gradients of a mean are often near the smallest numbers of float16, and the scores' are smaller.
    """
    largest = jnp.max(jnp.abs(d_out.astype(jnp.float32)), axis=(1, 2, 3), keepdims=True)
    usual = jnp.isfinite(largest) & (largest > 0)
    return jnp.exp2(-jnp.floor(jnp.log2(jnp.where(usual, largest, 1.0))))


def _settings(config: TurboConfig, options: Options, stages: int, **others: bool) -> Any:
    from pallas_kernels.mosaic.hopper.gradient.tiles import Settings

    return Settings(
        scale=options.scale,
        is_causal=options.is_causal,
        window=options.window,
        soft_cap=options.logits_soft_cap,
        approximate_tanh=config.mode in ("int8_fp8", "fp8"),
        block_q=config.block_q,
        block_kv=config.block_kv,
        stages=stages,
        programs=multiprocessors(),
        **others,
    )


def default_launch(
    head_dim: int, config: TurboConfig, *, is_plain: bool = True, changes_scores: bool = False
) -> Launch:
    """As many stages as fit into shared memory, up to the number that was fastest.

    Ping-pong was faster with 128 channels and 8 bits; with 64 or 256 they were not timed. Slots of
    128 keys are for scores that nothing changes and of which positions alone hide any.
    """
    is_8bit = config.gradient == "8bit"
    if head_dim == rows.HEAD_DIMS[-1]:
        return Launch(2, 2) if is_8bit else Launch(1, 1)
    # Four steps of codes and of two operands in 16 bits fill the shared memory.
    is_full = not is_plain and not is_8bit and config.mode != "float"
    is_wide = is_plain and not changes_scores
    stages = 2 if is_wide else 3 if is_full else 4
    ping_pong = is_8bit and head_dim == rows.HEAD_DIMS[1]
    return Launch(stages, 3, ping_pong=ping_pong, is_wide=is_wide)


def _in_16_bits(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x


Codes = tuple[jax.Array, jax.Array]
"""Numbers, and what scales them: one for each block ``[B, K, Sp / block]``."""


def _codes(x: jax.Array, length: jax.Array, block: int, config: TurboConfig) -> Codes:
    """Codes ``[B, K, Sp, H]`` of an operand of the scores; in mode ``"float"`` `x` itself."""
    if config.mode == "float":
        return _as_it_is(_in_16_bits(x))
    return quantize_queries(x, length, dataclasses.replace(config, block_q=block))


def _as_it_is(x: jax.Array) -> Codes:
    return x, jnp.ones((x.shape[0], x.shape[2], 1), jnp.float32)


def _row_operands(
    query: jax.Array,
    d_out: jax.Array,
    out: jax.Array,
    residual: jax.Array,
    d_residual: jax.Array,
    length: jax.Array,
    config: TurboConfig,
    tokens: int,
) -> tuple[Codes, Codes | None, jax.Array, jax.Array]:
    """Codes of queries and, with 8-bit gradients, of `d_out`; `lse` and `delta` of `rows`.

    One kernel computes them where it can, otherwise several do, with the same bits except for the
    sums in `delta`. `query` and `d_out` are `rows.padded`, with zeros in `d_out` for rows that saw
    nothing; the other arrays are not. `tokens` is the number of rows of `lse` and `delta`.
    """
    x = prepare_rows(query, d_out, out, residual, d_residual, length, config, tokens)
    if x is not None:
        d8 = None if x.d8 is None else (x.d8, x.d_scale)
        return (x.q8, x.q_scale), d8, x.lse, x.delta
    d_codes, weighed = _output_gradient(d_out, out.shape, length, config)
    _, lse, delta = rows.gradient_rows(out, residual, weighed, d_residual, tokens, all_see=True)
    return _codes(query, length, config.block_q, config), d_codes, lse, delta


def _output_gradient(
    d_out: jax.Array, shape: tuple[int, ...], length: jax.Array, config: TurboConfig
) -> tuple[Codes | None, jax.Array]:
    """`d_out` as codes ``[B, N, Tp, H]`` with 8-bit gradients, and as rounded by these.

    The latter is what multiplies the values, cut to `shape`.
    """
    _, tokens, _, head_dim = shape
    if config.gradient != "8bit":
        return None, d_out[:, :tokens, :, :head_dim]
    mode = rounding.values_mode(config.mode)
    codes, scale = _codes(d_out, length, config.block_q, dataclasses.replace(config, mode=mode))
    factor = jnp.repeat(scale, config.block_q, axis=2)[..., None]
    weighed = jnp.swapaxes(codes.astype(jnp.float32) * factor, 1, 2)
    return (codes, scale), weighed[:, :tokens, :, :head_dim]


def _value_codes(value: jax.Array, length: jax.Array, config: TurboConfig) -> Codes:
    """The forward pass' codes ``[B, K, Sp, H]``, or 16-bit values ``[B, S, K, H]``.

    They have 8 bits where the outputs' gradients have 8 bits: both operands of a matrix unit must
    be of one kind.
    """
    if config.mode == "float":
        return _as_it_is(_in_16_bits(value))
    codes, scale = quantize_values(value, length, config)
    if config.gradient == "8bit":
        return codes, scale
    wide = codes.astype(_in_16_bits(value).dtype)  # exact
    return jnp.swapaxes(wide, 1, 2)[:, : value.shape[1]], scale
