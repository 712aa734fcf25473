"""Attention to sequences whose tokens are split over devices: arguments, checks, the order."""

import dataclasses
from typing import Literal

import jax

from turbojax import _checks
from turbojax._registry import ImplementationName
from turbojax.attention import score_modifiers as given
from turbojax.attention.options import Options, check_output_dtype, plain_scale
from turbojax.attention.pooled import api as pooled_api
from turbojax.attention.pooled.static import PooledOptions
from turbojax.numerics.config import TurboConfig
from turbojax.parallel import ring as rings
from turbojax.parallel.local import Exact, Pooled, Turbo
from turbojax.parallel.zigzag import (
    Order,
    check_blocks,
    check_order,
    chunks,
    from_zigzag,
    to_zigzag,
)
from turbojax.sharding.axes import Names
from turbojax.sharding.varying import together


def ring_attention(  # noqa: D417
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    axis_name: Names,
    attention: TurboConfig | Literal["exact"] = TurboConfig(),
    order: Order = "natural",
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    query_segment_ids: jax.Array | None = None,
    key_value_segment_ids: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    sinks: jax.Array | None = None,
    output_dtype: jax.typing.DTypeLike | None = None,
    implementation: ImplementationName | Literal["cudnn"] | None = None,
    return_residual: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`turbojax.turbo_attention`, or exact attention, of sequences that are split over devices.

    Called inside `jax.shard_map`. Queries stay; keys and values travel round the ring, in the
    forward pass as codes with their scales, and meanwhile each device attends (Liu et al., 2023,
    Ring Attention; Brandon et al., 2023, Striped Attention, for why tokens are dealt out). Nothing
    else is sent, and every device does the same work: causal attention is in zig-zag order, see
    `zigzag`. Sequences in natural order are brought into it and back, half of each array a time,
    where that pays; a model that keeps its tokens in zig-zag order spares this.

    Scales of codes are those of blocks, as on one device, but for e4m3 values: they have one per
    sequence, KV head and chunk. Parts are merged in float32 in the order of the ring: no bits
    equal one device's, but every run's are the same.

    Differentiable in reverse mode once, as `turbo_attention` is. The keys' and values' gradients
    are summed in float32 while they travel.

    Arguments that are not named here are `turbojax.turbo_attention`'s. Positions (`is_causal`, the
    window) and lengths are of whole sequences, lengths equal on all devices; segments are
    ``[B, T]``, of this device's queries and of its keys. Keys that no device's queries can reach
    are not waited for: steps without any are left out.

    Args:
      query: ``[B, T, N, H]``, this device's tokens; bfloat16, float16 or float32.
      key: ``[B, T, K, H]``, of the same tokens.
      value: ``[B, T, K, Hv]``.
      axis_name: of the mesh, one or several, over which tokens are split.
      attention: numerics, or ``"exact"``.
      order: of the tokens; all of a sequence's, and segments, are in this order, and so is the
        output.
      implementation: of what each device runs; of exact attention also ``"cudnn"``.

    Returns:
      What `turbojax.turbo_attention` gives, for this device's queries.

    Raises:
      TypeError, NotImplementedError: as `turbojax.turbo_attention`.
      ValueError: the same; if the number of tokens is not a multiple of what the order needs, or
        keys are not those of the queries' tokens.
    """
    if attention != "exact" and not isinstance(attention, TurboConfig):
        raise TypeError(f"{attention=} must be a TurboConfig or 'exact'")
    _checks.check_query_key_value(query, key, value, one_head_dim=False)
    options = Options.complete(
        query.shape[3],
        scale=scale,
        is_causal=is_causal,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        output_dtype=output_dtype,
        implementation=implementation,
        residual=return_residual,
    )
    modifiers = given.complete(
        query,
        key,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
    )
    lengths = query_seq_lengths, key_value_seq_lengths
    op: rings.Op = (
        Turbo(attention, options) if isinstance(attention, TurboConfig) else Exact(options)
    )
    arrays = rings.Arrays(*lengths, modifiers)
    return _attend(op, query, key, value, arrays, axis_name, order)


def ring_pooled_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    levels: jax.Array,
    *,
    axis_name: Names,
    order: Order = "natural",
    block_q: int = 128,
    block_kv: int = 128,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    query_segment_ids: jax.Array | None = None,
    key_value_segment_ids: jax.Array | None = None,
    sinks: jax.Array | None = None,
    output_dtype: jax.typing.DTypeLike | None = None,
    implementation: ImplementationName | None = None,
    return_residual: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`turbojax.pooled_attention` of sequences that are split over devices.

    As `ring_attention`, with its arguments and errors, and those of `turbojax.pooled_attention`.
    Keys and values travel as they are, and their means are made where they are attended to. How
    even the work is depends on the `levels`, integers
    ``[B or 1, N or 1, T / block_q, S / block_kv]``: the rows of this device's blocks of queries, in
    their order, and the columns of all `S` keys, in natural order. The number of tokens must be a
    multiple of what the order and the blocks need.
    """
    _checks.check_query_key_value(query, key, value)
    options = PooledOptions(
        is_causal,
        scale=plain_scale(query.shape[3]) if scale is None else scale,
        block_q=block_q,
        block_kv=block_kv,
        out_dtype=check_output_dtype(output_dtype),
        implementation=implementation,
        residual=return_residual,
    )
    modifiers = given.complete(
        query,
        key,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
        sinks=sinks,
    )
    whole = jax.ShapeDtypeStruct(
        (key.shape[0], key.shape[1] * jax.lax.axis_size(axis_name), *key.shape[2:]), key.dtype
    )
    levels = pooled_api.check_levels(levels, query, whole, options)
    lengths = query_seq_lengths, key_value_seq_lengths
    arrays = rings.Arrays(*lengths, modifiers, levels)
    return _attend(Pooled(options), query, key, value, arrays, axis_name, order)


def _attend(
    op: rings.Op,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    arrays: rings.Arrays,
    axis_name: Names,
    order: Order,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Checks what is common; brings tokens into the order in which they are attended, and back."""
    devices = jax.lax.axis_size(axis_name)
    whole = query.shape[1] * devices
    check_order(order)
    if key.shape[1] != query.shape[1]:
        raise ValueError(f"{key.shape=} must have the queries' {query.shape[1]} tokens")
    run_in = order if order == "zigzag" or devices == 1 else rings.best_order(op.options, whole)
    parts = len(chunks(run_in, devices)[0])
    check_blocks(op.blocks, query.shape[1], parts, devices)
    size = query.shape[1] // parts
    of_queries = _lengths("query_seq_lengths", arrays.query_lengths, query.shape[0], whole)
    of_keys = _lengths("key_value_seq_lengths", arrays.key_lengths, query.shape[0], whole)
    arrays = dataclasses.replace(arrays, query_lengths=of_queries, key_lengths=of_keys)
    moves = run_in != order
    if moves:
        query, key, value = (to_zigzag(x, axis_name) for x in (query, key, value))
        arrays = _moved(arrays, axis_name)
    ring = rings.Ring(
        op,
        axis_name,
        run_in,
        rings.plan(run_in, devices, size, op.options),
        op.options.dtype_of_output(query).name,
    )
    out, residual = rings.attend(ring, *together(query, key, value, arrays))
    if moves:
        out = from_zigzag(out, axis_name)
        residual = from_zigzag(residual, axis_name) if op.options.residual else residual
    return (out, residual) if op.options.residual else out


def _lengths(name: str, lengths: jax.Array | None, batch: int, whole: int) -> jax.Array | None:
    """Checked lengths of whole sequences, within these."""
    if lengths is None:
        return None
    return _checks.check_lengths(name, lengths, batch, whole).clip(0, whole)


def _moved(arrays: rings.Arrays, axis_name: Names) -> rings.Arrays:
    """All arrays with an axis of tokens, in zig-zag order."""

    def moved(x: jax.Array | None, axis: int = 1) -> jax.Array | None:
        return None if x is None else to_zigzag(x, axis_name, axis=axis)

    modifiers = dataclasses.replace(
        arrays.modifiers,
        query_segment_ids=moved(arrays.modifiers.query_segment_ids),
        key_value_segment_ids=moved(arrays.modifiers.key_value_segment_ids),
    )
    return dataclasses.replace(arrays, modifiers=modifiers, levels=moved(arrays.levels, 2))
