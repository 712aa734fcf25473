"""What the pooled suite attends to: keys that are alike among neighbours, and maps of levels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.shapes import Shape

BLOCK = 128
"""Queries, and keys, that share a level."""
LEVELS = (1, 2, 4, 8)
# Fractions of the visible blocks at each level, as the default of `TopK` chooses them.
MIXTURE = (0.05, 0.10, 0.10, 0.25)
MIXTURE_DENSITY = sum(share / level for share, level in zip(MIXTURE, LEVELS, strict=True))
# Tokens of a segment share a topic; how many topics a head knows; how much of a token is topic.
_SEGMENT, _TOPICS, _STRENGTH = 256, 32, (0.6, 0.98)


@functools.partial(jax.jit, static_argnames="shape")
def sample(shape: Shape) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Query, key, value and the output's cotangent, in bfloat16.

    Each segment of 256 tokens has, in every KV head, one of 32 random directions and a strength s
    between 0.6 and 0.98. A key is s times the direction plus sqrt(1 - s**2) times noise, and so
    are the queries of its heads: neighbours are alike (cosine s**2), more in some segments
    than in others, and queries look for segments of their topic. Values are independent normal
    numbers.
    """
    heads, batch = shape.heads, shape.batch
    segments = -(-shape.tokens // _SEGMENT)
    places = (batch, segments, heads.kv)
    keys = jax.random.split(jax.random.key(0), 7)
    directions = jax.random.normal(keys[0], (_TOPICS, heads.kv, heads.dim), jnp.float32)
    topics = jax.random.randint(keys[1], places, 0, _TOPICS)
    strength = jax.random.uniform(keys[2], (*places, 1), jnp.float32, *_STRENGTH)
    common = strength * directions[topics, jnp.arange(heads.kv)[None, None]]

    def tokens(key: jax.Array, group: int) -> jax.Array:
        signal, weight = (
            jnp.repeat(jnp.repeat(x, _SEGMENT, 1)[:, : shape.tokens], group, 2)
            for x in (common, jnp.sqrt(1 - strength**2))
        )
        noise = jax.random.normal(key, signal.shape, jnp.float32)
        return (signal + weight * noise).astype(jnp.bfloat16)

    def normal(key: jax.Array, count: int) -> jax.Array:
        size = (batch, shape.tokens, count, heads.dim)
        return jax.random.normal(key, size, jnp.float32).astype(jnp.bfloat16)

    query = tokens(keys[3], heads.query // heads.kv)
    return query, tokens(keys[4], 1), normal(keys[5], heads.kv), normal(keys[6], heads.query)


def random_levels(shape: Shape, density: float, *, sink: bool = False) -> jax.Array:
    """A mixture of levels, at random places of every row and head.

    The mixture's fractions are scaled to the density, and what a row's whole blocks cannot express
    is carried over to the next rows. Causal: fractions of the visible blocks, the diagonal is one
    of those at level 1.

    Args:
      shape: of the attention.
      density: share of dense attention's work.
      sink: the first block is at level 1 too.

    Returns:
      int8 ``[1, N, T_r, T_c]``.
    """
    rows = columns = -(-shape.tokens // BLOCK)
    row, column = np.arange(rows)[:, None], np.arange(columns)[None]
    visible = column <= row if shape.is_causal else np.ones((rows, columns), bool)
    forced = (column == row) & shape.is_causal
    if sink:
        forced |= column == 0
    shares = np.array(MIXTURE) * (density / MIXTURE_DENSITY)
    bounds = np.cumsum(_counts(visible.sum(1), forced.sum(1), shares), axis=1)
    place = np.random.default_rng(0).random((shape.heads.query, rows, columns))
    order = np.argsort(place - forced + 2.0 * ~visible, axis=-1)
    rank = np.argsort(order, axis=-1)
    levels = np.zeros(rank.shape, np.int8)
    for i, level in reversed(list(enumerate(LEVELS))):
        levels[rank < bounds[:, i, None]] = level
    return jnp.asarray(levels[None])


def _counts(visible: np.ndarray, forced: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Blocks of each level in each row: int ``[T_r, 4]``."""
    counts = np.zeros((len(visible), len(LEVELS)), int)
    carried = np.zeros(len(LEVELS))
    for i, blocks in enumerate(visible):
        wanted, left = shares * blocks + carried, int(blocks)
        for j, share in enumerate(wanted):
            least = int(forced[i]) if j == 0 else 0
            counts[i, j] = np.clip(round(share), least, left)
            left -= counts[i, j]
        carried = wanted - counts[i]
    return counts
