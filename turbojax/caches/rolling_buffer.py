"""Rolling buffers: caches of a sliding window hold what it needs, not the whole text.

As in Mistral 7B (Jiang et al., 2023).

A query sees itself and the ``window - 1`` tokens before it. So a sequence gets room for its window
and `SPARE` tokens more, rounded up to what a kind of cache stores at once: single tokens, or blocks
of them. Further tokens then overwrite the oldest: row ``p % rows`` holds token `p` (or block
`p`). Lengths, positions and `max_length` are those of a cache without a window, and so are the rows
until they are all in use.

Several new tokens are attended to after all of them were stored. The first one's window begins
that much earlier: a rolling buffer with room for ``window + n - 1`` tokens serves `n` of them at a
time.
"""

from typing import Protocol

import jax
import jax.numpy as jnp

from turbojax import _checks

SPARE = 15
"""Tokens that there is room for beyond the window: 16 new ones can be stored, then attended to."""


class RollingBuffer(Protocol):
    """What a cache that may be a rolling buffer says about itself.

    A query may see `window` tokens, its own included, or all if it is None. Of a sequence the
    newest `room` tokens are kept; in a rolling buffer these are less than `max_length`.
    """

    @property
    def lengths(self) -> jax.Array: ...  # noqa: D102

    @property
    def max_length(self) -> int: ...  # noqa: D102

    @property
    def window(self) -> int | None: ...  # noqa: D102

    @property
    def room(self) -> int: ...  # noqa: D102

    @property
    def is_rolling(self) -> bool: ...  # noqa: D102


def window_of(local_window_size: int | tuple[int, int] | None) -> int | None:
    """Tokens that a newest query sees in such a window, its own included; None for all."""
    sides = _checks.normalize_window(local_window_size)
    return None if sides is None else sides[0] + 1


def units(window: int | None, whole: int, size: int = 1) -> int:
    """Units of `size` tokens in a sequence's memory: `whole`, or what its window needs."""
    return whole if window is None else min(whole, -(-(window + SPARE) // size))


def rows_of_new(lengths: jax.Array, accepted: jax.Array, tokens: int, rows: int) -> jax.Array:
    """Rows in which new tokens are stored: int32 ``[B, T]``.

    `lengths` are tokens seen before, `accepted` how many of the new ones count, the first ones.
    Tokens that do not count, and those that newer ones would overwrite, get distinct numbers past
    the last row.
    """
    offset = jnp.arange(tokens)[None]
    stays = (offset < accepted[:, None]) & (offset >= accepted[:, None] - rows)
    return jnp.where(stays, (lengths[:, None] + offset) % rows, rows + offset)


def positions_of_rows(lengths: jax.Array, rows: int) -> jax.Array:
    """The newest token of each row, int32 ``[B, rows]``; negative where there was none."""
    newest = lengths[:, None] - 1
    return newest - (newest - jnp.arange(rows)[None]) % rows


def held(cache: RollingBuffer) -> tuple[jax.Array, jax.Array]:
    """Which of all tokens a cache of rows holds, bool ``[B, max_length]``, and in which rows."""
    position = jnp.arange(cache.max_length)
    is_held = position[None] < cache.lengths[:, None]
    is_held = is_held & (position[None] >= cache.lengths[:, None] - cache.room)
    return is_held, position % cache.room


def newest(x: jax.Array, kept: jax.Array, rows: int) -> jax.Array:
    """The tokens of a prompt that the rows of an empty cache hold.

    `x` is ``[B, S, K, H]``, of which `kept` tokens (int32 ``[B]``, at most `S`) count. Returns `x`
    itself if `rows` suffice, otherwise ``[B, rows, K, H]``; the content of rows from `kept` on is
    arbitrary.
    """
    if x.shape[1] <= rows:
        return x
    token = jnp.maximum(positions_of_rows(kept, rows), 0)
    return jnp.take_along_axis(x, token[:, :, None, None], axis=1)


def most_new_tokens(cache: RollingBuffer, window: int | None) -> int | None:
    """How many new tokens can be stored before they attend; None if there is no limit.

    Raises ValueError if the cache does not keep the `window` tokens that each sees.
    """
    if not cache.is_rolling:
        return None
    assert cache.window is not None
    if window is None or window > cache.window:
        sees = "all tokens" if window is None else f"{window} tokens"
        raise ValueError(
            f"a query sees {sees}, must see at most {cache.window}, its own included: the cache "
            "was made for this window and does not keep what is older"
        )
    return cache.room - window + 1


def check_visible(cache: RollingBuffer, sides: tuple[int, int] | None, queries: int) -> None:
    """Raises ValueError unless the cache keeps all that its newest `queries` tokens see."""
    most = most_new_tokens(cache, window_of(sides))
    if most is not None and queries > most:
        raise ValueError(
            f"{queries} query tokens must be at most {most}: the cache keeps {cache.room} tokens "
            f"for a window of {cache.window}; append and attend in parts"
        )
