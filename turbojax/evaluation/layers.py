"""Layers one by one: how far their outputs are off, what a cache costs in one, which each gets."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbojax.attention.options import PLAIN
from turbojax.attention.score_modifiers import of_layer
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
from turbojax.evaluation.decoding import AnyDecoder, AnyModel, Batches, decoder_of, repeatable
from turbojax.evaluation.methods import Method
from turbojax.evaluation.scoring import checked_windows
from turbojax.models import ModelCaches, TransformerConfig
from turbojax.models.decoder import for_length
from turbojax.models.generation.caching import kinds_of_layers, widths_of, windows_of_layers
from turbojax.models.generation.session import Progress
from turbojax.rotary import Rope

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

    The arguments and errors of `score` are the same here, but that tokens are int ``[n, T]``, of
    which 1 to T - 1 are the `prompt`. Of `batch_size` windows the queries, keys and values of all
    layers are held at once; `progress` is called after each layer of each batch, with 1. Raises
    NotImplementedError, too, if the cache is one of latents, or the model is split over a mesh.
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
    # Through the cache: the prompt at once, the rest one by one.
    batch, tokens, heads, channels = key.shape
    sizes = (batch, tokens, heads, channels)
    cache = init_layer_cache(*sizes, kind=kind, dtype=key.dtype, local_window_size=window)
    lengths = jnp.full(batch, prompt, jnp.int32)
    q, k, v = (x[:, :prompt] for x in (query, key, value))
    first, cache = attend_prompt(lengths, attention=pooled)(q, k, v, cache, options, sinks)
    q, k, v = (x[:, prompt:] for x in (query, key, value))
    later, _ = _one_by_one(q, k, v, cache, options, sinks)
    out = jnp.concatenate([first, later], axis=1)
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


def layer_costs(
    model: AnyModel,
    tokens: np.ndarray,
    kinds: Sequence[CacheKind],
    *,
    prompt: int,
    batch_size: int = 4,
    progress: Progress | None = None,
) -> np.ndarray:
    """How far a layer's cache moves predictions, if the other layers' caches are exact.

    Prompts attend exactly: the cost of a cache is that of decoding through it. A layer before the
    compressed one is as in the exact model, and so are the keys and values of the prompt in all
    layers. So the exact model runs once; of a layer and a cache only the decoded tokens run, from
    this layer on: in this one they attend one by one to the real cache, in later ones all at once
    to exact keys and values. A layer's weights are arguments of a program, so that a cache is
    compiled once for all layers that are alike.

    The arguments and errors of `score` are the same here, but that `kinds` are C caches and the
    last one of a window's T + 1 tokens is not fed: 1 to T - 1 are the `prompt`. The model should be
    in float32, since one cache may cost less than what 16 bits round in the layers after it.
    `progress` is called after each layer of each cache, with 1. Raises NotImplementedError, too, if
    the model has latent attention or is split over a mesh.

    Returns:
      float64 ``[C, L]``, the mean divergence of the next token's distribution from the exact one's,
      in bits, see `turbojax.evaluation.Scores`; NaN where logits were.
    """
    decoder = decoder_of(model)
    tokens = checked_windows(decoder, tokens, prompt, batch_size)
    config, length = decoder.config, tokens.shape[1] - 1
    if decoder.axes is not None:
        raise NotImplementedError(f"{decoder.axes=} must be None: a split model is not looked into")
    if config.latent is not None:
        raise NotImplementedError("layers with latent attention are not looked into one by one")
    if prompt >= length:
        raise ValueError(f"{prompt=} must be below {length}, so that some tokens are decoded")
    windows = [windows_of_layers(config, [kind] * config.num_layers) for kind in kinds]
    decoder = for_length(decoder, length)
    sums = np.zeros((len(kinds), config.num_layers))
    for rows, part in Batches(min(batch_size, len(tokens))).of(tokens[:, :-1]):
        run = _Exact(decoder, part, prompt)
        for number, kind in enumerate(kinds):
            for layer, window in enumerate(windows[number]):
                found = run.divergence(layer, kind, window)
                sums[number, layer] += found[:rows].sum(dtype=np.float64)
                if progress is not None:
                    progress(1)
    return sums / (len(tokens) * (length - prompt))


def layer_bytes(
    config: TransformerConfig, kind: CacheKind, max_length: int, dtype: Any = jnp.bfloat16
) -> np.ndarray:
    """Bytes of one sequence's cache of this kind in every layer, int64 ``[L]``.

    For `max_length` tokens, in a model of this configuration and dtype. Raises ValueError if the
    cache cannot hold the model's heads.
    """
    heads, channels, rope_dim = widths_of(config, kind)
    windows = windows_of_layers(config, [kind] * config.num_layers)

    def size(window: int | None) -> int:
        options: Any = {"kind": kind, "dtype": dtype, "rope_dim": rope_dim}
        options["local_window_size"] = window
        sizes = (1, max_length, heads, channels)
        return int(jax.eval_shape(lambda: init_layer_cache(*sizes, **options)).nbytes)

    known = {window: size(window) for window in set(windows)}
    return np.array([known[window] for window in windows], np.int64)


class _Exact:
    """The exact model on int32 ``[B, T]`` tokens: all that no layer's cache changes."""

    def __init__(self, decoder: AnyDecoder, tokens: np.ndarray, prompt: int) -> None:
        self.layers = decoder.layers
        # The model without its layers, which running one layer needs.
        self.rest = dataclasses.replace(decoder, layers=())
        self.caches = _prompts(decoder, tokens[:, :prompt], max_length=tokens.shape[1]).layers
        self.positions = jnp.broadcast_to(
            jnp.arange(prompt, tokens.shape[1])[None], tokens[:, prompt:].shape
        )
        self.streams = [_embed(self.rest, tokens[:, prompt:])]
        for layer in range(len(self.layers)):
            self.streams.append(self._apply(layer, self.streams[-1]))
        self.log_p = _log_probabilities(self.rest, self.streams[-1])

    def divergence(self, layer: int, kind: CacheKind, window: int | None) -> np.ndarray:
        """Of the decoded tokens ``[B, T - prompt]``, with this cache in a layer.

        It must keep the last `window` tokens, None for all.
        """
        hidden = self._apply(layer, self.streams[layer], (kind, window))
        for later in range(layer + 1, len(self.layers)):
            hidden = self._apply(later, hidden)
        return np.asarray(_divergence(self.rest, hidden, self.log_p))

    def _apply(self, layer: int, hidden: jax.Array, compressed: Any = None) -> jax.Array:
        config = self.rest.config
        arrays = (self.rest, self.layers[layer], hidden, self.positions, self.caches[layer])
        done: jax.Array = _apply(
            *arrays, config.attention_options(layer), config.rope_of(layer), compressed
        )
        return done


@repeatable(static_argnames="max_length")
def _prompts(decoder: AnyDecoder, tokens: jax.Array, *, max_length: int) -> ModelCaches:
    """Exact caches of prompts, without windows: other caches are filled with what they hold."""
    config = decoder.config
    sizes = (len(tokens), max_length, config.num_kv_heads, config.head_dim)
    empty = init_layer_cache(*sizes, kind="exact", dtype=decoder.dtype)
    lengths = jnp.full(len(tokens), tokens.shape[1], jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    caches = (empty,) * config.num_layers
    return ModelCaches(decoder.hidden(tokens, positions, attend_prompt(lengths), caches)[1])


@repeatable()
def _embed(rest: AnyDecoder, tokens: jax.Array) -> jax.Array:
    return rest.embed(tokens)


@repeatable(static_argnums=(5, 6, 7))
def _apply(
    rest: AnyDecoder,
    layer: Any,
    hidden: jax.Array,
    positions: jax.Array,
    cache: Any,
    options: AttentionOptions,
    rope: Rope | None,
    compressed: tuple[CacheKind, int | None] | None,
) -> jax.Array:
    """The decoded tokens' stream ``[B, D, hidden]`` after a layer, whose exact cache is given."""
    attend, held = attend_new_tokens(REPEATABLE), cache
    if compressed is not None:
        (kind, window), sizes = compressed, cache.key.shape
        prompt = sizes[1] - hidden.shape[1]
        held = init_layer_cache(*sizes, kind=kind, dtype=cache.dtype, local_window_size=window)
        key, value = cache.key[:, :prompt], cache.value[:, :prompt]
        attend = _one_by_one
        held = kind_for(kind).store_prompt(held, key, value, cache.lengths)
    angles = None if rope is None else rope.angles(positions)
    return rest.apply(layer, hidden, angles, attend, held, options, rope)[0]


def _one_by_one(query, key, value, cache, options=PLAIN, sinks=None):  # type: ignore[no-untyped-def]
    """Attention of new tokens, appended one by one as in use; the cache after them is dropped."""
    attend = attend_new_tokens(REPEATABLE)

    def step(cache: Any, new: tuple[jax.Array, ...]) -> tuple[Any, jax.Array]:
        q, k, v = (x[:, None] for x in new)
        out, cache = attend(q, k, v, cache, options, sinks)
        return cache, out[:, 0]

    new = tuple(jnp.moveaxis(x, 1, 0) for x in (query, key, value))
    _, outs = jax.lax.scan(step, cache, new)
    return jnp.moveaxis(outs, 0, 1), None


@repeatable()
def _log_probabilities(rest: AnyDecoder, hidden: jax.Array) -> jax.Array:
    return jax.nn.log_softmax(rest.logits(rest.finish(hidden)), axis=-1)


@repeatable()
def _divergence(rest: AnyDecoder, hidden: jax.Array, exact: jax.Array) -> jax.Array:
    """From float32 log-probabilities ``[B, D, V]``, in bits: ``[B, D]``."""
    log_p = jax.nn.log_softmax(rest.logits(rest.finish(hidden)), axis=-1)
    p = jnp.exp(exact)
    return jnp.sum(jnp.where(p == 0, 0, p * (exact - log_p)), axis=-1) / math.log(2)


_MOST_STEPS = 2**16
"""Steps of size at most: with more, sizes are rounded up to them."""


def choose(
    costs: np.ndarray, sizes: np.ndarray, *, loss: float | None = None, size: int | None = None
) -> np.ndarray:
    """A choice for every layer, as if what layers cost added up.

    By dynamic programming over sizes, layer by layer. The choice is optimal where differences of
    sizes are at most `_MOST_STEPS` times their common divisor, as they are where the caches of all
    layers are alike. Elsewhere each layer's size is rounded up by a correspondingly small part of
    their sum.

    Args:
      costs: float ``[C, L]``, what each of C caches costs in each of L layers; a cache is not
        chosen where its cost is not finite.
      sizes: int ``[C, L]``, bytes.
      loss: what the costs may sum up to: then the fewest bytes, and of these choices the one that
        costs least.
      size: instead of `loss`, what the bytes may sum up to: then the least cost, and of these
        choices the smallest.

    Returns:
      int ``[L]``, which of the caches.

    Raises:
      ValueError: if shapes differ, not exactly one of `loss` and `size` is given, or no choice is
        within it; the error says what the nearest one has.
    """
    if costs.ndim != 2 or costs.shape != sizes.shape or 0 in costs.shape:
        raise ValueError(f"{costs.shape=} and {sizes.shape=} must be the same, [C, L]")
    if (loss is None) == (size is None):
        raise ValueError("give a loss or a size, one of them")
    costs = np.where(np.isfinite(costs), costs, np.inf)
    if not np.all(np.isfinite(costs).any(axis=0)):
        raise ValueError("costs must be finite for one cache of each layer at least")
    least = np.where(np.isfinite(costs), sizes, sizes.max()).min(axis=0)
    if size is not None and size < least.sum():
        raise ValueError(f"size={size} must be at least {least.sum()}, of the smallest caches")
    steps, unit = _steps(sizes - least)
    best, picks = _table(costs, steps)
    if loss is None:
        assert size is not None
        loss = float(best[min(len(best) - 1, int(size - least.sum()) // unit)])
    if best[-1] > loss:
        least_loss = f"{best[-1]:.6f}, of the caches that lose least"
        raise ValueError(f"{loss=} must be at least {least_loss}")
    return _walk(picks, steps, int(np.argmax(best <= loss)))


def _steps(extra: np.ndarray) -> tuple[np.ndarray, int]:
    """Sizes ``[C, L]`` above each layer's smallest, in steps, and bytes of a step."""
    unit = max(1, math.gcd(*extra.ravel().tolist()))
    unit *= -(-int(extra.max(axis=0).sum()) // (unit * _MOST_STEPS)) or 1
    return -(-extra // unit), unit


def _table(costs: np.ndarray, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The least cost for each size, and per layer the cache that the best choice so far ends with.

    As float64 ``[S + 1]`` and int32 ``[L, S + 1]``.
    """
    count = int(steps.max(axis=0).sum()) + 1
    best, picks = np.zeros(count), np.zeros((costs.shape[1], count), np.int32)
    for layer, (cost, step) in enumerate(zip(costs.T, steps.T, strict=True)):
        now = np.full(count, np.inf)
        # The smallest first: among equal costs it is kept.
        for cache in np.argsort(step, kind="stable"):
            there = np.full(count, np.inf)
            if 0 <= step[cache] < count:
                there[step[cache] :] = best[: count - step[cache]] + cost[cache]
            better = there < now
            now[better], picks[layer][better] = there[better], cache
        best = now
    return best, picks


def _walk(picks: np.ndarray, steps: np.ndarray, room: int) -> np.ndarray:
    """The choice of every layer, from the last one back."""
    chosen = np.zeros(len(picks), int)
    for layer in reversed(range(len(picks))):
        chosen[layer] = picks[layer, room]
        room -= int(steps[chosen[layer], layer])
    return chosen
