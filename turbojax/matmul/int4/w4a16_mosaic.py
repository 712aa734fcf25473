"""The Mosaic GPU kernels behind `int4_matmul` of 16-bit tokens on Hopper, and their launches."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from turbojax._device import multiprocessors
from turbojax.matmul.int4 import reference
from turbojax.matmul.int4.layout import OUT_MULTIPLE
from turbojax.matmul.int4.mosaic_operands import padded
from turbojax.matmul.int4.static import Activation
from turbojax.matmul.int4.weight import Int4Weight

# A kilobyte less than the GPU has: each buffer begins at a multiple of 128 bytes.
_SHARED_BYTES = 226 * 1024
# Up to this many tokens each warp multiplies on its own, if its copies fit.
_FEW = 32
_MOST_STRIPS = 7  # of a program, whose sums are in registers
# A warp's slots, of few strips and of many: the ring must be filled first, which more slots delay.
_FEWEST_SLOTS, _SLOTS, _SLOTS_OF_MANY = 3, 4, 6
# Tokens of a tile; the unit of copies of more tokens; rows of a tile.
_TOKENS, _COPY, _TILE = (8, 16, 32, 64, 128), 8, 128
_TWO_TEAMS = 64  # most tokens of a tile that two pairs of warpgroups have registers for
# Up to this many tokens programs share tiles if these are few; groups that are worth a program.
_SHARED, _FEWEST_GROUPS = 256, 4
_MOST_STAGES = 12


class FewLaunch(NamedTuple):
    """For few tokens: a program's strips of 16 rows, a warp's slots of 16 rows x 128 inputs."""

    strips: int
    warpgroups: int
    slots: int


class Launch(NamedTuple):
    """For more tokens: of a tile, groups of inputs in shared memory, programs that share a tile.

    `teams` are pairs of warpgroups that take a program's groups in turn.
    """

    tokens: int
    stages: int
    parts: int
    teams: int = 1


def default_launch(rows: int, weight: Int4Weight) -> FewLaunch | Launch:
    """The launch for this many tokens."""
    outputs, inputs = weight.padded_shape
    few = _few_launch(rows, outputs) if rows <= _FEW else None
    if few is not None:
        return few
    tokens = next((n for n in _TOKENS if n >= rows), _TOKENS[-1])
    tiles, groups = -(-rows // tokens) * -(-outputs // _TILE), inputs // 128
    parts = 1
    if rows <= _SHARED:
        parts = max(1, min(multiprocessors() // tiles, groups // _FEWEST_GROUPS))
    teams = 2 if tokens <= _TWO_TEAMS else 1
    return Launch(tokens, _stages(tokens, parts, teams, weight), parts, teams)


def _few_launch(rows: int, outputs: int) -> FewLaunch | None:
    """None if a warp's copies ahead of so many tokens do not fit."""
    from pallas_kernels.mosaic.hopper.matmul import w4a16_few

    epilogue = w4a16_few.Epilogue(None, False, False, "bfloat16", swizzle=0)
    tiles = -(-rows // w4a16_few.TILE)
    strips = _strips(outputs // w4a16_few.STRIP)

    def size(slots: int) -> int:
        return w4a16_few.Settings(strips, 2, slots, epilogue).shared_bytes(tiles)

    most = _SLOTS if strips < _MOST_STRIPS else _SLOTS_OF_MANY
    fitting = [n for n in range(_FEWEST_SLOTS, most + 1) if size(n) <= _SHARED_BYTES]
    return FewLaunch(strips, 2, fitting[-1]) if fitting else None


def _strips(total: int) -> int:
    """Strips of a program: the number with which all programs end soonest."""

    def time(strips: int) -> float:
        programs = -(-total // strips)
        return -(-programs // multiprocessors()) * (strips + 1)

    return min(range(1, _MOST_STRIPS + 1), key=lambda strips: (time(strips), strips))


def _stages(tokens: int, parts: int, teams: int, weight: Int4Weight) -> int:
    """As many stages as fit, a multiple of the teams."""
    from pallas_kernels.mosaic.hopper.matmul import w4a16

    epilogue = w4a16.Epilogue(None, False, False, "bfloat16", 0)
    row_bytes = weight.scales.dtype.itemsize + (weight.zeros is not None)

    def size(stages: int) -> int:
        settings = w4a16.Settings(epilogue, tokens, stages, teams, parts)
        return settings.shared_bytes(w4a16.stage_bytes(row_bytes, tokens))

    return max(n for n in range(teams, _MOST_STAGES + 1, teams) if size(n) <= _SHARED_BYTES)


@functools.partial(jax.jit, static_argnames=("activation", "launch"))
def matmul(
    x: jax.Array,
    weight: Int4Weight,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    activation: Activation | None,
    launch: FewLaunch | Launch,
) -> jax.Array:
    """`reference.matmul` of unrounded tokens as one kernel, sometimes with a sum after it.

    Sums are float32: of every group of 128 inputs, times its scale, and of all groups.
    """
    if isinstance(launch, FewLaunch):
        return _few(x, weight, bias, residual, activation, launch)
    return _many(x, weight, bias, residual, activation, launch)


def _few(
    x: jax.Array,
    weight: Int4Weight,
    bias: jax.Array | None,
    residual: jax.Array | None,
    activation: Activation | None,
    launch: FewLaunch,
) -> jax.Array:
    from pallas_kernels.mosaic.hopper.matmul import w4a16_few

    rows, inputs = weight.padded_shape
    columns = rows // 2 if weight.gated else rows
    epilogue = w4a16_few.Epilogue(
        activation, bias is not None, residual is not None, str(x.dtype), swizzle=0
    )
    out = w4a16_few.w4a16_few(
        weight.codes,
        weight.scales,
        weight.zeros,
        padded(x, (x.shape[0], inputs)),
        weight.output_scale,
        bias,
        None if residual is None else padded(residual, (x.shape[0], columns)),
        settings=w4a16_few.Settings(*launch, epilogue),
    )
    return out[:, : weight.result_size]


def _many(
    x: jax.Array,
    weight: Int4Weight,
    bias: jax.Array | None,
    residual: jax.Array | None,
    activation: Activation | None,
    launch: Launch,
) -> jax.Array:
    from pallas_kernels.mosaic.hopper.matmul import w4a16

    tokens, (stored, inputs) = x.shape[0], weight.padded_shape
    size = -(-tokens // _COPY) * _COPY
    is_shared = launch.parts > 1
    epilogue = w4a16.Epilogue(
        activation=None if is_shared else activation,
        has_bias=bias is not None and not is_shared,
        has_residual=residual is not None and not is_shared,
        dtype=str(x.dtype),
        swizzle=0 if launch.tokens < OUT_MULTIPLE else (64 if weight.gated else 128),
    )
    settings = w4a16.Settings(
        epilogue,
        launch.tokens,
        launch.stages,
        launch.teams,
        launch.parts,
        programs=multiprocessors(),
    )
    columns = stored // 2 if weight.gated and not is_shared else stored
    # At least two warpgroups' columns, see `program.launch`.
    columns = max(columns, settings.columns)
    rest: tuple[Any, Any] = (None, None)
    if not is_shared:
        rest = bias, None if residual is None else padded(residual, (size, columns))
    out = w4a16.w4a16(
        weight.codes,
        weight.scales,
        weight.zeros,
        padded(x, (size, inputs)),
        weight.output_scale,
        *rest,
        columns=columns,
        settings=settings,
    )
    if not is_shared:
        return out[:tokens, : weight.result_size]
    sums = jnp.sum(out, axis=0)[:tokens, :stored]
    unit = jnp.ones((tokens,), jnp.float32)
    out = reference.epilogue(sums, unit, weight, bias, residual, activation=activation)
    return out.astype(x.dtype)
