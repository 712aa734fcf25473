"""Codes of 4, 3 or 2 bits in bytes, without a bit between them."""

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks
from turbojax.polar.centroids import check_bits

_CODES_OF_A_WHOLE = {4: 2, 3: 8, 2: 4}
"""Codes that whole bytes hold, by their bits."""


def packed_width(head_dim: int, bits: int = 4) -> int:
    """Bytes of the packed codes of one vector, ``H * bits / 8``.

    Args:
      head_dim: channels, `H`.
      bits: 2, 3 or 4.

    Raises:
      TypeError: if an argument is not an integer.
      ValueError: if `bits` is another number, or the codes do not fill whole bytes: `H` must be a
        multiple of 2 for 4 bits, of 8 for 3 and of 4 for 2.
    """
    check_bits(bits)
    _checks.check_sizes(head_dim=head_dim)
    if head_dim % _CODES_OF_A_WHOLE[bits]:
        raise ValueError(
            f"{head_dim=} must be a multiple of {_CODES_OF_A_WHOLE[bits]} for codes of {bits} bits"
        )
    return head_dim * bits // 8


def pack(codes: jax.Array, bits: int = 4) -> jax.Array:
    """The codes of each vector in ``H * bits / 8`` bytes.

    - 4 bits: dimension ``2 i`` in the low nibble of byte `i`, ``2 i + 1`` in the high.
    - 2 bits: dimension ``4 i + j`` in bits ``2 j`` and ``2 j + 1`` of byte `i`.
    - 3 bits: the lower two bits of all codes as above, in the first ``H / 4`` bytes. Then ``H / 8``
      bytes with the highest bits: that of dimension ``8 i + 4 p + j`` in bit ``4 (j // 2) + 2 p +
      j % 2`` of byte `i`, so that a shift by ``2 p`` and by ``j % 2`` puts those of two dimensions
      into the two nibbles, where their lower bits come to lie as well.

    Args:
      codes: uint8 ``[..., H]`` below ``2**bits``, `H` as in `packed_width`.
      bits: 2, 3 or 4.

    Returns:
      uint8 ``[..., H * bits / 8]``.

    Raises:
      TypeError: if `codes` is not uint8.
      ValueError: if `H` does not fit or, outside `jit`, a code is too large.
    """
    check_bits(bits)
    check_codes("codes", codes, 2**bits)
    if codes.ndim < 1 or codes.shape[-1] % _CODES_OF_A_WHOLE[bits]:
        wanted = "even" if bits == 4 else f"a multiple of {_CODES_OF_A_WHOLE[bits]}"
        raise ValueError(f"{codes.shape=} must be [..., H], H {wanted}")
    if bits == 4:
        return codes[..., 0::2] | (codes[..., 1::2] << 4)
    low = codes & 3
    packed = low[..., 0::4] | low[..., 1::4] << 2 | low[..., 2::4] << 4 | low[..., 3::4] << 6
    if bits == 2:
        return packed
    high = jnp.zeros((*codes.shape[:-1], codes.shape[-1] // 8), jnp.uint8)
    for i, place in enumerate(_HIGH_PLACES):
        high = high | (codes[..., i::8] >> 2) << place
    return jnp.concatenate([packed, high], axis=-1)


_HIGH_PLACES = tuple(4 * (j // 2) + 2 * p + j % 2 for p in range(2) for j in range(4))
"""Where the highest of 3 bits goes, by the dimension within eight."""


def unpack(packed: jax.Array, bits: int = 4) -> jax.Array:
    """The inverse of `pack`.

    Args:
      packed: uint8 ``[..., H * bits / 8]``.
      bits: those of `pack`.

    Returns:
      uint8 ``[..., H]``.

    Raises:
      TypeError: if `packed` is not uint8.
      ValueError: if `bits` is another number or, for 3 bits, the width is not a multiple of 3.
    """
    check_bits(bits)
    check_codes("packed", packed, 256)
    if packed.ndim < 1 or (bits == 3 and packed.shape[-1] % 3):
        raise ValueError(f"{packed.shape=} must be [..., H * {bits} / 8]")
    if bits == 4:
        return _side_by_side([packed & 15, packed >> 4])
    if bits == 2:
        return _side_by_side([packed >> 2 * j & 3 for j in range(4)])
    cut = packed.shape[-1] // 3 * 2
    high = _side_by_side([packed[..., cut:] >> place & 1 for place in _HIGH_PLACES])
    return unpack(packed[..., :cut], 2) | high << 2


def _side_by_side(parts: list[jax.Array]) -> jax.Array:
    """One array in which elements of the parts take turns along the last axis."""
    both = jnp.stack(parts, axis=-1)
    return both.reshape(*both.shape[:-2], -1)


def check_codes(name: str, codes: jax.Array, limit: int) -> None:
    """Raises unless `codes` is uint8 and, outside `jit`, below `limit`."""
    if codes.dtype != jnp.uint8:
        raise TypeError(f"{name}.dtype={codes.dtype} must be uint8")
    if limit < 256 and _checks.is_concrete(codes) and codes.size:
        largest = int(np.asarray(codes).max())
        if largest >= limit:
            raise ValueError(f"{name} holds {largest}, must be below {limit}")
