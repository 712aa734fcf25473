"""The table of cache kinds: what stands for each, and which one a cache is of.

A new kind is a file of its own beside this one, and a line in `KINDS`.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from turbojax import _checks
from turbojax.caches.base import Kind, LayerCache, Stored
from turbojax.caches.comparison.kinds import E4M3, INT4, INT8, KIVI
from turbojax.caches.comparison.kivi import Kivi
from turbojax.caches.exact.kind import EXACT
from turbojax.caches.latent.kind import LATENT, LATENT_NAMES, LatentKind
from turbojax.caches.paged.kind import PAGES, POOL, PagedKind
from turbojax.caches.progressive.kind import PROGRESSIVE
from turbojax.caches.token_scaled.kind import K8V4, KV4
from turbojax.numerics.config import TurboConfig
from turbojax.sharding.axes import Axes
from turbojax.sharding.creation import Sizes, born

KINDS: tuple[Kind[Any], ...] = (
    EXACT,
    PROGRESSIVE,
    KV4,
    K8V4,
    PAGES,
    KIVI,
    INT8,
    INT4,
    E4M3,
)
"""All kinds of keys and values, in the order of their names on command lines; from `KIVI` on they
are for comparison."""

ALL_KINDS: tuple[Kind[Any], ...] = (*KINDS, LATENT)
"""These, and that of latents, which layers with latent attention alone can use."""

CacheKind = (
    Literal["exact", "kv4", "k8v4", "bfloat16", "int8", "int4", "e4m3"]
    | PagedKind
    | TurboConfig
    | LatentKind
    | Kivi
)
"""What stands for a kind in Python code, for type checkers: all that `ALL_KINDS` take."""

CACHE_NAMES = tuple(name for kind in KINDS for name in kind.names)
"""What stands for a kind of keys and values on command lines."""

LATENT_CACHE_NAMES = LATENT_NAMES
"""What stands for a kind of latents there."""

STORED: tuple[Stored[Any], ...] = (*ALL_KINDS, POOL)
"""What files can hold."""

_BY_CLASS = {kind.cls: kind for kind in ALL_KINDS}


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
    for known in ALL_KINDS:
        if known.stands_for(kind):
            return known
    takes = [x for known in ALL_KINDS for x in known.takes]
    names = sorted((x for x in takes if isinstance(x, str)), key=lambda x: x not in CACHE_NAMES)
    classes = "".join(f" or a {x.__name__}" for x in takes if isinstance(x, type))
    raise ValueError(f"cache={kind!r} must be {', '.join(map(repr, names))}{classes}")


def cache_by_name(name: str, num_kv_heads: int, devices: int = 1) -> CacheKind:
    """The cache that a name on a command line stands for.

    Args:
      name: ``"exact"``, the bits of all heads (``"4bit"``, ``"3bit"``, ``"2bit"``), ``"k4v2"``: 4
        bits for keys and 2 for values, whose errors cost far less, ``"2/4bit"``: half of the KV
        heads at 2 bits, the others at 4 (of an odd number one more of the values than of the keys,
        so that it is half of both together), ``"kv4"``: 4 bits with a
        scale per token and head (FireQ), ``"k8v4"``: the same with keys in e4m3, or pages of tokens
        as they are (``"paged"``), in an 8-bit float (``"fp8_e4m3"``, ``"fp8_e5m2"``), as integers
        (``"paged_int8"``), as codes (``"turbo4"``, ``"turbo_k4v2"`` ..) or with keys and values
        unlike each other (``"paged_k8v4"``, ``"paged_int8_v4"``); of models with latent attention,
        one of `LATENT_CACHE_NAMES`. For comparison: KIVI (``"kivi4"``, ``"kivi3"``,
        ``"kivi2"``), GEAR (``"gear4"`` ..), and tokens that are rounded independently (``"int8"``,
        ``"int4"``, ``"e4m3"``).
      num_kv_heads: of the model.
      devices: over how many its heads are to be split: ``"2/4bit"`` is half of each one's heads,
        ranked among themselves (`TurboConfig.heads_per_group`). Other names mean the same on any.

    Raises:
      TypeError: if a number is not an integer.
      ValueError: if the name is another one, a number is not positive, or heads that are ranked
        are not as many on all devices.
    """
    _checks.check_sizes(num_kv_heads=num_kv_heads, devices=devices)
    for kind in ALL_KINDS:
        if name in kind.names:
            asked: CacheKind = kind.by_name(name, num_kv_heads, devices)
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
    rope_dim: int | None = None,
    axes: Axes | None = None,
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
        57344), as integers of 8 bits (``"paged_int8"``), as codes (``"turbo4"``, ``"turbo_k4v2"``
        ..) or mixed (``"paged_k8v4"``, ``"paged_int8_v4"``), or the config of a progressively
        compressed cache. For comparison, without kernels: ``"int8"``, ``"int4"`` and ``"e4m3"``, or
        a `turbojax.caches.comparison.kivi.Kivi`.
      dtype: of queries, keys and values.
      local_window_size: window of the layer's `AttentionOptions`, if it has one: what it does not
        reach is not kept, see `turbojax.caches.rolling_buffer`. Queries must not see more.
      rope_dim: for latents (``"latent"``, ``"latent_fp8_e4m3"``, ``"latent_turbo4"``), and for
        nothing else, how many of the `head_dim` channels are the rotary key's, the last ones;
        `num_kv_heads` is 1.
      axes: of a mesh, over which sequences, heads and tokens are split, see
        `turbojax.parallel.partition_specs`: each device makes its part, and none the whole.

    Raises:
      TypeError: if the window is not an integer.
      ValueError: if `kind` is none of these, a size does not fit or cannot be split, or
        `rope_dim` is given where there are no latents, or missing where there are.
      NotImplementedError: if there is a window, and caches of this kind keep all tokens.
    """
    known, sizes = kind_for(kind), (batch_size, max_length, num_kv_heads, head_dim)
    if known.has_latents != (rope_dim is not None):
        wanted = "an integer" if known.has_latents else "None"
        raise ValueError(f"{rope_dim=} must be {wanted} for a cache of kind {kind!r}")
    given = {"rope_dim": rope_dim} if known.has_latents else {}
    if local_window_size is not None:
        if not known.has_rolling_buffers:
            raise NotImplementedError(
                f"{local_window_size=} must be None: a cache of kind {kind!r} keeps all tokens"
            )
        given["local_window_size"] = local_window_size
    if axes is not None:
        split = Sizes(*sizes[:3], *known.slots(kind, max_length))
        static = {"head_dim": head_dim, "kind": kind, "dtype": jnp.dtype(dtype), **given}
        made: LayerCache = born(known.init, axes, split, **static)
        return made
    init: Any = known.init  # only some take a window, or the rotary key's channels
    cache: LayerCache = init(*sizes, kind=kind, dtype=jnp.dtype(dtype), **given)
    return cache


def window_to_keep(kind: CacheKind, local_window_size: int | None) -> int | None:
    """A layer's window, for `init_layer_cache`; None where caches of this kind keep all tokens."""
    return local_window_size if kind_for(kind).has_rolling_buffers else None


def take_sequences(cache: LayerCache, first: jax.Array | int, count: int) -> LayerCache:
    """Sequences ``first`` to ``first + count - 1`` of a layer's cache, as a cache of their own."""
    part: LayerCache = kind_of(cache).take(cache, first, count)
    return part


def put_sequences(cache: LayerCache, part: LayerCache, first: jax.Array | int) -> LayerCache:
    """A layer's cache with its sequences from `first` on replaced by those of `part`."""
    whole: LayerCache = kind_of(cache).put(cache, part, first)
    return whole
