"""The Mosaic GPU kernel behind `grouped_matmul` on Hopper: what it takes, how it is launched."""

import functools
import math
from typing import NamedTuple

import jax

from turbojax._device import multiprocessors, unindexable
from turbojax.matmul.int4 import mosaic_gpu
from turbojax.matmul.int4.mosaic_operands import padded, tables_of
from turbojax.matmul.int4.static import Activation
from turbojax.matmul.int4.weight import Int4Weight
from turbojax.numerics.fp8 import Fp8Tokens

# Tokens of a tile with sums in two levels, which take twice the registers. Up to the second number
# four warpgroups convert weights, where memory bandwidth is the limit; beyond it two, which have
# more registers for sums.
_TOKENS, _FEW = (8, 16, 32, 64, 128), 64
# From the second number on, its products have as many eighths of that as are enough.
_EIGHTHS, _FINE = (2, 3, 4, 5, 6, 8), 32
# How many tokens products may have with sums in one level: of tiles of up to 144 with three
# warpgroups and with two, and of wider ones. With other numbers together, such as 128 and 160, or
# 144 and 208, ptxas lets all products wait for one another (C7511).
_NARROW, _NARROW_OF_TWO, _WIDE = (96, 128, 144), (96, 144, 256), (256,)
# A tile of three warpgroups takes so many times as long as one of two.
_THIRD = 1.4
# Experts are taken to have up to this many times the average number of tokens; with sums in one
# level up to the other.
_UNEVEN, _LESS_UNEVEN = 2, 9 / 8
# Outputs of a tile of four warpgroups.
_LARGEST_TILE = 256
_MOST_STAGES = 12
_SHARED_BYTES = 227 * 1024


def unsupported(
    *,
    tokens: Fp8Tokens,
    weight: Int4Weight,
    group_sizes: jax.Array,
    bias: jax.Array | None,
    activation: Activation | None,
) -> str | None:
    """Why the kernel cannot run this here; None if it can."""
    [experts] = group_sizes.shape
    refusal = mosaic_gpu.unsupported(
        tokens=tokens, weight=weight, bias=bias, residual=None, activation=activation
    )
    rows, inputs = weight.padded_shape
    return refusal or unindexable(tokens.codes.shape[0] * max(rows, inputs, experts))


class Launch(NamedTuple):
    """How the kernel is launched; `is_two_level`: every group's sum is added in float32.

    `widths` are how many tokens products may have, `consumers` warpgroups that compute, `stages`
    groups of inputs in shared memory.
    """

    widths: tuple[int, ...]
    consumers: int
    stages: int
    is_two_level: bool

    @property
    def tokens(self) -> int:
        """The most that a tile has."""
        return self.widths[-1]


def default_launch(rows: int, weight: Int4Weight, *, is_precise: bool = False) -> Launch:
    """The launch for this many tokens; with `is_precise`, sums always have two levels."""
    from pallas_kernels.mosaic.hopper.matmul import grouped

    [experts] = weight.stack
    is_e4m3 = weight.scale_dtype == "e4m3"
    columns = weight.padded_shape[0]
    wanted = min(rows, -(-_UNEVEN * rows // experts))
    is_two_level = is_precise or not is_e4m3 or wanted <= _TOKENS[-1]
    if is_two_level:
        tokens = next((n for n in _TOKENS if n >= wanted), _TOKENS[-1])
        eighths = [tokens * n // 8 for n in _EIGHTHS]
        widths = tuple(n for n in eighths if n % 8 == 0) if tokens >= _FINE else (tokens,)
        # Where tiles are few, smaller ones, so that more programs have one.
        tiles = min(rows, experts) * -(-columns // _LARGEST_TILE)
        consumers = 4 if tokens <= _FEW and tiles > multiprocessors() // 2 else 2
    else:
        widths, consumers = _one_level(rows, experts, columns)

    def settings(stages: int) -> grouped.Settings:
        epilogue = grouped.Epilogue(None, False, False, "bfloat16", 128)
        return grouped.Settings(epilogue, widths, stages, consumers, is_two_level)

    def fits(stages: int) -> bool:
        return settings(stages).shared_bytes(experts, 1 if is_e4m3 else 2, is_e4m3) <= _SHARED_BYTES

    stages = max(n for n in range(2, _MOST_STAGES + 1) if fits(n))
    return Launch(widths, consumers, stages, is_two_level)


def _one_level(rows: int, experts: int, columns: int) -> tuple[tuple[int, ...], int]:
    """Widths and warpgroups for sums that stay in the matrix unit."""
    wanted = min(rows, math.ceil(_LESS_UNEVEN * rows / experts))
    parts = -(-wanted // _WIDE[-1])
    # Two narrow tiles take as long as one and a third wide ones, three longer than two.
    is_narrow = parts <= 2 and wanted <= parts * _NARROW[-1]
    if not is_narrow:
        return _WIDE, 2
    two, three = (min(rows, experts) * parts * -(-columns // (64 * n)) for n in (2, 3))
    rounds = [-(-tiles // multiprocessors()) for tiles in (two, three)]
    is_three = three >= multiprocessors() and _THIRD * rounds[1] <= rounds[0]
    return (_NARROW, 3) if is_three else (_NARROW_OF_TWO, 2)


def matmul(
    tokens: Fp8Tokens,
    weight: Int4Weight,
    group_sizes: jax.Array,
    bias: jax.Array | None,
    *,
    activation: Activation | None,
    is_precise: bool,
) -> jax.Array:
    """`reference.matmul` as one kernel.

    Sums are float32 from group to group; but of more than 128 tokens, if experts have more than 64
    on average, they stay in the matrix unit, whose additions keep about 14 bits.
    """
    launch = default_launch(tokens.codes.shape[0], weight, is_precise=is_precise)
    return _matmul(tokens, weight, group_sizes, bias, activation=activation, launch=launch)


@functools.partial(jax.jit, static_argnames=("activation", "launch"))
def _matmul(
    tokens: Fp8Tokens,
    weight: Int4Weight,
    group_sizes: jax.Array,
    bias: jax.Array | None,
    *,
    activation: Activation | None,
    launch: Launch,
) -> jax.Array:
    from pallas_kernels.mosaic.hopper.matmul import grouped

    epilogue = grouped.Epilogue(
        activation=activation,
        has_bias=bias is not None,
        has_residual=False,
        dtype=str(tokens.dtype),
        swizzle=64 if weight.gated else 128,
    )
    settings = grouped.Settings(epilogue=epilogue, programs=multiprocessors(), **launch._asdict())
    out = grouped.grouped_matmul(
        weight.codes,
        weight.scales,
        tables_of(weight),
        padded(tokens.codes, (tokens.codes.shape[0], weight.padded_shape[1])),
        tokens.scale,
        weight.output_scale,
        bias,
        group_sizes,
        settings=settings,
    )
    return out[:, : weight.result_size]
