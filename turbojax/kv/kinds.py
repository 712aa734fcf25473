"""The table of cache kinds: what stands for each, and which one a cache is of.

A new kind is a file of its own beside this one, and its line in `KINDS`.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from turbojax.config import TurboConfig
from turbojax.kv.base import Kind, LayerCache, Stored
from turbojax.kv.exact import EXACT
from turbojax.kv.k8v4 import K8V4
from turbojax.kv.kv4 import KV4
from turbojax.kv.pages import PAGES, POOL, PagedKind
from turbojax.kv.progressive import PROGRESSIVE

KINDS: tuple[Kind[Any], ...] = (EXACT, PROGRESSIVE, KV4, K8V4, PAGES)
"""All kinds, in the order of their names on command lines."""

CacheKind = Literal["exact", "kv4", "k8v4", "bfloat16"] | PagedKind | TurboConfig
"""What stands for a kind in Python code, for type checkers: all that `KINDS` take."""

CACHE_NAMES = tuple(name for kind in KINDS for name in kind.names)
"""What stands for a kind on command lines."""

STORED: tuple[Stored[Any], ...] = (*KINDS, POOL)
"""What files can hold."""

_BY_CLASS = {kind.cls: kind for kind in KINDS}


def kind_of(cache: LayerCache) -> Kind[Any]:
    """The kind of a layer's cache.

    Raises:
      TypeError: if it is no cache of a layer.
    """
    if type(cache) not in _BY_CLASS:
        names = ", ".join(cls.__name__ for cls in _BY_CLASS)
        raise TypeError(f"cache is a {type(cache).__name__}, must be one of {names}")
    return _BY_CLASS[type(cache)]


def kind_for(kind: CacheKind) -> Kind[Any]:
    """The kind that is asked for.

    Raises:
      ValueError: if there is none such.
    """
    for known in KINDS:
        if known.stands_for(kind):
            return known
    takes = [x for known in KINDS for x in known.takes]
    names = sorted((x for x in takes if isinstance(x, str)), key=lambda x: x not in CACHE_NAMES)
    classes = "".join(f" or a {x.__name__}" for x in takes if isinstance(x, type))
    raise ValueError(f"cache={kind!r} must be {', '.join(map(repr, names))}{classes}")


def cache_by_name(name: str, num_kv_heads: int) -> CacheKind:
    """The cache that a name on a command line stands for.

    Args:
      name: ``"exact"``, the bits of all heads (``"4bit"``, ``"3bit"``, ``"2bit"``),
        ``"2/4bit"``: half of the KV heads at 2 bits, the others at 4, ``"kv4"``: 4 bits with a
        scale per token and head (FireQ), ``"k8v4"``: the same with keys in e4m3, or pages of tokens
        as they are (``"paged"``), in an 8-bit float (``"fp8_e4m3"``, ``"fp8_e5m2"``), as codes
        (``"turbo4"``, ``"turbo_k4v2"`` ..) or with keys and values unlike each other
        (``"paged_k8v4"``).
      num_kv_heads: of the model.

    Raises:
      ValueError: if the name is another one, or half of the heads is not a whole number.
    """
    for kind in KINDS:
        if name in kind.names:
            asked: CacheKind = kind.by_name(name, num_kv_heads)
            return asked
    raise ValueError(f"cache {name!r} must be one of {', '.join(CACHE_NAMES)}")


def init_layer_cache(
    batch_size: int,
    max_length: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    kind: CacheKind,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    local_window_size: int | None = None,
) -> LayerCache:
    """An empty cache of one layer.

    Args:
      batch_size: sequences, `B`.
      max_length: tokens each may grow to.
      num_kv_heads: key/value heads, `K`.
      head_dim: channels, `H`.
      kind: ``"exact"`` for keys and values as they are, ``"bfloat16"`` for the same rounded to
        that, ``"kv4"``, ``"k8v4"``, pages of tokens in `dtype` (``"paged"``), in 8-bit floats
        (``"fp8_e4m3"``, ``"fp8_e5m2"``: at scale 1, so that keys and values must be within 448 or
        57344), as codes (``"turbo4"``, ``"turbo_k4v2"`` ..) or mixed (``"paged_k8v4"``), or the
        config of a progressively compressed cache.
      dtype: of queries, keys and values.
      local_window_size: window of the layer's `AttentionOptions`, if it has one: what it does not
        reach is not kept, see `turbojax.state.ring`. Queries must not see more.

    Raises:
      TypeError: if the window is not an integer.
      ValueError: if `kind` is none of these, or a size does not fit.
      NotImplementedError: if there is a window, and caches of this kind keep all tokens.
    """
    known, sizes = kind_for(kind), (batch_size, max_length, num_kv_heads, head_dim)
    window = {}
    if local_window_size is not None:
        if not known.has_rings:
            raise NotImplementedError(
                f"{local_window_size=} must be None: a cache of kind {kind!r} keeps all tokens"
            )
        window["local_window_size"] = local_window_size
    init: Any = known.init  # only some take a window
    cache: LayerCache = init(*sizes, kind=kind, dtype=jnp.dtype(dtype), **window)
    return cache


def window_to_keep(kind: CacheKind, local_window_size: int | None) -> int | None:
    """A layer's window, for `init_layer_cache`; None where caches of this kind keep all tokens."""
    return local_window_size if kind_for(kind).has_rings else None


def take_sequences(cache: LayerCache, first: jax.Array | int, count: int) -> LayerCache:
    """Sequences ``first`` to ``first + count - 1`` of a layer's cache, as a cache of their own."""
    part: LayerCache = kind_of(cache).take(cache, first, count)
    return part


def put_sequences(cache: LayerCache, part: LayerCache, first: jax.Array | int) -> LayerCache:
    """A layer's cache with its sequences from `first` on replaced by those of `part`."""
    whole: LayerCache = kind_of(cache).put(cache, part, first)
    return whole
