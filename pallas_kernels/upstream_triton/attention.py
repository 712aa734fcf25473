"""Prefill attention on 8-bit operands: the launcher of the Triton kernel in `_kernel.py`.

Versions, by compiling for sm_90 (Triton 3.6; head dim 128, tiles of 128 x 64 and 128 x 128):

1. output accumulated in the matrix unit over all keys: ptxas serializes the products (C7514), as
   one is in flight across iterations while its accumulator is rescaled; biased, see `_kernel.py`;
2. each block's product kept in flight and merged one iteration later: serialized too (C7515);
3. each block's product merged at once: neither warning nor spills, 11 (9) instructions an element
   for 64 (128) keys. This is what runs;
4. 3, with the next block's scores computed during the softmax of this one: free of warnings and
   spills for int8 scores and 64 keys; serialized for e4m3, and spills with 128 keys. It was slower
   and is gone.

Measured on an H100 (jax 0.11.2, Triton 3.6; 2 sequences, 32 query and 8 KV heads, 8192 tokens, head
dim 128, not causal, exact softmax; TFLOP/s, cuDNN on bfloat16 643 in the same run):

| blocks | tile, warps, stages | fp8 | int8_fp8 | int8 |
|---|---|---|---|---|
| 128 | 128, 8, 3 | 695 | 648 | 579 |
| 128 | 64, 4, 2 | 711 | 688 | 600 |
| 128 | 64, 4, 3: two programs to a multiprocessor, the default | 758 | 751 | 655 |
| 128 | 64, 4, 3, one level (step 1 above) | 716 | 716 | - |
| 64 | 128, 8, 3 | 598 | 552 | 447 |
| 64 | 64, 4, 3, the default | 675 | 638 | 504 |
| 64 | 64, 4, 3, computed ahead (step 4) | 580 | 600 | 500 |
| 128 | 128, 8, 3, SAS base e / base 2 | 495 / 537 | 480 / 515 | 413 / 438 |

In another run (cuDNN 698, causal 641) the default reached 815 TFLOP/s in fp8 and 760 causal; with
four stages 525, with the next 128 keys' scores computed ahead 386. In the run of the suite (632,
causal 562) it was 761 and 693: 1.17 to 1.23 times cuDNN, the aim being 1.2. What bounds it: about
8.5 instructions per score outside the matrix unit, which only the other program of the
multiprocessor hides.
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

MAX_HEAD_DIM = 256
"""Largest head dim: beyond it the output of one tile does not fit the registers."""
BLOCK_KV = (32, 64, 128)
"""Sizes of a key block, which is one tile: an instruction takes 32 tokens, registers hold 128."""


@dataclasses.dataclass(frozen=True)
class SparseExponential:
    """An exponential from a table and a cubic: ``base**-i * cubic(f)`` where ``i + f = -x``.

    Attributes:
      coefficients: of the cubic on [0, 1), constant term first.
      threshold: natural-log units, negative; below it the value is 0.
      base: ``"e"``, or ``"2"`` where `x` counts powers of two.
    """

    coefficients: tuple[float, ...]
    threshold: float
    base: Literal["e", "2"]


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How the kernel is laid out on the GPU; results differ by rounding only.

    Attributes:
      rows: queries of one program, a power of two of at least 64.
      num_warps: warps that share them.
      num_stages: key blocks in flight.
    """

    rows: int
    num_warps: int
    num_stages: int


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
