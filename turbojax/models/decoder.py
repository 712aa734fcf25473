"""A `Transformer` unstacked for inference: one tree of weights per layer.

`Transformer` scans over stacked layers, which suits training. Through a KV cache it does not: a
scan that carries all caches slices one layer's out and writes it back in every iteration, so a step
would copy the whole cache. Here the layers are a Python loop, every array of every layer is an
argument of its own, and a donated cache is updated in place.
"""

import abc
import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx

from turbojax._pytrees import nbytes, pytree
from turbojax.caches import Attend, AttentionOptions
from turbojax.caches.base import Cache
from turbojax.caches.layered import attend_of
from turbojax.flax.norms import rms_norm
from turbojax.flax.projections import AdaptedLinear
from turbojax.models.config import TransformerConfig
from turbojax.models.tensor_parallel.layout import (
    gather_logits,
    hidden_axes,
    local_config,
    mask_padding,
)
from turbojax.models.transformer import Block, Transformer, embed, project
from turbojax.models.vision.soft_tokens import SoftTokens, embedded
from turbojax.rotary import LongRopeScaling, Rope
from turbojax.sharding import Axes

LayerParams = Any
"""Nested dicts of one layer's arrays, named as in `Block`.

A linear layer may have `lora_a` and `lora_b` beside its kernel, see `AdaptedLinear`.
"""


@dataclasses.dataclass(frozen=True)
class BaseDecoder(abc.ABC):
    """What `Decoder` and `QuantizedDecoder` compute alike; their docstrings describe the fields."""

    embedding: Any
    layers: tuple[Any, ...]
    norm: jax.Array
    lm_head: Any
    config: TransformerConfig = dataclasses.field(metadata={"static": True})
    dtype: np.dtype = dataclasses.field(metadata={"static": True})
    axes: Axes | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def nbytes(self) -> int:
        """Bytes of all weights, their padding included."""
        return nbytes(self)

    def hidden(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        attend: Attend,
        caches: tuple[Cache, ...],
        images: SoftTokens | None = None,
    ) -> tuple[jax.Array, tuple[Cache, ...]]:
        """The normed residual stream after the last layer, before the projection to logits.

        Args:
          tokens: int ``[B, T]`` within the vocabulary.
          positions: int ``[B, T]``, where each token stands in its sequence. LongRoPE uses the
            factors for the config's `max_length`, see `for_length`.
          attend: called once per layer, after RoPE.
          caches: one per layer.
          images: what stands in place of some tokens' embeddings; `attend` must know them, too.

        Returns:
          ``[B, T, D]`` in `dtype`, and the new caches.
        """
        hidden = embedded(self.embed(tokens), images)
        hidden, caches = apply_layers(
            self.apply, self.layers, hidden, positions, attend, caches, self.config
        )
        return self.finish(hidden), caches

    @abc.abstractmethod
    def embed(self, tokens: jax.Array) -> jax.Array:
        """The residual stream ``[B, T, D]`` before the first layer, from int tokens ``[B, T]``."""

    @abc.abstractmethod
    def apply(self, layer: Any, *operands: Any) -> tuple[jax.Array, Cache]:
        """Applies one of `layers`, see `apply_block`."""

    @abc.abstractmethod
    def finish(self, hidden: jax.Array) -> jax.Array:
        """Norms the residual stream after the last layer."""

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Projects ``[..., D]`` to float32 logits ``[..., V]``."""
        return gather_logits(self._project(hidden), self.config.vocab_size, self.axes)

    def local_logits(self, hidden: jax.Array) -> jax.Array:
        """The logits of this device's part of the vocabulary, with -inf where that has no token."""
        return mask_padding(self._project(hidden), self.config, self.axes)

    @abc.abstractmethod
    def _project(self, hidden: jax.Array) -> jax.Array: ...


@pytree
@dataclasses.dataclass(frozen=True)
class Decoder(BaseDecoder):
    """The weights of a `Transformer`, layer by layer: what `start` and `generate` run.

    Made by `unstack`, `load_decoder` or `random_decoder`. A pytree that is cheap to pass to `jit`.

    Attributes:
      embedding: ``[V, D]``.
      layers: one tree of arrays per layer.
      norm: ``[D]``, scale of the last norm.
      lm_head: ``[V, D]``, or None where the embedding serves.
      config: the shape, of the whole model.
      dtype: compute dtype.
      axes: of a mesh over which arrays are split as
        `turbojax.models.tensor_parallel.specs.partition_specs` says, or None. On a mesh, `hidden`
        and `logits` are what one device runs within `shard_map`, see
        `turbojax.models.tensor_parallel.programs`.
    """

    embedding: jax.Array
    layers: tuple[LayerParams, ...]
    lm_head: jax.Array | None

    def embed(self, tokens: jax.Array) -> jax.Array:
        """See `BaseDecoder.embed`."""
        over = hidden_axes(self.axes)
        return embed(self.embedding, tokens, self.config, self.dtype, over)

    def apply(self, layer: LayerParams, *operands: Any) -> tuple[jax.Array, Cache]:
        """See `BaseDecoder.apply`."""
        config = local_config(self.config, self.axes)
        return apply_block(layer, *operands, config=config, dtype=self.dtype, axes=self.axes)

    def finish(self, hidden: jax.Array) -> jax.Array:
        """See `BaseDecoder.finish`."""
        return final_norm(hidden, self.norm, self.config, self.config.norm_offset)

    def _project(self, hidden: jax.Array) -> jax.Array:
        weight = self.embedding if self.lm_head is None else self.lm_head
        return project(hidden, weight, self.dtype, self.config)


def apply_block(
    params: LayerParams,
    hidden: jax.Array,
    angles: jax.Array | None,
    attend: Attend,
    cache: Cache,
    options: AttentionOptions,
    rope: Rope | None,
    *,
    config: TransformerConfig,
    dtype: np.dtype,
    axes: Axes | None = None,
) -> tuple[jax.Array, Cache]:
    """Applies a layer of a `Decoder`, within `shard_map` with a device's arrays and config."""
    has_experts = "router" in params["mlp"]
    adapted = tuple(adapted_linears(params))
    graph = _block_graph(config, has_experts, dtype, jax.tree.leaves(params)[0].dtype, adapted)
    return nnx.merge(graph, params)(hidden, angles, attend, cache, options, rope, axes)


def adapted_linears(params: LayerParams) -> list[tuple[str, str]]:
    """The linear layers with an adapter, by their paths, such as ``("attention", "q_proj")``."""
    return [
        (part, name)
        for part in ("attention", "mlp")
        for name, arrays in params[part].items()
        if isinstance(arrays, dict) and "lora_a" in arrays
    ]


def final_norm(
    hidden: jax.Array, scale: jax.Array, config: TransformerConfig, offset: float = 0.0
) -> jax.Array:
    """The norm after the last layer, of the residual stream ``[..., D]``; see `rms_norm`."""
    return rms_norm(hidden, scale, config.norm_eps, offset, centered=config.layer_norm)


def apply_layers(
    apply: Callable[..., tuple[jax.Array, Cache]],
    layers: Sequence[Any],
    hidden: jax.Array,
    positions: jax.Array,
    attend: Attend,
    caches: tuple[Cache, ...],
    config: TransformerConfig,
) -> tuple[jax.Array, tuple[Cache, ...]]:
    """The residual stream ``[B, T, D]`` after all layers, and the new caches, one per layer.

    `apply` is `apply_block` or `QuantizedLayer`, with the arguments bound that all layers share;
    `layers` are the weights, `hidden` the embeddings and `positions` int ``[B, T]``.
    """
    attends = [attend_of(attend, i) for i in range(len(layers))]

    # Layers that attend alike, with the same options and RoPE, share one trace and one lowered
    # function; the compiler inlines it.
    @functools.partial(jax.jit, static_argnames=("number", "options", "rope"))
    def apply_one(
        layer: Any,
        hidden: jax.Array,
        angles: jax.Array | None,
        cache: Cache,
        number: int,
        options: AttentionOptions,
        rope: Rope | None,
    ) -> tuple[jax.Array, Cache]:
        return apply(layer, hidden, angles, attends[number], cache, options, rope)

    angles = {rope: rope.angles(positions) for rope in config.ropes}
    new_caches = []
    for i, (layer, cache) in enumerate(zip(layers, caches, strict=True)):
        options, rope = config.attention_options(i), config.rope_of(i)
        rotated = None if rope is None else angles[rope]
        number = next(j for j, other in enumerate(attends) if other is attends[i])
        hidden, new_cache = apply_one(layer, hidden, rotated, cache, number, options, rope)
        new_caches.append(new_cache)
    return hidden, tuple(new_caches)


AnyDecoder = TypeVar("AnyDecoder", bound=Any)


def for_length(decoder: AnyDecoder, max_length: int) -> AnyDecoder:
    """The same weights for sequences of up to `max_length` tokens.

    They get LongRoPE's short factors if these sequences need them and the config has the long ones;
    otherwise the decoder itself is returned.
    """
    config = config_for_length(decoder.config, max_length)
    return decoder if config is decoder.config else dataclasses.replace(decoder, config=config)


def config_for_length(config: TransformerConfig, max_length: int) -> TransformerConfig:
    """What `for_length` makes of a decoder's config."""
    scaling = config.rope_scaling
    if not isinstance(scaling, LongRopeScaling):
        return config
    original = scaling.original_max_length
    if not max_length <= original < config.max_length:
        return config
    return dataclasses.replace(config, max_length=original)


def warn_of_long_factors(
    config: TransformerConfig, prompt: int, max_length: int, *, stacklevel: int
) -> None:
    """Warns if a prompt for LongRoPE's short factors gets the long ones, as it may grow.

    `stacklevel` is counted from the caller.
    """
    scaling = config.rope_scaling
    if not isinstance(scaling, LongRopeScaling):
        return
    original = scaling.original_max_length
    if prompt <= original < max_length:
        warnings.warn(
            f"LongRoPE has other factors for sequences of up to {original} tokens than for longer "
            f"ones. Sequences that may grow beyond, here to {max_length}, take the long factors "
            "from their first token on, so that what this model says of shorter texts differs from "
            "what transformers computes. Where no sequence gets so long, give "
            f"max_length={original} or less (of a command: --max-length), or fewer new tokens.",
            UserWarning,
            stacklevel=stacklevel + 1,
        )


def unstack(model: Transformer, *, consume: bool = False) -> Decoder:
    """Splits a model's stacked weights into layers.

    Args:
      model: the model.
      consume: delete each stacked array of the model once it is split, so that memory holds the
        weights only once. The model cannot be used afterwards.

    Returns:
      The decoder. It shares the arrays that are not stacked with the model.
    """
    config = model.config
    places = [config.stack_of(layer) for layer in range(config.num_layers)]
    names = dict.fromkeys(name for name, _ in places)
    stacks = {name: _layers(getattr(model, name), consume) for name in names}
    return Decoder(
        embedding=model.embedding.get_value(),
        layers=tuple(stacks[name][number] for name, number in places),
        norm=model.norm.scale.get_value(),
        lm_head=None if model.lm_head is None else model.lm_head.get_value(),
        config=model.config,
        dtype=model.dtype,
    )


def _layers(stack: Block, consume: bool) -> list[LayerParams]:
    stacked, tree = jax.tree.flatten(nnx.to_pure_dict(nnx.state(stack)))
    columns = []
    while stacked:
        array = stacked.pop(0)
        columns.append(_rows(array))
        if consume:
            array.delete()
    return [jax.tree.unflatten(tree, leaves) for leaves in zip(*columns, strict=True)]


@jax.jit
def _rows(array: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(array[i] for i in range(array.shape[0]))


@functools.cache
def _block_graph(
    config: TransformerConfig,
    has_experts: bool,
    dtype: np.dtype,
    param_dtype: np.dtype,
    adapted: tuple[tuple[str, str], ...],
) -> Any:
    """The graph definition of a `Block` of this shape, without its arrays."""

    def make() -> Block:
        rngs = nnx.Rngs(0)
        block = Block(
            config, has_experts=has_experts, dtype=dtype, param_dtype=param_dtype, rngs=rngs
        )
        for part, name in adapted:
            module = getattr(block, part)
            setattr(module, name, AdaptedLinear(getattr(module, name), rngs=rngs))
        return block

    return nnx.graphdef(nnx.eval_shape(make))
