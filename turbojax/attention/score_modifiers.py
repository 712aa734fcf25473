"""Arrays that a call of attention may have beyond queries, keys, values and lengths.

They say which keys a query sees, or change its scores, as `mask_mod` and `score_mod` of
FlexAttention do. Users hand them over as keyword arguments; `ScoreModifiers` is the one form in
which implementations take them. These are data; static options are in `turbojax.attention.options`.
"""

import dataclasses
import functools
from collections.abc import Collection
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks

# No sequence is this long; beyond it, differences of positions could overflow int32.
_FARTHEST = 2**29


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "query_offset",
        "key_offset",
        "query_segment_ids",
        "key_value_segment_ids",
        "key_bounds",
        "bias",
        "alibi_slopes",
        "sinks",
    ],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ScoreModifiers:
    """What is not None is part of the call.

    Attributes:
      query_offset: int32 ``[B]``, the position of the first query.
      key_offset: int32 ``[B]``, the position of the first key.
      query_segment_ids: int32 ``[B, T]``; a query sees keys of its own segment alone.
      key_value_segment_ids: int32 ``[B, S]``, there if and only if those of queries are.
      key_bounds: int32 ``[B, T]`` twice; a query sees keys from the first to before the second
        alone. Unlike the user's, which are any positions, they are numbers of keys: from 0 to `S`.
      bias: ``[B or 1, N or 1, T or 1, S]``, float32 or the queries' dtype, added to the scores
        after their scale and cap; ``-inf`` hides a key.
      alibi_slopes: float32 ``[N]``: ``-slope * |query position - key position|`` is added (Press et
        al., 2022).
      sinks: float32 ``[N]``, a logit of every head that takes part in the denominator alone.
    """

    query_offset: jax.Array | None = None
    key_offset: jax.Array | None = None
    query_segment_ids: jax.Array | None = None
    key_value_segment_ids: jax.Array | None = None
    key_bounds: tuple[jax.Array, jax.Array] | None = None
    bias: jax.Array | None = None
    alibi_slopes: jax.Array | None = None
    sinks: jax.Array | None = None

    AXES: ClassVar[dict[str, str]] = {
        "query_offset": "B",
        "key_offset": "B",
        "query_segment_ids": "BT",
        "key_value_segment_ids": "BS",
        "key_bounds": "BT",
        "bias": "BNTS",
        "alibi_slopes": "N",
        "sinks": "N",
    }
    """The letter of every axis of every array, see `turbojax.sharding.axes`."""

    @property
    def given(self) -> tuple[str, ...]:
        """The names of the fields that are not None."""
        names = (field.name for field in dataclasses.fields(self))
        return tuple(name for name in names if getattr(self, name) is not None)

    def refusal(self, supported: Collection[str] = ()) -> str | None:
        """Why an implementation that supports only these cannot run the call; None if it can."""
        missing = [name for name in self.given if name not in supported]
        return f"it has no {', no '.join(missing)}" if missing else None

    def shift(self) -> jax.Array | None:
        """By how much a query's position exceeds a key's of the same index: int32 ``[B]``."""
        if self.query_offset is None:
            return None if self.key_offset is None else -self.key_offset
        return self.query_offset if self.key_offset is None else self.query_offset - self.key_offset

    def begin(self, length: jax.Array, query_length: jax.Array) -> jax.Array:
        """Where a cache's first query is, counted from the cache's first token: int32 ``[B]``."""
        if self.query_offset is None:
            return length - query_length
        return self.query_offset - (0 if self.key_offset is None else self.key_offset)

    def end(self, length: jax.Array, query_length: jax.Array) -> jax.Array:
        """The position after a cache's last query, as `begin` counts: int32 ``[B]``."""
        if self.query_offset is None:
            return length
        return self.begin(length, query_length) + query_length

    def visible(self, queries: jax.Array, keys: jax.Array) -> jax.Array | None:
        """Which of these keys segments and bounds show these queries: bool ``[B, t, s]``, or None.

        Indices past the end count as the last token. None if there are neither.
        """
        found = None
        if self.query_segment_ids is not None and self.key_value_segment_ids is not None:
            one = jnp.take(self.query_segment_ids, queries, axis=1, mode="clip")
            other = jnp.take(self.key_value_segment_ids, keys, axis=1, mode="clip")
            found = one[:, :, None] == other[:, None, :]
        if self.key_bounds is not None:
            start, end = (
                jnp.take(x, queries, axis=1, mode="clip")[:, :, None] for x in self.key_bounds
            )
            keys = keys[None, None]
            inside = (start <= keys) & (keys < end)
            found = inside if found is None else found & inside
        return found

    def added(self, queries: jax.Array, keys: jax.Array) -> jax.Array | None:
        """What is added to these scores, float32 ``[B or 1, N or 1, t, s]``, or None."""
        parts = []
        if self.bias is not None:
            bias = self.bias
            if bias.shape[2] > 1:
                bias = jnp.take(bias, queries, axis=2, mode="clip")
            parts.append(jnp.take(bias, keys, axis=3, mode="clip").astype(jnp.float32))
        if self.alibi_slopes is not None:
            slopes = self.alibi_slopes[None, :, None, None]
            parts.append(-slopes * self.distances(queries, keys)[:, None].astype(jnp.float32))
        return sum(parts[1:], parts[0]) if parts else None

    def distances(self, queries: jax.Array, keys: jax.Array) -> jax.Array:
        """How far the positions of these queries and keys are apart: int32 ``[B or 1, t, s]``."""
        shift = self.shift()
        index = (queries[:, None] - keys[None])[None]
        return jnp.abs(index if shift is None else index + shift[:, None, None])


NO_MODIFIERS = ScoreModifiers()
"""A call without any of them."""


def of_cache(
    query: jax.Array, *, sinks: Any = None, query_offset: Any = None, key_offset: Any = None
) -> ScoreModifiers:
    """The checked modifiers of a call to a cache; no `query_offset` means the newest tokens."""
    if sinks is None and query_offset is None and key_offset is None:
        return NO_MODIFIERS
    batch, _, heads, _ = query.shape
    first, of_keys = (
        check_offset(name, x, batch)
        for name, x in (("query_offset", query_offset), ("key_offset", key_offset))
    )
    # Without `query_offset` queries are the newest tokens: an offset of the keys moves both.
    of_keys = None if first is None else of_keys
    return ScoreModifiers(query_offset=first, key_offset=of_keys, sinks=check_sinks(sinks, heads))


def of_layer(query: jax.Array, sinks: Any = None) -> ScoreModifiers:
    """The checked modifiers of a layer: its sinks, if it has any."""
    return (
        NO_MODIFIERS if sinks is None else ScoreModifiers(sinks=check_sinks(sinks, query.shape[2]))
    )


def complete(
    query: jax.Array, key: jax.Array, *, sinks: Any = None, **arrays: Any
) -> ScoreModifiers:
    """The checked modifiers of a user's arguments, whose names are the fields of `ScoreModifiers`.

    Raises TypeError or ValueError, also if only one side has segments.
    """
    if sinks is None and all(x is None for x in arrays.values()):
        return NO_MODIFIERS
    (batch, tokens, heads), size = query.shape[:3], key.shape[1]
    modifiers = ScoreModifiers(sinks=sinks, **arrays)
    one, other = modifiers.query_segment_ids, modifiers.key_value_segment_ids
    if (one is None) != (other is None):
        given, missing = "query_segment_ids", "key_value_segment_ids"
        if one is None:
            given, missing = missing, given
        raise ValueError(f"{given} need {missing} beside them")
    key_offset = check_offset("key_offset", modifiers.key_offset, batch)
    return ScoreModifiers(
        query_offset=check_offset("query_offset", modifiers.query_offset, batch),
        key_offset=key_offset,
        query_segment_ids=check_segment_ids("query_segment_ids", one, batch, tokens),
        key_value_segment_ids=check_segment_ids("key_value_segment_ids", other, batch, size),
        key_bounds=_check_key_bounds(modifiers.key_bounds, (batch, tokens), size, key_offset),
        bias=_check_bias(modifiers.bias, (batch, heads, tokens, size)),
        alibi_slopes=_check_heads("alibi_slopes", modifiers.alibi_slopes, heads),
        sinks=check_sinks(sinks, heads),
    )


def check_offset(name: str, offset: Any, batch: int) -> jax.Array | None:
    """An offset, a scalar or ``[B]``, as int32 ``[B]``; None stays. Under `jit` it is clipped."""
    if offset is None:
        return None
    offset = _checks.as_int32(name, offset)
    if offset.shape not in ((), (batch,)):
        raise ValueError(f"{name}.shape={offset.shape} must be () or ({batch},), one per sequence")
    if _checks.is_concrete(offset):
        values = np.asarray(offset)
        if values.size and (values.min() < 0 or values.max() > _FARTHEST):
            raise ValueError(f"{name}={values.tolist()} must be between 0 and {_FARTHEST}")
    return jnp.broadcast_to(jnp.clip(offset, 0, _FARTHEST), (batch,))


def check_segment_ids(name: str, ids: Any, batch: int, tokens: int) -> jax.Array | None:
    """Ids as int32 ``[B, tokens]``; None stays. Raises TypeError or ValueError otherwise."""
    if ids is None:
        return None
    ids = _checks.as_int32(name, ids)
    if ids.shape != (batch, tokens):
        raise ValueError(f"{name}.shape={ids.shape} must be ({batch}, {tokens}), one per token")
    return ids


def _check_key_bounds(
    bounds: Any, shape: tuple[int, int], size: int, key_offset: jax.Array | None
) -> tuple[jax.Array, jax.Array] | None:
    """The user's bounds, of positions, as int32 ``[B, T]`` twice: numbers of keys, 0 to `size`."""
    if bounds is None:
        return None
    if not isinstance(bounds, tuple | list) or len(bounds) != 2:
        raise TypeError(f"key_bounds={bounds!r} must be a pair (start, end) of integer arrays")
    found = []
    for name, x in zip(("start", "end"), bounds, strict=True):
        # Every value beyond int32 is beyond every key, too.
        x = _checks.as_int32(f"{name} of key_bounds", x, saturate=True)
        if x.shape != shape:
            raise ValueError(f"{name} of key_bounds has shape {x.shape}, must be {shape}, [B, T]")
        if key_offset is not None:
            # Clipped first, so that the difference stays within int32: no key is this far.
            x = jnp.clip(x, -2 * _FARTHEST, 2 * _FARTHEST) - key_offset[:, None]
        found.append(jnp.clip(x, 0, size))  # what is beyond all keys shows no more, and no less
    start, end = found
    return start, end


def check_sinks(sinks: Any, heads: int) -> jax.Array | None:
    """Sinks as float32 ``[N]``; None stays. Raises TypeError or ValueError if they do not fit."""
    return _check_heads("sinks", sinks, heads)


def _check_heads(name: str, x: Any, heads: int) -> jax.Array | None:
    if x is None:
        return None
    x = jnp.asarray(x)
    _checks.check_float_dtype(name, x)
    if x.shape != (heads,):
        raise ValueError(f"{name}.shape={x.shape} must be ({heads},), one per query head")
    return x.astype(jnp.float32)


def _check_bias(bias: Any, shape: tuple[int, int, int, int]) -> jax.Array | None:
    if bias is None:
        return None
    bias = jnp.asarray(bias)
    _checks.check_float_dtype("bias", bias)
    batch, heads, tokens, size = shape
    allowed = ((batch, 1), (heads, 1), (tokens, 1), (size,))
    if bias.ndim != 4 or any(n not in some for n, some in zip(bias.shape, allowed, strict=True)):
        raise ValueError(
            f"{bias.shape=} must be ({batch} or 1, {heads} or 1, {tokens} or 1, {size}): "
            "sequences, query heads, queries, keys"
        )
    return bias
