"""What self-attention with a cache does, whichever Flax module holds its parameters."""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks
from turbojax.attention.options import check_implementation, require_plain
from turbojax.caches import (
    AttentionOptions,
    CacheKind,
    LayerCache,
    PooledAttention,
    attend_new_tokens,
    attend_prompt,
    init_layer_cache,
    kind_for,
    window_to_keep,
)
from turbojax.caches.whole import WholeAttention, attend_within, within_implementation
from turbojax.flax.projections import check_head_dim
from turbojax.numerics.config import TurboConfig
from turbojax.rotary import Rope


class Layers(Protocol):
    """A module's parameters in use, see `AttentionProjections`."""

    def given_sinks(self) -> tuple[jax.Array, ...]:
        """The sinks, if there are any."""
        ...

    def heads(
        self, x: jax.Array, angles: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values."""
        ...

    def output(self, attended: jax.Array) -> jax.Array:
        """Maps ``[B, T, N, H]`` to ``[B, T, D]``."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelfAttention:
    """How a module attends, checked and completed; static under `jit`.

    Fields are arguments of `TurboAttention`, completed by those that were not given. `attention`
    attends within whole sequences and within prompts. If it is None, the latter attend as the cache
    does with prompts, and so do the former, or exactly where that needs the cache.

    Raises TypeError if a size is not an integer, or another argument of another kind; ValueError if
    sizes do not fit, the cache is of no known kind, or there is no such implementation;
    NotImplementedError if pooled attention cannot attend with the options.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: Any
    head_dim: Any
    rope: Any
    cache: CacheKind
    attention: WholeAttention | None
    options: AttentionOptions
    implementation: Any
    dtype: Any

    def __post_init__(self) -> None:
        hidden_size, num_heads, rope = self.hidden_size, self.num_heads, self.rope
        num_kv_heads = num_heads if self.num_kv_heads is None else self.num_kv_heads
        sizes = {"hidden_size": hidden_size, "num_heads": num_heads}
        _checks.check_sizes(**sizes, num_kv_heads=num_kv_heads)
        _checks.check_head_groups(num_heads, num_kv_heads)
        if rope not in ("default", None) and not isinstance(rope, Rope):
            raise TypeError(f"rope={rope!r} must be a Rope, 'default' or None")
        head_dim = self.head_dim
        if isinstance(rope, Rope):
            head_dim = check_head_dim(rope, head_dim)
        elif head_dim is None:
            if hidden_size % num_heads:
                raise ValueError(
                    f"{hidden_size=} must be a multiple of {num_heads=} without head_dim"
                )
            head_dim = hidden_size // num_heads
        _checks.check_sizes(head_dim=head_dim)
        _check_attention(self.attention, self.options)
        complete = {"num_kv_heads": num_kv_heads, "head_dim": head_dim}
        complete |= {"rope": Rope(head_dim) if rope == "default" else rope}
        for name, value in (complete | {"dtype": jnp.dtype(self.dtype)}).items():
            object.__setattr__(self, name, value)
        jax.eval_shape(lambda: self.init_cache(1, 1))  # refuses unknown kinds now
        check_implementation(self.implementation, kind_for(self.cache).implementations)

    def init_cache(self, batch_size: int, max_length: int) -> LayerCache:
        """An empty cache; with a window it holds only what the window needs, if the kind can."""
        return init_layer_cache(
            batch_size,
            max_length,
            self.num_kv_heads,
            self.head_dim,
            kind=self.cache,
            dtype=self.dtype,
            local_window_size=window_to_keep(self.cache, self.options.local_window_size),
        )

    def whole(
        self,
        layers: Layers,
        x: jax.Array,
        positions: jax.Array | None,
        lengths: jax.Array | None,
    ) -> jax.Array:
        """Attends within whole sequences; see `TurboAttention.__call__`."""
        x, lengths = self._check(x, lengths)
        if positions is not None:
            positions = self._check_positions(positions, x)
        angles = self._angles(_places(x) if positions is None else positions)
        attended = self._attend(*layers.heads(x, angles), lengths, *layers.given_sinks())
        out = layers.output(attended)
        return _hide_padding(out, lengths)

    def prefill(
        self, layers: Layers, x: jax.Array, lengths: jax.Array | None, cache: LayerCache
    ) -> tuple[jax.Array, LayerCache]:
        """Attends within prompts and stores them; see `TurboAttention.prefill`."""
        x, known = self._check(x, lengths, cache)
        held = cache.lengths > 0
        if _checks.is_concrete(held) and np.any(np.asarray(held)):
            raise ValueError(
                f"cache.lengths={cache.lengths.tolist()} must be 0 before a prompt: call "
                "init_cache to begin anew, or decode to go on"
            )
        lengths = jnp.where(held, 0, x.shape[1] if known is None else known)
        attend = attend_prompt(
            lengths, implementation=self.implementation, attention=self.attention
        )
        query, key, value = layers.heads(x, self._angles(_places(x)))
        out, cache = attend(query, key, value, cache, self.options, *layers.given_sinks())
        cache = dataclasses.replace(cache, overflowed=cache.overflowed | held)
        return _hide_padding(layers.output(out), lengths), cache

    def decode(
        self, layers: Layers, x: jax.Array, cache: LayerCache
    ) -> tuple[jax.Array, LayerCache]:
        """Stores new tokens and attends to all that is held; see `TurboAttention.decode`."""
        x, _ = self._check(x, None, cache)
        angles = self._angles(cache.lengths[:, None] + _places(x))
        query, key, value = layers.heads(x, angles)
        attend = attend_new_tokens(self.implementation)
        out, cache = attend(query, key, value, cache, self.options, *layers.given_sinks())
        return layers.output(out), cache

    def _angles(self, positions: jax.Array) -> jax.Array | None:
        """Angles of positions ``[B, T]``; None without a rotary embedding."""
        return None if self.rope is None else self.rope.angles(positions)

    def _attend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        lengths: jax.Array | None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """Causal attention within whole sequences, ``[B, T, N, H]``."""
        kind, attention = kind_for(self.cache), self.attention
        if attention is None:
            attention = kind.whole_attention(self.cache)
        name = within_implementation(self.implementation, attention, kind.implementations)
        return attend_within(query, key, value, lengths, attention, self.options, name, sinks=sinks)

    def _check(
        self, x: jax.Array, lengths: jax.Array | None, cache: LayerCache | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Checked tokens, 0 in the padding, and int32 lengths within ``0..T``.

        Raises TypeError if dtypes are not supported, ValueError if a shape or length does not fit,
        or the cache is of another batch.
        """
        if x.ndim != 3 or x.shape[2] != self.hidden_size or 0 in x.shape:
            raise ValueError(f"{x.shape=} must be [B, T, {self.hidden_size}], no axis empty")
        _checks.check_float_dtype("x", x)
        if cache is not None and cache.lengths.shape != x.shape[:1]:
            raise ValueError(
                f"{x.shape=} must have {cache.lengths.shape[0]} sequences, as the cache has"
            )
        if lengths is None:
            return x, None
        batch, tokens = x.shape[:2]
        lengths = jnp.clip(_checks.check_lengths("lengths", lengths, batch, tokens), 0, tokens)
        return _hide_padding(x, lengths), lengths

    def _check_positions(self, positions: Any, x: jax.Array) -> jax.Array:
        positions = _checks.as_int32("positions", positions)
        if self.rope is None:
            raise ValueError(f"{positions.shape=} must be None: there is no rotary embedding")
        if positions.shape != x.shape[:2]:
            raise ValueError(f"{positions.shape=} must be {x.shape[:2]}, one per token")
        return positions


def _check_attention(attention: object, options: object) -> None:
    if not isinstance(options, AttentionOptions):
        raise TypeError(f"options={options!r} must be AttentionOptions")
    if isinstance(attention, PooledAttention):
        require_plain(options, "pooled attention", but_scale=True)
    elif not isinstance(attention, TurboConfig) and attention not in ("exact", None):
        raise TypeError(
            f"attention={attention!r} must be 'exact', a TurboConfig or PooledAttention"
        )


def _hide_padding(x: jax.Array, lengths: jax.Array | None) -> jax.Array:
    """``[B, T, D]`` with 0 past the lengths."""
    if lengths is None:
        return x
    return jnp.where(_places(x)[:, :, None] < lengths[:, None, None], x, 0)


def _places(x: jax.Array) -> jax.Array:
    """Positions of the tokens of ``[B, T, D]`` in `x`, int32 ``[B, T]``."""
    return jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32)[None], x.shape[:2])
