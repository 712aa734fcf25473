"""Means of 2, 4 and 8 adjacent tokens (multi-scale KV pooling, Li, 2025).

Roofline, for 1 sequence, 16 heads, 16384 tokens, head dim 128, bfloat16, keys or values alone:
  - bytes: 67 MB in, 7/8 of that out, 0.13 GB; at 3.0 TB/s, what a copy reaches on an H100: 42 us.
  - operations: a few per element, negligible next to the bytes.
Bytes are the floor: each is read and written once. Target: 50 us.

A program takes groups of eight tokens of one head. Their eight tokens are eight tiles of rows, read
with a stride, so that sums over groups are sums of tiles.

Keys and values together take 86 us there, 94 by XLA for one of them. The adjoint is a fusion of
XLA's: it moves its 0.32 GB in 111 us.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import varying
from pallas_kernels.triton import _common
from pallas_kernels.triton._common import Ref
from pallas_kernels.triton._packed import whole
from pallas_kernels.triton._pooled_common import LEVELS, group_offsets, load_rows

_WHOLE_GROUP = LEVELS[-1]


def _share(group: jax.Array, level: int, length: jax.Array) -> jax.Array:
    """1 over the tokens that groups of this level hold, float32 ``[groups, 1]``; 1 if none."""
    return (1 / jnp.clip(length - group * level, 1, level).astype(jnp.float32))[:, None]


def _pool_kernel(
    x_ref: Ref, lengths_ref: Ref, *out_refs: Ref, rows: int, offsets: dict[int, int]
) -> None:
    _, size, _, head_dim = x_ref.shape
    tile, h, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    length = jnp.minimum(plgpu.load(lengths_ref.at[b]), size)
    group = tile * rows + jnp.arange(rows, dtype=jnp.int32)
    channels = whole(head_dim)
    c = jnp.arange(channels.padded, dtype=jnp.int32)
    sums = []
    for n in range(_WHOLE_GROUP):
        token = group * _WHOLE_GROUP + n
        x = load_rows(x_ref, (b, token[:, None], h), channels, token < length)
        sums.append(x.astype(jnp.float32))
    for n, level in enumerate(LEVELS[1:]):
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
        out_ref = out_refs[n % len(out_refs)]
        groups = pl.cdiv(size, level) if len(out_refs) == 1 else out_ref.shape[2]
        for part, total in enumerate(sums):
            of_level = group * len(sums) + part
            mean = total * _share(of_level, level, length)
            plgpu.store(
                out_ref.at[b, h, (offsets[level] + of_level)[:, None], c[None, :]],
                mean.astype(out_ref.dtype),
                mask=(of_level < groups)[:, None] & (c < head_dim)[None, :],
            )


def pool(
    x: jax.Array,
    key_lengths: jax.Array,
    *,
    multiple: int = _WHOLE_GROUP,
    rows: int = 16,
    num_warps: int = 4,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`mosaic.hopper.pooled.pool.pool` of keys or of values, in the dtype of `x`.

    `rows`, a power of two, are the groups of eight tokens to a program.
    """
    tokens = pl.cdiv(x.shape[1], multiple) * multiple
    shapes = [tokens // level for level in LEVELS[1:]]
    offsets = dict.fromkeys(LEVELS[1:], 0)
    out = _launch_pool(x, key_lengths, tokens, shapes, offsets, rows, num_warps, interpret)
    return out[0], out[1], out[2]


def pool_together(
    x: jax.Array,
    key_lengths: jax.Array,
    *,
    rows: int = 16,
    num_warps: int = 4,
    interpret: bool = False,
) -> jax.Array:
    """As `pool`, all levels in one array ``[B, K, G_2 + G_4 + G_8, H]``, ``G_r = ceil(S / r)``."""
    offsets = group_offsets(x.shape[1])
    shapes = [offsets[16]]
    return _launch_pool(x, key_lengths, x.shape[1], shapes, offsets, rows, num_warps, interpret)[0]


def _launch_pool(
    x: jax.Array,
    key_lengths: jax.Array,
    tokens: int,
    shapes: list[int],
    offsets: dict[int, int],
    rows: int,
    num_warps: int,
    interpret: bool,
) -> list[jax.Array]:
    batch, _, kv_heads, head_dim = x.shape
    return varying.pallas_call(
        functools.partial(_pool_kernel, rows=rows, offsets=offsets),
        grid=(pl.cdiv(tokens, rows * _WHOLE_GROUP), kv_heads, batch),
        in_specs=[_common.WHOLE] * 2,
        out_specs=[_common.WHOLE] * len(shapes),
        out_shape=[jax.ShapeDtypeStruct((batch, kv_heads, n, head_dim), x.dtype) for n in shapes],
        compiler_params=_common.parameters(num_warps, 1),
        interpret=interpret,
        name="turbojax_pool",
    )(x, key_lengths)
