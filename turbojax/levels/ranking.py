"""Levels by rank of importance: the policies `TopK` and `Threshold`."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks
from turbojax.attention.score_modifiers import NO_MODIFIERS, ScoreModifiers
from turbojax.levels.grid import LEVELS, Grid

MASS_UNIT = 2**24
"""Masses are added up as integers in this unit: sums of integers have no order."""

# A rank is an int32: bit 30 says that the block is forced, the bits below are those of a float32
# below 2 that ends in the block's number. What is not visible is negative.
_FORCED = 1 << 30
_NOT_FINITE = 1.5


def _check_ascending(name: str, values: tuple[float, ...], least: float) -> None:
    for value in values:
        _checks.check_number(name, value)
    if any(a > b for a, b in itertools.pairwise(values)):
        raise ValueError(f"{name}={values} must not decrease")
    if values[0] < least or values[-1] > 1:
        raise ValueError(f"{name}={values} must be between {least:g} and 1")


def _check_near(near: int) -> None:
    _checks.check_integer("near", near)
    if not 0 <= near < 2**30:
        raise ValueError(f"{near=} must be at least 0 and below 2**30")


def _shares(fraction: float, columns: int) -> np.ndarray:
    """int32 ``ceil(fraction * n)`` for n = 0..columns, as if fractions such as 0.05 were exact."""
    exact = fraction * np.arange(columns + 1)
    return np.minimum(np.ceil(exact - 1e-9 * exact), np.arange(columns + 1)).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class TopK:
    """The most important blocks finely, the next ones coarsely, the rest not at all.

    The fractions are cumulative and count a row's visible blocks, rounded up: of 40 visible blocks
    the default gives level 1 to the first 2, level 2 to the next 4, level 4 to the next 4, level 8
    to the next 10, and skips 20. Blocks that are at level 1 whatever their importance come first.
    A row always has a block at level 1.

    Attributes:
      level1: up to which fraction blocks have level 1.
      level2: the same for level 2.
      level4: the same for level 4.
      level8: the same for level 8.
      near: blocks up to so many tokens away are at level 1 whatever their importance, see
        `LocalWindow`. They come first and count: where they are all that `level8` allows, no other
        block is read.

    Raises:
      TypeError: if one is not a number.
      ValueError: unless ``0 <= level1 <= level2 <= level4 <= level8 <= 1`` and ``near >= 0``.
    """

    level1: float = 0.05
    level2: float = 0.15
    level4: float = 0.25
    level8: float = 0.5
    near: int = 0

    def __post_init__(self) -> None:
        _check_near(self.near)
        _check_ascending("level1, level2, level4, level8", self._fractions, 0)

    @property
    def _fractions(self) -> tuple[float, ...]:
        return self.level1, self.level2, self.level4, self.level8

    def within(self, before: jax.Array, count: jax.Array) -> tuple[jax.Array, ...]:
        """Which ranks have a level of at most 1, 2, 4 and 8.

        Args:
          before: int32 ``[B, N, T_r, T_c]``; its values are not used.
          count: int32 ``[B or 1, 1, T_r, 1]``, visible blocks of the row.

        Returns:
          Four bools ``[B or 1, 1, T_r, T_c]``, from the most important rank on.
        """
        columns = before.shape[-1]
        rank = jnp.arange(columns, dtype=jnp.int32)[None, None, None]
        least = jnp.minimum(count, 1)
        tables = (jnp.asarray(_shares(fraction, columns)) for fraction in self._fractions)
        return tuple(rank < jnp.maximum(table[count], least) for table in tables)


@dataclasses.dataclass(frozen=True)
class Threshold:
    """As many blocks of each level as it takes to cover a share of the attention.

    Level 1 goes to the smallest number of most important blocks that together have the first mass,
    level 2 to those that complete the second, and so on; the rest is skipped. Blocks that are at
    level 1 whatever their importance come first, and their mass counts. A row always has a block
    at level 1.

    Attributes:
      mass: cumulative bounds for the levels 1, 2, 4 and 8.
      least: at least this fraction of the visible blocks, rounded up, has level 1.
      near: blocks up to so many tokens away are at level 1 whatever their importance, see `TopK`.

    Raises:
      TypeError: if one is not a number.
      ValueError: unless `mass` are four numbers that do not decrease, above 0 and at most 1,
        `least` is between 0 and 1, and `near` at least 0.
    """

    mass: tuple[float, ...] = (0.4, 0.5, 0.6, 0.8)
    least: float = 0.06
    near: int = 0

    def __post_init__(self) -> None:
        _check_near(self.near)
        object.__setattr__(self, "mass", tuple(self.mass))
        if len(self.mass) != len(LEVELS):
            raise ValueError(f"mass={self.mass} must be {len(LEVELS)} bounds, one per level")
        _check_ascending("mass", self.mass, 0)
        if self.mass[0] == 0:
            raise ValueError(f"mass={self.mass} must be above 0")
        _check_ascending("least", (self.least,), 0)

    def within(self, before: jax.Array, count: jax.Array) -> tuple[jax.Array, ...]:
        """Which ranks have a level of at most 1, 2, 4 and 8.

        Args:
          before: int32 ``[B, N, T_r, T_c]``, mass of the more important ranks in `MASS_UNIT`.
          count: int32 ``[B or 1, 1, T_r, 1]``, visible blocks of the row.

        Returns:
          Four bools ``[B, N, T_r, T_c]``, from the most important rank on.
        """
        columns = before.shape[-1]
        rank = jnp.arange(columns, dtype=jnp.int32)[None, None, None]
        least = jnp.maximum(jnp.asarray(_shares(self.least, columns))[count], jnp.minimum(count, 1))
        always = rank < least
        there = rank < count
        return tuple(
            always | ((before < math.ceil(bound * MASS_UNIT)) & there) for bound in self.mass
        )


def assign(
    importance: jax.Array,
    policy: TopK | Threshold,
    query_length: jax.Array,
    key_length: jax.Array,
    grid: Grid,
    modifiers: ScoreModifiers = NO_MODIFIERS,
) -> jax.Array:
    """Ranks each row's blocks and gives them levels, int8 ``[B, N, T_r, T_c]``.

    One sort of int32 keys that are all different, without a payload: a block's level follows from
    comparing its key with the last key of each level. Equal importances (up to the bits that the
    block's number takes) are ranked by position, the later block first. `importance` is float32
    ``[B, N, T_r, T_c]``, at least 0; the lengths are int32 ``[B or 1]``.
    """
    number = (1 << max(0, grid.columns - 1).bit_length()) - 1
    count, visible, forced = _sight(grid, query_length, key_length, modifiers)
    if policy.near:
        # Blocks that no query of the row sees have a negative rank, even if forced.
        forced = forced | (grid.distance(modifiers) <= policy.near)[:, None]
    column = jnp.arange(grid.columns, dtype=jnp.int32)[None, None, None]
    value = jnp.where(jnp.isfinite(importance), jnp.minimum(importance, 1.0), _NOT_FINITE)
    bits = jax.lax.bitcast_convert_type(value, jnp.int32)
    rank = (bits & ~number) | column | jnp.where(forced, _FORCED, 0)
    rank = jnp.where(column < count if visible is None else visible, rank, -1)

    # Ascending order of the complements is descending order.
    ordered = ~jax.lax.sort(~rank, dimension=3, is_stable=False)
    mass = _mass(ordered, number)
    before = jnp.cumsum(mass, axis=-1, dtype=jnp.int32) - mass
    largest = jnp.iinfo(jnp.int32).max
    level = jnp.zeros_like(rank)
    lasts = []
    for within in policy.within(before, count):
        lasts.append(jnp.min(jnp.where(within, ordered, largest), axis=-1, keepdims=True))
    for r, last in zip(reversed(LEVELS), reversed(lasts), strict=True):
        level = jnp.where(rank >= last, r, level)
    level = jnp.where(forced, LEVELS[0], level)
    return jnp.where(rank < 0, 0, level).astype(jnp.int8)


def _sight(
    grid: Grid, query_length: jax.Array, key_length: jax.Array, modifiers: ScoreModifiers
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """How many blocks a row sees, which if not the first ones, and which are forced.

    As int32 ``[B or 1, 1, T_r, 1]``; None, or bool ``[B, 1, T_r, T_c]``; bool of this shape.
    """
    lengths = (query_length, key_length)
    if modifiers.query_segment_ids is None:
        count = grid.count(*lengths, modifiers.shift())[:, None, :, None]
        return count, None, grid.forced(modifiers)[:, None]
    visible = grid.visible(*lengths, modifiers)
    count = jnp.sum(visible, axis=-1, keepdims=True, dtype=jnp.int32)[:, None]
    return count, visible[:, None], grid.forced(modifiers, visible)[:, None]


def _mass(rank: jax.Array, number: int) -> jax.Array:
    """What a rank says about its block's importance, int32 in `MASS_UNIT`; 0 if not finite."""
    value = jax.lax.bitcast_convert_type(rank & (_FORCED - 1) & ~number, jnp.float32)
    value = jnp.where((rank < 0) | (value > 1), 0.0, value)
    return jnp.floor(value * MASS_UNIT).astype(jnp.int32)
