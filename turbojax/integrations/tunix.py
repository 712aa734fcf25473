"""Tunix (``google-tunix``): turbojax attention in its models, and turbojax caches in its sampler.

`use_turbojax` changes a model in place: its attention layers, and what the sampler calls to make
a cache. Parameters keep their places, so that checkpoints, LoRA and weight transfer work on.
"""

import functools
import inspect
import sys
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from turbojax.caches import AttentionOptions, CacheKind
from turbojax.flax import TurboAttentionFn
from turbojax.integrations._shared import (
    TRAINING,
    Settings,
    attend_next_token,
    attend_padded_prompt,
)

Model = TypeVar("Model")

FAMILIES = ("llama3", "qwen2", "qwen3", "gemma", "gemma3")
"""Families of models whose attention is known, by their folders in ``tunix.models``."""


def use_turbojax(
    model: Model,
    *,
    attention: TurboAttentionFn | None = TRAINING,
    cache: CacheKind = "exact",
    implementation: str | None = None,
) -> Model:
    """Lets a model of Tunix attend with turbojax, in training and in ``tunix.generate.sampler``.

    Args:
      model: a ``Llama3``, ``Qwen2``, ``Qwen3``, ``Gemma`` or ``Gemma3`` of ``tunix.models``. It is
        changed in place; its parameters are not.
      attention: what attends where there is no cache, which is in training and scoring. Masks must
        be causal; with its `segments`, which is the default, they may also hide padding on either
        side and packed sequences. Scale, window and cap are the layer's own. None leaves the
        model's own attention there.
      cache: kind of the caches that the sampler gets, as in `turbojax.flax.TurboAttention`.
      implementation: of the cache's ops; None to choose.

    Returns:
      The same model.

    Raises:
      TypeError: if the model is another one, or `attention` not a `TurboAttentionFn`.
      ValueError: if there is no such cache or implementation, or `attention` is not causal.
    """
    settings = Settings(attention, cache, implementation)
    layers = _layers(model)
    for layer in layers:
        known: Any = type(layer.attn)
        _become(layer.attn, _attention_class(known, settings))
    known = type(model)
    _become(model, _model_class(known, settings))
    return model


def _become(module: object, cls: type) -> None:
    """Changes a module's class without the check of Flax, which watches attributes."""
    object.__setattr__(module, "__class__", cls)


def _layers(model: Any) -> list[Any]:
    """The decoder layers of a model of a known family."""
    known = [f"tunix.models.{family}.model" for family in FAMILIES]
    module = type(model).__module__
    layers = list(getattr(model, "layers", ()))
    if module not in known or not all(type(x.attn).__module__ == module for x in layers):
        raise TypeError(
            f"model is a {type(model).__qualname__} of {module}, must be one of "
            f"{', '.join(known)}, not changed before"
        )
    return layers


@functools.cache
def _model_class(base: Any, settings: Settings) -> Any:
    """A model's class whose `init_cache`, which the sampler calls, makes turbojax caches."""

    class TurboModel(base):
        def init_cache(self, batch_size: int, cache_size: int, dtype: Any) -> dict[str, Any]:
            """Empty caches by the names of the layers."""
            return {
                f"layer_{i}": settings.init_cache(
                    batch_size,
                    cache_size,
                    layer.attn.num_kv_heads,
                    layer.attn.head_dim,
                    dtype,
                    _options(layer.attn).local_window_size,
                )
                for i, layer in enumerate(self.layers)
            }

    return _named(TurboModel, base)


@functools.cache
def _attention_class(base: Any, settings: Settings) -> Any:
    """A class of attention layers whose `block` attends with turbojax."""
    signature = inspect.signature(base.block)

    class TurboAttention(base):
        def block(self, *args: Any, **kwargs: Any) -> tuple[Any, jax.Array]:
            """Attends as the base does; where it is called from has checkpoints around it."""
            call = signature.bind(self, *args, **kwargs)
            call.apply_defaults()
            given = call.arguments
            if given["cache"] is None and settings.attention is None:
                out: tuple[Any, jax.Array] = super().block(*args, **kwargs)
                return out
            heads = _heads(self, sys.modules[base.__module__], given)
            attended, cache = _attend(self, settings, heads, given)
            project = self.o_proj if hasattr(self, "o_proj") else self.attn_vec_einsum
            shard = _shard(sys.modules[base.__module__])
            return cache, shard(project(attended.astype(heads[0].dtype)), self.shd_config.act_btd)

    return _named(TurboAttention, base)


def _named(new: type, base: type) -> type:
    """Gives a class the base's names, which appear in repr and in names of scopes."""
    new.__name__, new.__qualname__, new.__doc__ = base.__name__, base.__qualname__, base.__doc__
    return new


def _heads(attn: Any, module: Any, given: dict[str, Any]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values as the layer makes them, without its scale."""
    x, shard = given["x"], _shard(module)
    if hasattr(attn, "q_proj"):  # Llama and Qwen
        heads = [attn.q_proj(x), attn.k_proj(x), attn.v_proj(x)]
    elif attn.use_qkv_einsum:
        heads = list(attn.qkv_einsum(x))
    else:
        heads = [attn.q_einsum(x), *attn.kv_einsum(x)]
    if hasattr(attn, "q_bias"):
        biases = (attn.q_bias, attn.k_bias, attn.v_bias)
        heads = [
            y + bias[...].astype(attn.config.dtype).reshape(1, 1, *y.shape[2:])
            for y, bias in zip(heads, biases, strict=True)
        ]
    query, key, value = (shard(y, attn.shd_config.act_btnh) for y in heads)
    for names in (("q_norm", "k_norm"), ("_query_norm", "_key_norm")):
        if hasattr(attn, names[0]):
            query, key = getattr(attn, names[0])(query), getattr(attn, names[1])(key)
    return _rotate(attn, module, query, given), _rotate(attn, module, key, given), value


def _rotate(attn: Any, module: Any, heads: jax.Array, given: dict[str, Any]) -> jax.Array:
    """The family's rotary embedding of queries or keys."""
    if "sin" in given:
        rotated: jax.Array = module.apply_rotary_embedding(heads, given["sin"], given["cos"])
        return rotated
    base = {}
    if hasattr(attn, "rope_base_frequency"):
        base = {
            "base_frequency": attn.rope_base_frequency,
            "scale_factor": attn.rope_scale_factor,
        }
    rotated = module.apply_rope(heads, given["segment_pos"], head_dim=attn.head_dim, **base)
    return rotated


def _shard(module: Any) -> Any:
    """The family's function that places activations on a mesh."""
    return module.shard if hasattr(module, "shard") else module.sharding_utils.shard


def _options(attn: Any) -> AttentionOptions:
    """Scale, window and cap of a layer."""
    scale = getattr(attn, "scale", None) or getattr(attn, "query_pre_attn_scalar", None)
    kind = getattr(attn, "attn_type", None)
    is_local = kind is not None and kind.name == "LOCAL_SLIDING"
    return AttentionOptions(
        scale=float(attn.head_dim**-0.5 if scale is None else scale),
        local_window_size=attn.sliding_window_size if is_local else None,
        logits_soft_cap=getattr(attn, "attn_logits_soft_cap", None),
    )


def _attend(
    attn: Any,
    settings: Settings,
    heads: tuple[jax.Array, jax.Array, jax.Array],
    given: dict[str, Any],
) -> tuple[jax.Array, Any]:
    """Attends within whole sequences, or through a cache, which stores the new tokens."""
    cache, mask, tokens = given["cache"], given["attn_mask"], heads[0].shape[1]
    if cache is None:
        segments = given.get("segment_ids")
        if mask is None:  # to the model: everything; attention says that it must be causal
            mask = jnp.ones((1, tokens, tokens), bool)
        if segments is not None:
            mask = mask.astype(bool) & (segments[:, :, None] == segments[:, None])
        return settings.attend(*heads, mask, _options(attn)), None
    how: Any = {"options": _options(attn), "implementation": settings.implementation}
    if tokens > 1:
        return attend_padded_prompt(*heads, cache, mask, **how)
    # The sampler hides padding tokens, even those that the model has generated.
    new = mask[:, 0].sum(1) > cache.lengths
    return attend_next_token(*heads, cache, new, **how)
