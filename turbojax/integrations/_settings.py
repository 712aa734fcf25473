"""The arguments of adapters, checked once."""

import dataclasses
from typing import Any

import jax

from turbojax.attention.options import check_implementation
from turbojax.caches import AttentionOptions, CacheKind, init_layer_cache, kind_for, window_to_keep
from turbojax.flax import TurboAttentionFn

TRAINING = TurboAttentionFn(is_causal=True, segments=True)
"""Attention of the training step if no other is asked for."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a model attends; hashable, so that what is compiled is shared.

    `attention` attends where there is no cache; None for the model's own attention. Raises
    TypeError if it is no `TurboAttentionFn`; ValueError if it is not causal, or there is no such
    cache or implementation.
    """

    attention: TurboAttentionFn | None
    cache: CacheKind
    implementation: str | None

    def __post_init__(self) -> None:
        if self.attention is not None:
            check_attention(self.attention)
        check_implementation(self.implementation, kind_for(self.cache).implementations)

    def init_cache(
        self, batch: int, tokens: int, heads: int, channels: int, dtype: Any, window: int | None
    ) -> Any:
        """An empty cache of a layer, only as long as its window reaches if the kind can do that."""
        return init_layer_cache(
            batch,
            tokens,
            heads,
            channels,
            kind=self.cache,
            dtype=dtype,
            local_window_size=window_to_keep(self.cache, window),
        )

    def attend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        mask: jax.Array,
        options: AttentionOptions,
    ) -> jax.Array:
        """Attends within whole sequences under a mask ``[B or 1, T, S]``."""
        assert self.attention is not None
        fn = dataclasses.replace(self.attention, **options.arguments())
        return fn(query, key, value, mask=mask[:, None])


def check_attention(attention: object) -> None:
    """Raises TypeError or ValueError unless it is a causal `TurboAttentionFn`."""
    if not isinstance(attention, TurboAttentionFn):
        raise TypeError(f"{attention=} must be a TurboAttentionFn")
    if not attention.is_causal:
        raise ValueError(f"{attention=} must be causal: is_causal=True")
