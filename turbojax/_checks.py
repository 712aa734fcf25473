"""Argument checks shared by the public functions: one message names value and requirement."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _json

FLOAT_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


def is_concrete(*arrays: jax.Array) -> bool:
    """Whether all values are known, that is, no array is being traced."""
    return not any(isinstance(x, jax.core.Tracer) for x in arrays)


def check_float_dtype(name: str, x: jax.Array) -> None:
    """Raises TypeError unless `x` is bfloat16, float16 or float32."""
    if x.dtype not in FLOAT_DTYPES:
        raise TypeError(f"{name}.dtype={x.dtype} must be bfloat16, float16 or float32")


def check_query_key_value(
    query: jax.Array, key: jax.Array, value: jax.Array, *, one_head_dim: bool = True
) -> None:
    """Raises unless arguments of attention fit the `BTNH` / `BSKH` contract.

    Values may have another head dim where `one_head_dim` is False.
    """
    check_query(query)
    for name, x in (("key", key), ("value", value)):
        if x.dtype != query.dtype:
            raise TypeError(f"{name}.dtype={x.dtype} must equal query.dtype={query.dtype}")
    check_key_value(key, value, one_head_dim=one_head_dim)
    if query.shape[0] != key.shape[0]:
        raise ValueError(f"{query.shape=} and {key.shape=} must have the same batch size")
    if query.shape[3] != key.shape[3]:
        raise ValueError(f"{query.shape=} and {key.shape=} must have the same head dim")
    check_head_groups(query.shape[2], key.shape[2])


def check_query(query: jax.Array) -> None:
    """Raises unless `query` is a floating-point ``[B, T, N, H]`` array without empty axes."""
    if query.ndim != 4 or 0 in query.shape:
        raise ValueError(f"{query.shape=} must be [B, T, N, H], no axis empty")
    check_float_dtype("query", query)


def check_key_value(key: jax.Array, value: jax.Array, *, one_head_dim: bool = True) -> None:
    """Raises unless both are floating-point ``[B, S, K, H]`` arrays of one shape and dtype.

    Only the head dims may differ where `one_head_dim` is False.
    """
    if key.ndim != 4 or 0 in key.shape:
        raise ValueError(f"{key.shape=} must be [B, S, K, H], no axis empty")
    if one_head_dim and value.shape != key.shape:
        raise ValueError(f"{value.shape=} must equal {key.shape=}")
    if value.ndim != 4 or value.shape[:3] != key.shape[:3] or 0 in value.shape:
        raise ValueError(f"{value.shape=} must equal {key.shape=}, but for the head dim")
    check_float_dtype("key", key)
    if value.dtype != key.dtype:
        raise TypeError(f"value.dtype={value.dtype} must equal key.dtype={key.dtype}")


def check_head_groups(num_heads: int, num_kv_heads: int) -> None:
    """Raises ValueError unless every KV head serves the same number of query heads."""
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{num_heads} query heads must be a multiple of {num_kv_heads} key/value heads"
        )


def check_lengths(name: str, lengths: jax.Array | None, batch_size: int, largest: int) -> jax.Array:
    """Lengths as int32 ``[B]``; None means `largest`. Outside `jit`, none may be out of range."""
    if lengths is None:
        return jnp.full(batch_size, largest, jnp.int32)
    lengths = as_int32(name, lengths)
    if lengths.shape != (batch_size,):
        raise ValueError(f"{name}.shape={lengths.shape} must be ({batch_size},), one per sequence")
    if is_concrete(lengths):
        values = np.asarray(lengths)
        if values.size and (values.min() < 0 or values.max() > largest):
            raise ValueError(f"{name}={values.tolist()} must be between 0 and {largest}")
    return lengths


def as_int32(name: str, x: Any, *, saturate: bool = False) -> jax.Array:
    """Integers, of jax, numpy or Python, as an int32 array, without wrapping around.

    Outside `jit`, ValueError if one is beyond int32, unless they `saturate` as under `jit`.
    """
    if not isinstance(x, jax.Array):
        # jnp.asarray drops the upper half of numpy's 64 bits.
        wide = np.asarray(x) if is_concrete(*jax.tree.leaves(x)) else None
        is_wide = wide is not None and jnp.issubdtype(wide.dtype, jnp.integer)
        x = wide if is_wide else jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name}.dtype={x.dtype} must be an integer type")
    given, held = jnp.iinfo(x.dtype), jnp.iinfo(jnp.int32)
    if given.min < held.min or given.max > held.max:
        inside = x.clip(max(given.min, held.min), min(given.max, held.max))
        if not saturate and is_concrete(x) and np.any(wrong := np.asarray(inside != x)):
            raise ValueError(f"{name} holds {x[wrong][0]}, must be within {held.min}..{held.max}")
        x = inside
    if isinstance(x, np.ndarray):
        x = x.astype(np.int32)  # on the device it would compile a program for every shape
    return jnp.asarray(x, jnp.int32)


def check_sizes(**sizes: int) -> None:
    """Raises TypeError unless each is an integer, ValueError unless it is at least 1."""
    for name, size in sizes.items():
        check_integer(name, size)
        if size < 1:
            raise ValueError(f"{name}={size} must be at least 1")


def check_integer(name: str, x: object) -> None:
    """Raises TypeError unless `x` is an integer (and no bool)."""
    if isinstance(x, bool) or not isinstance(x, int | np.integer):
        raise TypeError(f"{name}={x!r} must be an integer")


def normalize_window(window: object) -> tuple[int, int] | None:
    """A window (None, an integer or a pair, none negative) as (left, right)."""
    if window is None:
        return None
    pair = tuple(window) if isinstance(window, tuple | list) else (window, window)
    integers = [w for w in pair if isinstance(w, int | np.integer) and not isinstance(w, bool)]
    if len(pair) != 2 or len(integers) != 2 or min(integers) < 0:
        raise ValueError(f"local_window_size={window!r} must be one or two integers >= 0")
    # No sequence is this long; beyond it, adding a position could overflow int32.
    left, right = (min(int(w), 2**30) for w in integers)
    return left, right


def check_number(name: str, x: object) -> None:
    """Raises unless `x` is None or a finite Python number: options are static under `jit`."""
    if x is None:
        return
    if isinstance(x, jax.Array) or not isinstance(x, int | float | np.integer | np.floating):
        raise TypeError(f"{name} is a {type(x).__name__}, must be a Python number")
    if not _is_finite(x):
        raise ValueError(f"{name}={_json.shown(x)} must be finite")


def check_positive(name: str, x: float | None) -> None:
    """Raises ValueError unless `x` is None or a positive finite number."""
    if x is not None and not (_is_finite(x) and x > 0):
        raise ValueError(f"{name}={_json.shown(x)} must be positive and finite")


def is_finite_number(x: object) -> bool:
    """Whether `x` is a Python number (and no bool) that a float can hold."""
    return isinstance(x, int | float) and not isinstance(x, bool) and _is_finite(x)


def _is_finite(x: Any) -> bool:
    try:
        return math.isfinite(float(x))
    except OverflowError:  # Python's integers may be larger than any float
        return False
