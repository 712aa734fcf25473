"""The Mosaic GPU kernels behind `int4_matmul` on Hopper: what they take, how they are launched."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from turbojax._device import multiprocessors, needs_hopper
from turbojax.matmul.fp8_tokens import quantize_activation
from turbojax.matmul.int4 import few_mosaic, reference, w4a16_mosaic
from turbojax.matmul.int4.mosaic_operands import padded, padded_tokens, tables_of
from turbojax.matmul.int4.static import Activation
from turbojax.matmul.int4.weight import Int4Weight
from turbojax.numerics.fp8 import Fp8Tokens

_DTYPES = (jnp.bfloat16, jnp.float16)
_GROUP = 128
# Outputs of a tile; tokens that a tile may have.
_TILE, _TOKENS = 128, (8, 16, 32, 64, 128, 192, 256)
# With so few tokens memory bandwidth is the limit, and twice as many warpgroups convert.
_FEW = 64
# Largest number of tokens in a tile with sums in two levels, which take twice the registers.
_TWO_LEVELS = 128
# From this many tokens on it pays to expand e4m3 weights first.
_MANY = 4096
# Up to this many tokens programs share tiles if these are few; groups that are worth a program.
_SHARED, _FEWEST_GROUPS = 256, 4
# Tiles are cut evenly if a program then has at least so many groups, and, by a tile's tokens, so
# many fewer than the most that one has of whole tiles: handing their sums over takes as long as 8
# groups of 128 tokens, 10 of 256.
_EVEN_GROUPS, _FEWER_GROUPS = 11, {128: 10, 192: 13, 256: 16}
_MOST_STAGES = 12
_SHARED_BYTES = 227 * 1024


def unsupported(
    *,
    tokens: Fp8Tokens | jax.Array,
    weight: Int4Weight,
    bias: jax.Array | None,
    residual: jax.Array | None,
    activation: Activation | None,
) -> str | None:
    """Why the kernels cannot run this here; None if they can."""
    del bias, residual, activation
    if tokens.dtype not in _DTYPES:
        return f"dtype={tokens.dtype} must be bfloat16 or float16"
    if weight.group_size != _GROUP:
        return f"group_size={weight.group_size} must be {_GROUP}"
    if weight.zeros is not None and isinstance(tokens, Fp8Tokens):
        return "weight.zeros must be None: weights must be symmetric"
    return needs_hopper()


class Launch(NamedTuple):
    """How the kernels are launched; `stages` are groups of inputs in shared memory.

    Attributes:
      tokens: of a tile.
      teams: pairs of warpgroups that take groups in turn.
      parts: programs that share a tile (split-K).
      expands: whether weights become e4m3 in memory first.
      is_many: whether it is the kernel for many tokens.
      is_even: whether that cuts tiles so that all programs have equally many groups; their sums
        take 17 MB meanwhile.
    """

    tokens: int
    stages: int
    teams: int
    parts: int
    expands: bool
    is_many: bool = False
    is_even: bool = False


def default_launch(rows: int, weight: Int4Weight, *, is_precise: bool = False) -> Launch:
    """The launch for this many tokens; with `is_precise`, sums always have two levels."""
    is_e4m3 = weight.scale_dtype == "e4m3"
    in_two_levels = is_precise or not is_e4m3
    expands = rows >= _MANY and not in_two_levels
    most = _TWO_LEVELS if in_two_levels else _TOKENS[-1]
    share = -(-rows // -(-rows // most))
    tokens = next(n for n in _TOKENS if n >= share)
    teams = 2 if tokens <= _FEW else 1
    outputs, groups = weight.padded_shape[0], weight.scales.shape[1]
    tiles = -(-rows // tokens) * -(-outputs // _TILE)
    is_many = is_e4m3 and tokens > _FEW and not expands
    is_even = is_many and _is_worth_cutting(tiles, groups, _FEWER_GROUPS[tokens])
    parts = 1
    if rows <= _SHARED and not is_even:
        parts = max(1, min(multiprocessors() // tiles, groups // _FEWEST_GROUPS))
    if is_many and parts == 1:
        return Launch(tokens, _stages_of_many(tokens), teams, parts, expands, True, is_even)
    return Launch(tokens, _stages(tokens, teams, parts, expands, is_e4m3), teams, parts, expands)


def _is_worth_cutting(tiles: int, groups: int, fewer: int) -> bool:
    """Whether programs with equally many groups are done sooner than with whole tiles.

    `fewer` are the groups that it takes to hand sums over.
    """
    programs = multiprocessors()
    most, even = -(-tiles // programs) * groups, -(-tiles * groups // programs)
    # Of many tiles little is to be won, and each program's weights are read again and again.
    is_more = most - even >= max(fewer, most // 7)
    return even >= _EVEN_GROUPS and is_more and tiles * groups < 2**31 // (programs + 1)


def _stages_of_many(tokens: int) -> int:
    """As many stages as fit beside everything that an epilogue may need."""
    from pallas_kernels.mosaic.hopper.matmul import int4_many

    epilogue = int4_many.Epilogue(None, True, True, "bfloat16", 128)

    def size(stages: int) -> int:
        return int4_many.Settings(epilogue, tokens, stages).shared_bytes

    return max(n for n in range(1, _MOST_STAGES + 1) if size(n) <= _SHARED_BYTES)


def _stages(tokens: int, teams: int, parts: int, expands: bool, is_e4m3: bool) -> int:
    """As many stages as fit, a multiple of the teams."""
    from pallas_kernels.mosaic.hopper.matmul import fp8 as fp8_matmul
    from pallas_kernels.mosaic.hopper.matmul import int4 as int4_matmul

    epilogue = int4_matmul.Epilogue(None, False, False, "bfloat16", 0)
    weights = fp8_matmul.STAGE_BYTES if expands else int4_matmul.stage_bytes(1 if is_e4m3 else 2)

    def size(stages: int) -> int:
        settings = int4_matmul.Settings(epilogue, tokens, stages, teams, parts)
        return settings.shared_bytes(weights) + (0 if expands else int4_matmul.TABLES_BYTES)

    return max(n for n in range(teams, _MOST_STAGES + 1, teams) if size(n) <= _SHARED_BYTES)


def matmul(
    tokens: Fp8Tokens | jax.Array,
    weight: Int4Weight,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    activation: Activation | None,
    is_precise: bool,
    rounds: bool = False,
) -> jax.Array:
    """`reference.matmul` as one kernel, sometimes with a sum after it or weights expanded before.

    Up to 64 tokens have a kernel of their own, which rounds them too. Sums are float32 from group
    to group for up to 128 tokens, for scales of 16 bits, and if `is_precise`. Others stay in the
    matrix unit, whose additions keep about 14 bits. With `rounds`, `tokens` that are an array
    become e4m3 first.
    """
    if not rounds and not isinstance(tokens, Fp8Tokens):
        of_floats = w4a16_mosaic.default_launch(tokens.shape[0], weight)
        return w4a16_mosaic.matmul(
            tokens, weight, bias, residual, activation=activation, launch=of_floats
        )
    few = few_mosaic.default_launch(
        tokens.shape[0], weight, rounds=not isinstance(tokens, Fp8Tokens)
    )
    if few is not None:
        tables = tables_of(weight)
        return few_mosaic.matmul(
            tokens, weight, bias, residual, activation=activation, launch=few, tables=tables
        )
    if not isinstance(tokens, Fp8Tokens):
        tokens = quantize_activation(tokens)
    launch = default_launch(tokens.codes.shape[0], weight, is_precise=is_precise)
    return _matmul(tokens, weight, bias, residual, activation=activation, launch=launch)


@functools.partial(jax.jit, static_argnames=("activation", "launch"))
def _matmul(
    tokens: Fp8Tokens,
    weight: Int4Weight,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    activation: Activation | None,
    launch: Launch,
) -> jax.Array:
    from pallas_kernels.mosaic.hopper.matmul import expand as int4_expand
    from pallas_kernels.mosaic.hopper.matmul import fp8 as fp8_matmul
    from pallas_kernels.mosaic.hopper.matmul import int4 as int4_matmul
    from pallas_kernels.mosaic.hopper.matmul import int4_many

    rows, width = tokens.codes.shape[0], weight.result_size
    is_shared = launch.parts > 1
    epilogue = int4_matmul.Epilogue(
        activation=None if is_shared else activation,
        has_bias=bias is not None and not is_shared,
        has_residual=residual is not None and not is_shared,
        dtype=str(tokens.dtype),
        swizzle=0 if launch.tokens < _FEW else (64 if weight.gated else 128),
    )
    many = int4_many.Settings(
        epilogue,
        launch.tokens,
        launch.stages,
        multiprocessors(),
        launch.is_even,
        is_two_level=launch.tokens <= _TWO_LEVELS,
    )
    settings = int4_matmul.Settings(
        epilogue=epilogue,
        tokens=launch.tokens,
        stages=launch.stages,
        teams=launch.teams,
        parts=launch.parts,
        is_two_level=launch.tokens <= _TWO_LEVELS,
        programs=multiprocessors(),
    )
    x, scale = padded_tokens(tokens, weight.padded_shape[1])
    vectors = (x, scale, weight.output_scale)
    tables = tables_of(weight)
    stored = weight.padded_shape[0]
    columns = _columns(stored if is_shared or not weight.gated else stored // 2, settings.width)
    if is_shared:
        rest: tuple[Any, Any] = (None, None)
    else:
        rest = (bias, None if residual is None else padded(residual, (x.shape[0], columns)))
    if launch.expands and tables is not None:
        # Tied to the tokens: else XLA would expand all layers' weights first, and keep them.
        codes, x = lax.optimization_barrier((weight.codes, x))
        vectors = (x, *vectors[1:])
        expanded = int4_expand.int4_expand(codes, weight.scales, tables, programs=multiprocessors())
        out = fp8_matmul.fp8_matmul(expanded, *vectors, *rest, columns=columns, settings=settings)
        return out[:rows, :width]
    if launch.is_many and tables is not None:
        weights = (weight.codes, weight.scales, tables)
        out = int4_many.int4_matmul(*weights, *vectors, *rest, columns=columns, settings=many)
        return out[:rows, :width]
    out = int4_matmul.int4_matmul(
        weight.codes, weight.scales, tables, *vectors, *rest, columns=columns, settings=settings
    )
    if not is_shared:
        return out[:rows, :width]
    sums = jnp.sum(out, axis=0)[:rows, :stored]
    out = reference.epilogue(sums, tokens.scale, weight, bias, residual, activation=activation)
    return out.astype(tokens.dtype)


def _columns(results: int, width: int) -> int:
    """Columns of the kernel's output for `results`, of which a warpgroup writes `width`.

    At least those of two warpgroups: Mosaic copies rows without a gap between them as one run of
    bytes, so with one warpgroup's columns the other's, past the last, would land in the next row.
    """
    return max(results, 2 * width)
