"""Google DeepMind's ``gemma``: turbojax attention in its models, turbojax caches in its sampler.

`with_turbojax` gives a model of the same parameters whose attention layers are intercepted, as
Linen allows it.
"""

import dataclasses
import functools
import inspect
import sys
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from turbojax import _checks
from turbojax.caches import AttentionOptions, CacheKind
from turbojax.flax import TurboAttentionFn
from turbojax.integrations._shared import (
    TRAINING,
    Settings,
    attend_next_token,
    attend_padded_prompt,
)

Model = TypeVar("Model")


def with_turbojax(
    model: Model,
    *,
    attention: TurboAttentionFn | None = TRAINING,
    cache: CacheKind = "exact",
    implementation: str | None = None,
) -> Model:
    """A model of ``gm.nn`` that attends with turbojax, in training and in ``gm.text.Sampler``.

    Args:
      model: a ``gm.nn.Transformer``, which are those of Gemma 2 and 3, for text.
      attention: as `turbojax.integrations.tunix.use_turbojax`. Masks must be causal, so there are
        no images.
      cache: kind of the caches that the sampler gets, as in `turbojax.flax.TurboAttention`. They
        serve one turn of a conversation.
      implementation: of the cache's ops; None to choose.

    Returns:
      A model of a subclass, for the same parameters.

    Raises:
      TypeError: if the model is another one, or `attention` not a `TurboAttentionFn`.
      ValueError: if there is no such cache or implementation, or `attention` is not causal.
    """
    from gemma import gm

    if not isinstance(model, gm.nn.Transformer):
        raise TypeError(f"model is a {type(model).__qualname__}, must be a gm.nn.Transformer")
    known: Any = type(model)
    cls = _model_class(known, Settings(attention, cache, implementation))
    names = {x.name for x in dataclasses.fields(known) if x.init} - {"parent", "name"}
    fields = {name: getattr(model, name) for name in names}
    changed: Model = cls(**fields)
    return changed


@functools.cache
def _model_class(base: Any, settings: Settings) -> Any:
    """A model's class whose attention layers are intercepted, and whose caches are turbojax's."""
    from gemma import gm

    attention = gm.nn.Attention
    signature = inspect.signature(attention.__call__)

    def intercept(call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        layer = context.module
        if not isinstance(layer, attention) or context.method_name != "__call__":
            return call(*args, **kwargs)
        given = signature.bind(layer, *args, **kwargs).arguments
        if given["cache"] is None and settings.attention is None:
            return call(*args, **kwargs)
        return _attend(settings, **given)

    class TurboModel(base):
        def _apply_attention(self, *args: Any, **kwargs: Any) -> Any:
            with nn.intercept_methods(intercept):
                return super()._apply_attention(*args, **kwargs)

        def init_cache(
            self, *, batch_size: int, dtype: Any, cache_length: int, sharding: Any = None
        ) -> dict[str, Any]:
            """Empty caches by the names of the layers."""
            if sharding is not None:
                raise NotImplementedError(f"{sharding=} must be None for a turbojax cache")
            c = self.config
            windows = [
                c.sliding_window_size if kind == gm.nn.AttentionType.LOCAL_SLIDING else None
                for _, kind in zip(range(c.num_layers), c.attention_types, strict=False)
            ]
            sizes = (batch_size, cache_length, c.num_kv_heads, c.head_dim, dtype)
            return {
                f"layer_{i}": _layer_cache(settings.init_cache(*sizes, window))
                for i, window in enumerate(windows)
            }

    TurboModel.__name__, TurboModel.__qualname__ = base.__name__, base.__qualname__
    TurboModel.__doc__ = base.__doc__
    return TurboModel


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["cache"], meta_fields=["shown_length"]
)
@dataclasses.dataclass(frozen=True)
class _Held:
    """A turbojax cache in the place of an array of keys ``[B, S, K, H]`` in gemma's sampler.

    The sampler cuts arrays to the prompt's length (`shown_length` becomes `S`) and puts them back;
    the cache stays whole.
    """

    cache: Any
    shown_length: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch = self.cache.lengths.shape[0]
        return batch, self.shown_length, self.cache.num_kv_heads, self.cache.head_dim

    def __getitem__(self, key: tuple[Any, ...]) -> "_Held":
        """What a prompt will be stored in, ``[:, :length, :, :]``."""
        lengths = self.cache.lengths
        if _checks.is_concrete(lengths) and (lengths > 0).any():
            raise NotImplementedError(
                f"the cache holds {lengths.tolist()} tokens, must be empty before a prompt: a "
                "turbojax cache serves one turn; begin anew without last_state"
            )
        return dataclasses.replace(self, shown_length=min(key[1].stop, self.shown_length))

    @property
    def at(self) -> "_Place":
        return _Place(self)


@dataclasses.dataclass(frozen=True)
class _Place:
    """``held.at[:, :length, :, :].set(new)``: the cache that took the prompt, at full length."""

    held: _Held

    def __getitem__(self, key: tuple[Any, ...]) -> "_Place":
        return self

    def set(self, new: _Held) -> _Held:
        return dataclasses.replace(new, shown_length=self.held.shown_length)


def _layer_cache(cache: Any) -> dict[str, Any]:
    """A layer's cache as the sampler expects it."""
    batch, length = cache.lengths.shape[0], cache.max_length
    if any(x.shape[:1] != (batch,) for x in jax.tree.leaves(cache)):
        raise NotImplementedError(
            f"a {type(cache).__name__} has arrays that are not [batch, ...], as gemma takes a "
            "cache's to be: take one without pages"
        )
    return {
        "k": _Held(cache, length),
        "v": jnp.zeros((batch, length, 0, 0), cache.dtype),
        "end_index": jnp.zeros(batch, jnp.int32),
        "positions": jnp.zeros((batch, length), jnp.int32),
    }


def _attend(
    settings: Settings,
    self: Any,
    x: jax.Array,
    segment_pos: jax.Array,
    cache: dict[str, Any] | None,
    attn_mask: jax.Array,
) -> tuple[dict[str, Any] | None, jax.Array]:
    """What ``gm.nn.Attention`` does, with turbojax: the new cache and ``[B, T, D]``."""
    query, key, value = _heads(self, x, segment_pos)
    is_local = self.attn_type.name == "LOCAL_SLIDING"
    options = AttentionOptions(
        scale=float(self.query_pre_attn_scalar),
        local_window_size=self.sliding_window_size if is_local else None,
        logits_soft_cap=self.attn_logits_soft_cap,
    )
    if cache is None:
        out = settings.attend(query, key, value, attn_mask, options)
    else:
        how: dict[str, Any] = {"options": options, "implementation": settings.implementation}
        held = cache["k"].cache
        if x.shape[1] > 1:
            out, held = attend_padded_prompt(query, key, value, held, attn_mask, **how)
        else:
            # The sampler gives the prompt's last token again, and repeats tokens of sequences that
            # have ended; positions tell which tokens are new.
            new = segment_pos[:, 0] >= held.lengths
            out, held = attend_next_token(query, key, value, held, new, **how)
        cache = {
            **cache,
            "k": dataclasses.replace(cache["k"], cache=held),
            "end_index": cache["end_index"] + x.shape[1],
        }
    return cache, self.attn_vec_einsum("BTNH,NHD->BTD", out.astype(value.dtype))


def _heads(self: Any, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values as the layer makes them, without its scale."""
    if self.use_qkv_einsum:
        query, key, value = self.qkv_einsum("BTD,SNDH->SBTNH", x)
    else:
        query = self.q_einsum("BTD,NDH->BTNH", x)
        key, value = self.kv_einsum("BSD,CKDH->CBSKH", x)
    if self.use_qk_norm:
        query, key = self._query_norm(query), self._key_norm(key)
    from gemma import gm

    rope = functools.partial(
        sys.modules[gm.nn.Attention.__module__]._positional_embeddings.apply_rope,
        base_frequency=self.rope_base_frequency,
        scale_factor=self.rope_scale_factor,
    )
    return rope(query, positions), rope(key, positions), value
