"""INT4 weights from plain codes, scales and zero points, such as other programs make, and back."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from turbojax import _checks
from turbojax.matmul.int4.layout import (
    BLOCK,
    code_rows,
    code_tiles,
    pack_codes,
    scale_rows,
    scale_tiles,
    stored_inputs,
    stored_rows,
    unpack_codes,
)
from turbojax.matmul.int4.weight import Int4Weight, unpad_rows

LOWEST, HIGHEST = -8, 7
"""Of codes."""
HIGHEST_ZERO = 8
"""Of zero points: one more than a code has."""

_SCALE_DTYPES = ("bfloat16", "float16")


class PlainCodes(NamedTuple):
    """A weight ``[N, K]`` in plain arrays: ``(codes - zeros) * scales * output_scale``.

    Attributes:
      codes: int8 ``[N, K]``, -8 to 7.
      scales: ``[N, ceil(K / group_size)]``, a number for each group of neighbouring inputs.
      zeros: int8 as `scales`, or None for zeros.
      output_scale: float32 ``[N]``.
    """

    codes: jax.Array
    scales: jax.Array
    zeros: jax.Array | None
    output_scale: jax.Array


def from_codes(
    codes: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None = None,
    *,
    group_size: int | None = None,
    output_scale: jax.Array | None = None,
) -> Int4Weight:
    """The weight ``(codes - zeros) * scales * output_scale``, exactly.

    Nothing is rounded: `dequantize` gives these values in float32. Programs that dequantize in the
    scales' dtype round ``(code - zero) * scale`` once, so that
    ``dequantize(weight).astype(scales.dtype)`` has their bits.

    The scales of groups of more than 128 inputs are repeated: the weight has groups of 128, as the
    kernels want them, and the same values.

    Args:
      codes: int8 or int4 ``[N, K]``, -8 to 7.
      scales: bfloat16 or float16 ``[N, ceil(K / group_size)]``.
      zeros: optional int8 or int4 as `scales`, -8 to 8: the code whose value is zero.
      group_size: neighbouring inputs that share a scale: 32, 64, a multiple of 128, or, with one
        scale a row, None for all of them.
      output_scale: optional float32 ``[N]``, a factor of each output.

    Returns:
      The weight. A group whose scale is not finite has values that are not finite.

    Raises:
      TypeError: if a dtype is another.
      ValueError: if a shape, the group size or a number does not fit.
    """
    codes, scales = jnp.asarray(codes), jnp.asarray(scales)
    zeros = None if zeros is None else jnp.asarray(zeros)
    size = _check(codes, scales, zeros, group_size)
    rows, inputs = codes.shape
    factor = jnp.ones(rows, jnp.float32) if output_scale is None else jnp.asarray(output_scale)
    if factor.dtype != jnp.float32:
        raise TypeError(f"output_scale.dtype={factor.dtype} must be float32")
    if factor.shape != (rows,):
        raise ValueError(f"output_scale.shape={factor.shape} must be ({rows},)")
    packed, scales, zeros, factor = _pack(codes, scales, zeros, factor, size)
    return Int4Weight(
        codes=packed,
        scales=scales,
        output_scale=factor,
        out_size=rows,
        in_size=inputs,
        group_size=min(size, BLOCK),
        zeros=zeros,
    )


@jax.jit
def to_codes(weight: Int4Weight) -> PlainCodes:
    """The plain arrays of a weight, which `from_codes` takes.

    Of a gated weight they hold all rows of the gate, then those of its partner. With e4m3 scales a
    value of the weight is ``e4m3(code * scale)``, not the product itself.

    Args:
      weight: one weight, no stack.
    """
    groups = -(-weight.in_size // weight.group_size)

    def plain(tiles: jax.Array) -> jax.Array:
        return unpad_rows(scale_rows(tiles), weight)[:, :groups]

    codes = unpad_rows(unpack_codes(code_rows(weight.codes)), weight)[:, : weight.in_size]
    zeros = None if weight.zeros is None else plain(weight.zeros)
    return PlainCodes(codes, plain(weight.scales), zeros, unpad_rows(weight.output_scale, weight))


def _check(
    codes: jax.Array, scales: jax.Array, zeros: jax.Array | None, group_size: int | None
) -> int:
    """The group size; None becomes all inputs, rounded up to whole blocks."""
    if codes.dtype.name not in ("int8", "int4"):
        raise TypeError(f"codes.dtype={codes.dtype} must be int8 or int4")
    if codes.ndim != 2 or 0 in codes.shape:
        raise ValueError(f"{codes.shape=} must be [N, K], no axis empty")
    if scales.dtype.name not in _SCALE_DTYPES:
        raise TypeError(f"scales.dtype={scales.dtype} must be {' or '.join(_SCALE_DTYPES)}")
    rows, inputs = codes.shape
    whole = -(-inputs // BLOCK) * BLOCK
    if group_size is None:
        size = whole
    else:
        _checks.check_integer("group_size", group_size)
        size = int(group_size)
    if size not in (32, 64) and (size < BLOCK or size % BLOCK):
        raise ValueError(f"{group_size=} must be 32, 64 or a multiple of {BLOCK}, or None")
    shape = (rows, -(-inputs // size))
    if scales.shape != shape:
        raise ValueError(f"{scales.shape=} must be {shape} for {codes.shape=}, {group_size=}")
    _check_range("codes", codes, HIGHEST)
    if zeros is not None:
        if zeros.dtype.name not in ("int8", "int4"):
            raise TypeError(f"zeros.dtype={zeros.dtype} must be int8 or int4")
        if zeros.shape != shape:
            raise ValueError(f"{zeros.shape=} must be {shape}, as that of scales")
        _check_range("zeros", zeros, HIGHEST_ZERO)
    return size


def _check_range(name: str, x: jax.Array, highest: int) -> None:
    if x.dtype != jnp.int8 or not _checks.is_concrete(x):
        return
    least, most = int(jnp.min(x)), int(jnp.max(x))
    if least < LOWEST or most > highest:
        raise ValueError(f"{name} from {least} to {most} must be from {LOWEST} to {highest}")


@functools.partial(jax.jit, static_argnames="group_size")
def _pack(
    codes: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    factor: jax.Array,
    group_size: int,
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array]:
    """A weight's four arrays."""
    rows, inputs = codes.shape
    size = min(group_size, BLOCK)
    padding = stored_rows(rows) - rows, stored_inputs(inputs, size) - inputs
    groups = stored_inputs(inputs, size) // size

    def widened(x: jax.Array, value: float = 0) -> jax.Array:
        x = jnp.repeat(x, group_size // size, axis=1)[:, :groups]
        return jnp.pad(x, ((0, 0), (0, groups - x.shape[1])), constant_values=value)

    def stacked(x: jax.Array, value: float = 0) -> jax.Array:
        return jnp.pad(x, ((0, padding[0]), (0, 0)), constant_values=value)

    if zeros is None:
        fill = jnp.zeros((rows, padding[1]), jnp.int8)
    else:
        # So that padding is zeros, as far as codes can be: none stands for a zero point of 8.
        zeros = widened(zeros.astype(jnp.int8))
        fill = jnp.minimum(jnp.repeat(zeros, size, axis=1)[:, inputs:], HIGHEST)
    codes = jnp.concatenate([codes.astype(jnp.int8), fill], axis=1)
    return (
        code_tiles(pack_codes(stacked(codes))),
        scale_tiles(stacked(widened(scales, 1), 1)),
        None if zeros is None else scale_tiles(stacked(zeros)),
        jnp.pad(factor, (0, padding[0]), constant_values=1.0),
    )
