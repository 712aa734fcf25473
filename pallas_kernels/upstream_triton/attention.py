"""Prefill attention on 8-bit operands: the launcher of the Triton kernel in `_kernel.py`.

Each block's product is merged at once: with it in flight over the next one ptxas serializes all
products. Seen on an H100, 2 sequences of 8,192 tokens, 32 query heads on 8 of 128 channels, not
causal: fp8 758 TFLOP/s, int8_fp8 751, int8 655 (cuDNN on bfloat16 643). What bounds it: about 8.5
instructions per score outside the matrix unit, which only the other program of the multiprocessor
hides.

Roofline in full and versions: `docs/kernels/triton.md`.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels import varying

MAX_HEAD_DIM = 256  # largest head dim: beyond it the output of one tile does not fit the registers
BLOCK_KV = (32, 64, 128)
"""Sizes of a key block, which is one tile: an instruction takes 32 tokens, registers hold 128."""


@dataclasses.dataclass(frozen=True)
class SparseExponential:
    """An exponential from a table and a cubic: ``base**-i * cubic(f)`` where ``i + f = -x``."""

    coefficients: tuple[float, ...]  # of the cubic on [0, 1), constant term first
    threshold: float  # natural-log units, negative; below it the value is 0
    base: Literal["e", "2"]  # ``"e"``, or ``"2"`` where `x` counts powers of two


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How the kernel is laid out on the GPU; results differ by rounding only."""

    rows: int  # queries of one program, a power of two of at least 64
    num_warps: int  # warps that share them
    num_stages: int  # key blocks in flight


def default_tiling(head_dim: int) -> Tiling:
    """The largest tile that fits registers and shared memory, for any `BLOCK_KV` on any GPU.

    `head_dim` is a power of two.
    """
    if head_dim > 128:
        return Tiling(rows=64, num_warps=8, num_stages=2)
    # Two programs to a multiprocessor: one's softmax runs under the other's products.
    return Tiling(rows=64, num_warps=4, num_stages=3)


def attention(
    q: jax.Array,
    q_scale: jax.Array,
    k: jax.Array,
    k_scale: jax.Array,
    v: jax.Array,
    v_scale: jax.Array,
    query_length: jax.Array,
    key_length: jax.Array,
    *,
    tokens: int,
    out_dtype: jnp.dtype,
    scale: float,
    left: int | None,
    right: int | None,
    soft_cap: float | None,
    exponential: SparseExponential | None,
    tiling: Tiling | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Blockwise online attention (TurboAttention, Algorithm 1).

    Operands are int8 or float8_e4m3fn codes, values int8 only if queries are: `q`
    ``[B, N, Tp, H]``, `k` ``[B, K, Sp, H]`` of the same dtype, `v` ``[B, K, H, Sp]``, tokens
    contiguous; `N` is a multiple of `K`. Float32 scales ``[B, N, Tp / block_q]`` of queries and
    ``[B, K, Sp / block_kv]`` of keys say how long the blocks are; values have one for each block of
    keys, all equal within a head if `v` is float8. The kernel's key tile is one block: the softmax
    is relative to the running maximum after each block. Under `vmap` the mapped axis is folded into
    `B`.

    Queries at or past `query_length`, int32 ``[B]``, give 0 and ``-inf``; keys at or past
    `key_length` are ignored. `tokens` is `T`, the queries without padding; `out_dtype` is bfloat16,
    float16 or float32. A query at ``p`` sees keys from ``p - left`` to ``p + right`` (0 is causal),
    each unbounded if None. With a `soft_cap` `c` scores become ``c * tanh(score / c)``.
    `exponential` None is the exact one.

    Returns out ``[B, T, N, H]`` and the float32 log-sum-exp ``[B, T, N]``; 0 and ``-inf`` for
    queries that see nothing. A NaN scale reaches the queries that see its block.

    Raises:
      ValueError: if `scale` is negative, or the block size or head dim is not supported.
    """
    head_dim = q.shape[-1]
    block_q = q.shape[2] // q_scale.shape[2]
    block_kv = k.shape[2] // k_scale.shape[2]
    if scale < 0:
        raise ValueError(f"{scale=} must not be negative: negate the queries instead")
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"{head_dim=} must be at most {MAX_HEAD_DIM}")
    if block_kv not in BLOCK_KV:
        raise ValueError(f"{block_kv=} must be one of {BLOCK_KV}")
    block_h = max(32, 1 << (head_dim - 1).bit_length())
    padding = block_h - head_dim
    q, k = (jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, padding))) for x in (q, k))
    v = jnp.pad(v, ((0, 0), (0, 0), (0, padding), (0, 0)))
    tiling = tiling or default_tiling(block_h)
    launch = functools.partial(
        _launch,
        tokens=tokens,
        head_dim=head_dim,
        out_dtype=jnp.dtype(out_dtype),
        tiling=tiling,
        constants={
            "SCALE": float(scale),
            "LEFT": left,
            "RIGHT": right,
            "SOFT_CAP": soft_cap,
            "POLICY": _policy(exponential),
            "BLOCK_Q": block_q,
            "BLOCK_M": tiling.rows,
            "BLOCK_N": block_kv,
            "BLOCK_H": block_h,
        },
    )
    return _fold_vmap(launch)(q, q_scale, k, k_scale, v, v_scale, query_length, key_length)


def _policy(exponential: SparseExponential | None) -> tuple[Any, ...] | None:
    """The exponential as the kernel's constants, with the threshold in the unit of its argument."""
    if exponential is None:
        return None
    is_base_2 = exponential.base == "2"
    unit = math.log2(math.e) if is_base_2 else 1.0
    return tuple(exponential.coefficients), exponential.threshold * unit, is_base_2


def _launch(
    *operands: jax.Array,
    tokens: int,
    head_dim: int,
    out_dtype: jnp.dtype,
    tiling: Tiling,
    constants: dict[str, Any],
) -> tuple[jax.Array, jax.Array]:
    import jax_triton

    from pallas_kernels.upstream_triton import _kernel

    q, q_scale, k, k_scale = operands[:4]
    batch, heads = q.shape[:2]
    results = (
        jax.ShapeDtypeStruct((batch, tokens, heads, head_dim), out_dtype),
        jax.ShapeDtypeStruct((batch, tokens, heads), jnp.float32),
    )
    # jax-triton 0.4 renamed this argument and warns about the old name.
    renamed = "out_type" in inspect.signature(jax_triton.triton_call).parameters
    out, residual = jax_triton.triton_call(
        *operands,
        heads,
        k.shape[1],
        tokens,
        q_scale.shape[2],
        k_scale.shape[2],
        kernel=_kernel.attention_kernel,
        grid=-(-tokens // tiling.rows) * batch * heads,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        HEAD_DIM=head_dim,
        **constants,
        **{"out_type" if renamed else "out_shape": results},
    )
    return varying.cast((out, residual), varying.axes_of(operands))


def _fold_vmap(run: Callable[..., tuple[jax.Array, ...]]) -> Callable[..., Any]:
    """`run`, whose arrays all begin with `B`, with a rule for `vmap`: `triton_call` has none."""

    @jax.custom_batching.custom_vmap
    def call(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return run(*arrays)

    @call.def_vmap
    def fold(
        size: int, batched: list[bool], *arrays: jax.Array
    ) -> tuple[tuple[jax.Array, ...], tuple[bool, ...]]:
        mapped = [
            x if is_batched else jnp.broadcast_to(x[None], (size, *x.shape))
            for x, is_batched in zip(arrays, batched, strict=True)
        ]
        results = call(*(x.reshape(-1, *x.shape[2:]) for x in mapped))
        unfolded = tuple(x.reshape(size, -1, *x.shape[1:]) for x in results)
        return unfolded, (True,) * len(unfolded)

    return call
