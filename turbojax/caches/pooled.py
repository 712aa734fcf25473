"""How a layer attends to a prompt or a training text with pooled attention."""

import dataclasses
from typing import Any

import jax

from turbojax import _checks
from turbojax.attention import pooled as pooled_attention
from turbojax.attention.options import PLAIN, AttentionOptions, check_implementation, require_plain
from turbojax.attention.pooled.static import PooledOptions
from turbojax.attention.score_modifiers import of_layer
from turbojax.levels import (
    LocalWindow,
    Pattern,
    Policy,
    Threshold,
    TopK,
    level_density,
    select_levels,
)

POLICY_NAMES = ("threshold", "topk", "window")


@dataclasses.dataclass(frozen=True)
class PooledAttention:
    """Causal `pooled_attention` with the levels of a policy; static under `jit`.

    An `Attend`: `Transformer` takes it in training, `generate` and `start` take it for the prompt.

    Attributes:
      policy: see `turbojax.levels`. A pattern's levels are made when a function is traced; the
        others are chosen by every layer in every call, and have no gradient.
      block_q: queries that share a row of levels.
      block_kv: keys that share a level, a multiple of 8.
      implementation: of `pooled_attention`; None to choose.
      query_samples: of `select_levels`, for policies that estimate.
      key_means: the same.
    """

    policy: Policy
    block_q: int = 128
    block_kv: int = 128
    implementation: str | None = None
    query_samples: int = 4
    key_means: int = 4

    def __post_init__(self) -> None:
        """Checks the options, see `check_pooled`."""
        check_pooled(
            self.policy,
            self.block_q,
            self.block_kv,
            self.implementation,
            self.query_samples,
            self.key_means,
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
        """Attends over the given tokens alone; the cache passes through untouched.

        With `segment_ids`, int32 ``[B, T]``, it attends within segments, as of packed documents:
        ``functools.partial(pooled, segment_ids=ids)`` is an `Attend`.
        """
        levels = self.levels(query, key, options=options, segment_ids=segment_ids)
        out = self.attend(
            query, key, value, levels, options=options, sinks=sinks, segment_ids=segment_ids
        )
        return out, cache

    def levels(
        self,
        query: jax.Array,
        key: jax.Array,
        lengths: jax.Array | None = None,
        options: AttentionOptions = PLAIN,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """The levels of a layer.

        Args:
          query: ``[B, T, N, H]``.
          key: ``[B, T, K, H]``.
          lengths: optional int32 ``[B]``; what lies past them is padding.
          options: of the layer.
          segment_ids: optional int32 ``[B, T]``, of packed documents.

        Returns:
          int8 ``[B or 1, N or 1, ceil(T / block_q), ceil(T / block_kv)]``.

        Raises:
          NotImplementedError: if the layer has a window or a cap of its scores.
        """
        require_plain(options, "pooled attention", but_scale=True)
        if isinstance(self.policy, Pattern) and segment_ids is None:
            # Positions alone: a constant of the program, which `pooled_attention` can check.
            with jax.ensure_compile_time_eval():
                return self.policy.levels(
                    query.shape[1],
                    key.shape[1],
                    block_q=self.block_q,
                    block_kv=self.block_kv,
                    is_causal=True,
                )
        return select_levels(
            query,
            key,
            self.policy,
            block_q=self.block_q,
            block_kv=self.block_kv,
            scale=options.scale,
            is_causal=True,
            query_seq_lengths=lengths,
            key_value_seq_lengths=lengths,
            query_segment_ids=segment_ids,
            key_value_segment_ids=segment_ids,
            query_samples=self.query_samples,
            key_means=self.key_means,
        )

    def attend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        levels: jax.Array,
        lengths: jax.Array | None = None,
        options: AttentionOptions = PLAIN,
        sinks: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Attends under given levels.

        Args:
          query: ``[B, T, N, H]``.
          key: ``[B, T, K, H]``.
          value: ``[B, T, K, H]``.
          levels: see `levels`.
          lengths: optional int32 ``[B]``; what lies past them is padding.
          options: of the layer.
          sinks: float ``[N]`` of the layer, or None; levels are chosen without.
          segment_ids: optional int32 ``[B, T]``, of packed documents.

        Returns:
          ``[B, T, N, H]`` in the query's dtype.

        Raises:
          NotImplementedError: if the layer has a window or a cap of its scores.
        """
        _checks.check_query_key_value(query, key, value)
        require_plain(options, "pooled attention", but_scale=True)
        static = PooledOptions(
            True,
            scale=options.complete(query.shape[3]).scale,
            block_q=self.block_q,
            block_kv=self.block_kv,
            implementation=self.implementation,
        )
        out, _ = pooled_attention.attend(
            query,
            key,
            value,
            levels,
            lengths,
            lengths,
            options=static,
            modifiers=dataclasses.replace(
                of_layer(query, sinks),
                query_segment_ids=segment_ids,
                key_value_segment_ids=segment_ids,
            ),
        )
        return out

    def density(self, levels: jax.Array) -> jax.Array:
        """The share of dense causal attention's work that levels leave, a float32 scalar."""
        return level_density(levels, is_causal=True, block_q=self.block_q, block_kv=self.block_kv)

    def describe(self) -> dict[str, Any]:
        """The options as plain JSON values."""
        options = {x.name: getattr(self, x.name) for x in dataclasses.fields(self)}
        return {**options, "policy": repr(self.policy)}


def check_pooled(
    policy: object,
    block_q: int,
    block_kv: int,
    implementation: object,
    query_samples: int,
    key_means: int,
) -> None:
    """Raises TypeError or ValueError if fields of `PooledAttention` do not fit."""
    if not isinstance(policy, Policy):
        raise TypeError(f"policy is a {type(policy).__name__}, must be one of turbojax.levels")
    _checks.check_sizes(
        block_q=block_q, block_kv=block_kv, query_samples=query_samples, key_means=key_means
    )
    if block_kv % 8:
        raise ValueError(f"{block_kv=} must be a multiple of 8")
    check_implementation(implementation)


def pooled_by_name(
    name: str,
    *,
    window: int | None = None,
    block_size: int = 128,
    implementation: str | None = None,
    bounds: tuple[float, ...] | None = None,
    near: int | None = None,
    samples: int | None = None,
) -> PooledAttention:
    """The attention that names and numbers on a command line stand for.

    Args:
      name: ``"threshold"``, by cumulative attention (up to 0.62 at level 1, 0.77 at 2, 0.89 at 4
        and 0.97 at 8, estimated from 8 queries and 8 means of keys a block); ``"topk"``, the
        default `turbojax.levels.TopK`; or ``"window"``, tokens one by one up to a distance of
        `window`, and means of 8 beyond.
      window: tokens, that of the default `turbojax.levels.LocalWindow` (896) if not given; of
        ``"window"`` alone.
      block_size: tokens of a block of queries, and of keys.
      implementation: of `pooled_attention`; None to choose.
      bounds: of ``"threshold"`` and ``"topk"``, in place of those above: four cumulative shares of
        the attention, or of the visible blocks, up to which blocks have level 1, 2, 4 and 8.
      near: of the same, tokens: nearer blocks are at level 1 whatever their importance, 0 if not
        given. A window, and beside it the most important blocks that the bounds leave room for.
      samples: of the same, the queries, and the means of keys, of a block that importance is
        estimated from; 8 of ``"threshold"`` and 4 of ``"topk"`` if not given.

    Raises:
      TypeError: if a number is not an integer.
      ValueError: if there is no such name, or a number does not fit or has no effect.
    """
    if name not in POLICY_NAMES:
        raise ValueError(f"policy {name!r} must be one of {', '.join(POLICY_NAMES)}")
    if window is not None and name != "window":
        raise ValueError(f"{window=} is for policy 'window', not {name!r}")
    if name == "window":
        for option, value in {"bounds": bounds, "near": near, "samples": samples}.items():
            if value is not None:
                raise ValueError(f"{option}={value} is for other policies, not 'window'")
        return PooledAttention(
            LocalWindow() if window is None else LocalWindow(window),
            block_size,
            block_size,
            implementation,
        )
    if bounds is not None and len(bounds) != 4:
        raise ValueError(f"{bounds=} must be four, of the levels 1, 2, 4 and 8")
    if name == "threshold":
        # The published bounds (0.4, 0.5, 0.6, 0.8) leave out too much of a small model's attention.
        policy: Policy = Threshold(bounds or (0.62, 0.77, 0.89, 0.97), near=near or 0)
        samples = 8 if samples is None else samples
    else:
        names = ("level1", "level2", "level4", "level8")
        fractions: dict[str, Any] = dict(zip(names, bounds or (), strict=False))
        policy = TopK(**fractions, near=near or 0)
        samples = 4 if samples is None else samples
    return PooledAttention(policy, block_size, block_size, implementation, samples, samples)
