"""The Mosaic GPU kernel behind `decode` on Hopper: what it takes, how it is launched."""

import functools
from typing import TYPE_CHECKING, NamedTuple

import jax

from turbojax._device import needs_hopper
from turbojax.config import TurboConfig
from turbojax.ops.options import Options
from turbojax.sas import SAS
from turbojax.state.progressive.cache import CacheSide, ProgressiveCache

if TYPE_CHECKING:
    from pallas_kernels.mosaic.hopper.decode.kernel import Side, SparseExponential

_HEAD_DIMS = (64, 128, 256)
_BLOCKS = (64, 128)
_BITS = (2, 4)
_MOST_QUERY_ROWS = 128
# Of an H100.
_MULTIPROCESSORS, _SHARED_MEMORY = 132, 227 * 2**10
_WARPS = 4
# Queries of a KV head that `hopper.decode` takes in one program, and channels times tokens of the
# largest block of which the kernel for many takes 32.
_FEW_ROWS, _LARGEST_BLOCK = 8, 128 * 64
_LARGEST_CLUSTER, _FEW_BLOCKS = 4, 32
# Programs of a long call, and blocks that one of them should have.
_EVEN, _ENOUGH_BLOCKS = 512, 64


def decode_unsupported(
    *,
    query: jax.Array,
    cache: ProgressiveCache,
    options: Options,
) -> str | None:
    """Why `decode` cannot run this here; None if it can."""
    del options
    config = cache.config
    rows = _query_rows(query, cache)
    if config.mode == "float":
        return "config.mode='float' must be an 8-bit mode: its products are of int8"
    if cache.head_dim not in _HEAD_DIMS:
        return f"head_dim={cache.head_dim} must be one of {_HEAD_DIMS}"
    if config.block_kv not in _BLOCKS:
        return f"block_kv={config.block_kv} must be one of {_BLOCKS}"
    if config.buffer_size != config.block_kv:
        return f"buffer_size={config.buffer_size} must be block_kv={config.block_kv}"
    for name, bits in (("key", cache.key.bits), ("value", cache.value.bits)):
        if any(width not in _BITS for width in bits):
            return f"{name} bits {bits} must be in {_BITS}"
    if rows > _MOST_QUERY_ROWS:
        return f"{rows} queries of a KV head must be at most {_MOST_QUERY_ROWS}"
    return needs_hopper()


def _query_rows(query: jax.Array, cache: ProgressiveCache) -> int:
    """Queries of a KV head."""
    return query.shape[1] * query.shape[2] // cache.num_kv_heads


class Launch(NamedTuple):
    """How the kernel is laid out on the GPU; results differ by rounding only.

    Attributes:
      splits: programs of a KV head.
      warpgroups: of a program.
      stages: blocks in flight of a warp.
      cluster: programs of a KV head that merge their results without another kernel.
      rows: queries of a KV head that a program takes: 4 or 8, or 16 or 32 of the kernel for many;
        None for as many as `default_rows` says.
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
    query_length: jax.Array,
    *,
    options: Options,
    launch: Launch | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`decode_reference.decode` as one kernel, and a merge where a KV head is split.

    `launch` is `default_launch` if not given.
    """
    from pallas_kernels.mosaic.hopper.decode import kernel
    from pallas_kernels.mosaic.hopper.decode_rows import kernel as many

    config = cache.config
    launch = launch or default_launch(query, cache)
    rows = launch.rows or default_rows(query, cache)
    chosen = {**launch._asdict(), "rows": rows}
    kind: type[kernel.Settings] = many.RowSettings
    if rows <= _FEW_ROWS:
        kind = kernel.Settings
        del chosen["team"]
    settings = kind(
        exponential=_exponential(config),
        key_bits=cache.key.bits,
        value_bits=cache.value.bits,
        block=config.block_kv,
        scale=options.scale,
        window=options.window,
        soft_cap=options.logits_soft_cap,
        **chosen,
    )
    run = many.decode if isinstance(settings, many.RowSettings) else kernel.decode
    return run(
        query,
        _side(cache.key),
        _side(cache.value),
        cache.lengths,
        cache.buffer_lengths,
        query_length,
        settings,
    )


def default_rows(query: jax.Array, cache: ProgressiveCache) -> int:
    """Queries of a KV head that a program takes.

    For more than 8 the kernel for many, whose programs take up to 32 where outputs and scores of as
    many fit a warp's registers.
    """
    rows = _query_rows(query, cache)
    if rows <= _FEW_ROWS:
        return 4 if rows <= 4 else 8
    has_room = cache.head_dim * cache.config.block_kv <= _LARGEST_BLOCK
    return 32 if rows > 16 and has_room else 16


def default_launch(query: jax.Array, cache: ProgressiveCache) -> Launch:
    """For any shape, from the sizes of an H100.

    A short cache is cut so far that every multiprocessor has a program, down to one block for each
    warp. A long one is cut into a few more programs than run at once, which evens out differences
    in their speed; each still has enough work that merging costs little in comparison.
    """
    from pallas_kernels.mosaic.hopper.decode.kernel import stage_bytes

    rows, taken = _query_rows(query, cache), default_rows(query, cache)
    heads = cache.batch_size * cache.num_kv_heads * -(-rows // taken)
    blocks = cache.key.block_scale.shape[2]
    to_fill = min(blocks // _WARPS, _MULTIPROCESSORS // heads)
    to_even_out = min(_EVEN // heads, blocks // _ENOUGH_BLOCKS)
    splits = max(1, to_fill, to_even_out)
    # Waiting for each other costs more than a second kernel, except where there is little to do.
    cluster = splits if splits <= _LARGEST_CLUSTER and blocks <= _FEW_BLOCKS else 1
    stage = _WARPS * stage_bytes(
        cache.head_dim, cache.config.block_kv, cache.key.bits, cache.value.bits
    )
    useful = -(-blocks // (splits * _WARPS))
    wanted = 2 if splits * heads > 2 * _MULTIPROCESSORS else 3
    stages = max(1, min(wanted, useful, _SHARED_MEMORY // stage))
    return Launch(splits, 1, stages, cluster)


def _exponential(config: TurboConfig) -> "SparseExponential | None":
    from pallas_kernels.mosaic.hopper.decode import kernel

    if not isinstance(config.softmax, SAS):
        return None
    sas = config.softmax
    return kernel.SparseExponential(sas.coefficients, sas.threshold, sas.unit)


def _side(side: CacheSide) -> "Side":
    from pallas_kernels.mosaic.hopper.decode import kernel

    return kernel.Side(*(getattr(side, name) for name in kernel.Side._fields))
