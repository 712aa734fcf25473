"""The grid of blocks: which exist, which are visible, which hold the diagonal."""

import dataclasses

import jax
import jax.numpy as jnp

from turbojax import _checks
from turbojax.attention.pooled import segments
from turbojax.attention.pooled.static import LEVELS as LEVELS
from turbojax.attention.score_modifiers import NO_MODIFIERS, ScoreModifiers

# A block's number goes into the low bits of its rank, next to what is left of its importance.
_MOST_COLUMNS = 2**16


@dataclasses.dataclass(frozen=True)
class Grid:
    """Queries in rows of `block_q`, keys in columns of `block_kv` tokens, a multiple of 8.

    Raises TypeError if a number is not an integer; ValueError if one is not positive, `block_kv`
    not a multiple of 8, or there are more than 65536 columns.
    """

    query_tokens: int
    key_tokens: int
    block_q: int
    block_kv: int
    is_causal: bool

    def __post_init__(self) -> None:
        _checks.check_sizes(
            query_tokens=self.query_tokens,
            key_tokens=self.key_tokens,
            block_q=self.block_q,
            block_kv=self.block_kv,
        )
        if self.block_kv % LEVELS[-1]:
            raise ValueError(f"block_kv={self.block_kv} must be a multiple of {LEVELS[-1]}")
        if self.columns > _MOST_COLUMNS:
            raise ValueError(
                f"{self.key_tokens} keys in blocks of {self.block_kv} are {self.columns} blocks, "
                f"must be at most {_MOST_COLUMNS}"
            )

    @property
    def rows(self) -> int:
        """T_r, blocks of queries."""
        return -(-self.query_tokens // self.block_q)

    @property
    def columns(self) -> int:
        """T_c, blocks of keys."""
        return -(-self.key_tokens // self.block_kv)

    def lengths(
        self, query_length: jax.Array | None, key_length: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """int32 ``[B]`` within bounds, or ``[1]`` with all tokens where there are no lengths."""
        full = [jnp.full(1, size, jnp.int32) for size in (self.query_tokens, self.key_tokens)]
        return (
            full[0] if query_length is None else jnp.clip(query_length, 0, self.query_tokens),
            full[1] if key_length is None else jnp.clip(key_length, 0, self.key_tokens),
        )

    def last_query(self, query_length: jax.Array) -> jax.Array:
        """Position after a row's last query, 0 for a row without any: int32 ``[B or 1, T_r]``."""
        start = jnp.arange(self.rows, dtype=jnp.int32)[None] * self.block_q
        stop = jnp.minimum(start + self.block_q, query_length[:, None])
        return jnp.where(stop > start, stop, 0)

    def count(
        self, query_length: jax.Array, key_length: jax.Array, shift: jax.Array | None = None
    ) -> jax.Array:
        """How many blocks a row sees by position, always the first: int32 ``[B or 1, T_r]``."""
        stop = self.last_query(query_length)
        seen = jnp.where(stop > 0, key_length[:, None], 0)
        if self.is_causal:
            seen = jnp.minimum(seen, stop if shift is None else stop + shift[:, None])
        if shift is not None:
            seen = jnp.maximum(seen, 0)
        return (seen + self.block_kv - 1) // self.block_kv

    def visible(
        self,
        query_length: jax.Array,
        key_length: jax.Array,
        modifiers: ScoreModifiers = NO_MODIFIERS,
    ) -> jax.Array:
        """Blocks of which some query of the row sees some key: bool ``[B or 1, T_r, T_c]``.

        Positions and segments are tested each alone, not together.
        """
        column = jnp.arange(self.columns, dtype=jnp.int32)[None, None]
        lengths = (query_length, key_length)
        visible = column < self.count(*lengths, modifiers.shift())[:, :, None]
        found = segments.of(modifiers, *lengths, self.block_q, self.block_kv)
        return visible if found is None else visible & found.meet()

    def first(self, visible: jax.Array) -> jax.Array:
        """The first of a row's visible blocks, where there is one: int32 ``[B or 1, T_r, 1]``."""
        return jnp.argmax(visible, axis=-1, keepdims=True).astype(jnp.int32)

    def forced(
        self, modifiers: ScoreModifiers = NO_MODIFIERS, visible: jax.Array | None = None
    ) -> jax.Array:
        """Blocks at level 1 whatever their importance, if visible: bool ``[B or 1, T_r, T_c]``.

        With causality that is the first block (of the `visible` ones, if given), and those that
        hold the position of a query of the row.
        """
        if not self.is_causal:
            return jnp.zeros((1, self.rows, self.columns), bool)
        column = jnp.arange(self.columns, dtype=jnp.int32)[None, None]
        first = 0 if visible is None else self.first(visible)
        return (column == first) | ((column + 1) * self.block_kv > self._first_query(modifiers))

    def distance(self, modifiers: ScoreModifiers = NO_MODIFIERS) -> jax.Array:
        """Positions between the nearest query and key of blocks: int32 ``[B or 1, T_r, T_c]``."""
        first_query = self._first_query(modifiers)
        first_key = jnp.arange(self.columns, dtype=jnp.int32)[None, None] * self.block_kv
        past = first_query - (first_key + self.block_kv - 1)
        future = first_key - (first_query + self.block_q - 1)
        return jnp.maximum(0, jnp.maximum(past, future))

    def _first_query(self, modifiers: ScoreModifiers) -> jax.Array:
        """Position of a row's first query, counted as those of keys: int32 ``[B or 1, T_r, 1]``."""
        index = jnp.arange(self.rows, dtype=jnp.int32)[None, :, None] * self.block_q
        shift = modifiers.shift()
        return index if shift is None else index + shift[:, None, None]
