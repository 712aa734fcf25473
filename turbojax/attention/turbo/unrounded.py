"""Calls that exact attention answers sooner than rounding does: on Hopper, by cuDNN."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from turbojax import _device
from turbojax.attention import cudnn
from turbojax.attention.options import Options
from turbojax.numerics.config import TurboConfig
from turbojax.sharding import together

# How many keys a query must see on average, and queries a key, for rounding to pay, by head dim. A
# causal call of 1,024 tokens has 512 of both. Speed of whole calls on an H200 relative to cuDNN,
# causal, 4,096 to 8,192 tokens in all (`benchmarks/results/default_versions_2026-11-23.json`):
#   causal tokens:    512    1,024  2,048  4,096  8,192
#   head dim, group
#   128, 4            0.87   1.10   1.30          1.44
#   128, 1                   0.81   1.12   1.39   1.41
#   64, 4                    0.78   0.98   1.15   1.26
#   64, 1                    0.67   0.88   1.08   1.24
#   96, 1                    0.72          1.16   1.21
#   256, 2                   0.75                 1.07
_LEAST_PAIRS = {64: 2048, 128: 1024}
_LEAST_PAIRS_IN_GROUPS = {64: 2048, 128: 512}
# For other head dims, which take the time of the next larger one.
_LEAST_PAIRS_PADDED, _LEAST_PAIRS_WIDE = 2048, 4096
_GROUP = 4


def is_faster(query: jax.Array, key: jax.Array, config: TurboConfig, options: Options) -> bool:
    """Whether exact attention is the fastest for whole sequences of these shapes here.

    It is where nothing is to be rounded, and where there is so little to attend to that rounding
    queries, keys and values does not pay. Only where cuDNN sees the same keys, and only in
    processes with one device: cuDNN refuses some shardings, which are not known here.
    """
    if config.softmax != "exact" or options.scale <= 0:
        return False
    if _device.needs_hopper() is not None or jax.device_count() != 1:
        return False
    cap = options.logits_soft_cap
    if cudnn.unsupported(query, key, forward_only=True, logits_soft_cap=cap) is not None:
        return False
    tokens, size = query.shape[1], key.shape[1]
    if options.is_causal and tokens != size:
        return False
    if options.window is not None and not options.is_causal:
        return False
    return config.mode == "float" or _pairs(tokens, size, options) < _least_pairs(query, key)


def _pairs(tokens: int, size: int, options: Options) -> float:
    """Keys that a query sees on average, or queries that see a key, whichever are fewer."""
    pairs = size / 2 if options.is_causal else float(min(tokens, size))
    return pairs if options.window is None else min(pairs, options.window[0] + 1)


def _least_pairs(query: jax.Array, key: jax.Array) -> int:
    head_dim, group = query.shape[3], query.shape[2] // key.shape[2]
    if head_dim > max(_LEAST_PAIRS):
        return _LEAST_PAIRS_WIDE
    table = _LEAST_PAIRS_IN_GROUPS if group >= _GROUP else _LEAST_PAIRS
    return table.get(head_dim, _LEAST_PAIRS_PADDED)


def exact(query: jax.Array, key: jax.Array, value: jax.Array, options: Options) -> jax.Array:
    """Exact attention by cuDNN, under `vmap` too, where jax's own call supports few axes."""

    @jax.custom_batching.custom_vmap
    def call(*arrays: jax.Array) -> jax.Array:
        return cudnn.attend(*arrays, options=options)

    @call.def_vmap
    def _(size: int, is_mapped: list[bool], *arrays: jax.Array) -> tuple[Any, bool]:
        """Makes mapped axes part of the batch; mapped ones come first."""
        wide = [
            x if mapped else jnp.broadcast_to(x, (size, *x.shape))
            for x, mapped in zip(arrays, is_mapped, strict=True)
        ]
        out = call(*(x.reshape(-1, *x.shape[2:]) for x in wide))
        return out.reshape(size, -1, *out.shape[1:]), True

    out: jax.Array = call(query, key, value)
    return out


def attend(
    rounded: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    options: Options,
) -> jax.Array:
    """Exact attention; where it is differentiated, `rounded` and its gradient.

    So a gradient is always that of `turbo_attention`, with what it keeps from its forward pass.
    `rounded` is differentiable attention of query, key and value by kernels.
    """

    @jax.custom_vjp
    def call(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return exact(query, key, value, options)

    def forward(*arrays: jax.Array) -> tuple[jax.Array, Callable[..., tuple[jax.Array, ...]]]:
        out, pull = jax.vjp(rounded, *arrays)
        return out, pull

    def backward(
        pull: Callable[..., tuple[jax.Array, ...]], d_out: jax.Array
    ) -> tuple[jax.Array, ...]:
        return pull(d_out)

    call.defvjp(forward, backward)
    return call(*together(query, key, value))
