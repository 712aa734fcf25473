"""Which rows are whose: experts' ranges of sorted tokens, cut into tiles of one expert each."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Tiles(NamedTuple):
    """Tiles of tokens in order, each of one expert, whose last tile may be partly empty.

    Attributes:
      expert: int32 ``[U]``, whose tile it is; any from tile `total` on.
      first: int32 ``[U]``, the first token of that expert.
      end: int32 ``[U]``, the token after its last one.
      start: int32 ``[U]``, the number of the expert's first tile.
      of_expert: int32 ``[U]``, how many tiles the expert has.
      total: int32 scalar, how many tiles there are.
      rows: int32 scalar, how many tokens they hold.
      is_valid: bool scalar; where it is False, there are no tiles.
    """

    expert: jax.Array
    first: jax.Array
    end: jax.Array
    start: jax.Array
    of_expert: jax.Array
    total: jax.Array
    rows: jax.Array
    is_valid: jax.Array


def most_tiles(rows: int, experts: int, tile: int) -> int:
    """The largest possible number of tiles, whatever the sizes of groups."""
    return min(rows, (rows + min(rows, experts) * (tile - 1)) // tile)


def cut(group_sizes: jax.Array, rows: int, tile: int) -> Tiles:
    """Cuts experts' tokens into tiles of at most `tile`, if sizes are valid for `rows`."""
    experts = group_sizes.shape[0]
    # Compared with all others instead of summed up in turn: on a GPU that is one small kernel.
    until = jnp.arange(experts)[:, None] >= jnp.arange(experts)[None]

    def prefix(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(until, x[None], 0), axis=1)

    inside = jnp.clip(group_sizes, 0, rows)
    is_valid = jnp.all(inside == group_sizes) & (jnp.sum(inside) <= rows)
    sizes = jnp.where(is_valid, inside, 0)
    ends, counts = prefix(sizes), (sizes + (tile - 1)) // tile
    last = prefix(counts)
    number = jnp.arange(most_tiles(rows, experts, tile), dtype=jnp.int32)
    # The expert is the first whose tiles go beyond this one.
    expert = jnp.sum((last[None] <= number[:, None]).astype(jnp.int32), axis=1)
    expert = jnp.minimum(expert, experts - 1)
    return Tiles(
        expert=expert,
        first=(ends - sizes)[expert],
        end=ends[expert],
        start=(last - counts)[expert],
        of_expert=counts[expert],
        total=last[-1],
        rows=ends[-1],
        is_valid=is_valid,
    )


# A word of two float16 or bfloat16 NaNs.
_NAN = 0x7FFF7FFF


def listed(tiles: Tiles) -> tuple[jax.Array, jax.Array]:
    """Tiles as kernels read them: int32 ``[U, 5]`` and ``[3]``.

    The first has expert, first, end, start and of_expert of each; the second total, rows, and the
    word of two 16-bit numbers that rows of no expert hold.
    """
    fields = (tiles.expert, tiles.first, tiles.end, tiles.start, tiles.of_expert)
    fill = jnp.where(tiles.is_valid, 0, _NAN)
    return jnp.stack(fields, axis=1), jnp.stack([tiles.total, tiles.rows, fill])
