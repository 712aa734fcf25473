"""What a cache costs in one layer alone, layer by layer, and how large it is there.

A layer before the compressed one is as in the exact model, and so are the keys and values of the
prompt in all layers. So the exact model runs once; of a layer and a cache only the decoded tokens
run, from this layer on. In this layer they attend one by one to the real cache, in later ones all
at once to exact keys and values. A layer's weights are arguments of a program, so that a cache is
compiled once for all layers that are alike.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbojax.attention.options import PLAIN
from turbojax.caches import (
    AttentionOptions,
    CacheKind,
    attend_new_tokens,
    attend_prompt,
    init_layer_cache,
    kind_for,
)
from turbojax.caches.exact import REPEATABLE
from turbojax.evaluation.decoding import AnyDecoder, AnyModel, Batches, decoder_of
from turbojax.evaluation.programs import repeatable
from turbojax.evaluation.scoring import checked_windows
from turbojax.models import ModelCaches, TransformerConfig
from turbojax.models.decoder import for_length
from turbojax.models.generation.caching import widths_of, windows_of_layers
from turbojax.models.generation.session import Progress
from turbojax.rotary import Rope


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

    Prompts attend exactly: the cost of a cache is that of decoding through it.

    Args:
      model: of floating point or with INT4 weights; in float32, since one cache may cost less than
        what 16 bits round in the layers after it.
      tokens: int ``[n, T + 1]``; the last one of a window is not fed.
      kinds: the caches, C of them.
      prompt: tokens of each window that are in the caches before, 1 to T - 1.
      batch_size: windows that run at once.
      progress: called after each layer of each cache, with 1.

    Returns:
      float64 ``[C, L]``, the mean divergence of the next token's distribution from the exact one's,
      in bits, see `turbojax.evaluation.Scores`; NaN where logits were.

    Raises:
      TypeError: if the model is another, or tokens or sizes are not integers.
      ValueError: if a shape or a size does not fit, a token is not in the vocabulary, or a cache
        cannot hold the model's heads.
      NotImplementedError: if the model has latent attention or is split over a mesh, or a layer's
        attention cannot run through a cache.
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
                found = run.divergence(layer, _Compressed(kind, window))
                sums[number, layer] += found[:rows].sum(dtype=np.float64)
                if progress is not None:
                    progress(1)
    return sums / (len(tokens) * (length - prompt))


def layer_bytes(
    config: TransformerConfig, kind: CacheKind, max_length: int, dtype: Any = jnp.bfloat16
) -> np.ndarray:
    """Bytes of one sequence's cache of this kind in every layer, int64 ``[L]``.

    Args:
      config: of the model.
      kind: the cache.
      max_length: tokens of the sequence.
      dtype: of the model.

    Raises:
      ValueError: if the cache cannot hold the model's heads.
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


@dataclasses.dataclass(frozen=True)
class _Compressed:
    """The cache of the layer that is looked at, and tokens that it must keep; None for all."""

    kind: CacheKind
    window: int | None


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

    def divergence(self, layer: int, cache: _Compressed) -> np.ndarray:
        """Of the decoded tokens ``[B, T - prompt]``, with this cache in a layer."""
        hidden = self._apply(layer, self.streams[layer], cache)
        for later in range(layer + 1, len(self.layers)):
            hidden = self._apply(later, hidden)
        return np.asarray(_divergence(self.rest, hidden, self.log_p))

    def _apply(
        self, layer: int, hidden: jax.Array, compressed: _Compressed | None = None
    ) -> jax.Array:
        config = self.rest.config
        options, rope = config.attention_options(layer), config.rope_of(layer)
        cache, static = self.caches[layer], (options, rope, compressed)
        done: jax.Array = _apply(
            self.rest, self.layers[layer], hidden, self.positions, cache, *static
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
    compressed: _Compressed | None,
) -> jax.Array:
    """The decoded tokens' stream ``[B, D, hidden]`` after a layer, whose exact cache is given."""
    attend, held = attend_new_tokens(REPEATABLE), cache
    if compressed is not None:
        kind, lengths = kind_for(compressed.kind), cache.lengths
        batch, room, heads, channels = cache.key.shape
        prompt = room - hidden.shape[1]
        held = init_layer_cache(
            batch,
            room,
            heads,
            channels,
            kind=compressed.kind,
            dtype=cache.dtype,
            local_window_size=compressed.window,
        )
        key, value = cache.key[:, :prompt], cache.value[:, :prompt]
        attend, held = _one_by_one, kind.store_prompt(held, key, value, lengths)
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
