"""How the Hopper kernel of few tokens is launched: at most 64 of them times INT4 weights."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from turbojax.matmul.fp8_tokens import quantize_activation
from turbojax.matmul.int4.static import Activation
from turbojax.matmul.int4.weight import Int4Weight
from turbojax.numerics.fp8 import Fp8Tokens

MOST_TOKENS = 64
_TOKENS = (8, 16, 32, 64)
_GROUP, _ROWS = 128, 64
# Warpgroups of a program: more of them have too few registers for 64 tokens.
_WARPGROUPS = 4
# Programs that share rows. Pairs leave no multiprocessor idle. An H200 cannot run 32 clusters of
# four at a time: the last ones wait until the first end.
_PARTS = (1, 2)
# Clocks, from the times in `few.py`: of a multiprocessor for a tile; of a warpgroup for all it does
# with one; of a program until its first weights arrive and after its last; and the extra for sums
# of two programs, and for few tokens that do not fit and are copied ahead.
_TILE, _LATENCY, _START, _CLUSTER, _RING = 240, 500, 6500, 2200, 14000
# With more of them in flight the first ones arrive later: each costs 0.2 to 0.9 us.
_STAGES = 3
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

    With `rounds` the kernel is to round the tokens, if a program can hold its part of them. The
    order of sums follows from the weight's shape alone.
    """
    if rows > MOST_TOKENS:
        return None
    outputs, inputs = weight.padded_shape
    tokens = next(n for n in _TOKENS if n >= rows)
    tiles, groups = outputs // _ROWS, inputs // _GROUP
    scale_bytes = 1 if weight.scale_dtype == "e4m3" else 2
    layout = _layout(tokens, tiles, groups, scale_bytes)
    if layout is None:
        return None
    cut, resident = layout
    if rounds:
        from pallas_kernels.mosaic.hopper.matmul.rounding import Rounding

        part = -(-groups // cut.parts)
        rule = Rounding("bfloat16", rows, inputs, tokens, part, cut.parts, cut.warpgroups)
        rounds = resident == part and rule.held <= _MOST_HELD
    return Launch(tokens, cut.warpgroups, cut.parts, _STAGES, resident, cut.splits, rounds)


class _Cut(NamedTuple):
    """How work is divided: rows of tiles of a program, its warpgroups for each, and programs."""

    tiles: int
    splits: int
    parts: int

    @property
    def warpgroups(self) -> int:
        return self.tiles * self.splits

    @property
    def shares(self) -> int:
        """Into how many warpgroups a row's inputs are divided; sums are added in their order."""
        return self.splits * self.parts

    def clocks(self, tiles: int, groups: int) -> float:
        """The estimated time of a call, in clocks."""
        programs = -(-tiles // self.tiles) * self.parts
        waves = -(-programs // _MULTIPROCESSORS)
        own = self.warpgroups * -(-groups // self.shares)
        each = max(_TILE, _LATENCY / self.warpgroups)
        return waves * (own * each + _START) + _CLUSTER * (self.parts - 1)


@functools.cache
def _cuts(tiles: int, groups: int) -> list[_Cut]:
    """The cuts with as many shares as the fastest, the fastest first."""
    cuts = sorted(
        (
            _Cut(rows, splits, parts)
            for rows in range(1, min(tiles, _WARPGROUPS) + 1)
            for splits in range(1, _WARPGROUPS // rows + 1)
            for parts in _PARTS
            if splits * parts <= groups
        ),
        key=lambda cut: cut.clocks(tiles, groups),
    )
    return [cut for cut in cuts if cut.shares == cuts[0].shares]


@functools.cache
def _layout(tokens: int, tiles: int, groups: int, scale_bytes: int) -> tuple[_Cut, int] | None:
    """How work is divided, and how many groups of tokens are resident; None if nothing fits."""
    from pallas_kernels.mosaic.hopper.matmul.few import MOST_LOADED

    found = []
    for cut in _cuts(tiles, groups):
        resident = _resident(tokens, cut, groups, scale_bytes)
        if resident is not None:
            is_short = tokens <= MOST_LOADED and resident < -(-groups // cut.parts)
            found.append((cut.clocks(tiles, groups) + _RING * is_short, cut, resident))
    if not found:
        return None
    _, cut, resident = min(found)
    return cut, resident


def _resident(tokens: int, cut: _Cut, groups: int, scale_bytes: int) -> int | None:
    """Groups of tokens in shared memory: all of a program's, or the same number of each share."""
    from pallas_kernels.mosaic.hopper.matmul import few

    epilogue = few.Epilogue(None, False, False, "bfloat16", 0)
    _, splits, parts = cut
    resident, each = -(-groups // parts), -(-groups // cut.shares)
    while True:
        sizes = (tokens, cut.warpgroups, parts, _STAGES, resident)
        settings = few.Settings(epilogue, *sizes, splits=splits)
        if few.Memory.of(settings, groups, scale_bytes).size <= _SHARED_BYTES:
            return resident
        if each <= 2:
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
    """`reference.matmul` of few tokens as one kernel, if need be after another that rounds them.

    Sums are float32 from group to group, in an order that the weight's shape alone decides.
    `tables` are those of e4m3 scales, or None.
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
