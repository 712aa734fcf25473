"""Exact attention as jax has it, and what its cuDNN implementation takes."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

from turbojax import _device
from turbojax.attention.options import Options
from turbojax.sharding import together

# Without a gradient, of whole sequences, from compute capability 9.0 on.
_MOST_CHANNELS, _MOST_CHANNELS_FORWARD = 128, 256


@functools.partial(jax.jit, static_argnames=("options", "implementation"))
def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    options: Options,
    implementation: Literal["xla", "cudnn"] = "cudnn",
) -> jax.Array:
    """`jax.nn.dot_product_attention` of whole sequences; without a soft cap."""
    return dot_product_attention(
        query,
        key,
        value,
        scale=options.scale,
        is_causal=options.is_causal,
        local_window_size=options.window,
        implementation=implementation,
    )


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    implementation: Literal["xla", "cudnn"] = "xla",
    **options: Any,
) -> jax.Array:
    """`jax.nn.dot_product_attention` under every promotion rule, and on CPUs in float16."""
    dtype = query.dtype
    query, key, value = together(query, key, value)
    if dtype == jnp.float16 and jax.default_backend() == "cpu":
        # Compiled, jax's own function asks for products that CPUs do not have.
        query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    # jax's own function promotes bfloat16 with float32 inside.
    with jax.numpy_dtype_promotion("standard"):
        out = jax.nn.dot_product_attention(
            query, key, value, implementation=implementation, **options
        )
    return out.astype(dtype)


@functools.partial(jax.jit, static_argnames=("options",))
def attend_part(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    key_length: jax.Array | None = None,
    *,
    options: Options,
) -> tuple[jax.Array, jax.Array]:
    """Attends by cuDNN, for merging: the output is rounded to 16 bits, all else is float32.

    jax's function gives the log-sum-exp rounded to the output's dtype, too coarse for merging. Its
    derivative keeps it in float32, so it is taken from there.

    Keys at or past `key_length` are ignored, but must be finite; there is no soft cap. Sequences
    without keys give 0 and ``-inf``. Raises NotImplementedError if this jax keeps no log-sum-exp.
    """
    # cuDNN's result for a sequence without keys is not defined.
    lengths = None if key_length is None else jnp.maximum(key_length, 1)

    def call(*arrays: jax.Array) -> jax.Array:
        return dot_product_attention(
            *arrays,
            scale=options.scale,
            is_causal=options.is_causal,
            local_window_size=options.window,
            key_value_seq_lengths=lengths,
            implementation="cudnn",
        )

    out, pull = jax.vjp(call, query, key, value)
    shape = (query.shape[0], query.shape[2], query.shape[1])
    kept = [x for x in jax.tree.leaves(pull) if x.dtype == jnp.float32 and x.shape == shape]
    if len(kept) != 1:
        raise NotImplementedError(
            f"cuDNN's attention gives no part: jax {jax.__version__} keeps {len(kept)} arrays like "
            "its log-sum-exp, must keep one"
        )
    out, residual = out.astype(jnp.float32), jnp.swapaxes(kept[0], 1, 2)
    if key_length is None:
        return out, residual
    is_empty = (key_length == 0)[:, None, None]
    return (
        jnp.where(is_empty[..., None], 0.0, out),
        jnp.where(is_empty, -jnp.inf, residual),
    )


@functools.cache
def no_part() -> str | None:
    """Why `attend_part` cannot run where cuDNN attends; None if it can. Looked up once."""
    x = jax.ShapeDtypeStruct((1, 8, 1, 64), jnp.bfloat16)
    options = Options(is_causal=False, scale=1.0)
    try:
        jax.eval_shape(functools.partial(attend_part, options=options), x, x, x)
    except NotImplementedError as error:
        return str(error)
    return None


@functools.cache
def missing() -> str | None:
    """Why jax finds no cuDNN that it can use; None if it finds one. Looked up once per process."""
    x = jax.ShapeDtypeStruct((1, 8, 1, 64), jnp.bfloat16)
    call = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    try:
        jax.eval_shape(call, x, x, x)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return (str(error).splitlines() or [type(error).__name__])[0]
    return None


def unsupported(
    query: jax.Array | jax.ShapeDtypeStruct,
    key: jax.Array | jax.ShapeDtypeStruct,
    *,
    decoding: bool = False,
    forward_only: bool = False,
    windowed: bool = False,
    logits_soft_cap: float | None = None,
) -> str | None:
    """None if cuDNN's attention takes these arrays here, or the reason why not.

    `decoding` means queries of the newest tokens, not aligned with the keys; `windowed` a window
    counted from the first key.
    """
    capability = _device.gpu_compute_capability()
    if capability is None or capability < 8.0:
        found = jax.default_backend() if capability is None else f"compute capability {capability}"
        return f"needs an NVIDIA GPU of compute capability 8.0 or newer, not {found}"
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"query.dtype={query.dtype} must be bfloat16 or float16"
    if key.dtype != query.dtype:
        return f"key.dtype={key.dtype} must equal query.dtype={query.dtype}"
    channels = query.shape[-1]
    most = _MOST_CHANNELS_FORWARD if forward_only and capability >= 9.0 else _MOST_CHANNELS
    if channels % 8 or channels > most:
        return f"head dim {channels} must be a multiple of 8 and at most {most}"
    if logits_soft_cap is not None:
        return f"{logits_soft_cap=} must be None"
    if decoding and windowed:
        return "decoding takes no window"
    if decoding and query.shape[1] != 1:
        return f"{query.shape[1]} queries per sequence must be 1"
    return missing()
