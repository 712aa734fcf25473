"""How far each layer's attention output is off through a cache, layer by layer."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbojax.attention.optional_arrays import of_layer
from turbojax.attention.options import PLAIN
from turbojax.attention.sinks import with_sinks
from turbojax.caches import (
    AttentionOptions,
    CacheKind,
    PooledAttention,
    attend_new_tokens,
    attend_prompt,
    causal_attention,
    init_layer_cache,
    kind_for,
)
from turbojax.caches.exact import REPEATABLE
from turbojax.caches.exact.reference import masked_part
from turbojax.evaluation.decoding import AnyDecoder, AnyModel, Batches, decoder_of
from turbojax.evaluation.methods import Method
from turbojax.evaluation.programs import repeatable
from turbojax.evaluation.scoring import checked_windows
from turbojax.models.decoder import for_length
from turbojax.models.generation.caching import kinds_of_layers, windows_of_layers
from turbojax.models.generation.session import Progress

_BLOCK = 128
"""Queries that the definition attends with at once."""


@dataclasses.dataclass(frozen=True)
class Errors:
    """Errors of attention outputs, numpy float64 ``[layers]`` each.

    Attributes:
      cosine: mean over queries and heads of the cosine between the output and the exact one.
      relative_l1: sum of the absolute differences over the sum of the exact outputs' absolutes.
      rmse: root of the mean squared difference.
    """

    cosine: np.ndarray
    relative_l1: np.ndarray
    rmse: np.ndarray


@dataclasses.dataclass(frozen=True)
class LayerErrors(Errors):
    """`Errors` of all queries, and of two parts of them.

    Attributes:
      prefill: of the prompts' queries.
      decode: of those that attend to the cache, one by one.
      by_token: float64 ``[layers, T]``, the relative L1 of the queries of each place.
    """

    prefill: Errors
    decode: Errors
    by_token: np.ndarray


def layer_errors(
    model: AnyModel,
    tokens: np.ndarray,
    method: Method,
    *,
    prompt: int,
    batch_size: int = 2,
    progress: Progress | None = None,
) -> LayerErrors:
    """Attention outputs of every layer through a method's cache, against float32 exact attention.

    Queries, keys and values of a layer are those of the exact model, so that errors do not add up
    over layers. A prompt goes through the cache as the method prefills, the rest is appended and
    attends token by token.

    Args:
      model: of floating point or with INT4 weights.
      tokens: int ``[n, T]``.
      method: see `turbojax.evaluation.method`.
      prompt: tokens of each window that are prefilled, 1 to T - 1.
      batch_size: windows whose queries, keys and values of all layers are held at once.
      progress: called after each layer of each batch, with 1.

    Raises:
      TypeError: if the model is another, or tokens or sizes are not integers.
      ValueError: if a shape or a size does not fit, a token is not in the vocabulary, or the cache
        cannot hold the model's heads.
      NotImplementedError: if a layer's attention cannot run through the cache, or the cache is one
        of latents, or the model is split over a mesh.
    """
    decoder = decoder_of(model)
    tokens = checked_windows(decoder, tokens, prompt, batch_size)
    config = decoder.config
    kinds = kinds_of_layers(method.cache, config.num_layers)
    if decoder.axes is not None:
        raise NotImplementedError(f"{decoder.axes=} must be None: a split model is not looked into")
    if any(kind_for(kind).has_latents for kind in kinds):
        raise NotImplementedError(
            f"method {method.name!r} must be one of keys and values: latents are not looked into"
        )
    decoder, windows = for_length(decoder, tokens.shape[1]), windows_of_layers(config, kinds)
    sums = np.zeros((config.num_layers, tokens.shape[1], 5))
    for count, rows in Batches(min(batch_size, len(tokens))).of(tokens):
        for layer, operands in enumerate(_operands(decoder, rows)):
            found = _measured(
                *operands,
                kind=kinds[layer],
                window=windows[layer],
                options=config.attention_options(layer),
                prompt=prompt,
                pooled=method.pooled,
            )
            sums[layer] += np.asarray(found, np.float64)[:count].sum(axis=0)
            if progress is not None:
                progress(1)
    whole, prefill, decode = (
        _errors(x.sum(axis=1)) for x in (sums, sums[:, :prompt], sums[:, prompt:])
    )
    by_token = _errors(sums).relative_l1
    return LayerErrors(**vars(whole), prefill=prefill, decode=decode, by_token=by_token)


def _errors(sums: np.ndarray) -> Errors:
    """Errors from sums over tokens ``[..., 5]``, see `_measured`."""
    cosine, difference, size, square, count = np.moveaxis(sums, -1, 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return Errors(cosine / count, difference / size, np.sqrt(square / count))


@repeatable()
def _operands(decoder: AnyDecoder, tokens: jax.Array) -> tuple[Any, ...]:
    """Every layer's query, key, value and sinks, with exact attention."""

    def attend(query, key, value, cache, options=PLAIN, sinks=None):  # type: ignore[no-untyped-def]
        del cache
        out, _ = causal_attention(query, key, value, None, options, sinks)
        return out, (query, key, value, sinks)

    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    _, kept = decoder.hidden(tokens, positions, attend, (None,) * decoder.config.num_layers)
    return kept


@repeatable(static_argnames=("kind", "window", "options", "prompt", "pooled"))
def _measured(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sinks: jax.Array | None,
    *,
    kind: CacheKind,
    window: int | None,
    options: AttentionOptions,
    prompt: int,
    pooled: PooledAttention | None,
) -> jax.Array:
    """A layer's errors, token by token: float32 ``[B, T, 5]``.

    The columns are the mean cosine over heads, the sums of absolute differences and of absolute
    exact values, the mean squared difference, and 1.
    """
    out = _through(query, key, value, sinks, kind, window, options, prompt, pooled)
    exact = _exact(query, key, value, sinks, options)
    difference = out.astype(jnp.float32) - exact
    cosine = jnp.mean(_cosine(out.astype(jnp.float32), exact), axis=-1)
    columns = [
        cosine,
        jnp.sum(jnp.abs(difference), axis=(2, 3)),
        jnp.sum(jnp.abs(exact), axis=(2, 3)),
        jnp.mean(jnp.square(difference), axis=(2, 3)),
        jnp.ones_like(cosine),
    ]
    return jnp.stack(columns, axis=-1)


def _through(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sinks: jax.Array | None,
    kind: CacheKind,
    window: int | None,
    options: AttentionOptions,
    prompt: int,
    pooled: PooledAttention | None,
) -> jax.Array:
    """Attention ``[B, T, N, H]`` through a cache: the prompt at once, the rest one by one."""
    batch, tokens, heads, channels = key.shape
    cache = init_layer_cache(
        batch,
        tokens,
        heads,
        channels,
        kind=kind,
        dtype=key.dtype,
        local_window_size=window,
    )
    lengths = jnp.full(batch, prompt, jnp.int32)
    q, k, v = (x[:, :prompt] for x in (query, key, value))
    out, cache = attend_prompt(lengths, attention=pooled)(q, k, v, cache, options, sinks)
    attend = attend_new_tokens(REPEATABLE)

    def step(cache: Any, new: tuple[jax.Array, ...]) -> tuple[Any, jax.Array]:
        q, k, v = (x[:, None] for x in new)
        out, cache = attend(q, k, v, cache, options, sinks)
        return cache, out[:, 0]

    rest = tuple(jnp.moveaxis(x[:, prompt:], 1, 0) for x in (query, key, value))
    _, later = jax.lax.scan(step, cache, rest)
    return jnp.concatenate([out, jnp.moveaxis(later, 0, 1)], axis=1)


def _exact(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sinks: jax.Array | None,
    options: AttentionOptions,
) -> jax.Array:
    """Exact attention, float32 ``[B, T, N, H]``, some queries at a time."""
    static, (batch, tokens) = options.complete(query.shape[3]), query.shape[:2]
    lengths = jnp.full(batch, tokens, jnp.int32)
    place = jnp.arange(tokens, dtype=jnp.int32)[None]

    def attend(block: jax.Array) -> jax.Array:
        # The last block begins where it is full: some queries are computed twice.
        first = jnp.minimum(block * size, tokens - size)
        part = jax.lax.dynamic_slice_in_dim(query, first, size, axis=1)
        mine = first + jnp.arange(size, dtype=jnp.int32)[None]
        out, residual = masked_part(
            part,
            key,
            value,
            static.mask(mine, place, lengths),
            scale=static.scale,
            logits_soft_cap=static.logits_soft_cap,
        )
        if sinks is not None:
            given = of_layer(query, sinks).sinks
            assert given is not None
            out, _ = with_sinks(out, residual, given)
        return out

    size = min(_BLOCK, tokens)
    blocks = -(-tokens // size)
    outs = jax.lax.map(attend, jnp.arange(blocks, dtype=jnp.int32))
    whole = jnp.moveaxis(outs[:-1], 0, 1).reshape(batch, -1, *query.shape[2:])
    return jnp.concatenate([whole, outs[-1][:, blocks * size - tokens :]], axis=1)


def _cosine(a: jax.Array, b: jax.Array) -> jax.Array:
    """Cosines along the last axis; 1 for two vectors of zeros, 0 for one."""
    dot, lengths = jnp.sum(a * b, axis=-1), [jnp.linalg.norm(x, axis=-1) for x in (a, b)]
    product = lengths[0] * lengths[1]
    alike = (lengths[0] == lengths[1]).astype(jnp.float32)
    return jnp.where(product == 0, alike, dot / jnp.where(product == 0, 1, product))
