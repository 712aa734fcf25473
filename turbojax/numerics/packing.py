"""Packing of 2-, 3- and 4-bit codes into bytes: the layout that every kernel relies on.

An axis of `n` codes is cut into equal runs and one byte takes one code of each run, the first
run in the lowest bits. With 4 bits code `c` shares a byte with `c + n/2`; with 2 bits the runs
are quarters. A 3-bit code is stored as a plane of its low two bits (quarters), followed along
the same axis by a plane of its top bit (eighths). A run stays contiguous, so unpacking is a
shift and a mask and never an interleave.
"""

import jax
import jax.numpy as jnp

from turbojax._programs import one_program

# Widths, low bits first, of the planes that make up one code.
_PLANES = {2: (2,), 3: (2, 1), 4: (4,)}


def packed_size(size: int, bits: int) -> int:
    """Bytes that `size` codes of `bits` bits take.

    Args:
      size: number of codes, a multiple of 2, 4, 8 for 4, 2, 3 bits.
      bits: 2, 3 or 4.

    Raises:
      ValueError: if `bits` is another number or `size` not such a multiple.
    """
    if bits not in _PLANES:
        raise ValueError(f"{bits=} must be one of {tuple(_PLANES)}")
    multiple = 8 // min(_PLANES[bits])
    if size % multiple:
        raise ValueError(f"{size=} must be a multiple of {multiple} to pack {bits}-bit codes")
    return size * bits // 8


def pack(codes: jax.Array, bits: int, axis: int = -1) -> jax.Array:
    """Packs codes along one axis.

    Args:
      codes: uint8, any shape, values below ``2**bits``.
      bits: 2, 3 or 4.
      axis: the axis to pack.

    Returns:
      uint8, with `axis` shortened to `packed_size(n, bits)`.

    Raises:
      TypeError: if `codes` is not uint8.
      ValueError: as `packed_size`.
    """
    _check_bytes(codes, "codes")
    packed_size(codes.shape[axis], bits)
    return _pack(codes, bits, axis)


@one_program("bits", "axis")
def _pack(codes: jax.Array, bits: int, axis: int) -> jax.Array:
    planes, shift = [], 0
    for width in _PLANES[bits]:
        plane = (codes >> shift) & (2**width - 1)
        runs = jnp.split(plane, 8 // width, axis=axis)
        packed = runs[0]
        for i, run in enumerate(runs[1:], start=1):
            packed = packed | (run << (i * width))
        planes.append(packed)
        shift += width
    return planes[0] if len(planes) == 1 else jnp.concatenate(planes, axis=axis)


def unpack(packed: jax.Array, bits: int, axis: int = -1) -> jax.Array:
    """Inverse of `pack`.

    Args:
      packed: uint8, the result of `pack` with the same `bits` and `axis`.
      bits: 2, 3 or 4.
      axis: the packed axis.

    Returns:
      uint8 codes, with `axis` at its length before packing.

    Raises:
      TypeError: if `packed` is not uint8.
      ValueError: if `bits` is another number or the axis is not a packed length.
    """
    _check_bytes(packed, "packed")
    if bits not in _PLANES:
        raise ValueError(f"{bits=} must be one of {tuple(_PLANES)}")
    length = packed.shape[axis]
    if length % bits and bits == 3:
        raise ValueError(f"packed.shape[{axis}]={length} must be a multiple of 3 for 3-bit codes")
    return _unpack(packed, bits, axis)


@one_program("bits", "axis")
def _unpack(packed: jax.Array, bits: int, axis: int) -> jax.Array:
    size = packed.shape[axis] * 8 // bits
    codes, start, shift = None, 0, 0
    for width in _PLANES[bits]:
        stop = start + size * width // 8
        plane = jax.lax.slice_in_dim(packed, start, stop, axis=axis)
        runs = [(plane >> (i * width)) & (2**width - 1) for i in range(8 // width)]
        part = jnp.concatenate(runs, axis=axis) << shift
        codes = part if codes is None else codes | part
        start, shift = stop, shift + width
    assert codes is not None
    return codes


def _check_bytes(x: jax.Array, name: str) -> None:
    if x.dtype != jnp.uint8:
        raise TypeError(f"{name}.dtype={x.dtype} must be uint8")
