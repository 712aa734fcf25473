"""Levels by position alone: a map that is made once, outside of the training step."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from turbojax import _checks
from turbojax.attention.score_modifiers import NO_MODIFIERS, ScoreModifiers
from turbojax.levels.grid import LEVELS, Grid


class Pattern:
    """What patterns have in common: they depend on positions, not on data."""

    def levels(
        self,
        query_tokens: int,
        key_tokens: int,
        *,
        block_q: int = 128,
        block_kv: int = 128,
        is_causal: bool = False,
    ) -> jax.Array:
        """The pattern's map for sequences of these lengths.

        Args:
          query_tokens: T.
          key_tokens: S.
          block_q: queries of a block.
          block_kv: keys of a block, a multiple of 8.
          is_causal: a query sees the keys up to its own position.

        Returns:
          int8 ``[1, 1, ceil(T / block_q), ceil(S / block_kv)]``, for all sequences and heads.

        Raises:
          TypeError: if a number is not an integer.
          ValueError: if one is not positive or `block_kv` not a multiple of 8.
        """
        grid = Grid(query_tokens, key_tokens, block_q, block_kv, bool(is_causal))
        return _levels(self, grid)

    def on(
        self,
        grid: Grid,
        query_length: jax.Array,
        key_length: jax.Array,
        modifiers: ScoreModifiers = NO_MODIFIERS,
    ) -> jax.Array:
        """The map for sequences with these lengths: int8 ``[B or 1, T_r, T_c]``.

        With segments, a row's first tokens (the sinks) are those of the first block that it sees.
        """
        visible = grid.visible(query_length, key_length, modifiers)
        distance = jnp.broadcast_to(grid.distance(modifiers), visible.shape)
        has_segments = modifiers.query_segment_ids is not None
        first = grid.first(visible) if has_segments else None
        level = jnp.where(visible, self._wanted(grid, grid.distance(modifiers), first), 0)
        # A row that sees something attends to something: at least to the nearest blocks.
        has_fine = jnp.any(level == 1, axis=-1, keepdims=True)
        hidden = jnp.iinfo(jnp.int32).max
        nearest = jnp.min(jnp.where(visible, distance, hidden), axis=-1, keepdims=True)
        level = jnp.where(visible & ~has_fine & (distance == nearest), 1, level)
        return level.astype(jnp.int8)

    def _wanted(self, grid: Grid, distance: jax.Array, first: jax.Array | None) -> jax.Array:
        """Levels int32 ``[B or 1, T_r, T_c]``, without regard to what is visible.

        `distance` is that of `Grid.distance`; `first`, int32 ``[B, T_r, 1]``, is the block with a
        row's first tokens, 0 if not given.
        """
        raise NotImplementedError


@functools.partial(jax.jit, static_argnames=("pattern", "grid"))
def _levels(pattern: Pattern, grid: Grid) -> jax.Array:
    """A pattern's map for full sequences: int8 ``[1, 1, T_r, T_c]``."""
    return pattern.on(grid, *grid.lengths(None, None))[:, None]


def _near(
    grid: Grid, distance: jax.Array, first: jax.Array | None, window: int, sinks: int
) -> jax.Array:
    """Blocks with a key in the window or a sink: bool ``[B or 1, T_r, T_c]``."""
    first_key = jnp.arange(grid.columns, dtype=jnp.int32)[None, None] * grid.block_kv
    if first is not None:
        first_key = first_key - first * grid.block_kv
    return (distance <= window) | (first_key < sinks)


def _check_tokens(**tokens: int) -> None:
    for name, count in tokens.items():
        _checks.check_integer(name, count)
        if not 0 <= count < 2**30:
            raise ValueError(f"{name}={count} must be at least 0 and below 2**30")


@dataclasses.dataclass(frozen=True)
class LocalWindow(Pattern):
    """Near keys one by one, farther ones as means, the coarser the farther they are.

    Distances are in tokens, between the nearest query and key of two blocks; the diagonal has 0.
    Without `is_causal` they reach to both sides.

    Attributes:
      window: up to this distance, level 1.
      bounds: up to which distance blocks beyond have level 2, 4 and 8; farther ones are skipped.
        None: no limit. If not given, ``(window, window, None)``: level 8 beyond the window.
      sinks: the blocks of so many first tokens have level 1.

    Raises:
      TypeError: if a number is not an integer.
      ValueError: if one is negative, there are not three bounds, or they decrease.
    """

    window: int = 896
    bounds: tuple[int | None, ...] = ()
    sinks: int = 1

    def __post_init__(self) -> None:
        _check_tokens(window=self.window, sinks=self.sinks)
        object.__setattr__(self, "bounds", tuple(self.bounds) or (self.window, self.window, None))
        if len(self.bounds) != len(LEVELS) - 1:
            raise ValueError(f"bounds={self.bounds} must be three, of the levels 2, 4 and 8")
        for bound in self.bounds:
            if bound is not None:
                _check_tokens(bounds=bound)
        reach = [float("inf") if bound is None else bound for bound in self.bounds]
        if sorted(reach) != reach or reach[0] < self.window:
            raise ValueError(
                f"bounds={self.bounds} must not decrease, from window={self.window} on"
            )

    def _wanted(self, grid: Grid, distance: jax.Array, first: jax.Array | None) -> jax.Array:
        level = jnp.zeros_like(distance)
        for r, bound in zip(reversed(LEVELS[1:]), reversed(self.bounds), strict=True):
            reached = jnp.ones_like(distance, bool) if bound is None else distance <= bound
            level = jnp.where(reached, r, level)
        near = _near(grid, distance, first, self.window, self.sinks)
        return jnp.where(near, 1, level)


@dataclasses.dataclass(frozen=True)
class Strided(Pattern):
    """Near keys one by one; of farther blocks every `stride`-th finely, the others coarsely.

    Attributes:
      window: up to this distance, level 1; see `LocalWindow`.
      stride: blocks 0, `stride`, ``2 * stride``, ... are the regular ones.
      level: level of the regular blocks: 0, 1, 2, 4 or 8.
      others: level of the others.
      sinks: the blocks of so many first tokens have level 1.

    Raises:
      TypeError: if a number is not an integer.
      ValueError: if one is negative, the stride below 1, or a level not one of these.
    """

    window: int = 1024
    stride: int = 8
    level: int = 1
    others: int = 8
    sinks: int = 1

    def __post_init__(self) -> None:
        _check_tokens(window=self.window, sinks=self.sinks)
        _checks.check_sizes(stride=self.stride)
        for name in ("level", "others"):
            _checks.check_integer(name, getattr(self, name))
            if getattr(self, name) not in (0, *LEVELS):
                raise ValueError(f"{name}={getattr(self, name)} must be one of {(0, *LEVELS)}")

    def _wanted(self, grid: Grid, distance: jax.Array, first: jax.Array | None) -> jax.Array:
        column = jnp.arange(grid.columns, dtype=jnp.int32)[None, None]
        level = jnp.where(column % self.stride == 0, self.level, self.others)
        near = _near(grid, distance, first, self.window, self.sinks)
        return jnp.where(near, 1, level)
