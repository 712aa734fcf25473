"""Registers classes as pytrees of jax, which `jax.export` can serialize too; sizes and paths.

A serialized function names the class of every cache or weight that goes in or out, and holds its
static fields as JSON: ``{"version": 1, "static": {"max_length": 20, ..}}``. Names and fields stay
readable: a field that is added later has a default, which is what older files mean. Arrays are no
part of it: they are the function's arguments and results.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from turbojax import _json

VERSION = 1

T = TypeVar("T")

PYTREES: dict[str, type] = {}
"""The classes that can go in and out of exported functions, by their names there."""

_STATIC: dict[str, Any] = {}


def pytree(cls: type[T]) -> type[T]:
    """Registers a dataclass as `jax.tree_util.register_dataclass` does, and for `jax.export`.

    Its name in files is ``turbojax.`` and that of the class: it may never change. Modules that are
    not imported have not registered theirs.
    """
    jax.tree_util.register_dataclass(cls)
    fields = static_fields(cls)
    name = f"turbojax.{cls.__name__}"
    export.register_pytree_node_serialization(
        cls,
        serialized_name=name,
        serialize_auxdata=functools.partial(_write, name, fields),
        deserialize_auxdata=functools.partial(_read, name, fields),
    )
    PYTREES[name] = cls
    return cls


def static_fields(cls: Any) -> tuple[dataclasses.Field[Any], ...]:
    """Those that are no arrays."""
    return tuple(x for x in dataclasses.fields(cls) if x.metadata.get("static"))


def nbytes(tree: Any) -> int:
    """Bytes of all arrays of a tree; they may be abstract."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their paths, in the tree's order."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def static(cls: type[T]) -> type[T]:
    """Registers a frozen dataclass that stands in static fields, such as a configuration."""
    _STATIC[cls.__name__] = cls
    return cls


def _write(name: str, fields: tuple[dataclasses.Field[Any], ...], values: tuple[Any, ...]) -> bytes:
    plain = {
        field.name: _plain(f"{name}.{field.name}", value)
        for field, value in zip(fields, values, strict=True)
    }
    return json.dumps({"version": VERSION, "static": plain}, sort_keys=True).encode()


def _read(name: str, fields: tuple[dataclasses.Field[Any], ...], data: bytes) -> tuple[Any, ...]:
    content = _json.parse(bytes(data))
    version = content.get("version") if isinstance(content, dict) else None
    if version != VERSION:
        raise ValueError(
            f"{name} of an exported function has version {_json.shown(version)}, must "
            f"have {VERSION}: another version of turbojax wrote it"
        )
    found = _arguments(name, fields, content.get("static"))
    return tuple(found[field.name] for field in fields)


def _plain(name: str, value: Any) -> Any:
    """A static field's value in JSON; TypeError, which names the field, for what has no form."""
    if isinstance(value, np.integer):
        return int(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return [_plain(name, x) for x in value]
    if isinstance(value, np.dtype):
        return {"dtype": value.name}
    cls = _STATIC.get(type(value).__name__)
    if cls is not None and type(value) is cls:
        fields = {
            x.name: _plain(f"{name}.{x.name}", getattr(value, x.name))
            for x in dataclasses.fields(cls)
        }
        return {"class": cls.__name__, "fields": fields}
    raise TypeError(f"{name}={value!r} cannot be serialized: a function with it cannot be exported")


def _value(name: str, plain: Any) -> Any:
    """The inverse of `_plain`; ValueError for what that did not write."""
    if isinstance(plain, list):
        return tuple(_value(name, x) for x in plain)
    if not isinstance(plain, dict):
        return plain
    if plain.keys() == {"dtype"} and isinstance(plain["dtype"], str):
        return jnp.dtype(plain["dtype"])
    cls = _STATIC.get(str(plain.get("class")))
    if cls is None or plain.keys() != {"class", "fields"}:
        raise ValueError(f"{name}={_json.shown(plain)} of an exported function is unknown here")
    return cls(**_arguments(name, dataclasses.fields(cls), plain["fields"]))


def _arguments(
    name: str, fields: tuple[dataclasses.Field[Any], ...], given: Any
) -> Mapping[str, Any]:
    """Values of all fields; ValueError for unknown ones, and for missing ones without a default."""
    known = {field.name: field for field in fields}
    if not isinstance(given, dict) or given.keys() - known.keys():
        raise ValueError(
            f"{name} of an exported function holds {_json.shown(given)}, must hold {list(known)}"
        )
    found = {}
    for field in fields:
        if field.name in given:
            found[field.name] = _value(f"{name}.{field.name}", given[field.name])
        elif field.default is not dataclasses.MISSING:
            found[field.name] = field.default
        else:
            raise ValueError(f"{name} of an exported function has no {field.name}")
    return found
