"""Blockwise online attention in plain JAX: the definition of `turbo_attention` (Algorithm 1)."""

import functools

import jax
import jax.numpy as jnp

from turbojax.attention.options import Options
from turbojax.attention.score_modifiers import NO_MODIFIERS, ScoreModifiers
from turbojax.attention.sinks import with_sinks
from turbojax.attention.turbo.operands import Stage1, blocks
from turbojax.numerics import rounding
from turbojax.numerics.config import TurboConfig
from turbojax.sharding import varying_like

_State = tuple[jax.Array, jax.Array, jax.Array]


@functools.partial(jax.jit, static_argnames=("config", "options"))
def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_length: jax.Array,
    key_length: jax.Array,
    *,
    config: TurboConfig,
    options: Options,
    modifiers: ScoreModifiers = NO_MODIFIERS,
    stage1: Stage1 | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Prefill attention with the numerics of `config`, and its float32 log-sum-exp.

    Memory grows with ``T + S``: query blocks run one after the other, and each walks over the key
    blocks that it can see. `stage1` are codes of keys and values that exist already, in order.
    """
    batch, length, heads, channels = query.shape
    kv_heads, shift = key.shape[2], modifiers.shift()
    # Padding must not reach the scale that a block of queries shares.
    real = jnp.arange(length)[None] < query_length[:, None]
    padded = jnp.where(real[:, :, None, None], query, jnp.zeros((), query.dtype))
    grouped = padded.reshape(batch, length, kv_heads, heads // kv_heads, channels)
    q_blocks = _query_blocks(grouped, config.block_q)
    q, q_scale = rounding.quantize_scores_operand(q_blocks, config.mode, axis=(-2, -1))
    k, k_scale, v, v_scale = _key_blocks(key, value, key_length, config, stage1)

    def one_query_block(
        operands: tuple[jax.Array, jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array]:
        number, q, q_scale = operands
        first = number * config.block_q
        position = first + jnp.arange(config.block_q)
        last = jnp.minimum(first + config.block_q, length) - 1
        start, stop = options.key_range(first, last, key_length, shift)

        def step(j: jax.Array, state: _State) -> _State:
            keys = j * config.block_kv + jnp.arange(config.block_kv)
            mask = _visible(position, keys, query_length, key_length, options, modifiers)
            scores = rounding.exact_dot("bkgqh,bkth->bkgqt", q, _at(k, j))
            factor = q_scale * _at(k_scale, j)[:, :, None] * options.scale
            scores = rounding.cap_logits(scores * factor[..., None, None], options.logits_soft_cap)
            added = modifiers.added(position, keys)
            if added is not None:
                added = in_groups(added, kv_heads)
                scores, mask = scores + added, mask & (added != -jnp.inf)
            return _online_step(state, scores, mask, _at(v, j), _at(v_scale, j), config)

        rows = q.shape[:-1]
        empty = (
            jnp.zeros((*rows, value.shape[3]), jnp.float32),
            jnp.full(rows, -jnp.inf, jnp.float32),
            jnp.zeros(rows, jnp.float32),
        )
        bounds = (start // config.block_kv, -(-stop // config.block_kv))
        empty = varying_like(
            empty, (query, key, value, query_length, key_length, modifiers, stage1)
        )
        return rounding.finish(*jax.lax.fori_loop(*bounds, step, empty))

    numbers = jnp.arange(q.shape[0], dtype=jnp.int32)
    out, residual = jax.lax.map(one_query_block, (numbers, q, q_scale))
    out = jnp.moveaxis(out, (0, 4), (1, 2)).reshape(batch, -1, heads, value.shape[3])[:, :length]
    residual = jnp.moveaxis(residual, (0, 4), (1, 2)).reshape(batch, -1, heads)[:, :length]
    if modifiers.sinks is not None:
        out, residual = with_sinks(out, residual, modifiers.sinks, real)
    return out.astype(options.dtype_of_output(query)), residual


def _visible(
    queries: jax.Array,
    keys: jax.Array,
    query_length: jax.Array,
    key_length: jax.Array,
    options: Options,
    modifiers: ScoreModifiers,
) -> jax.Array:
    """Which queries ``[q]`` see which keys ``[t]``, padding excluded: bool ``[B, 1, 1, q, t]``."""
    mask = visible_pairs(queries, keys, key_length, options, modifiers)
    mask = mask & (queries[None] < query_length[:, None])[:, :, None]
    return mask[:, None, None]


def visible_pairs(
    queries: jax.Array,
    keys: jax.Array,
    key_length: jax.Array,
    options: Options,
    modifiers: ScoreModifiers,
) -> jax.Array:
    """Which keys each query sees, all by index: bool ``[B, t, s]``."""
    shift = modifiers.shift()
    position = queries[None] if shift is None else queries[None] + shift[:, None]
    mask = options.mask(position, keys[None], key_length)
    of_one_segment = modifiers.visible(queries, keys)
    return mask if of_one_segment is None else mask & of_one_segment


def in_groups(x: jax.Array, kv_heads: int) -> jax.Array:
    """``[b, N or 1, t, s]`` as ``[b, K or 1, G or 1, t, s]``."""
    heads = x.shape[1]
    if heads == 1:
        return x[:, :, None]
    return x.reshape(x.shape[0], kv_heads, heads // kv_heads, *x.shape[2:])


def _online_step(
    state: _State,
    scores: jax.Array,
    mask: jax.Array,
    value: jax.Array,
    value_scale: jax.Array,
    config: TurboConfig,
) -> _State:
    """One key block of Algorithm 1.

    Blocks are rescaled with the exact exponential. SAS(0) is 0.9996: with it the oldest of `n`
    blocks would lose a factor 0.9996**n of its weight.

    The state holds outputs ``[B, K, G, q, H]``, row maxima and row sums ``[B, K, G, q]``; scores
    are float32 ``[B, K, G, q, t]``, value codes ``[B, K, t, H]`` and their scales ``[B, K]``.
    """
    o, m, l = state
    exp = rounding.exponential(config)
    scores = jnp.where(mask, scores, -jnp.inf)
    block_max = jnp.max(scores, axis=-1)
    new_max = jnp.maximum(m, block_max)
    shift = rounding.finite_maximum(new_max)
    p = jnp.where(mask, exp(scores - shift[..., None]), 0)
    p_codes, p_scale = rounding.round_probabilities(
        p, exp(block_max - shift)[..., None], config.mode
    )
    product = rounding.exact_dot("bkgqt,bkth->bkgqh", p_codes, value)
    product = product * (p_scale * value_scale[:, :, None, None, None])
    # A block that a row does not see must not reach it, not even as 0 * NaN.
    product = jnp.where(jnp.any(mask, axis=-1, keepdims=True), product, 0)
    alpha = jnp.exp(m - shift)
    return o * alpha[..., None] + product, new_max, l * alpha + jnp.sum(p, axis=-1)


def _key_blocks(
    key: jax.Array,
    value: jax.Array,
    length: jax.Array,
    config: TurboConfig,
    stage1: Stage1 | None,
) -> Stage1:
    """Codes ``[B, K, n, block, H]`` and scales ``[B, K, n]`` of keys, and of values."""
    if stage1 is not None:
        k, k_scale, v, v_scale = stage1
        v = jnp.swapaxes(v, 2, 3)
        shape = (*k.shape[:2], -1, config.block_kv)
        return k.reshape(*shape, k.shape[3]), k_scale, v.reshape(*shape, v.shape[3]), v_scale
    k_blocks, v_blocks = (blocks(x, length, config.block_kv) for x in (key, value))
    return (
        *rounding.quantize_scores_operand(k_blocks, config.mode, axis=(-2, -1)),
        *rounding.quantize_values(v_blocks, config.mode),
    )


def _query_blocks(query: jax.Array, block: int) -> jax.Array:
    """``[B, T, K, G, H]`` to blocks ``[n, B, K, G, block, H]``, padded with zeros."""
    batch, length, kv_heads, group, channels = query.shape
    query = jnp.pad(query, ((0, 0), (0, -length % block), (0, 0), (0, 0), (0, 0)))
    blocks = query.reshape(batch, -1, block, kv_heads, group, channels)
    return jnp.transpose(blocks, (1, 0, 3, 4, 2, 5))


def _at(x: jax.Array, block: jax.Array) -> jax.Array:
    """Block number `block` of ``[B, K, n, ...]``."""
    return jax.lax.dynamic_index_in_dim(x, block, axis=2, keepdims=False)
