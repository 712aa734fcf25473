"""Some outputs, or some inputs, of INT4 weights; no code and no scale changes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbojax._programs import one_program
from turbojax.matmul.int4.layout import (
    BLOCK,
    OUT_MULTIPLE,
    code_rows,
    code_tiles,
    scale_rows,
    scale_tiles,
    stored_inputs,
)
from turbojax.matmul.int4.weight import (
    Int4Weight,
    gate_and_up,
    pack_codes,
    unpack_codes,
    unpad_rows,
)

NOTHING = -1
"""Stands for a row that is no output: zeros."""


def take_outputs(weight: Int4Weight, outputs: np.ndarray) -> Int4Weight:
    """Some outputs of a weight, or of a stack of weights, in the order given.

    `outputs` are integers ``[n]``, or `NOTHING` for an output of zeros; for a gated weight they
    count pairs of a gate's and its partner's outputs, and the result is gated.
    """
    wanted = jnp.asarray(outputs, jnp.int32)
    if not weight.gated:
        return _take_outputs(weight, wanted)
    half = weight.result_size
    parts = [_take_outputs(weight, jnp.where(wanted < 0, wanted, wanted + i)) for i in (0, half)]
    if not weight.stack:
        return gate_and_up(*parts)
    return jax.vmap(gate_and_up)(*parts)


@one_program()
def _take_outputs(weight: Int4Weight, wanted: jax.Array) -> Int4Weight:
    """`take_outputs` by number, those of a gate first; the result is not gated."""
    if weight.stack:
        return jax.vmap(_take_outputs, in_axes=(0, None))(weight, wanted)
    count = wanted.shape[0]

    def rows(x: jax.Array, nothing: float) -> jax.Array:
        plain = unpad_rows(x, weight)
        found = plain[jnp.maximum(wanted, 0)]
        there = (wanted >= 0).reshape(-1, *(1,) * (x.ndim - 1))
        found = jnp.where(there, found, jnp.asarray(nothing, x.dtype))
        more = jnp.full((-count % OUT_MULTIPLE, *x.shape[1:]), nothing, x.dtype)
        return jnp.concatenate([found, more])

    zeros = weight.zeros
    return dataclasses.replace(
        weight,
        codes=code_tiles(rows(code_rows(weight.codes), 0)),
        scales=scale_tiles(rows(scale_rows(weight.scales), 1)),
        output_scale=rows(weight.output_scale, 1),
        zeros=None if zeros is None else scale_tiles(rows(scale_rows(zeros), 0)),
        out_size=count,
        gated=False,
    )


def take_inputs(weight: Int4Weight, start: int, size: int, group_size: int) -> Int4Weight:
    """`size` consecutive inputs of a weight, or of a stack; past the last one they are zeros.

    Raises ValueError unless each group of the result lies in one of the weight's.
    """
    first = start + np.arange(-(-size // group_size)) * group_size
    last = np.minimum(np.minimum(first + group_size, start + size), weight.in_size) - 1
    groups = np.minimum(first, weight.in_size - 1) // weight.group_size
    if np.any((last >= first) & (last // weight.group_size != groups)):
        raise ValueError(
            f"{size} inputs from {start} on in groups of {group_size} must each lie in one group "
            f"of {weight.group_size}"
        )
    return _take_inputs(weight, start, size, group_size)


@one_program("start", "size", "group_size")
def _take_inputs(weight: Int4Weight, start: int, size: int, group_size: int) -> Int4Weight:
    stored = stored_inputs(size, group_size)
    kept = min(max(weight.in_size - start, 0), size)
    # Padded groups need some scale, too.
    first = start + np.arange(stored // group_size) * group_size
    groups = np.minimum(first, weight.in_size - 1) // weight.group_size
    if start % BLOCK == 0 and kept % BLOCK == 0:
        tiles = weight.codes[..., start // BLOCK : (start + kept) // BLOCK, :, :]
        widths: Any = [(0, 0)] * tiles.ndim
        widths[-3] = (0, stored // BLOCK - tiles.shape[-3])
        codes = jnp.pad(tiles, widths)
    else:
        values = unpack_codes(code_rows(weight.codes))[..., start : start + kept]
        if weight.zeros is not None:
            values = values[..., :kept]
        widths = [(0, 0)] * (values.ndim - 1) + [(0, stored - kept)]
        codes = code_tiles(pack_codes(jnp.pad(values, widths)))
    return dataclasses.replace(
        weight,
        codes=codes,
        scales=weight.scales[..., groups, :],
        zeros=None if weight.zeros is None else weight.zeros[..., groups, :],
        in_size=size,
        group_size=group_size,
    )


def split_group_size(group_size: int, share: int, in_size: int) -> int:
    """The group size of weights of which devices have `share` of `in_size` inputs each.

    Smaller than that of the whole weight where a device's inputs end within a group. Raises
    NotImplementedError if no possible group lies in one of the whole weight's.
    """
    if share % group_size == 0:
        return group_size
    if group_size % share == 0 or in_size <= group_size:
        return min(group_size, BLOCK)
    for size in (BLOCK, 64, 32):
        if share % size == 0 and group_size % size == 0:
            return size
    raise NotImplementedError(
        f"{share} inputs a device of an INT4 weight with {group_size=} are not supported: must be "
        "a multiple of 32"
    )
