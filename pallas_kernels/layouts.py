"""What both backends know of arrays: who holds what in which order, and what codes stand for."""

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np

Ref = Any  # an array in memory, as kernels see it; jax's own type does not know `at`

LOG2_E = math.log2(math.e)  # powers of two in one nat
INT8_RANGE = 119.0  # the largest int8 code that is used
E4M3_MAX = 448.0  # the largest number of e4m3
LEVELS = (1, 2, 4, 8)  # tokens that a pooled key stands for


class Side(NamedTuple):
    """Keys or values of a cache: the arrays of `turbojax.CacheSide`, by the same names."""

    codes: tuple[Ref, ...]
    channel_scale: Ref
    channel_zero: Ref
    block_scale: Ref
    head_slots: Ref  # for kernels, each head's place in `codes`; ignored if all have one width
    buffer: Ref
    buffer_scale: Ref


@dataclasses.dataclass(frozen=True)
class Codec:
    """The upper half of a symmetric quantizer of ``2**bits`` levels for N(0, 1)."""

    bits: int  # bits of a code: 2, 3 or 4
    thresholds: tuple[float, ...]  # the positive thresholds, increasing; there is one more at 0
    # Integers below ``2**(30 - bits)``, the squares of the positive levels in multiples of a common
    # unit; their sum over a vector fits 31 bits.
    squares: tuple[int, ...]
    unit: float  # that unit divided by the head dim


class Compressed(NamedTuple):
    """What a kernel that compresses a prompt returns for one side of a cache."""

    codes: tuple[Ref, ...]  # the packed codes, uint8, one array for each width
    channel_scale: Ref  # int8 ``[B, K, n, H]``
    channel_zero: Ref  # int8 ``[B, K, n, H]``
    block_scale: Ref  # float32 ``[B, K, n]``
    # Float32 ``[B, K, m]``, largest absolute value of each of the prompt's `m` blocks, NaN if one
    # is not finite. Undefined for blocks that were neither stored nor asked for.
    maximum: Ref
    # None, or codes ``[B, K, m * block, H]`` (tokens last: ``[B, K, H, m * block]``) and their
    # float32 scales ``[B, K, m]``, as `quantize` makes them.
    operand: tuple[Ref, Ref] | None


class GradientRows(NamedTuple):
    """What the backward pass needs of its query rows, or references to it."""

    q8: Any  # codes of the queries ``[B, N, Tp, H]``, `T` rounded up to whole blocks
    q_scale: Any  # float32 ``[B, N, Tp / block]``
    d8: Any  # codes of `d_out` ``[B, N, Tp, H]``, or None
    d_scale: Any  # float32 ``[B, N, Tp / block]``, or None
    # Float32 ``[B, N, tokens]``: log-sum-exps in powers of two, ``inf`` for rows that see nothing
    # or do not exist.
    lse: Any
    # Float32 ``[B, N, tokens]``: ``rowsum(d_out * out)`` less the residual's cotangent, 0 for those
    # rows. If `d_out` has codes, the sum is over the values that they stand for.
    delta: Any


def float32(x: float) -> float:
    """The float32 nearest to a number."""
    return float(np.float32(x))


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
