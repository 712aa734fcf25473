"""The operands of the prefill kernels: codes in the layout that matrix units need."""

import functools
import types
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from turbojax._device import ADA, AMPERE, interpreting, needs_gpu, needs_hopper, unindexable
from turbojax.attention.options import Options
from turbojax.attention.score_modifiers import ScoreModifiers
from turbojax.numerics import rounding
from turbojax.numerics.config import TurboConfig
from turbojax.numerics.rows import pad_axis

_LARGEST_HEAD_DIM = 256
# What Hopper's kernels support, forward and backward, in `plain_refusal`'s names: all there is.
_HOPPER_MODIFIERS = (
    "query_offset",
    "key_offset",
    "query_segment_ids",
    "key_value_segment_ids",
    "key_bounds",
    "bias",
    "alibi_slopes",
    "sinks",
    "output_dtype",
    "value_head_dim",
)
_DTYPES_OF_BIAS = ("float32", "bfloat16", "float16")
# Lanes load as many keys of a bias at once.
_KEYS_OF_BIAS = 4
_LARGEST_BLOCK = 256
# The limit of a launch's second axis.
_MOST_BLOCKS = 2**16 - 1


class Backward(NamedTuple):
    """What a backward pass takes: operands and results of the forward pass, and their cotangents.

    Attributes:
      query: ``[B, T, N, H]``.
      key: ``[B, S, K, H]``.
      value: ``[B, S, K, Hv]``.
      query_length: int32 ``[B]``; queries at or past it are padding.
      key_length: the same of keys and values.
      out: ``[B, T, N, Hv]``.
      residual: the log-sum-exp, float32 ``[B, T, N]``.
      d_out: as `out`.
      d_residual: as `residual`.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    query_length: jax.Array
    key_length: jax.Array
    out: jax.Array
    residual: jax.Array
    d_out: jax.Array
    d_residual: jax.Array


class Operands(NamedTuple):
    """Quantized queries, keys and values, padded to whole blocks.

    Padding tokens are zero. `dtype` of the codes follows the mode: int8, float8_e4m3fn, or the
    inputs' own.

    Attributes:
      q: ``[B, N, Tp, H]``.
      q_scale: float32 ``[B, N, Tp / block_q]``.
      k: ``[B, K, Sp, H]``; if permuted, row ``16i + 8h + 2t + r`` is token ``16i + 4t + 2h + r``
        (`t` in 0..3, `h` and `r` in 0..1), the order of `mosaic_gpu`.
      k_scale: float32 ``[B, K, Sp / block_kv]``.
      v: ``[B, K, H, Sp]``: tokens are contiguous, because 8-bit matrix units cannot transpose.
      v_scale: float32 ``[B, K, Sp / block_kv]``.
    """

    q: jax.Array
    q_scale: jax.Array
    k: jax.Array
    k_scale: jax.Array
    v: jax.Array
    v_scale: jax.Array


Stage1 = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
"""The fields `k`, `k_scale`, `v` and `v_scale` of `Operands`."""


def quantize_operands(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_length: jax.Array,
    key_length: jax.Array,
    config: TurboConfig,
    stage1: Stage1 | None = None,
    *,
    permuted: bool = False,
) -> Operands:
    """Stage 1 of Algorithm 1 for a whole call: by kernels where they can, else in plain JAX.

    Both give the same bits. Which one runs depends on the device and on `interpreting`, so a jitted
    caller takes the latter as a static argument. Tokens past their length count as zero. With
    `permuted` (see `Operands`) `block_kv` must be a multiple of 16; a `stage1` that is given must
    have that order already.
    """
    if stage1 is None:
        stage1 = quantize_keys_and_values(key, value, key_length, config, permuted=permuted)
    return Operands(*quantize_queries(query, query_length, config), *stage1)


def quantize_queries(
    query: jax.Array, query_length: jax.Array, config: TurboConfig, channels: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """The fields `q` and `q_scale` of `Operands`; kernels add zero channels up to `channels`."""
    block = config.block_q
    if _kernels_unsupported(query, block, config) is None:
        dtype = _dtype(config.mode == "fp8")
        run = kernel("quantize", query, block)
        return run(query, query_length, block=block, dtype=dtype, channels=channels)
    codes, scale = rounding.quantize_scores_operand(
        blocks(query, query_length, block), config.mode, axis=(-2, -1)
    )
    return _join(codes), scale


def quantize_keys_and_values(
    key: jax.Array,
    value: jax.Array,
    length: jax.Array,
    config: TurboConfig,
    *,
    permuted: bool,
    multiple: int | None = None,
    channels: int | None = None,
) -> Stage1:
    """The fields `k`, `k_scale`, `v` and `v_scale` of `Operands`.

    `Sp` is `S` rounded up to `multiple`, which is a multiple of `block_kv`, or to whole blocks.
    Kernels pad with zeros up to `channels`, if given.
    """
    block = config.block_kv
    multiple = multiple or block
    if _kernels_unsupported(key, block, config, multiple) is None:
        return kernel("keys_and_values", key, block)(
            *(key, value, length),
            block=block,
            key_dtype=_dtype(config.mode == "fp8"),
            value_dtype=_dtype(config.mode != "int8"),
            multiple=multiple,
            channels=channels,
            permuted=permuted,
        )
    k_blocks, v_blocks = (blocks(x, length, block, multiple) for x in (key, value))
    k, k_scale = rounding.quantize_scores_operand(k_blocks, config.mode, axis=(-2, -1))
    k = permute_tokens(_join(k)) if permuted else _join(k)
    v, v_scale = rounding.quantize_values(v_blocks, config.mode)
    return k, k_scale, jnp.swapaxes(_join(v), 2, 3), v_scale


def quantize_values(
    value: jax.Array, length: jax.Array, config: TurboConfig
) -> tuple[jax.Array, jax.Array]:
    """The values' codes as in `Operands`, but ``[B, K, Sp, H]``: tokens are rows."""
    block = config.block_kv
    if _kernels_unsupported(value, block, config) is None:
        is_e4m3 = config.mode != "int8"
        maxima = kernel("absolute_maxima", value, block)(value, length) if is_e4m3 else None
        run = kernel("quantize", value, block)
        return run(value, length, maxima, block=block, dtype=_dtype(is_e4m3))
    codes, scale = rounding.quantize_values(blocks(value, length, block), config.mode)
    return _join(codes), scale


def prepare_rows(
    query: jax.Array,
    d_out: jax.Array,
    out: jax.Array,
    residual: jax.Array,
    d_residual: jax.Array,
    length: jax.Array,
    config: TurboConfig,
    tokens: int,
) -> Any:
    """`pallas_kernels.layouts.GradientRows` for a backward pass; None if no one kernel makes them.

    `out` and `length` may have fewer tokens than `query` and `d_out`, `out` fewer channels. The
    residuals are float32; ``-inf`` marks rows that saw nothing, whose `d_out` counts as zero.
    `tokens` is the number of rows of the results that are not codes.
    """
    block = config.block_q
    if any(_kernels_unsupported(x, block, config) is not None for x in (query, out)):
        return None
    is_e4m3 = rounding.values_mode(config.mode) == "fp8"
    return _rows_kernel(query, out, block)(
        *(query, d_out, out, residual, d_residual, length),
        block=block,
        query_dtype=_dtype(config.mode == "fp8"),
        gradient_dtype=_dtype(is_e4m3) if config.gradient == "8bit" else None,
        tokens=tokens,
    )


def _rows_kernel(query: jax.Array, out: jax.Array, block: int) -> Callable[..., Any]:
    """The kernel that prepares rows: for Hopper, or for other GPUs."""
    if needs_hopper() is None:
        from pallas_kernels.mosaic.hopper.gradient import rows

        if rows.unsupported(query, out, block) is None:
            return rows.prepare_rows
    from pallas_kernels.triton import gradient_rows

    return functools.partial(gradient_rows.prepare_rows, interpret=interpreting())


def kernel(name: str, x: jax.Array, block: int) -> Callable[..., Any]:
    """The kernel of this name that quantizes blocks of `x`, which share a scale.

    ``"quantize"``, ``"absolute_maxima"`` or ``"keys_and_values"``; for Hopper, or for other GPUs.
    """
    if _hopper(x, block) is not None:
        found: Callable[..., Any] = getattr(_hopper(x, block), name)
        return found
    from pallas_kernels.triton import quantize

    return functools.partial(getattr(quantize, name), interpret=interpreting())


def _hopper(x: jax.Array, block: int) -> types.ModuleType | None:
    """The kernels for Hopper, where they run and take blocks of `x`."""
    if needs_hopper() is not None:
        return None
    from pallas_kernels.mosaic.hopper import quantize

    return quantize if quantize.unsupported(x, block) is None else None


def plain_refusal(
    key: jax.Array | jax.ShapeDtypeStruct,
    value: jax.Array | jax.ShapeDtypeStruct,
    options: Options,
    modifiers: ScoreModifiers,
    supported: Collection[str] = (),
) -> str | None:
    """Why a kernel that has only the `supported` modifiers cannot run a call; None if it can.

    These may include ``"output_dtype"``, and ``"value_head_dim"``: values of fewer channels than
    keys.
    """
    of_keys, of_values = key.shape[3], value.shape[3]
    if of_values > of_keys and "value_head_dim" in supported:
        return f"head_dim={of_values} of values must be at most that of keys, {of_keys}"
    if of_values != of_keys and "value_head_dim" not in supported:
        return f"head dims {of_keys} of keys and {of_values} of values must be equal"
    if options.out_dtype is not None and "output_dtype" not in supported:
        return f"it has no output_dtype={options.out_dtype}"
    return modifiers.refusal(supported)


def hopper_refusal(
    key: jax.Array | jax.ShapeDtypeStruct,
    value: jax.Array | jax.ShapeDtypeStruct,
    options: Options,
    modifiers: ScoreModifiers,
) -> str | None:
    """`plain_refusal` of Hopper's kernels, forward and backward."""
    if modifiers.key_bounds is not None and modifiers.query_segment_ids is not None:
        return "it has no key_bounds beside segments: turbojax.bounds.segments makes bounds of them"
    if modifiers.bias is not None and jnp.dtype(modifiers.bias.dtype).name not in _DTYPES_OF_BIAS:
        return f"{modifiers.bias.dtype=} must be one of {_DTYPES_OF_BIAS}"
    return plain_refusal(key, value, options, modifiers, _HOPPER_MODIFIERS)


def bias_of_hopper(modifiers: ScoreModifiers) -> jax.Array | None:
    """A bias as Hopper's kernels take it: a copy only if its keys are no multiple of 4."""
    if modifiers.bias is None:
        return None
    return pad_axis(modifiers.bias, 3, -(-modifiers.bias.shape[3] // _KEYS_OF_BIAS) * _KEYS_OF_BIAS)


def permute_tokens(x: jax.Array) -> jax.Array:
    """``[B, K, S, H]``, `S` a multiple of 16, with tokens in the order that `Operands` names."""
    groups = x.reshape(*x.shape[:2], -1, 4, 2, 2, x.shape[-1])  # t, h, r
    return jnp.swapaxes(groups, 3, 4).reshape(x.shape)


def blocks(x: jax.Array, length: jax.Array, block: int, multiple: int | None = None) -> jax.Array:
    """``[B, S, K, H]`` to blocks ``[B, K, n, block, H]``, zero past each length.

    Tokens are rounded up to `multiple`, which is a multiple of `block`, or to whole blocks.
    """
    batch, size, heads, channels = x.shape
    valid = jnp.arange(size)[None] < length[:, None]
    x = jnp.where(valid[:, :, None, None], x, jnp.zeros((), x.dtype))
    x = jnp.pad(x, ((0, 0), (0, -size % (multiple or block)), (0, 0), (0, 0)))
    return jnp.transpose(x.reshape(batch, -1, block, heads, channels), (0, 3, 1, 2, 4))


def _kernels_unsupported(
    x: jax.Array, block: int, config: TurboConfig, multiple: int | None = None
) -> str | None:
    """Why kernels cannot quantize blocks of `x` here; None if they can."""
    batch, size, heads, channels = x.shape
    multiple = multiple or block
    count = -(-size // multiple) * (multiple // block)
    if config.mode == "float":
        return "config.mode='float' rounds nothing"
    if block & (block - 1) or block > _LARGEST_BLOCK:
        return f"{block=} must be a power of two up to {_LARGEST_BLOCK}"
    if channels > _LARGEST_HEAD_DIM:
        return f"head_dim={channels} must be at most {_LARGEST_HEAD_DIM}"
    if _hopper(x, block) is not None:
        return None
    if count > _MOST_BLOCKS:
        return f"{count} blocks must be at most {_MOST_BLOCKS}"
    return unindexable(batch * heads * channels * count * block) or needs_gpu(
        AMPERE if config.mode == "int8" else ADA
    )


def _dtype(is_e4m3: bool) -> jax.typing.DTypeLike:
    return jnp.float8_e4m3fn if is_e4m3 else jnp.int8


def _join(x: jax.Array) -> jax.Array:
    """Blocks ``[B, K, n, block, H]`` to tokens ``[B, K, n * block, H]``."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])
