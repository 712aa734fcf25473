"""An uncompressed KV cache with the operations of `ProgressiveCache`: the baseline."""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks, _device
from turbojax.config import TurboConfig
from turbojax.ops.numerics import cap_logits
from turbojax.ops.options import Options
from turbojax.ops.turbo_attention import turbo_attention

IMPLEMENTATIONS = ("xla", "cudnn")
_FLOAT = TurboConfig(mode="float", softmax="exact")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExactCache:
    """Keys and values as they are, in one floating-point dtype.

    Attributes:
      key: ``[B, max_length, K, H]``, zero past each length.
      value: the same.
      lengths: int32 ``[B]``, tokens held.
      overflowed: bool ``[B]``, True where a call under `jit` had to leave tokens out.
    """

    key: jax.Array
    value: jax.Array
    lengths: jax.Array
    overflowed: jax.Array

    @property
    def max_length(self) -> int:
        """Tokens each sequence can hold."""
        return self.key.shape[-3]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays held."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    @property
    def compression_ratio(self) -> float:
        """Bytes of bfloat16 keys and values over `nbytes`."""
        return 2 * (self.key.size + self.value.size) / self.nbytes


def init_cache(
    batch_size: int,
    max_length: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
) -> ExactCache:
    """An empty cache of these sizes.

    Raises:
      ValueError: if a size is not positive.
      TypeError: if `dtype` is none of bfloat16, float16, float32.
    """
    shape = (batch_size, max_length, num_kv_heads, head_dim)
    if min(shape) < 1:
        raise ValueError(f"cache shape {shape} must be positive in every axis")
    if jnp.dtype(dtype) not in _checks.FLOAT_DTYPES:
        raise TypeError(f"dtype={jnp.dtype(dtype)} must be bfloat16, float16 or float32")
    return ExactCache(
        key=jnp.zeros(shape, dtype),
        value=jnp.zeros(shape, dtype),
        lengths=jnp.zeros(batch_size, jnp.int32),
        overflowed=jnp.zeros(batch_size, jnp.bool_),
    )


def append(
    cache: ExactCache, key: jax.Array, value: jax.Array, *, lengths: jax.Array | None = None
) -> ExactCache:
    """Adds new tokens, rounded to the cache's dtype; see `turbojax.append`.

    Args:
      cache: the cache to extend.
      key: ``[B, T, K, H]``, floating point.
      value: the same.
      lengths: optional int ``[B]``, how many of the `T` tokens are real.

    Returns:
      The extended cache; under `jit`, tokens past `max_length` are left out and reported in
      `overflowed`.

    Raises:
      TypeError: if dtypes are not supported or differ.
      ValueError: if a shape does not fit, or, outside `jit`, a sequence would exceed
        `max_length`.
    """
    _checks.check_key_value(key, value)
    batch, tokens = key.shape[:2]
    if (batch, *key.shape[2:]) != (cache.key.shape[0], *cache.key.shape[2:]):
        raise ValueError(f"{key.shape=} must fit {cache.key.shape=}")
    lengths = _checks.check_lengths("lengths", lengths, batch, tokens)
    total = cache.lengths + jnp.clip(lengths, 0, tokens)
    if _checks.is_concrete(total) and np.any(np.asarray(total) > cache.max_length):
        raise ValueError(
            f"appending would give lengths {np.asarray(total).tolist()}, "
            f"which must be at most max_length={cache.max_length}"
        )
    offset = jnp.arange(tokens)[None]
    index = cache.lengths[:, None] + offset
    # Padding gets rows past the end, which the scatter drops; no row is named twice.
    index = jnp.where(offset < lengths[:, None], index, cache.max_length + offset)
    put = jax.vmap(lambda old, i, new: old.at[i].set(new, mode="drop", unique_indices=True))
    return ExactCache(
        key=put(cache.key, index, key.astype(cache.key.dtype)),
        value=put(cache.value, index, value.astype(cache.value.dtype)),
        lengths=jnp.minimum(total, cache.max_length),
        overflowed=cache.overflowed | (total > cache.max_length),
    )


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    scale: float | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Exact causal attention within prompts.

    Args:
      query: ``[B, T, N, H]``.
      key: ``[B, T, K, H]``.
      value: ``[B, T, K, H]``.
      scale: factor of the scores; ``1 / sqrt(H)`` if not given.
      local_window_size: see `turbojax.turbo_attention`.
      logits_soft_cap: the same; with one, `turbojax.turbo_attention` attends, in mode ``"float"``
        and with the exact softmax.
      implementation: ``"xla"``, ``"cudnn"``, or None for cuDNN where it can.

    Returns:
      ``[B, T, N, H]`` in the query's dtype.

    Raises:
      TypeError: if dtypes are not supported or differ.
      ValueError: if a shape, an option or the name does not fit.
      NotImplementedError: if cuDNN is asked for and cannot run this here.
    """
    _checks.check_query_key_value(query, key, value)
    chosen = _choose(implementation, query, key, logits_soft_cap=logits_soft_cap)
    if logits_soft_cap is not None:
        out = turbo_attention(
            query,
            key,
            value,
            config=_FLOAT,
            scale=scale,
            is_causal=True,
            local_window_size=local_window_size,
            logits_soft_cap=logits_soft_cap,
            implementation="xla" if implementation == "xla" else None,
        )
        assert isinstance(out, jax.Array)
        return out
    # jax's own function promotes bfloat16 with float32 inside.
    with jax.numpy_dtype_promotion("standard"):
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            scale=scale,
            is_causal=True,
            local_window_size=_checks.normalize_window(local_window_size),
            implementation=chosen,
        )


def decode(
    query: jax.Array,
    cache: ExactCache,
    *,
    scale: float | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Exact attention of the last `T` cached tokens' queries; see `turbojax.decode`.

    Args:
      query: ``[B, T, N, H]``.
      cache: the cache, which already holds the queries' own keys and values.
      scale: factor of the scores; ``1 / sqrt(H)`` if not given.
      local_window_size: see `turbojax.decode`.
      logits_soft_cap: see `turbojax.decode`.
      implementation: ``"xla"``, ``"cudnn"`` (one query per sequence, neither window nor cap), or
        None for cuDNN where it can.

    Returns:
      ``[B, T, N, H]`` in the query's dtype.

    Raises:
      TypeError: if the query's dtype is not supported.
      ValueError: if a shape, an option or the name does not fit.
      NotImplementedError: if cuDNN is asked for and cannot run this here.
    """
    _checks.check_query(query)
    _checks.check_head_groups(query.shape[2], cache.key.shape[2])
    options = Options.complete(
        query.shape[3],
        scale=scale,
        is_causal=True,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
    )
    tokens = query.shape[1]
    chosen = _choose(
        implementation,
        query,
        cache.key,
        decoding=True,
        windowed=local_window_size is not None,
        logits_soft_cap=logits_soft_cap,
    )
    if chosen == "cudnn":
        return jax.nn.dot_product_attention(
            query,
            cache.key,
            cache.value,
            scale=scale,
            key_value_seq_lengths=cache.lengths,
            implementation="cudnn",
        )
    position = cache.lengths[:, None] - tokens + jnp.arange(tokens)[None]
    mask = options.mask(position, jnp.arange(cache.max_length)[None], cache.lengths)
    return masked_attention(
        query,
        cache.key.astype(query.dtype),
        cache.value.astype(query.dtype),
        mask,
        scale=options.scale,
        logits_soft_cap=logits_soft_cap,
    )


def masked_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array,
    *,
    scale: float,
    logits_soft_cap: float | None = None,
) -> jax.Array:
    """Exact attention under a mask, by XLA.

    Args:
      query: ``[B, T, N, H]``.
      key: ``[B, S, K, H]``.
      value: ``[B, S, K, H]``.
      mask: bool ``[B, T, S]``, what is visible; a row without anything is the mean of all values.
      scale: factor of the scores.
      logits_soft_cap: see `turbojax.decode`.

    Returns:
      ``[B, T, N, H]`` in the query's dtype.
    """
    if logits_soft_cap is None:
        # jax's own function promotes bfloat16 with float32 inside.
        with jax.numpy_dtype_promotion("standard"):
            return jax.nn.dot_product_attention(
                query, key, value, scale=scale, mask=mask[:, None], implementation="xla"
            )
    batch, tokens, _, channels = query.shape
    grouped = query.reshape(batch, tokens, key.shape[2], -1, channels)
    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    scores = cap_logits(dot("btkgh,bskh->bkgts", grouped, key) * scale, logits_soft_cap)
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(query.dtype)
    out = dot("bkgts,bskh->btkgh", weights, value)
    return out.reshape(query.shape).astype(query.dtype)


def cudnn_unsupported(
    query: jax.Array | jax.ShapeDtypeStruct,
    key: jax.Array | jax.ShapeDtypeStruct,
    *,
    decoding: bool = False,
    windowed: bool = False,
    logits_soft_cap: float | None = None,
) -> str | None:
    """None if cuDNN's attention takes these arrays here, or the reason why not.

    Args:
      query: ``[B, T, N, H]``.
      key: ``[B, S, K, H]``.
      decoding: whether the queries are those of the newest tokens, and not aligned with the keys.
      windowed: whether there is a window, which is counted from the first key.
      logits_soft_cap: of the scores.
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
    if channels % 8 or channels > 128:
        return f"head dim {channels} must be a multiple of 8 and at most 128"
    if logits_soft_cap is not None:
        return f"{logits_soft_cap=} must be None"
    if decoding and windowed:
        return "decoding takes no window"
    if decoding and query.shape[1] != 1:
        return f"{query.shape[1]} queries per sequence must be 1"
    return None


def _choose(
    implementation: str | None,
    query: jax.Array,
    key: jax.Array,
    *,
    decoding: bool = False,
    windowed: bool = False,
    logits_soft_cap: float | None = None,
) -> Literal["xla", "cudnn"]:
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(
            f"{implementation=} must be None or one of {IMPLEMENTATIONS} for an exact cache"
        )
    if implementation == "xla":
        return "xla"
    refusal = cudnn_unsupported(
        query, key, decoding=decoding, windowed=windowed, logits_soft_cap=logits_soft_cap
    )
    if implementation == "cudnn" and refusal is not None:
        raise NotImplementedError(f"exact attention cannot run here: cudnn: {refusal}")
    return "xla" if refusal is not None else "cudnn"
