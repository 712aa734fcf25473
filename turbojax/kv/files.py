"""Which parts of a layer's cache are stored, and how the cache is restored from them.

Only what sequences hold is kept: of a cache with room for 32k tokens that holds 500, these 500.
What lies past a sequence's length means nothing, and comes back as zeros.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks, _device, _json
from turbojax.baselines import exact
from turbojax.config import TurboConfig
from turbojax.kv.kinds import LayerCache
from turbojax.kv.pages import PagedLayer
from turbojax.sas import SAS
from turbojax.state import kv4
from turbojax.state.pages.pool import PagedCache, init_paged_cache, page_arrays
from turbojax.state.progressive import ProgressiveCache, init_cache
from turbojax.state.stored_file import StoredFile

Description = Mapping[str, Any]
"""Kind, sizes and configuration of a cache, in plain JSON values."""

Counts = Mapping[str, np.ndarray]
"""How many tokens, blocks and buffered tokens each sequence holds: int ``[..., B]`` by name."""


class _Rule(NamedTuple):
    """An array's axis that grows with what is held.

    Attributes:
      axis: counted from the end; that of the sequences comes before it.
      counted: the name of its counts.
    """

    axis: int
    counted: str


class _Kind(NamedTuple):
    """How one class of caches is stored.

    Attributes:
      cls: the class.
      describe: its sizes and options.
      make: an empty cache of a description; called abstractly.
      rules: by the name of a field; arrays of other fields are kept whole.
    """

    cls: type
    describe: Callable[[Any], dict[str, Any]]
    make: Callable[[Description], Any]
    rules: Mapping[str, _Rule]


def describe(cache: Any) -> dict[str, Any]:
    """Kind, sizes and configuration of a layer's cache, whose arrays may be abstract.

    Raises:
      TypeError: if it is not a cache that can be stored.
    """
    name = _kind_name(cache)
    return {"kind": name, **_KINDS[name].describe(cache)}


def pack(cache: LayerCache | PagedCache) -> dict[str, np.ndarray]:
    """The arrays to store, in host memory.

    Raises:
      TypeError: if it is not a cache that can be stored.
      ValueError: under `jit`, or for stacked layers of pages.
    """
    rules = _KINDS[_kind_name(cache)].rules
    if not _checks.is_concrete(*jax.tree.leaves(cache)):
        raise ValueError("a cache cannot be stored under jit: its values are not known there")
    if isinstance(cache, PagedLayer) and cache.lengths.ndim > 1:
        raise ValueError("stacked layers of pages cannot be stored together, only one by one")
    leaves = _named_leaves(_in_rows(cache) if isinstance(cache, PagedLayer) else cache)
    counts = _counts({name: np.asarray(leaves[name]) for name in _lengths_of(leaves)}, cache)
    arrays = {}
    for name, x in leaves.items():
        rule = rules.get(_field(name))
        arrays[name] = np.asarray(x) if rule is None else _held(x, rule.axis, counts[rule.counted])
    return arrays


def check_room(path: Path, descriptions: Sequence[Description], max_length: int | None) -> None:
    """Raises ValueError where caches would be larger than all memory of their device.

    A file holds what its sequences hold, and says for how many tokens there shall be room.

    Args:
      path: of the file, for messages.
      descriptions: see `describe`, of all that are to be read.
      max_length: see `unpack`.
    """
    there = _device.total_memory()
    templates = (_template(path, x, max_length)[1] for x in descriptions)
    needed = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(list(templates)))
    if there is not None and needed > there:
        longest = max((x.get("max_length", 0) for x in descriptions), default=0)
        raise ValueError(
            f"{path} asks for {needed} bytes, must ask for at most {there}, which is all memory: "
            f"max_length={max_length or longest}"
        )


def unpack(
    file: StoredFile, prefix: str, description: Description, max_length: int | None = None
) -> Any:
    """A cache of what `pack` made, on the default device; one array at a time is in host memory.

    Args:
      file: where it lies.
      prefix: of its arrays' names.
      description: see `describe`.
      max_length: tokens each sequence shall be able to hold; as it was if not given.

    Raises:
      ValueError: naming the file, if the description is not one, arrays are missing, mis-shaped,
        damaged or impossible, or `max_length` is less than what is held.
    """
    rules, template = _template(file.path, description, max_length)
    try:
        leaves = _read_leaves(file, prefix, rules, template)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f"{file.path} cannot be read onto the device: {_json.line(str(error))}"
        ) from error
    cache = jax.tree.unflatten(jax.tree.structure(template), leaves)
    _validate(file.path, cache)
    return _in_pages(cache, description["page_size"]) if isinstance(cache, PagedLayer) else cache


def _read_leaves(
    file: StoredFile, prefix: str, rules: Mapping[str, _Rule], template: Any
) -> list[jax.Array]:
    """The arrays of a cache like this one, in its order."""
    structs = _named_leaves(template)
    for name in _lengths_of(structs):
        file.require(prefix + name, structs[name].shape, structs[name].dtype)
    counts = _counts({name: file.read(prefix + name) for name in _lengths_of(structs)}, template)
    _check_counts(file.path, counts, template)
    leaves = []
    for name, struct in structs.items():
        rule = rules.get(_field(name))
        if rule is None:
            file.require(prefix + name, struct.shape, struct.dtype)
            leaves.append(jnp.asarray(file.read(prefix + name)))
        else:
            held, full = counts[rule.counted], struct.shape
            rest = _rows_first(full, rule.axis, held.ndim)[held.ndim + 1 :]
            file.require(prefix + name, (int(held.sum()), *rest), struct.dtype)
            leaves.append(_spread(file.read(prefix + name), rule.axis, held, full))
    return leaves


# Kinds -------------------------------------------------------------------------------------------


def _sizes(cache: Any) -> dict[str, Any]:
    """Sizes that every kind but a bare pool has; leading axes are those of stacked layers."""
    is_exact, is_paged = isinstance(cache, exact.ExactCache), isinstance(cache, PagedLayer)
    heads: Any = cache.pages if is_paged else cache
    return {
        "stacked": list(cache.lengths.shape[:-1]),
        "batch_size": cache.lengths.shape[-1],
        "max_length": cache.max_length,
        "num_kv_heads": cache.key.shape[-2] if is_exact else heads.num_kv_heads,
        "head_dim": cache.key.shape[-1] if is_exact else heads.head_dim,
        "dtype": cache.key.dtype.name if is_exact else heads.dtype.name,
    }


def _pool(pages: Any) -> dict[str, Any]:
    return {"page_size": pages.page_size, "kv_dtype": pages.kv_dtype, "seed": pages.seed}


def _arguments(description: Description) -> tuple[list[int], dict[str, Any]]:
    names = ("batch_size", "max_length", "num_kv_heads", "head_dim")
    return [description[name] for name in names], {"dtype": jnp.dtype(description["dtype"])}


def _make_exact(description: Description) -> exact.ExactCache:
    sizes, dtype = _arguments(description)
    return exact.init_cache(*sizes, **dtype)


def _make_kv4(description: Description) -> kv4.Kv4Cache:
    sizes, dtype = _arguments(description)
    return kv4.init_cache(*sizes, **dtype)


def _make_progressive(description: Description) -> ProgressiveCache:
    sizes, dtype = _arguments(description)
    config = dict(description["config"])
    if isinstance(config["softmax"], Mapping):
        config["softmax"] = SAS(**config["softmax"])
    return init_cache(*sizes, config=TurboConfig(**config), **dtype)


def _make_pool(description: Description) -> PagedCache:
    return init_paged_cache(
        description["num_pages"],
        description["page_size"],
        description["num_kv_heads"],
        description["head_dim"],
        kv_dtype=description["kv_dtype"],
        dtype=jnp.dtype(description["dtype"]),
        seed=description["seed"],
    )


def _make_layer(description: Description) -> PagedLayer:
    """In rows, see `_in_rows`."""
    batch, size = description["batch_size"], description["page_size"]
    pages = -(-description["max_length"] // size)
    layer = PagedLayer(
        pages=_make_pool({**description, "num_pages": batch * pages}),
        block_tables=jnp.arange(batch * pages, dtype=jnp.int32).reshape(batch, pages),
        lengths=jnp.zeros(batch, jnp.int32),
        overflowed=jnp.zeros(batch, jnp.bool_),
        max_length=description["max_length"],
    )
    return _in_rows(layer)


_TOKENS, _BLOCKS, _BUFFERED = "lengths", "num_blocks", "buffer_lengths"

_KINDS = {
    "exact": _Kind(
        exact.ExactCache,
        _sizes,
        _make_exact,
        {"key": _Rule(-3, _TOKENS), "value": _Rule(-3, _TOKENS)},
    ),
    "progressive": _Kind(
        ProgressiveCache,
        lambda cache: {**_sizes(cache), "config": dataclasses.asdict(cache.config)},
        _make_progressive,
        {
            "codes": _Rule(-3, _BLOCKS),
            "channel_scale": _Rule(-2, _BLOCKS),
            "channel_zero": _Rule(-2, _BLOCKS),
            "block_scale": _Rule(-1, _BLOCKS),
            "buffer": _Rule(-2, _BUFFERED),
        },
    ),
    "kv4": _Kind(
        kv4.Kv4Cache,
        _sizes,
        _make_kv4,
        {
            "key_codes": _Rule(-2, _TOKENS),
            "key_scale": _Rule(-1, _TOKENS),
            "value_codes": _Rule(-2, _TOKENS),
            "value_scale": _Rule(-1, _TOKENS),
        },
    ),
    "paged_layer": _Kind(
        PagedLayer,
        lambda cache: {**_sizes(cache), **_pool(cache.pages)},
        _make_layer,
        {
            "key": _Rule(-2, _TOKENS),
            "value": _Rule(-2, _TOKENS),
            "key_norm": _Rule(-1, _TOKENS),
            "value_norm": _Rule(-1, _TOKENS),
        },
    ),
    "paged_pool": _Kind(
        PagedCache,
        lambda cache: {
            "num_pages": cache.num_pages,
            "num_kv_heads": cache.num_kv_heads,
            "head_dim": cache.head_dim,
            "dtype": cache.dtype.name,
            **_pool(cache),
        },
        _make_pool,
        {},
    ),
}


def _kind_name(cache: Any) -> str:
    for name, kind in _KINDS.items():
        if type(cache) is kind.cls:
            return name
    names = ", ".join(kind.cls.__name__ for kind in _KINDS.values())
    raise TypeError(f"cache is a {type(cache).__name__}, must be one of {names}")


# What a description that is none leads to.
_NOT_KNOWN = (AttributeError, KeyError, OverflowError, TypeError, ValueError)
_SIZES = ("batch_size", "max_length", "num_kv_heads", "head_dim", "page_size", "num_pages")
_LARGEST = 2**31 - 1


def _check_sizes(description: Description, stacked: tuple[Any, ...]) -> None:
    """Raises unless all sizes are some that arrays can have."""
    sizes = {name: description[name] for name in _SIZES if name in description}
    sizes |= {f"stacked[{axis}]": size for axis, size in enumerate(stacked)}
    _checks.check_sizes(**sizes)
    for name, size in sizes.items():
        if size > _LARGEST:
            raise ValueError(f"{name}={_json.shown(size)} must be at most {_LARGEST}")


def _template(
    path: Path, description: Description, max_length: int | None
) -> tuple[Mapping[str, _Rule], Any]:
    """The rules of a description's kind, and its cache without arrays."""
    try:
        kind = _KINDS[description["kind"]]
        if max_length is not None:
            description = {**description, "max_length": max_length}
        stacked = tuple(description.get("stacked", ()))
        _check_sizes(description, stacked)
        empty = jax.eval_shape(lambda: kind.make(description))
    except (*_NOT_KNOWN, NotImplementedError) as error:
        reason = _json.line(repr(error))
        raise ValueError(f"{path} describes no cache that is known here: {reason}") from error
    return kind.rules, jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((*stacked, *x.shape), x.dtype), empty
    )


# Pages of a layer --------------------------------------------------------------------------------


def _in_rows(layer: PagedLayer) -> PagedLayer:
    """A layer whose page arrays are ``[B, K, S, ...]``, in the order of tokens, without tables.

    Only to be stored: where its pages lay does not matter.
    """
    pages, (batch, entries) = layer.pages, layer.block_tables.shape
    # Entries past a sequence's pages may be anything; what is read there is not used.
    tables = jnp.clip(layer.block_tables, 0, pages.num_pages - 1)

    def rows(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x[tables], 1, 2)  # [B, K, entries, page_size, ...]
        return x.reshape(batch, x.shape[1], entries * pages.page_size, *x.shape[4:])

    return dataclasses.replace(layer, pages=_map_pages(rows, pages), block_tables=tables[:, :0])


def _in_pages(layer: PagedLayer, page_size: int) -> PagedLayer:
    """The inverse of `_in_rows`, with the pages of each sequence in order."""
    batch, entries = layer.batch_size, layer.pages.key.shape[2] // page_size
    tables = jnp.arange(batch * entries, dtype=jnp.int32).reshape(batch, entries)

    def split(x: jax.Array) -> jax.Array:
        x = x.reshape(batch, x.shape[1], entries, -1, *x.shape[3:])
        return jnp.moveaxis(x, 2, 1).reshape(batch * entries, *x.shape[1:2], *x.shape[3:])

    return dataclasses.replace(layer, pages=_map_pages(split, layer.pages), block_tables=tables)


def _map_pages(change: Callable[[jax.Array], jax.Array], pages: PagedCache) -> PagedCache:
    changed: dict[str, Any] = {name: change(x) for name, x in page_arrays(pages).items()}
    return dataclasses.replace(pages, **changed)


# Arrays ------------------------------------------------------------------------------------------


def _named_leaves(tree: Any) -> dict[str, Any]:
    """Every array by its place, such as ``key.codes.0``."""
    leaves, _ = jax.tree.flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves}


def _field(name: str) -> str:
    """The last name of a place that is not a number: ``codes`` of ``key.codes.0``."""
    return next(part for part in reversed(name.split(".")) if not part.isdigit())


def _lengths_of(leaves: Mapping[str, Any]) -> list[str]:
    return [name for name in ("lengths", "buffer_lengths") if name in leaves]


def _counts(lengths: dict[str, np.ndarray], cache: Any) -> dict[str, np.ndarray]:
    if not isinstance(cache, ProgressiveCache):
        return dict(lengths)
    compressed = lengths[_TOKENS] - lengths[_BUFFERED]
    return {**lengths, _BLOCKS: compressed // cache.config.block_kv}


def _check_counts(path: Path, counts: Counts, template: Any) -> None:
    """Raises ValueError where a file's lengths cannot be those of such a cache."""
    if _BUFFERED in counts:
        size, buffered = template.config.buffer_size, counts[_BUFFERED]
        if np.any(buffered >= size):
            raise ValueError(f"{path}: buffer_lengths={buffered.tolist()} must be below {size}")
    for name, held in counts.items():
        if np.any(held < 0):
            raise ValueError(f"{path}: {name}={held.tolist()} must not be negative")
    if _TOKENS in counts and np.any(counts[_TOKENS] > template.max_length):
        raise ValueError(
            f"{path} holds lengths={counts[_TOKENS].tolist()}, which must be at most "
            f"max_length={template.max_length}"
        )


def _rows_first(x: Any, axis: int, ndim: int) -> tuple[int, ...]:
    """The shape with `axis` moved behind the first `ndim` axes, which count sequences."""
    shape = list(x)
    size = shape.pop(len(shape) + axis)
    return (*shape[:ndim], size, *shape[ndim:])


def _held(x: jax.Array, axis: int, counts: np.ndarray) -> np.ndarray:
    """What sequences hold, one after the other: ``[sum of counts, ...]``."""
    longest = int(counts.max(initial=0))
    # Cut on the device: what nobody holds is not copied to the host.
    rows = np.asarray(jax.lax.slice_in_dim(x, 0, longest, axis=x.ndim + axis))
    rows = np.moveaxis(rows, axis, counts.ndim)
    return rows[np.arange(longest) < counts[..., None]]


def _spread(x: np.ndarray, axis: int, counts: np.ndarray, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `_held`: an array of this shape, 0 where nothing is held."""
    longest = int(counts.max(initial=0))
    rows = np.zeros((*counts.shape, longest, *x.shape[1:]), x.dtype)
    rows[np.arange(longest) < counts[..., None]] = x
    held = jnp.asarray(np.moveaxis(rows, counts.ndim, axis))
    padding = [(0, 0, 0)] * len(shape)
    padding[axis] = (0, shape[axis] - longest, 0)
    return jax.lax.pad(held, jnp.zeros((), x.dtype), padding)


def _validate(path: Path, cache: Any) -> None:
    """Raises ValueError if the cache breaks an invariant of its class."""
    if isinstance(cache, PagedLayer | exact.ExactCache):
        return  # all that there is to check has been checked
    if not isinstance(cache, PagedCache) and cache.lengths.ndim > 1:
        for layer in range(len(cache.lengths)):
            _validate(path, jax.tree.map(lambda x: x[layer], cache))  # noqa: B023
        return
    try:
        cache.validate()
    except ValueError as error:
        raise ValueError(f"{path} holds no valid cache: {error}") from error
