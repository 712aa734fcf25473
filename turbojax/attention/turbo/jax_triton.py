"""`turbo_attention` by an upstream Triton kernel, launched through jax-triton."""

import dataclasses
import functools
import importlib.util

import jax

from turbojax import _extras
from turbojax._device import interpreting, needs_gpu
from turbojax.attention.options import Options
from turbojax.attention.score_modifiers import NO_MODIFIERS, ScoreModifiers
from turbojax.attention.turbo.operands import Stage1, plain_refusal, quantize_operands
from turbojax.numerics.config import TurboConfig
from turbojax.numerics.sas import SAS

_MAX_HEAD_DIM = 256
_BLOCK_KV = (32, 64, 128)
# Offsets within one head are 32-bit.
_MAX_HEAD_SIZE = 2**31


@functools.partial(jax.jit, static_argnames=("config", "options"))
def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_length: jax.Array,
    key_length: jax.Array,
    *,
    config: TurboConfig,
    options: Options,
    modifiers: ScoreModifiers = NO_MODIFIERS,
    stage1: Stage1 | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Prefill attention with the numerics of `config`, as `reference.attention` defines them.

    Beyond the order of float32 sums two things differ from the reference: hardware exponentials,
    and e4m3 products, which Hopper accumulates with about 14 bits within one block of keys (or over
    the head dim). Mode ``"float"`` is not supported.
    """
    from pallas_kernels.upstream_triton import attention as kernel

    if options.scale < 0:  # the kernel takes the maximum of scores before it scales them
        query, options = -query, dataclasses.replace(options, scale=-options.scale)
    left, right = options.window or (None, None)
    if options.is_causal:
        right = 0
    softmax = config.softmax
    exponential = None
    if isinstance(softmax, SAS):
        exponential = kernel.SparseExponential(
            softmax.coefficients, softmax.threshold, softmax.base
        )
    return kernel.attention(
        *quantize_operands(query, key, value, query_length, key_length, config, stage1),
        query_length,
        key_length,
        tokens=query.shape[1],
        out_dtype=query.dtype,
        scale=options.scale,
        left=left,
        right=right,
        soft_cap=options.logits_soft_cap,
        exponential=exponential,
    )


def unsupported(
    *,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    config: TurboConfig,
    options: Options,
    modifiers: ScoreModifiers = NO_MODIFIERS,
) -> str | None:
    """Why `attention` cannot run these arguments here, or None; see `registry.Implementation`."""
    refusal = plain_refusal(key, value, options, modifiers)
    if refusal is not None:
        return refusal
    head_dim = query.shape[-1]
    if config.mode == "float":
        return "config.mode='float' must be an 8-bit mode: 'int8', 'int8_fp8' or 'fp8'"
    if config.block_kv not in _BLOCK_KV:
        return f"config.block_kv={config.block_kv} must be one of {_BLOCK_KV}, its key tile"
    if head_dim > _MAX_HEAD_DIM:
        return f"{head_dim=} must be at most {_MAX_HEAD_DIM}"
    if max(query.shape[1], key.shape[1]) * 2 * head_dim >= _MAX_HEAD_SIZE:
        return f"{query.shape=} or {key.shape=} is too long for 32-bit offsets within a head"
    if interpreting():
        return "its kernel cannot be interpreted"
    missing = [name for name in ("jax_triton", "triton") if importlib.util.find_spec(name) is None]
    if missing:
        return f"not installed: {' and '.join(missing)}; {_extras.install('triton')}"
    return needs_gpu(8.0 if config.mode == "int8" else 8.9, by_pallas=False)
