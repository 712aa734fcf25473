"""Unpacking 2-, 3- and 4-bit codes in registers.

An axis of `n` codes is stored in equal runs that share bytes, the first run in the lowest bits (3
bits: a plane of 2 and a plane of 1). A *span* is the part of the axis that is unpacked at once: a
whole run, where it is wide enough for an 8-bit product and then a shift and a mask for four codes
in one register; otherwise the whole axis, loading each byte once for every run.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.triton._common import Ref, next_power_of_2

_PLANES = {2: (2,), 3: (2, 1), 4: (4,)}
# Codes that an 8-bit product takes along its contracted axis, at least.
_NARROWEST = 32


class Span(NamedTuple):
    """Codes ``start .. start + size`` of an axis, in a tile padded to `padded`."""

    start: int
    size: int
    padded: int

    def positions(self) -> jax.Array:
        """Positions on the axis; those of the padding repeat its beginning."""
        offset = jnp.arange(self.padded, dtype=jnp.int32)
        if self.padded != self.size:
            offset = jnp.where(offset < self.size, offset, 0)
        return self.start + offset

    def inside(self) -> jax.Array:
        return jnp.arange(self.padded, dtype=jnp.int32) < self.size

    def mask(self) -> jax.Array | None:
        return None if self.padded == self.size else self.inside()


def spans(size: int, bits: int) -> tuple[Span, ...]:
    """The spans into which an axis of `size` codes is cut."""
    run = size * bits // 8
    if bits == 3 or run < _NARROWEST:
        return (whole(size),)
    return tuple(Span(start, run, next_power_of_2(run)) for start in range(0, size, run))


def whole(size: int) -> Span:
    return Span(0, size, max(_NARROWEST, next_power_of_2(size)))


def load_codes(
    ref: Ref,
    at: tuple[jax.Array, ...],
    rows: Span,
    columns: Span,
    axis_size: int,
    bits: int,
    interpret: bool,
) -> jax.Array:
    """Codes as int8 ``[rows.padded, columns.padded]``, arbitrary in the padding.

    `ref` is uint8 ``[..., rows, axis_size * bits / 8]`` and `at` its leading indices; `columns` are
    of the packed axis, which has `axis_size` codes, and `rows` of the axis before.
    """
    codes, base, shift = None, 0, 0
    index = columns.positions()
    for width in _PLANES[bits]:
        run = axis_size * width // 8
        is_run = columns.size == run and columns.start % run == 0
        byte = base + (index - columns.start if is_run else index % run)
        tile = plgpu.load(ref.at[(*at, rows.positions()[:, None], byte[None, :])])
        tile = jax.lax.bitcast_convert_type(tile, jnp.int8)
        if is_run:
            part = _field(tile, columns.start // run * width, width, interpret)
        else:
            moved = tile.astype(jnp.int32) >> (index // run * width)[None, :]
            part = (moved & (2**width - 1)).astype(jnp.int8)
        codes = part if codes is None else codes | (part << shift).astype(jnp.int8)
        base, shift = base + run, shift + width
    assert codes is not None
    return codes


def _field(x: jax.Array, shift: int, width: int, interpret: bool) -> jax.Array:
    """Bits ``shift .. shift + width`` of each byte, computed on four bytes at a time."""
    mask = 2**width - 1
    if interpret:
        return ((x.astype(jnp.int32) >> shift) & mask).astype(jnp.int8)
    if shift == 0:
        asm = f"and.b32 $0, $1, {mask * 0x01010101:#x};"
    else:
        asm = (
            "{ .reg .b32 moved; "
            f"shr.u32 moved, $1, {shift}; and.b32 $0, moved, {mask * 0x01010101:#x}; }}"
        )
    [out] = plgpu.elementwise_inline_asm(
        asm,
        args=[x],
        constraints="=r,r",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.int8)],
    )
    return out
