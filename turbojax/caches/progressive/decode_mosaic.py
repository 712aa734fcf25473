"""The Mosaic GPU kernel behind `decode`: what it takes, how it is launched."""

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from turbojax._device import (
    has_bulk_copies,
    needs_mosaic,
    shared_memory,
    too_much_memory,
)
from turbojax.attention.options import Options
from turbojax.attention.score_modifiers import NO_MODIFIERS, ScoreModifiers
from turbojax.caches.progressive.cache import ProgressiveCache
from turbojax.numerics.config import TurboConfig
from turbojax.numerics.sas import SAS

if TYPE_CHECKING:
    from pallas_kernels.mosaic.hopper.decode.kernel import SparseExponential

_LARGEST_HEAD_DIM = 256
_BLOCKS = (32, 64, 128)
_MOST_QUERY_ROWS = 128
# An H100 has this many.
_MULTIPROCESSORS = 132
_WARPS = 4
# Queries of a KV head that `hopper.decode` takes in one program; and the largest block, in channels
# times tokens, with which the kernel for many takes 32.
_FEW_ROWS, _LARGEST_BLOCK = 8, 128 * 64
_ROWS_OF_MANY, _HEAD_DIMS_OF_MANY, _BLOCKS_OF_MANY = (16, 32), (64, 128, 256), (64, 128)
_LARGEST_CLUSTER, _FEW_BLOCKS = 4, 32
# Programs of a long call, and blocks that each of them should have.
_EVEN, _ENOUGH_BLOCKS = 512, 64


def unsupported(
    *,
    query: jax.Array,
    cache: ProgressiveCache,
    options: Options,
    modifiers: ScoreModifiers = NO_MODIFIERS,
) -> str | None:
    """Why `decode` cannot run this here; None if it can."""
    config = cache.config
    rows = _query_rows(query, cache)
    refusal = modifiers.refusal() or cache.why_not_in_order(query.shape[1], options.window)
    if refusal is not None:
        return refusal
    if config.mode == "float":
        return "config.mode='float' must be an 8-bit mode: its products are of int8"
    # A lane reads a quarter of a key's codes, and of a channel's, in whole words.
    multiple = 32 if min(cache.key.bits) == 4 else 64
    if cache.head_dim % multiple or cache.head_dim > _LARGEST_HEAD_DIM:
        return (
            f"head_dim={cache.head_dim} must be a multiple of {multiple} up to {_LARGEST_HEAD_DIM} "
            f"with key bits {cache.key.bits}"
        )
    # A warp's result takes the place of its blocks.
    bits = min(cache.key.bits + cache.value.bits)
    blocks = _BLOCKS if bits == 4 else _BLOCKS[1:]
    if config.block_kv not in blocks:
        return f"block_kv={config.block_kv} must be one of {blocks} with codes of {bits} bits"
    if rows > _MOST_QUERY_ROWS:
        return f"{rows} queries of a KV head must be at most {_MOST_QUERY_ROWS}"
    return needs_mosaic() or too_much_memory(_memory(query, cache))


def _memory(query: jax.Array, cache: ProgressiveCache) -> int:
    """Bytes of shared memory of a program."""
    from pallas_kernels.mosaic.hopper.decode.kernel import Settings
    from pallas_kernels.mosaic.hopper.decode_rows.kernel import RowSettings

    launch = default_launch(query, cache)
    launch = launch._replace(rows=launch.rows or default_rows(query, cache))
    given = _settings(cache, launch)
    if launch.rows in _ROWS_OF_MANY:
        of_many = RowSettings(**given)
        return of_many.warps * of_many.warp_bytes(cache.head_dim)
    del given["team"]
    s = Settings(**given)
    return s.warps * s.warp_bytes(cache.head_dim)


def _query_rows(query: jax.Array, cache: ProgressiveCache) -> int:
    """Query rows of a KV head."""
    return query.shape[1] * query.shape[2] // cache.num_kv_heads


class Launch(NamedTuple):
    """How the kernel is laid out on the GPU; results differ by rounding only.

    Attributes:
      splits: programs of a KV head.
      stages: blocks in flight of a warp.
      cluster: programs of a KV head that merge their results without another kernel.
      rows: queries of a KV head that a program takes: 4 or 8, or 16 or 32 of the kernel for many;
        None for as many as `default_rows` says.
      team: in the kernel for many, warps that share a block, 1 or 2.
    """

    splits: int
    warpgroups: int
    stages: int
    cluster: int = 1
    rows: int | None = None
    team: int = 1


@functools.partial(jax.jit, static_argnames=("options", "launch"))
def decode(
    query: jax.Array,
    cache: ProgressiveCache,
    query_length: jax.Array | None,
    modifiers: ScoreModifiers = NO_MODIFIERS,
    *,
    options: Options,
    launch: Launch | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`decode_reference.decode` as one kernel, and a merge where a KV head is split."""
    from pallas_kernels.mosaic.hopper.decode import kernel
    from pallas_kernels.mosaic.hopper.decode_rows import kernel as many

    del modifiers  # see `unsupported`
    launch = launch or default_launch(query, cache)
    launch = launch._replace(rows=launch.rows or default_rows(query, cache))
    given = _settings(cache, launch) | {
        "exponential": _exponential(cache.config),
        "scale": options.scale,
        "window": options.window,
        "soft_cap": options.logits_soft_cap,
        "out_dtype": options.out_dtype,
    }
    operands = (
        query,
        cache.key.for_kernels(),
        cache.value.for_kernels(),
        cache.lengths,
        cache.buffer_lengths,
        query_length,
    )
    if launch.rows in _ROWS_OF_MANY:
        return many.decode(*operands, many.RowSettings(**given))
    del given["team"]
    return kernel.decode(*operands, kernel.Settings(**given))


def _settings(cache: ProgressiveCache, launch: Launch) -> dict[str, Any]:
    """Settings of the kernels that follow from cache and launch; the others have no effect."""
    nothing = {"exponential": None, "scale": 1.0, "window": None, "soft_cap": None}
    return (
        nothing
        | launch._asdict()
        | {
            "key_bits": cache.key.bits,
            "value_bits": cache.value.bits,
            "block": cache.config.block_kv,
            "copies_words": not has_bulk_copies(),
        }
    )


def default_rows(query: jax.Array, cache: ProgressiveCache) -> int:
    """How many queries of a KV head a program takes.

    For more than 8 it is the kernel for many, which exists for the usual sizes and widths only. Its
    programs take up to 32 where the outputs and scores of so many fit a warp's registers.
    """
    rows, block = _query_rows(query, cache), cache.config.block_kv
    is_usual = cache.head_dim in _HEAD_DIMS_OF_MANY and block in _BLOCKS_OF_MANY
    if rows <= _FEW_ROWS or not is_usual or 3 in cache.key.bits + cache.value.bits:
        return 4 if rows <= 4 else 8
    few, many = _ROWS_OF_MANY
    has_room = cache.head_dim * block <= _LARGEST_BLOCK
    return many if rows > few and has_room else few


def default_launch(query: jax.Array, cache: ProgressiveCache) -> Launch:
    """The launch for any shape, from the sizes of an H100.

    A short cache is cut until every multiprocessor has a program, down to one block for each warp.
    A long one is cut into a few more programs than run at once, which evens out differences in
    their speed; each still has enough work that merging costs little in comparison.
    """
    from pallas_kernels.mosaic.hopper.decode.kernel import stage_bytes

    rows = default_rows(query, cache)
    if rows > _FEW_ROWS:
        return _launch_of_many(query, cache, rows)
    heads, blocks = _heads(query, cache, rows), cache.key.block_scale.shape[2]
    to_fill = min(blocks // _WARPS, _MULTIPROCESSORS // heads)
    to_even_out = min(_EVEN // heads, blocks // _ENOUGH_BLOCKS)
    splits = max(1, to_fill, to_even_out)
    cluster = _cluster(splits, blocks)
    stage = _WARPS * stage_bytes(
        cache.head_dim, cache.config.block_kv, cache.key.bits, cache.value.bits
    )
    useful = -(-blocks // (splits * _WARPS))
    wanted = 2 if splits * heads > 2 * _MULTIPROCESSORS else 3
    stages = max(1, min(wanted, useful, shared_memory() // stage))
    return Launch(splits, 1, stages, cluster)


def _launch_of_many(query: jax.Array, cache: ProgressiveCache, rows: int) -> Launch:
    """For 16 or 32 `rows`: as many programs as run at once, since each starts and ends slowly."""
    from pallas_kernels.mosaic.hopper.decode_rows.kernel import RowSettings

    # Two warps hold the outputs of 32 queries; 12 warps fill a multiprocessor's registers.
    heads, blocks = _heads(query, cache, rows), cache.key.block_scale.shape[2]
    team = 1 if rows == _ROWS_OF_MANY[0] else 2
    warpgroups, at_once = (3, 1) if team == 2 and heads <= 2 * _MULTIPROCESSORS else (1, 2)
    for stages in (team + 1, team):
        launch = Launch(1, warpgroups, stages, rows=rows, team=team)
        s = RowSettings(**_settings(cache, launch))
        fit = shared_memory() // (s.warps * s.warp_bytes(cache.head_dim))
        if fit:
            break
    useful = blocks // (4 * warpgroups // team)
    splits = max(1, min(min(at_once, fit) * _MULTIPROCESSORS // heads, useful))
    return launch._replace(splits=splits, cluster=_cluster(splits, blocks))


def _heads(query: jax.Array, cache: ProgressiveCache, rows: int) -> int:
    """Programs of a call that is not split."""
    return cache.batch_size * cache.num_kv_heads * -(-_query_rows(query, cache) // rows)


def _cluster(splits: int, blocks: int) -> int:
    """Clusters only where there is little to do; else waiting costs more than a second kernel."""
    is_little = splits <= _LARGEST_CLUSTER and blocks <= _FEW_BLOCKS and has_bulk_copies()
    return splits if is_little else 1


def _exponential(config: TurboConfig) -> "SparseExponential | None":
    from pallas_kernels.mosaic.hopper.decode import kernel

    if not isinstance(config.softmax, SAS):
        return None
    sas = config.softmax
    return kernel.SparseExponential(sas.coefficients, sas.threshold, sas.unit)
