"""Straight-through gradients of `turbo_attention`: those of the exact attention it stands for."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from turbojax._gradient import refuse_gradients
from turbojax.config import TurboConfig
from turbojax.ops import numerics
from turbojax.ops.options import Options
from turbojax.ops.turbo_attention.operands import blocks

# Tokens of a tile's side. A tile of float32 scores then is 256 KiB per sequence and head.
_BLOCK = 256

_Arrays = tuple[jax.Array, ...]


def straight_through(
    run: Callable[..., tuple[jax.Array, jax.Array]],
    *,
    config: TurboConfig,
    options: Options,
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """`run` with its options bound, differentiable in reverse mode.

    The forward pass is `run`. The backward pass is that of attention with unrounded operands and
    the exact exponential, under the same scale, masks and soft cap. It is computed from the
    inputs alone, which are all that the forward pass keeps, so it does not depend on `config`
    nor on which implementation `run` is.

    Args:
      run: an implementation of `turbo_attention`: a function of query ``[B, T, N, H]``, key and
        value ``[B, S, K, H]``, int32 query and key lengths ``[B]``, and of the options.
      config: numerics of the forward pass.
      options: of the call.

    Returns:
      A function of the five arrays. It gives what `run` gives; gradients have the dtype of the
      input they belong to. A second derivative raises NotImplementedError, forward mode (`jvp`)
      raises jax's TypeError about `custom_vjp`.
    """
    differentiate_once = refuse_gradients(
        _gradient,
        "the gradient of turbo_attention",
        because="only first derivatives are supported",
        options=options,
    )

    @jax.custom_vjp
    def call(*arrays: Any) -> tuple[jax.Array, jax.Array]:
        return run(*arrays, config=config, options=options)

    def forward(*arrays: Any) -> Any:
        # `call`, not `run`: a second derivative must not find its own way through the rounding.
        return call(*arrays), arrays

    def backward(arrays: Any, cotangents: Any) -> Any:
        return *differentiate_once(*arrays, *cotangents), None, None  # lengths are integers

    call.defvjp(forward, backward)
    return call


@functools.partial(jax.jit, static_argnames="options")
def _gradient(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_length: jax.Array,
    key_length: jax.Array,
    d_out: jax.Array,
    d_residual: jax.Array,
    *,
    options: Options,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of exact attention.

    With ``P = exp(S - lse)``, ``dP = dO V^T`` and a row's ``D = sum_j P_j dP_j``, which is
    ``dO . O``, the scores' gradient is ``dS = P (dP - D + d_lse)``. Query blocks run one after
    the other and walk twice over the key blocks that they can see: for the rows' maxima, sums
    and `D`, then for the gradients. Memory grows with ``T + S``.

    Args:
      query: ``[B, T, N, H]``.
      key: ``[B, S, K, H]``.
      value: ``[B, S, K, H]``.
      query_length: int32 ``[B]``; queries at or past it are padding: zero gradient.
      key_length: int32 ``[B]``; keys at or past it are ignored: zero gradient.
      d_out: ``[B, T, N, H]``, cotangent of the output.
      d_residual: float32 ``[B, T, N]``, cotangent of the log-sum-exp.
      options: of the call.

    Returns:
      Gradients of query, key and value in their shapes and dtypes, summed in float32.
    """
    batch, length, heads, channels = query.shape
    size, kv_heads = key.shape[1:3]
    block_q, block_kv = min(_BLOCK, length), min(_BLOCK, size)
    # Float32 products of bfloat16 or float16 need no more than what a matrix unit keeps.
    precision = jax.lax.Precision.HIGHEST if query.dtype == jnp.float32 else None

    def dot(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.einsum(subscripts, a, b, precision=precision)

    def query_blocks(x: jax.Array) -> jax.Array:  # [n, B, K, G, q, channels]
        x = blocks(x, query_length, block_q)
        return jnp.moveaxis(x.reshape(batch, kv_heads, -1, *x.shape[2:]), 3, 0)

    k, v = (jnp.moveaxis(blocks(x, key_length, block_kv), 2, 0) for x in (key, value))

    def one_query_block(sums: _Arrays, operands: _Arrays) -> tuple[_Arrays, jax.Array]:
        number, q, d_o, d_lse = operands
        first = number * block_q
        position = first + jnp.arange(block_q)
        real = position[None] < query_length[:, None]
        last = jnp.minimum(first + block_q, length) - 1
        start, stop = options.key_range(first, last, key_length)
        bounds = (start // block_kv, -(-stop // block_kv))

        def tile(j: jax.Array) -> _Arrays:
            keys = j * block_kv + jnp.arange(block_kv)
            mask = options.mask(position[None], keys[None], key_length) & real[:, :, None]
            mask = mask[:, None, None]
            scores = dot("bkgqh,bkth->bkgqt", q, _at(k, j)) * options.scale
            scores = jnp.where(mask, numerics.cap_logits(scores, options.logits_soft_cap), -jnp.inf)
            return mask, scores, dot("bkgqh,bkth->bkgqt", d_o, _at(v, j))

        shift, share, d = _row_sums(tile, bounds, q.shape[:-1])

        def add(j: jax.Array, sums: _Arrays) -> _Arrays:
            d_q, d_k, d_v = sums
            mask, scores, d_p = tile(j)
            p = jnp.exp(scores - shift) * share
            d_s = p * (d_p - d + d_lse) * options.scale
            if options.logits_soft_cap is not None:
                d_s = d_s * (1 - jnp.square(scores / options.logits_soft_cap))
            # Where a row sees nothing, the residual's cotangent may be anything.
            d_s = jnp.where(mask, d_s, 0)
            return (
                d_q + dot("bkgqt,bkth->bkgqh", d_s, _at(k, j)),
                _add_at(d_k, j, dot("bkgqt,bkgqh->bkth", d_s, q)),
                _add_at(d_v, j, dot("bkgqt,bkgqh->bkth", p, d_o)),
            )

        d_q, *sums = jax.lax.fori_loop(*bounds, add, (jnp.zeros(q.shape, jnp.float32), *sums))
        return tuple(sums), d_q.astype(query.dtype)

    q = query_blocks(query)
    numbers = jnp.arange(q.shape[0], dtype=jnp.int32)
    operands: _Arrays = (numbers, q, query_blocks(d_out), query_blocks(d_residual[..., None]))
    nothing: _Arrays = (jnp.zeros(k.shape, jnp.float32),) * 2
    (d_k, d_v), d_q = jax.lax.scan(one_query_block, nothing, operands)
    d_q = jnp.moveaxis(d_q, 0, 3).reshape(batch, heads, -1, channels)
    d_k, d_v = (jnp.moveaxis(x, 0, 2).reshape(batch, kv_heads, -1, channels) for x in (d_k, d_v))
    return (
        jnp.swapaxes(d_q, 1, 2)[:, :length],
        jnp.swapaxes(d_k, 1, 2)[:, :size].astype(key.dtype),
        jnp.swapaxes(d_v, 1, 2)[:, :size].astype(value.dtype),
    )


def _row_sums(
    tile: Callable[[jax.Array], _Arrays],
    bounds: tuple[jax.Array, jax.Array],
    rows: tuple[int, ...],
) -> _Arrays:
    """What the gradients of a block of rows need to know of all its keys.

    Args:
      tile: mask, scores (``-inf`` where masked) and ``dP`` of a key block, each ``[*rows, t]``.
      bounds: the first key block and the one past the last.
      rows: their shape.

    Returns:
      float32 ``[*rows, 1]``: the largest score, 1 over the sum of the exponentials relative to
      it, and ``D``; zeros where nothing is visible.
    """

    def step(j: jax.Array, state: _Arrays) -> _Arrays:
        m, l, d = state
        mask, scores, d_p = tile(j)
        new_max = jnp.maximum(m, jnp.max(scores, axis=-1, keepdims=True))
        shift = numerics.finite_maximum(new_max)
        p = jnp.exp(scores - shift)
        alpha = jnp.exp(m - shift)
        d = d * alpha + jnp.sum(jnp.where(mask, p * d_p, 0), axis=-1, keepdims=True)
        return new_max, l * alpha + jnp.sum(p, axis=-1, keepdims=True), d

    zeros = jnp.zeros((*rows, 1), jnp.float32)
    m, l, d = jax.lax.fori_loop(*bounds, step, (zeros - jnp.inf, zeros, zeros))
    share = jnp.where(l == 0, 0, 1 / jnp.where(l == 0, 1, l))
    return numerics.finite_maximum(m), share, d * share


def _at(x: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, index, keepdims=False)


def _add_at(x: jax.Array, index: jax.Array, change: jax.Array) -> jax.Array:
    """`x` with `change` added to ``x[index]``."""
    return jax.lax.dynamic_update_index_in_dim(x, _at(x, index) + change, index, 0)
