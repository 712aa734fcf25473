"""How similar a block's keys are, and the policy that pools only similar ones: `SimilarityCap`."""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp

from turbojax import _checks
from turbojax.levels.grid import LEVELS, Grid
from turbojax.levels.patterns import Pattern
from turbojax.levels.ranking import Threshold, TopK


@dataclasses.dataclass(frozen=True)
class SimilarityCap:
    """Another policy's levels, made finer where keys that would be averaged differ.

    A block stays at level 8, 4 or 2 only if the mean cosine similarity of its keys within groups of
    so many tokens exceeds that level's limit; otherwise it gets the next finer level for which it
    does, in the end 1. What the other policy skips stays skipped.

    Attributes:
      policy: whose levels.
      limits: of the levels 2, 4 and 8.

    Raises:
      TypeError: if the policy is not a `TopK`, `Threshold`, `LocalWindow` or `Strided`, or a limit
        not a number.
      ValueError: if there are not three limits or one is outside ``-1..1``.
    """

    policy: TopK | Threshold | Pattern
    limits: tuple[float, ...] = (0.7, 0.65, 0.6)

    def __post_init__(self) -> None:
        if not isinstance(self.policy, TopK | Threshold | Pattern):
            raise TypeError(
                f"policy is a {type(self.policy).__name__}, must be a TopK, Threshold, "
                "LocalWindow or Strided"
            )
        object.__setattr__(self, "limits", tuple(self.limits))
        if len(self.limits) != len(LEVELS) - 1:
            raise ValueError(f"limits={self.limits} must be three, of the levels 2, 4 and 8")
        for limit in self.limits:
            _checks.check_number("limits", limit)
            if not -1 <= limit <= 1:
                raise ValueError(f"limits={self.limits} must be between -1 and 1")


def key_similarity(
    key: jax.Array, *, block_kv: int = 128, key_value_seq_lengths: jax.Array | None = None
) -> jax.Array:
    """Mean cosine similarity of the keys in groups of 2, 4 and 8 adjacent tokens, per block.

    The mean is over all pairs of different tokens that share a group. A block without such pairs
    has 1, a zero key has similarity 0 to any other, and a key that is not finite gives NaN.

    Args:
      key: ``[B, S, K, H]``.
      block_kv: keys of a block, a multiple of 8.
      key_value_seq_lengths: optional int ``[B]``; keys past them are ignored.

    Returns:
      float32 ``[3, B, K, ceil(S / block_kv)]``, for groups of 2, 4 and 8.

    Raises:
      TypeError: if the keys' dtype is not supported or lengths are not integers.
      ValueError: if shapes, blocks or lengths do not fit.
    """
    _checks.check_key_value(key, key)
    length = key_value_seq_lengths
    if length is not None:
        length = _checks.check_lengths("key_value_seq_lengths", length, *key.shape[:2])
    # Queries do not matter here.
    grid = Grid(1, key.shape[1], 1, block_kv, False)
    return similarity(jax.lax.stop_gradient(key), grid.lengths(None, length)[1], grid)


@functools.partial(jax.jit, static_argnames="grid")
def similarity(key: jax.Array, key_length: jax.Array, grid: Grid) -> jax.Array:
    """`key_similarity` of checked arguments; `key_length` is int32 ``[B or 1]``.

    With unit keys u, the sum of all ordered pairs of a group of 2r is that of its halves and
    2 * sum(first half) . sum(second half): no pair is formed, and nothing cancels.
    """
    batch, size, kv_heads, channels = key.shape
    padding = grid.columns * grid.block_kv - size
    if padding:
        key = jnp.pad(key, ((0, 0), (0, padding), (0, 0), (0, 0)))
    octets = grid.block_kv // LEVELS[-1]
    x = key.reshape(batch, grid.columns, octets, LEVELS[-1], kv_heads, channels)
    token = jnp.arange(grid.columns * grid.block_kv, dtype=jnp.int32)[None]
    there = (token < key_length[:, None]).reshape(-1, grid.columns, octets, LEVELS[-1], 1)

    # One reduction for all norms: written per token, XLA would read the keys eight times.
    wide = jnp.where(there[..., None], x.astype(jnp.float32), 0.0)
    square = jnp.sum(wide * wide, axis=-1)
    norm = jnp.where(square == 0, 0.0, jax.lax.rsqrt(square))

    def unit(t: int) -> jax.Array:
        token = jnp.where(there[:, :, :, t, :, None], x[:, :, :, t].astype(jnp.float32), 0.0)
        return token * norm[:, :, :, t, :, None]

    sums = [unit(t) for t in range(LEVELS[-1])]
    products = jnp.zeros((batch, grid.columns, kv_heads), jnp.float32)
    result = []
    for r in LEVELS[1:]:
        pairs = list(zip(sums[::2], sums[1::2], strict=True))
        sums = [a + b for a, b in pairs]
        # First over channels, which are contiguous, then over the block's groups.
        dots = jnp.sum(functools.reduce(operator.add, (a * b for a, b in pairs)), axis=-1)
        products = products + 2 * jnp.sum(dots, axis=2)
        count = jnp.sum(there.reshape(-1, grid.columns, grid.block_kv // r, r), axis=-1)
        total = jnp.sum(count * (count - 1), axis=-1)[:, :, None]
        mean = products / jnp.maximum(total, 1).astype(jnp.float32)
        result.append(jnp.where(total > 0, mean, 1.0))
    return jnp.stack([jnp.swapaxes(mean, 1, 2) for mean in result])


def cap(levels: jax.Array, alike: jax.Array, limits: tuple[float, ...]) -> jax.Array:
    """Makes levels int8 ``[B, N, T_r, T_c]`` finer where keys differ.

    `alike` is float32 ``[3, B, K, T_c]``, see `key_similarity`; `limits` are of the levels 2, 4, 8.
    """
    batch, heads, rows, columns = levels.shape
    kv_heads = alike.shape[2]
    grouped = levels.reshape(batch, kv_heads, heads // kv_heads, rows, columns)
    # The level that a block wanted at level r gets, from the finest r on.
    allowed = jnp.ones((batch, kv_heads, columns), jnp.int8)
    result = jnp.where(grouped > 0, jnp.int8(1), jnp.int8(0))
    for r, mean, limit in zip(LEVELS[1:], alike, limits, strict=True):
        allowed = jnp.where(mean > limit, jnp.int8(r), allowed)
        result = jnp.where(grouped == r, allowed[:, :, None, None, :], result)
    return result.reshape(levels.shape)
