"""The language of tables, which say what each axis of each array of an op is."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

OWN = "*"
"""Stands for the letters in a class's attribute `AXES`, which are by name of field. Letters before
it are those of further axes that come first in all of its arrays."""

Entry = str | tuple["Entry", ...]
"""What the arrays of one argument or result are: a letter for each axis, or as many entries.

Letters are those of `turbojax.sharding.axes`, and of further axes: `F` outputs and `I` inputs of a
product, `P` pages of a pool, `H` and `C` channels, `E` experts. A leading ``...`` is any number of
axes whose elements have nothing to do with each other. After a ``+`` are the letters over which the
array is a sum, so that devices add up their parts.
"""

MEANINGS = {
    "B": "sequences",
    "N": "query heads",
    "K": "key/value heads",
    "T": "queries",
    "S": "keys",
    "L": "slots of a cache",
    "P": "pages of a pool",
    "H": "channels of a head",
    "C": "channels",
    "F": "outputs",
    "I": "inputs",
    "E": "experts",
    "R": "tokens of a block or page",
    "M": "tokens sorted by expert",
}

_LEADING = "abcdefgh"


@dataclasses.dataclass(frozen=True)
class Table:
    """The letters of an op's arrays.

    `inputs` names the arguments that are arrays or hold arrays, in order, with their entries, and
    `outputs` is the entry of what the op returns. `whole` has letters that this op, unlike most,
    cannot split, with the reason.
    """

    op: str
    inputs: tuple[tuple[str, Entry], ...]
    outputs: Entry
    whole: tuple[tuple[str, str], ...] = ()

    def needs_whole(self, dims: str, reason: str) -> "Table":
        """This table, of an op that cannot split these dims, unlike most."""
        return dataclasses.replace(self, whole=(*self.whole, (dims, reason)))

    def refusal(self, letter: str) -> str | None:
        """Why an axis of this letter cannot be split; None if it can."""
        for dims, reason in self.whole:
            if letter in dims:
                return reason
        if letter in "BNKFI" or letter in _LEADING or letter.isdigit():
            return None
        return "which each device needs whole"


def table(op: str, outputs: Entry, **inputs: Entry) -> Table:
    """The table of an op, with an entry for each argument, in order."""
    return Table(op, tuple(inputs.items()), outputs)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of a call, with a letter for each axis; devices add up parts over `summed`."""

    name: str
    dims: str
    summed: str = ""


def leaves_of(name: str, entry: Entry, value: Any) -> list[Leaf]:
    """The arrays of an argument, which may be a pytree, in the order of `jax.tree.leaves`.

    Instead of arrays there may be `ShapeDtypeStruct`s. Raises TypeError if a class has no `AXES`,
    ValueError if an array has another number of axes.
    """
    if value is None:
        return []
    if isinstance(entry, tuple):
        pairs = enumerate(zip(entry, value, strict=True))
        return [x for i, (e, v) in pairs for x in leaves_of(f"{name}[{i}]", e, v)]
    dims, _, summed = entry.partition("+")
    summed = summed.replace("...", _LEADING)
    if dims.endswith(OWN) or hasattr(value, "AXES"):
        found = _by_class(name, dims.partition(OWN)[0] if OWN in dims else "", value)
    elif isinstance(value, Mapping):  # some arrays have fewer of the axes
        found = [_leaf(name, dims[: x.ndim], x) for x in jax.tree.leaves(value)]
    else:
        found = [_leaf(name, dims, x) for x in jax.tree.leaves(value)]
    return [dataclasses.replace(x, summed=summed) for x in found]


def _by_class(name: str, first: str, value: Any) -> list[Leaf]:
    if not hasattr(value, "AXES"):
        raise TypeError(f"{name} is a {type(value).__name__}, which has no AXES")
    found: list[Leaf] = []
    for field in dataclasses.fields(value):
        child = getattr(value, field.name)
        if field.metadata.get("static") or child is None:
            continue
        path, dims = f"{name}.{field.name}", value.AXES.get(field.name)
        if dims is None:
            children = child if isinstance(child, tuple | list) else (child,)
            found += [x for one in children for x in _by_class(path, first, one)]
        else:
            found += [_leaf(path, first + dims, x) for x in jax.tree.leaves(child)]
    return found


def _leaf(name: str, dims: str, x: Any) -> Leaf:
    if dims.startswith("..."):
        rest = dims[3:]
        lead = x.ndim - len(rest)
        if 0 <= lead <= len(_LEADING):
            dims = _LEADING[:lead] + rest
    if len(dims) != x.ndim:
        raise ValueError(f"{name}.shape={x.shape} must have the {len(dims)} axes {dims}")
    return Leaf(name, dims)


def meaning(letter: str) -> str:
    """What an axis of this letter is, in words."""
    return MEANINGS.get(letter, "a leading axis")
