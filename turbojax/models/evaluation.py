"""Teacher-forced scoring of whole windows in one pass, as if through a cache."""

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks
from turbojax.kv import Attend, AttentionOptions, causal_attention
from turbojax.kv.base import Cache
from turbojax.models.decoder import Decoder, for_length
from turbojax.models.generation.padding import check_tokens
from turbojax.models.generation.session import Progress
from turbojax.models.quantized import QuantizedDecoder
from turbojax.ops.options import PLAIN
from turbojax.quantizers.fp8 import quantize_fp8
from turbojax.state import kv4

CacheName = Literal["exact", "kv4"]


def through_kv4(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: Cache = None,
    options: AttentionOptions = PLAIN,
) -> tuple[jax.Array, Cache]:
    """What decoding token by token through a `Kv4Cache` attends to, for all tokens at once.

    Keys and values are those the cache holds, queries are rounded to e4m3, and the rest is exact.
    """
    codes, scale = quantize_fp8(query, axis=-1)
    rounded = codes.astype(jnp.float32) * scale[..., None]
    out, cache = causal_attention(rounded, _held(key), _held(value), cache, options)
    return out.astype(query.dtype), cache


def _held(x: jax.Array) -> jax.Array:
    """Keys or values as the cache holds them, float32."""
    codes, scale = kv4.quantize_vectors(x)
    return kv4.unpack_codes(codes).astype(jnp.float32) * scale.astype(jnp.float32)[..., None]


_ATTEND: dict[CacheName, Attend] = {"exact": causal_attention, "kv4": through_kv4}


def caches_of(model: Decoder | QuantizedDecoder) -> tuple[CacheName, ...]:
    """The caches that can hold a model's heads: ``"kv4"`` packs 8 channels at a time."""
    return ("exact",) if model.config.head_dim % 8 else ("exact", "kv4")


def token_bits(
    model: Decoder | QuantizedDecoder,
    tokens: np.ndarray,
    *,
    cache: CacheName = "exact",
    batch_size: int = 4,
    progress: Progress | None = None,
) -> np.ndarray:
    """Information content of every token but the first of each window.

    Args:
      model: the model.
      tokens: int ``[n, T + 1]``.
      cache: ``"exact"``, or ``"kv4"`` for keys, values and queries as decoding through a `Kv4Cache`
        has them.
      batch_size: windows that run at once.
      progress: called after each batch.

    Returns:
      float32 ``[n, T]``, bits.

    Raises:
      TypeError: if the model is another, or tokens or the batch size are not integers.
      ValueError: if the shape does not fit, a token is not in the vocabulary, `batch_size` is not
        positive, there is no such cache, or it cannot hold the model's heads.
    """
    if not isinstance(model, Decoder | QuantizedDecoder):
        raise TypeError(
            f"model is a {type(model).__name__}, must be a Decoder (see unstack) or a "
            "QuantizedDecoder"
        )
    _checks.check_sizes(batch_size=batch_size)
    if tokens.ndim != 2 or len(tokens) < 1 or tokens.shape[1] < 2:
        raise ValueError(f"{tokens.shape=} must be [n, T + 1] with n and T at least 1")
    if cache not in _ATTEND:
        raise ValueError(f"{cache=} must be one of {', '.join(_ATTEND)}")
    if cache not in caches_of(model):
        size = model.config.head_dim
        raise ValueError(f"{cache=} needs a head_dim that is a multiple of 8, not {size}")
    tokens = np.asarray(check_tokens(tokens, model.config.vocab_size))
    model, bits = for_length(model, tokens.shape[1] - 1), []
    for first in range(0, len(tokens), batch_size):
        part = tokens[first : first + batch_size]
        # One shape, compiled once: the last batch is filled up with its own first window.
        full = np.concatenate([part, np.repeat(part[:1], batch_size - len(part), axis=0)])
        bits.append(np.asarray(_bits(model, jnp.asarray(full), cache=cache))[: len(part)])
        if progress is not None:
            progress(part.shape[0] * (part.shape[1] - 1))
    return np.concatenate(bits)


@functools.partial(jax.jit, static_argnames="cache")
def _bits(model: Decoder | QuantizedDecoder, tokens: jax.Array, *, cache: CacheName) -> jax.Array:
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    positions = jnp.broadcast_to(jnp.arange(inputs.shape[1])[None], inputs.shape)
    nothing = (None,) * model.config.num_layers
    hidden, _ = model.hidden(inputs, positions, _ATTEND[cache], nothing)
    log_p = jax.nn.log_softmax(model.logits(hidden), axis=-1)
    chosen = jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]
    return chosen * (-1 / math.log(2))
