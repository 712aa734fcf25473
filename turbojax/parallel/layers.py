"""How a model's layers attend where its tokens are split over devices: an `Attend`."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from turbojax.attention.options import PLAIN, AttentionOptions, require_plain
from turbojax.attention.score_modifiers import of_layer
from turbojax.caches.pooled import PooledAttention
from turbojax.levels import Pattern, SimilarityCap, estimate, select_levels
from turbojax.numerics.config import TurboConfig
from turbojax.parallel.context import ring_attention, ring_pooled_attention
from turbojax.parallel.zigzag import Order, check_blocks, check_order, chunks
from turbojax.sharding.axes import Axes


@dataclasses.dataclass(frozen=True)
class ContextAttention:
    """Causal attention over a ring, within a model: an `Attend` whose cache passes through.

    Inside `jax.shard_map` over the sequence axes it is called as it is. Elsewhere it opens a
    `shard_map` for the attention alone: the rest of the model then is split by jax, as its tokens
    are. For packed documents ``functools.partial(attention, segment_ids=ids)`` is an `Attend`, too.

    With ``order="zigzag"`` the model's tokens are in this order and their positions are
    `positions`; the result is of the same tokens, and nothing is moved but keys and values.

    Attributes:
      axes: over which sequences, heads and tokens are split; `axes.sequence` must be there.
      attention: ``"exact"``, numerics, or a `turbojax.models.PooledAttention`. Its levels are
        chosen on each device for its own queries; policies that estimate need means of all keys,
        which are gathered.
      order: of the tokens.
      implementation: of `ring_attention`; a `PooledAttention` names its own.

    Raises:
      TypeError: if `axes` or `attention` is of another kind.
      ValueError: if there is no sequence axis or no such order, or there are two implementations.
      NotImplementedError: if the levels' policy looks at all keys.
    """

    axes: Axes
    attention: Literal["exact"] | TurboConfig | PooledAttention = "exact"
    order: Order = "natural"
    implementation: str | None = None

    def __post_init__(self) -> None:
        check_order(self.order)
        if not isinstance(self.axes, Axes):
            raise TypeError(f"axes is a {type(self.axes).__name__}, must be Axes")
        if not self.axes.sequence:
            raise ValueError(f"{self.axes} must have a sequence axis")
        found = self.attention
        if not isinstance(found, TurboConfig | PooledAttention) and found != "exact":
            raise TypeError(f"attention={found!r} must be 'exact', a TurboConfig or pooled")
        if isinstance(found, PooledAttention):
            if self.implementation is not None:
                raise ValueError(f"{self.implementation=} must be None: pooled attention has one")
            if isinstance(found.policy, SimilarityCap):
                raise NotImplementedError(
                    f"policy={found.policy} compares all keys, which no device has"
                )

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        cache: Any = None,
        options: AttentionOptions = PLAIN,
        sinks: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Attends over the given tokens alone, see `Attend`.

        Args:
          query: ``[B, T, N, H]``, rotated; inside `jax.shard_map` this device's.
          key: ``[B, T, K, H]``, rotated.
          value: ``[B, T, K, H]``.
          cache: passes through.
          options: of the layer.
          sinks: float ``[N]`` of the layer, or None.
          segment_ids: optional int32 ``[B, T]``, of packed documents.

        Raises:
          NotImplementedError: if pooled attention shall have a window or a cap.
        """
        sinks = of_layer(query, sinks).sinks
        operands = (query, key, value, sinks, segment_ids)
        if set(self.axes.of_dimension("sequence")) <= _manual_axes():
            return self._attend(*operands, options=options), cache
        dims = ("BTNH", "BSKH", "BSKH", "N", "BT")
        specs = tuple(
            None if x is None else self.axes.spec(names)
            for names, x in zip(dims, operands, strict=True)
        )
        call = jax.shard_map(
            lambda *arrays: self._attend(*arrays, options=options),
            mesh=self.axes.mesh,
            in_specs=specs,
            out_specs=specs[0],
        )
        return call(*operands), cache

    def _attend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        sinks: jax.Array | None,
        segment_ids: jax.Array | None,
        *,
        options: AttentionOptions,
    ) -> jax.Array:
        """This device's part."""
        arguments: dict[str, Any] = {
            "axis_name": self.axes.of_dimension("sequence"),
            "order": self.order,
            "is_causal": True,
            "sinks": sinks,
            "query_segment_ids": segment_ids,
            "key_value_segment_ids": segment_ids,
        }
        found = self.attention
        if not isinstance(found, PooledAttention):
            arguments |= {"attention": found, "implementation": self.implementation}
            return ring_attention(query, key, value, **arguments, **options.arguments())  # type: ignore[return-value]
        require_plain(options, "pooled attention", but_scale=True)
        arguments["implementation"] = found.implementation
        levels = self._levels(found, query, key, segment_ids, options)
        return ring_pooled_attention(  # type: ignore[return-value]
            *(query, key, value, levels),
            block_q=found.block_q,
            block_kv=found.block_kv,
            scale=options.scale,
            **arguments,
        )

    def _levels(
        self,
        found: PooledAttention,
        query: jax.Array,
        key: jax.Array,
        segment_ids: jax.Array | None,
        options: AttentionOptions,
    ) -> jax.Array:
        """The rows of levels of this device's queries, in their order."""
        names = self.axes.of_dimension("sequence")
        devices = jax.lax.axis_size(names)
        held = jnp.asarray(chunks(self.order, devices), jnp.int32)
        own, size = held[jax.lax.axis_index(names)], query.shape[1] // held.shape[1]
        check_blocks((found.block_q, found.block_kv), query.shape[1], held.shape[1], devices)
        whole = self._keys(found, query, key, names)
        ids = None if segment_ids is None else self._natural(segment_ids, names)
        parts = []
        for i in range(held.shape[1]):
            place = slice(i * size, (i + 1) * size)
            parts.append(
                select_levels(
                    *(query[:, place], whole, found.policy),
                    block_q=found.block_q,
                    block_kv=found.block_kv,
                    scale=options.scale,
                    is_causal=True,
                    query_segment_ids=None if segment_ids is None else segment_ids[:, place],
                    key_value_segment_ids=ids,
                    query_offset=own[i] * size,
                    query_samples=found.query_samples,
                    key_means=found.key_means,
                )
            )
        return jnp.concatenate(parts, axis=2)

    def _keys(
        self, found: PooledAttention, query: jax.Array, key: jax.Array, names: tuple[str, ...]
    ) -> jax.Array:
        """Keys ``[B, S, K, H]`` of all devices, as far as levels depend on them.

        Each key is replaced by the mean of its group of neighbours. Patterns read no keys.
        """
        batch, tokens, kv_heads, channels = key.shape
        if isinstance(found.policy, Pattern):
            return jnp.zeros((batch, tokens * jax.lax.axis_size(names), *key.shape[2:]), key.dtype)
        grid = estimate.check_arguments(query, key, found.block_q, found.block_kv, True)
        means = estimate.mean_keys(key, None, grid, found.key_means)
        means = jnp.transpose(means, (0, 3, 2, 1, 4)).reshape(batch, -1, kv_heads, channels)
        whole = self._natural(jax.lax.stop_gradient(means), names)
        return jnp.repeat(whole, found.block_kv // found.key_means, axis=1)

    def _natural(self, x: jax.Array, names: tuple[str, ...]) -> jax.Array:
        """What all devices have of ``[B, T, ...]``, in natural order."""
        parts = jax.lax.all_gather(x, names)
        held = chunks(self.order, parts.shape[0])
        pieces = {
            number: piece
            for part, numbers in zip(parts, held, strict=True)
            for number, piece in zip(numbers, jnp.split(part, len(numbers), axis=1), strict=True)
        }
        return jnp.concatenate([pieces[number] for number in sorted(pieces)], axis=1)


def _manual_axes() -> set[str]:
    return set(jax.sharding.get_abstract_mesh().manual_axes)
