"""Ranking: where the heads of a cache's first blocks go, if some heads keep fewer bits.

It is done once in a sequence's life, by the step that fills its first buffer. Plain JAX in a
`lax.cond` takes no time on the device in all other steps, but XLA waits for the condition on the
host, 0.1 ms a side and layer, where a launch takes 1 us. So this kernel is launched in every step,
and returns at once if there is nothing to do.

Roofline: one launch, 1 us; in the step that ranks 16 KB a head are read, some 10 us.

A program takes all heads of one sequence, of keys or of values: of each the extremes of its
channels over the buffer and the new token, then what follows from them (TurboAttention, Eq. 11).
"""

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import varying
from pallas_kernels.triton._common import WHOLE, next_power_of_2, parameters
from pallas_kernels.triton._quantize import (
    clamped_stage1_codes,
    magnitude_bits,
    maximum_from_bits,
    scale_from_maximum,
)

Method = Literal["gap_std", "min_max", "variation"]
_ROWS = 32  # tokens that are read at a time


class Side(NamedTuple):
    """Keys or values."""

    x: Any  # the new token, bfloat16, float16 or float32 ``[B, K, H]``
    buffer: Any  # int8 ``[B, K, size, H]``, full but for its last token
    buffer_scale: Any  # float32 ``[B, K]``
    slots: Any  # int32 ``[B, K]``, those so far


def rank(
    is_first: jax.Array,
    sides: Sequence[Side],
    *,
    method: Method,
    group: int | None,
    interpret: bool = False,
) -> list[jax.Array]:
    """The slots of each side, ranked anew where `is_first` (int32 ``[B]``) is not 0.

    There the new token is the buffer's last one. `group` neighbours are ranked among themselves,
    None for all heads. Returns int32 ``[B, K]`` of each side, in the memory of those so far if it
    was donated; a head with a value that is not finite has the highest rank.
    """
    arrays = [array for side in sides for array in side]
    slots = [side.slots for side in sides]
    out: list[jax.Array] = varying.pallas_call(
        functools.partial(_kernel, method=method, group=group, interpret=interpret),
        grid=(len(sides), slots[0].shape[0]),
        in_specs=[WHOLE] * (1 + len(arrays)),
        out_specs=[WHOLE] * len(sides),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in slots],
        input_output_aliases={(i + 1) * len(Side._fields): i for i in range(len(sides))},
        compiler_params=parameters(4, 1),
        interpret=interpret,
        name="turbojax_rank",
    )(is_first, *arrays)
    return out


def _kernel(
    is_first: jax.Ref, *refs: jax.Ref, method: Method, group: int | None, interpret: bool
) -> None:
    count, size = len(refs) // (len(Side._fields) + 1), len(Side._fields)
    inputs, outputs = refs[: count * size], refs[count * size :]
    sequence = pl.program_id(1)
    for i, out in enumerate(outputs):
        side = Side(*inputs[i * size : (i + 1) * size])
        is_own = (pl.program_id(0) == i) & (is_first[sequence] != 0)
        write = functools.partial(_rank, side, out, sequence, method, group, interpret)
        pl.when(is_own)(write)


def _rank(
    side: Side,
    out: jax.Ref,
    sequence: jax.Array,
    method: Method,
    group: int | None,
    interpret: bool,
) -> None:
    heads = side.slots.shape[1]
    head = jnp.arange(next_power_of_2(heads), dtype=jnp.int32)

    def add(k: jax.Array, found: jax.Array) -> jax.Array:
        return jnp.where(head == k, _priority(side, sequence, k, method, interpret), found)

    priority = jax.lax.fori_loop(0, heads, add, jnp.full(head.shape, -jnp.inf, jnp.float32))
    size = group or heads
    mine, other = priority[:, None], priority[None]
    # Ties keep the heads' order.
    is_before = (other > mine) | ((other == mine) & (head[None] < head[:, None]))
    is_before = is_before & (head[None] // size == head[:, None] // size)
    slots = jnp.sum(is_before.astype(jnp.int32), axis=1)
    plgpu.store(out.at[sequence, head], slots, mask=head < heads)


def _priority(
    side: Side, sequence: jax.Array, head: jax.Array, method: Method, interpret: bool
) -> jax.Array:
    """A head's priority, a scalar; infinite for NaN."""
    size, channels = side.buffer.shape[2:]
    channel = jnp.arange(next_power_of_2(channels), dtype=jnp.int32)
    inside = channel < channels
    token = plgpu.load(side.x.at[sequence, head, channel], mask=inside, other=0.0)
    token = token.astype(jnp.float32)
    maximum = maximum_from_bits(jnp.max(magnitude_bits(token)))
    held = side.buffer_scale[sequence, head]
    scale = jnp.where((held == 0) & (maximum != 0), scale_from_maximum(2 * maximum), held)
    broken = (maximum != maximum) | (scale != scale)
    scale = jnp.where(broken | (scale == 0), 1.0, scale)
    code = clamped_stage1_codes(token, scale, interpret)

    def extend(i: jax.Array, found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        row = i * _ROWS + jnp.arange(_ROWS, dtype=jnp.int32)
        mask = (row < size - 1)[:, None] & inside[None]
        place = side.buffer.at[sequence, head, row[:, None], channel[None]]
        codes = plgpu.load(place, mask=mask, other=0).astype(jnp.float32)
        low = jnp.min(jnp.where(mask, codes, jnp.inf), axis=0)
        high = jnp.max(jnp.where(mask, codes, -jnp.inf), axis=0)
        return jnp.minimum(found[0], low), jnp.maximum(found[1], high)

    low, high = jax.lax.fori_loop(0, pl.cdiv(size - 1, _ROWS), extend, (code, code))
    low, high = low * scale, high * scale
    ends = jnp.where(inside, high, -jnp.inf), jnp.where(inside, low, jnp.inf)
    gap = jnp.max(ends[0]) - jnp.min(ends[1])
    gaps = jnp.where(inside, high - low, 0.0)
    apart = jnp.where(inside, gaps - jnp.sum(gaps) / channels, 0.0)
    spread = jnp.sqrt(jnp.sum(apart * apart) / channels)
    priority = {"gap_std": gap * spread, "min_max": gap, "variation": spread}[method]
    return jnp.where(broken | (priority != priority), jnp.inf, priority)
