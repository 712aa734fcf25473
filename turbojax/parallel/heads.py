"""Attention of sequences split over devices, by exchanging tokens for heads (DeepSpeed-Ulysses)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from turbojax import _checks
from turbojax.sharding.axes import Names
from turbojax.sharding.varying import together

_OF_TOKENS = ("query_segment_ids", "key_value_segment_ids", "key_bounds")
_OF_HEADS = ("alibi_slopes", "sinks")


def heads_attention(
    op: Callable[..., Any],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    levels: jax.Array | None = None,
    *,
    axis_name: Names,
    **arguments: Any,
) -> Any:
    """An op of whole sequences, of sequences that are split over devices in natural order.

    Called inside `jax.shard_map`. An all-to-all each of queries, keys and values makes every device
    hold all tokens of some heads; it attends as if it were alone, with the same bits as one device
    has, and one more brings the output back (Jacobs et al., 2023). That sends less than a ring
    where there are few devices and needs no order of the tokens, but there must be heads for all:
    of fewer KV heads than devices several devices get the same one.

    For more devices than heads, `op` can be a ring over other axes: with tokens split over
    ``("outer", "inner")``, that is ``functools.partial(ring_attention, axis_name="outer")``, and
    ``axis_name="inner"``.

    Args:
      op: `turbojax.turbo_attention`, `turbojax.pooled_attention`, or another function of queries,
        keys, values, levels if there are any, and keyword arguments of these names.
      query: ``[B, T, N, H]``, this device's tokens; `N` a multiple of the devices.
      key: ``[B, T, K, H]``, of the same tokens; `K` a multiple of the devices, or a divisor.
      value: ``[B, T, K, Hv]``.
      levels: optional ``[B or 1, N or 1, rows, columns]``: the rows of this device's queries.
      axis_name: of the mesh, one or several, over which tokens are split.
      **arguments: those of the op. Segments and bounds are of this device's tokens; slopes and
        sinks are of all heads, lengths of whole sequences.

    Returns:
      What the op gives, for this device's tokens.

    Raises:
      ValueError: if heads do not fit.
      NotImplementedError: if there is a bias.
    """
    devices = jax.lax.axis_size(axis_name)
    if arguments.get("bias") is not None:
        raise NotImplementedError("heads_attention has no bias, whose queries are on all devices")
    _checks.check_query(query)
    heads, kv_heads = query.shape[2], key.shape[2]
    if heads % devices:
        raise ValueError(f"{heads} query heads must be a multiple of {devices} devices")
    if kv_heads % devices and devices % kv_heads:
        raise ValueError(
            f"{kv_heads} KV heads must be a multiple of {devices} devices, or a divisor"
        )
    repeats = max(devices // kv_heads, 1)
    arrays = {name: arguments[name] for name in (*_OF_TOKENS, *_OF_HEADS) if name in arguments}
    query, key, value, levels, arrays = together(query, key, value, levels, arrays)
    query, key, value = (
        jax.lax.all_to_all(x, axis_name, split_axis=2, concat_axis=1, tiled=True)
        for x in (query, *(jnp.repeat(x, repeats, axis=2) for x in (key, value)))
    )
    for name, x in arrays.items():
        if x is not None:
            split = _everywhere if name in _OF_TOKENS else _own_heads
            arguments[name] = jax.tree.map(lambda a, split=split: split(a, axis_name), x)
    operands: tuple[jax.Array, ...] = (query, key, value)
    if levels is not None:
        operands = (*operands, _own_levels(levels, axis_name))
    out = op(*operands, **arguments)
    return jax.tree.map(
        lambda x: jax.lax.all_to_all(x, axis_name, split_axis=1, concat_axis=2, tiled=True), out
    )


def _everywhere(x: jax.Array, axis_name: Names, axis: int = 1) -> jax.Array:
    """What all devices have, joined along an axis, on each of them."""
    copies = jnp.broadcast_to(x[None], (jax.lax.axis_size(axis_name), *x.shape))
    parts = jax.lax.all_to_all(copies, axis_name, split_axis=0, concat_axis=axis + 1, tiled=True)
    return parts[0]


def _own_heads(x: jax.Array, axis_name: Names) -> jax.Array:
    """This device's part of ``[N]``."""
    size = x.shape[0] // jax.lax.axis_size(axis_name)
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axis_name) * size, size)


def _own_levels(levels: jax.Array, axis_name: Names) -> jax.Array:
    """All rows of levels, of this device's heads."""
    if levels.shape[1] == 1:
        return _everywhere(levels, axis_name, axis=2)
    return jax.lax.all_to_all(levels, axis_name, split_axis=1, concat_axis=2, tiled=True)
