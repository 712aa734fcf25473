"""One split of a decode call: its mask, its softmax, and how splits are added up.

Tokens are rows and queries columns.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.triton import _common
from pallas_kernels.triton._decode_inputs import Query, Settings

State = tuple[jax.Array, jax.Array, jax.Array]
"""Outputs ``[H, R]``, maxima in the exponential's units and sums of weights ``[R]``, float32."""


def empty(shape: tuple[int, ...]) -> State:
    """The state before the first split, for outputs ``[H, R]``."""
    lowest = jnp.full(shape[1:], -jnp.inf, jnp.float32)
    return jnp.zeros(shape, jnp.float32), lowest, jnp.zeros(shape[1:], jnp.float32)


def softmax(
    products: list[jax.Array],
    factor: jax.Array,
    masks: list[jax.Array] | None,
    s: Settings,
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """A split's own softmax, over tokens, which are rows.

    Returns unnormalized weights ``[t, R]``, and for each column its maximum in the exponential's
    units (``-inf`` where nothing is visible, and perhaps where scores are NaN) and sum.
    """
    scores = products
    scale = factor * s.unit
    if s.soft_cap is not None:
        scores = [_common.soft_cap(x * factor[None, :], s.soft_cap) for x in scores]
        scale = jnp.full_like(factor, s.unit)
    if masks is not None:
        scores = [
            jnp.where(mask, x * scale[None, :], -jnp.inf)
            for x, mask in zip(scores, masks, strict=True)
        ]
        scale = jnp.ones_like(factor)
    maximum = functools.reduce(jnp.maximum, [jnp.max(x, axis=0) for x in scores]) * scale
    shift = maximum
    if masks is not None:
        shift = jnp.where(maximum > -jnp.inf, maximum, 0.0)
    weights = []
    for i, x in enumerate(scores):
        x = _common.fma(x, scale[None, :], -shift[None, :], s.interpret)
        p = _common.evaluate(s.exp, x, s.interpret)
        weights.append(p if masks is None else jnp.where(masks[i], p, 0.0))
    total = functools.reduce(jnp.add, [jnp.sum(p, axis=0) for p in weights])
    return weights, maximum, total


def round_weights(p: jax.Array, s: Settings) -> tuple[jax.Array, jax.Array, float]:
    """Weights as the second product's operand, their sums over tokens, and the value of a unit."""
    if s.mode == "int8":
        unit = s.largest / _common.INT8_RANGE
        codes = _common.round_product(p, 1 / unit, s.interpret)
        return codes, jnp.sum(codes.astype(jnp.int32), axis=0), unit
    return p, jnp.sum(p, axis=0), 1.0


def seen_of(masks: list[jax.Array]) -> jax.Array:
    """Which queries see anything, from masks ``[t, R]``."""
    found = [jnp.max(jnp.where(mask, 1.0, 0.0), axis=0) for mask in masks]
    return functools.reduce(jnp.maximum, found) > 0


def merge_split(
    state: State,
    product: jax.Array,
    maximum: jax.Array,
    total: jax.Array,
    factor: jax.Array,
    seen: jax.Array | None,
    s: Settings,
) -> State:
    """Adds a split's result, float32 ``[H, R]``, to the running outputs, maxima and sums.

    `maximum` ``[R]`` is ``-inf`` where the split shows nothing; `total` ``[R]`` are sums of
    weights; `factor` scales the scores, and is NaN where a key was; `seen` ``[R]`` says which
    queries see something of the split, None if all see all of it.
    """
    o, m, l = state
    exp = functools.partial(_exp_of_units, s=s)
    # A maximum and SAS lose a NaN; the sum brings it back.
    lost = factor * 0.0
    new = jnp.maximum(m, maximum)
    shift = new
    if seen is not None:
        lost = jnp.where(seen, lost, 0.0)
        product = jnp.where(seen[None, :], product, 0.0)
        shift = jnp.where(new > -jnp.inf, new, 0.0)
    alpha, weight = exp(m - shift), exp(maximum - shift)
    o = _common.fma(product, weight[None, :], o * alpha[None, :], s.interpret)
    return o, new, l * alpha + (total * weight + lost)


def _exp_of_units(x: jax.Array, s: Settings) -> jax.Array:
    return _common.exp2(x * (_common.LOG2_E / s.unit), s.interpret)


def mask_of(query: Query, position: jax.Array, extra: jax.Array | None, s: Settings) -> jax.Array:
    """Which tokens at `position` ``[t]`` each query sees, ``[t, R]``."""
    q, k = query.position[None, :], position[:, None]
    mask = (k <= q) & query.is_real[None, :]
    if s.window is not None:
        mask = mask & (k >= q - s.window[0]) & (k <= q + s.window[1])
    return mask if extra is None else mask & extra[:, None]
