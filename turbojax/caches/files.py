"""Which parts of a layer's cache are stored, and how the cache is restored from them.

Only what sequences hold is kept: of a cache with room for 32k tokens that holds 500, these 500.
Rows past a sequence's length mean nothing, and come back as zeros.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks, _device, _json
from turbojax.caches.base import Counts, Description, LayerCache, Stored
from turbojax.caches.kinds import STORED
from turbojax.caches.paged.pool import PagedCache
from turbojax.caches.stored_file import StoredFile


def describe(cache: Any) -> dict[str, Any]:
    """Kind, sizes and configuration of a layer's cache, whose arrays may be abstract."""
    stored = _stored(cache)
    return {"kind": stored.stored_as, **stored.describe(cache)}


def pack(cache: LayerCache | PagedCache) -> dict[str, np.ndarray]:
    """The arrays to store, in host memory; not under `jit`, nor of stacked layers of pages."""
    stored = _stored(cache)
    if not _checks.is_concrete(*jax.tree.leaves(cache)):
        raise ValueError("a cache cannot be stored under jit: its values are not known there")
    leaves = _named_leaves(stored.to_rows(cache))
    counts = stored.counts({name: np.asarray(leaves[name]) for name in stored.counting}, cache)
    arrays = {}
    for name, x in leaves.items():
        if grows := stored.grows.get(_field(name)):
            arrays[name] = _held(x, grows.axis, counts[grows.counted])
        else:
            arrays[name] = np.asarray(x)
    return arrays


def check_room(path: Path, descriptions: Sequence[Description], max_length: int | None) -> None:
    """Raises ValueError where caches would be larger than all memory of their device.

    A file holds only what its sequences hold, but says for how many tokens there shall be room.
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


def described(path: Path, description: Description) -> Any:
    """The cache of a description as files hold it, without arrays: its kind and sizes."""
    return _template(path, description, None)[1]


def unpack(
    file: StoredFile, prefix: str, description: Description, max_length: int | None = None
) -> Any:
    """A cache of what `pack` made, on the default device; one array at a time is in host memory.

    With `max_length` each sequence has room for so many tokens, otherwise for as many as before.
    Raises ValueError, naming the file, for what is not valid, or if `max_length` is less than what
    is held.
    """
    stored, template = _template(file.path, description, max_length)
    try:
        leaves = _read_leaves(file, prefix, stored, template)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f"{file.path} cannot be read onto the device: {_json.line(str(error))}"
        ) from error
    cache = jax.tree.unflatten(jax.tree.structure(template), leaves)
    try:
        stored.validate(cache)
    except ValueError as error:
        raise ValueError(f"{file.path} holds no valid cache: {error}") from error
    return stored.from_rows(cache, description)


def _read_leaves(
    file: StoredFile, prefix: str, stored: Stored[Any], template: Any
) -> list[jax.Array]:
    """The arrays of a cache from a file, in the order of the template's."""
    structs = _named_leaves(template)
    for name in stored.counting:
        file.require(prefix + name, structs[name].shape, structs[name].dtype)
    read = {name: file.read(prefix + name) for name in stored.counting}
    counts = stored.counts(read, template)
    _check_counts(file.path, counts, stored, template)
    leaves = []
    for name, struct in structs.items():
        grows = stored.grows.get(_field(name))
        if grows is None:
            file.require(prefix + name, struct.shape, struct.dtype)
            leaves.append(jnp.asarray(file.read(prefix + name)))
        else:
            held, full = counts[grows.counted], struct.shape
            rest = _rows_first(full, grows.axis, held.ndim)[held.ndim + 1 :]
            file.require(prefix + name, (int(held.sum()), *rest), struct.dtype)
            leaves.append(_unpacked_rows(file.read(prefix + name), grows.axis, held, full))
    return leaves


# Descriptions ------------------------------------------------------------------------------------


def _stored(cache: Any) -> Stored[Any]:
    """The `Stored` of a cache's class."""
    for stored in STORED:
        if type(cache) is stored.cls:
            return stored
    names = ", ".join(stored.cls.__name__ for stored in STORED)
    raise TypeError(f"cache is a {type(cache).__name__}, must be one of {names}")


# Errors that an invalid description leads to.
_NOT_KNOWN = (AttributeError, KeyError, OverflowError, TypeError, ValueError)
_SIZES = (
    "batch_size",
    "max_length",
    "num_kv_heads",
    "head_dim",
    "local_window_size",
    "page_size",
    "num_pages",
)
_LARGEST = 2**31 - 1


def _check_sizes(description: Description, stacked: tuple[Any, ...]) -> None:
    """Raises unless all sizes are possible sizes of arrays."""
    sizes = {name: description[name] for name in _SIZES if name in description}
    sizes |= {f"stacked[{axis}]": size for axis, size in enumerate(stacked)}
    _checks.check_sizes(**sizes)
    for name, size in sizes.items():
        if size > _LARGEST:
            raise ValueError(f"{name}={_json.shown(size)} must be at most {_LARGEST}")


def _template(
    path: Path, description: Description, max_length: int | None
) -> tuple[Stored[Any], Any]:
    """The `Stored` of a description's cache, and that cache without arrays."""
    try:
        stored = {x.stored_as: x for x in STORED}[description["kind"]]
        if max_length is not None:
            description = {**description, "max_length": max_length}
        stacked = tuple(description.get("stacked", ()))
        _check_sizes(description, stacked)
        empty = jax.eval_shape(lambda: stored.make(description))
    except (*_NOT_KNOWN, NotImplementedError) as error:
        reason = _json.line(repr(error))
        raise ValueError(f"{path} describes no cache that is known here: {reason}") from error
    return stored, jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((*stacked, *x.shape), x.dtype), empty
    )


# Arrays ------------------------------------------------------------------------------------------


# What fields were called when the first files were written.
_STORED_AS = {"dropped_tokens": "lost"}


def _named_leaves(tree: Any) -> dict[str, Any]:
    """Every array by its place as files name it, such as ``key.codes.0``."""
    leaves, _ = jax.tree.flatten_with_path(tree)
    found = {}
    for path, x in leaves:
        place = jax.tree_util.keystr(path, simple=True, separator=".")
        *outer, field = place.split(".")
        found[".".join([*outer, _STORED_AS.get(field, field)])] = x
    return found


def _field(name: str) -> str:
    """The last name of a place that is not a number: ``codes`` of ``key.codes.0``."""
    return next(part for part in reversed(name.split(".")) if not part.isdigit())


def _check_counts(path: Path, counts: Counts, stored: Stored[Any], template: Any) -> None:
    """Raises ValueError where a file's lengths cannot be those of such a cache."""
    try:
        stored.check_counts(counts, template)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    for name, held in counts.items():
        if np.any(held < 0):
            raise ValueError(f"{path}: {name}={held.tolist()} must not be negative")
    if "lengths" in counts and np.any(counts["lengths"] > template.max_length):
        raise ValueError(
            f"{path} holds lengths={counts['lengths'].tolist()}, which must be at most "
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
    # Cut on the device: rows that are not held are not copied to the host.
    rows = np.asarray(jax.lax.slice_in_dim(x, 0, longest, axis=x.ndim + axis))
    rows = np.moveaxis(rows, axis, counts.ndim)
    return rows[np.arange(longest) < counts[..., None]]


def _unpacked_rows(
    x: np.ndarray, axis: int, counts: np.ndarray, shape: tuple[int, ...]
) -> jax.Array:
    """The inverse of `_held`: an array of this shape, 0 where nothing is held."""
    longest = int(counts.max(initial=0))
    rows = np.zeros((*counts.shape, longest, *x.shape[1:]), x.dtype)
    rows[np.arange(longest) < counts[..., None]] = x
    held = jnp.asarray(np.moveaxis(rows, counts.ndim, axis))
    padding = [(0, 0, 0)] * len(shape)
    padding[axis] = (0, shape[axis] - longest, 0)
    return jax.lax.pad(held, jnp.zeros((), x.dtype), padding)
