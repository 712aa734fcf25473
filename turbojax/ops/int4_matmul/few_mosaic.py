"""How the Hopper kernel of few tokens is launched: at most 64 of them times INT4 weights."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from turbojax.ops.fp8_tokens import quantize_activation
from turbojax.ops.int4_matmul.static import Activation
from turbojax.quantizers import Fp8Tokens, Int4Weight

MOST_TOKENS = 64
_TOKENS = (8, 16, 32, 64)
_GROUP, _ROWS = 128, 64
# Warpgroups of a program: more of them have too few registers for 64 tokens.
_WARPGROUPS = 4
# Programs that share rows. Pairs of multiprocessors leave none idle; of a cluster of four an H200
# has no place for 32 at a time, and the last ones wait until the first end.
_PARTS = (1, 2)
# Clocks of a multiprocessor for a tile, of a warpgroup for all it does with one, of a program until
# its first weights are there and from its last on, and what sums of two programs take more.
_TILE, _LATENCY, _START, _CLUSTER = 200, 700, 4000, 600
_MOST_STAGES, _FEWEST_STAGES = 8, 4
# Of 227 KB, less what Pallas takes.
_SHARED_BYTES = 222 * 1024
# Runs of eight tokens' inputs that a lane can hold, to round them.
_MOST_HELD = 16
# Inputs of a token are read 16 bytes at a time.
_LOAD = 16
# Multiprocessors of every Hopper GPU with a full board, so that sums are the same on all of them.
_MULTIPROCESSORS = 132


class Launch(NamedTuple):
    """How the kernel is launched.

    Attributes:
      tokens: columns of a product.
      warpgroups: of a program.
      parts: programs that share rows, each with part of the inputs.
      stages: tiles of a warpgroup in shared memory.
      resident: groups of inputs whose tokens are in shared memory.
      splits: warpgroups of a program that share rows, each with part of its inputs.
      rounds: whether the kernel rounds tokens to e4m3 itself.
    """

    tokens: int
    warpgroups: int
    parts: int
    stages: int
    resident: int
    splits: int
    rounds: bool


def default_launch(rows: int, weight: Int4Weight, *, rounds: bool = False) -> Launch | None:
    """The launch for this many tokens, or None if there are too many or too many inputs.

    With `rounds` it is that for tokens that are not e4m3 yet, which the kernel rounds if a program
    can hold its part of them.

    All but memory follows from the weight's shape alone, and with it the order of sums.
    """
    if rows > MOST_TOKENS:
        return None
    outputs, inputs = weight.padded_shape
    tokens = next(n for n in _TOKENS if n >= rows)
    tiles, splits, parts = _shares(outputs // _ROWS, inputs // _GROUP)
    warpgroups = tiles * splits
    scale_bytes = 1 if weight.scale_dtype == "e4m3" else 2
    groups = inputs // _GROUP
    memory = _memory(tokens, warpgroups, splits, parts, groups, scale_bytes)
    if memory is None:
        return None
    stages, resident = memory
    part = -(-groups // parts)
    if rounds:
        held = -(-part * _ROUNDED_RUNS // 32) * -(-rows // (4 * warpgroups))
        rounds = resident == part and held <= _MOST_HELD
    return Launch(tokens, warpgroups, parts, stages, resident, splits, rounds)


_ROUNDED_RUNS = _GROUP // 8


@functools.cache
def _shares(tiles: int, groups: int) -> tuple[int, int, int]:
    """Rows of tiles of a program, its warpgroups for each, and programs that share them.

    For the least time by estimate.
    """

    def clocks(shares: tuple[int, int, int]) -> tuple[float, int]:
        rows, splits, parts = shares
        programs = -(-tiles // rows) * parts
        waves = -(-programs // _MULTIPROCESSORS)
        each = max(_TILE, _LATENCY / (rows * splits))
        own = rows * splits * -(-groups // (parts * splits)) * each
        return waves * (own + _START) + _CLUSTER * (parts - 1), splits

    return min(
        (
            (rows, splits, parts)
            for rows in range(1, min(tiles, _WARPGROUPS) + 1)
            for splits in range(1, _WARPGROUPS // rows + 1)
            for parts in _PARTS
            if splits * parts <= groups
        ),
        key=clocks,
    )


@functools.cache
def _memory(
    tokens: int, warpgroups: int, splits: int, parts: int, groups: int, scale_bytes: int
) -> tuple[int, int] | None:
    """Stages, and groups of tokens that are resident: all of a part's if there is room.

    None if not even one group of tokens for each share fits beside the scales.
    """
    from pallas_kernels.mosaic.hopper.matmul import few

    epilogue = few.Epilogue(None, False, False, "bfloat16", 0)

    def size(stages: int, resident: int) -> int:
        s = few.Settings(epilogue, tokens, warpgroups, parts, stages, resident, splits=splits)
        return few.Memory.of(s, groups, scale_bytes).size

    resident, each = -(-groups // parts), -(-groups // (parts * splits))
    while True:
        for stages in range(_MOST_STAGES, _FEWEST_STAGES - 1, -1):
            if size(stages, resident) <= _SHARED_BYTES:
                return stages, resident
        if each == 1:
            return None
        each = -(-each // 2)
        resident = each * splits


def matmul(
    tokens: jax.Array | Fp8Tokens,
    weight: Int4Weight,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    activation: Activation | None,
    launch: Launch,
    tables: jax.Array | None,
) -> jax.Array:
    """`reference.matmul` of few tokens as one kernel, after another one that rounds them, or not.

    Sums are float32 from group to group, in an order that the weight's shape alone decides.

    Args:
      tokens: ``[M, K]``, rounded or not.
      weight: as there.
      bias: as there.
      residual: as there.
      activation: as there.
      launch: `default_launch` of these tokens.
      tables: of e4m3 scales, ``[128, 16]``, or None.
    """
    if not isinstance(tokens, Fp8Tokens) and not launch.rounds:
        tokens = quantize_activation(tokens)
    return _matmul(tokens, weight, bias, residual, tables, activation=activation, launch=launch)


@functools.partial(jax.jit, static_argnames=("activation", "launch"))
def _matmul(
    tokens: jax.Array | Fp8Tokens,
    weight: Int4Weight,
    bias: jax.Array | None,
    residual: jax.Array | None,
    tables: jax.Array | None,
    *,
    activation: Activation | None,
    launch: Launch,
) -> jax.Array:
    from pallas_kernels.mosaic.hopper.matmul import few
    from pallas_kernels.mosaic.hopper.matmul.rounding import Rounding

    x, scale = (tokens.codes, tokens.scale) if isinstance(tokens, Fp8Tokens) else (tokens, None)
    dtype = str(tokens.dtype)
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % _LOAD)))
    rounding = None
    if launch.rounds:
        rounding = Rounding(
            dtype=dtype,
            tokens=x.shape[0],
            inputs=x.shape[1],
            columns=launch.tokens,
            groups=launch.resident,
            parts=launch.parts,
            warpgroups=launch.warpgroups,
        )
    settings = few.Settings(
        epilogue=few.Epilogue(activation, bias is not None, residual is not None, dtype, 0),
        tokens=launch.tokens,
        warpgroups=launch.warpgroups,
        parts=launch.parts,
        stages=launch.stages,
        resident=launch.resident,
        splits=launch.splits,
        rounding=rounding,
    )
    return few.few_matmul(
        weight.codes,
        weight.scales,
        tables,
        x,
        scale,
        weight.output_scale,
        bias,
        residual,
        width=weight.result_size,
        settings=settings,
    )
