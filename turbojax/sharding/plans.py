"""How a call is split over a mesh: from the splits of its arrays to those that the devices need."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule
from jax.sharding import PartitionSpec

from turbojax.sharding.notation import Leaf, Table, meaning

Names = tuple[str, ...]
Split = tuple[Names, ...]
"""For each axis of an array, the axes of the mesh over which it is split."""

_GROUPS = {"K": "N"}
"""Letters that are split together with another one, by which their group is named."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Over which axes of a mesh of these sizes each group of letters is split, outermost first."""

    names: Mapping[str, Names]
    sizes: Mapping[str, int]

    def split(self, leaf: Leaf, shape: Sequence[int]) -> Split:
        """How an array is split; axes of size 1 stand for all and are whole."""
        return tuple(
            self.names.get(_group(letter), ()) if size != 1 else ()
            for letter, size in zip(leaf.dims, shape, strict=True)
        )

    def spec(self, leaf: Leaf, shape: Sequence[int]) -> PartitionSpec:
        """`split` as a `PartitionSpec`."""
        return PartitionSpec(*(_entry(names) for names in self.split(leaf, shape)))

    def parts(self, letter: str) -> int:
        """Into how many parts a letter's axes are split."""
        return math.prod(self.sizes[name] for name in self.names.get(_group(letter), ()))

    def over(self, letter: str) -> Names:
        """The axes of the mesh over which a letter is split."""
        return self.names.get(_group(letter), ())

    def added(self, leaf: Leaf, shape: Sequence[int]) -> Names:
        """The axes of the mesh over which an array's parts are to be added up."""
        own = {name for names in self.split(leaf, shape) for name in names}
        groups = dict.fromkeys(_group(letter) for letter in leaf.summed)
        over = [name for group in groups for name in self.names.get(group, ())]
        return tuple(name for name in over if name not in own)


WHOLE = Plan({}, {})
"""Nothing is split."""


def _group(letter: str) -> str:
    return _GROUPS.get(letter, letter)


def _entry(names: Names) -> str | Names | None:
    return names[0] if len(names) == 1 else names or None


def plan(
    table: Table,
    leaves: Sequence[Leaf],
    shapes: Sequence[Sequence[int]],
    splits: Sequence[Split],
    sizes: Mapping[str, int],
    *,
    wanted: Sequence[tuple[Leaf, Split]] = (),
) -> Plan:
    """How each letter is split, from the splits of a call's arrays.

    An array that is split less than another is cut further, which costs no communication. `wanted`
    has results with the splits that their users would like; what does not fit is left out. Raises
    NotImplementedError if an axis is split that the op needs whole, ValueError if arrays are split
    in different ways, or not evenly.
    """
    names: dict[str, Names] = {}
    sources: dict[str, str] = {}
    for leaf, shape, split in zip(leaves, shapes, splits, strict=True):
        for axis, (letter, size, over) in enumerate(zip(leaf.dims, shape, split, strict=True)):
            if not over or size == 1:
                continue
            where = f"{leaf.name} along axis {axis} ({meaning(letter)}) over {', '.join(over)}"
            reason = table.refusal(letter)
            if reason is not None:
                raise NotImplementedError(
                    f"{table.op} cannot be split so: {leaf.name} with axes {leaf.dims} is split "
                    f"along axis {axis}, {meaning(letter)}, over {', '.join(over)} of the mesh, "
                    f"{reason}; see turbojax.parallel for what can be"
                )
            _join(table, names, sources, _group(letter), over, where)
    result = Plan(names, sizes)
    _check_apart(table, names, sources)
    for leaf, shape in zip(leaves, shapes, strict=True):
        _check_even(table, result, leaf, shape)
    return _with_wanted(table, result, leaves, shapes, wanted)


def _join(
    table: Table,
    names: dict[str, Names],
    sources: dict[str, str],
    group: str,
    over: Names,
    where: str,
) -> None:
    known = names.get(group, ())
    short, long = sorted((known, over), key=len)
    if long[: len(short)] != short:
        raise ValueError(
            f"{table.op} cannot be split so: {where} does not agree with {sources[group]}"
        )
    if long is over:
        names[group], sources[group] = over, where


def _check_apart(table: Table, names: Mapping[str, Names], sources: Mapping[str, str]) -> None:
    seen: dict[str, str] = {}
    for group, over in names.items():
        for name in over:
            if name in seen:
                raise ValueError(
                    f"{table.op} cannot be split so: {sources[group]} and {sources[seen[name]]} "
                    f"have {name} both"
                )
            seen[name] = group


def _check_even(table: Table, result: Plan, leaf: Leaf, shape: Sequence[int]) -> None:
    for axis, (letter, size) in enumerate(zip(leaf.dims, shape, strict=True)):
        parts = result.parts(letter)
        # Unlike other axes of size 1, one key/value head cannot stay whole on every device.
        if size % parts and (size != 1 or letter == "K"):
            raise ValueError(
                f"{table.op} cannot be split so: {leaf.name} has {size} {meaning(letter)} (axis "
                f"{axis}), must be a multiple of {parts}, the devices that share them"
            )


def _with_wanted(
    table: Table,
    result: Plan,
    leaves: Sequence[Leaf],
    shapes: Sequence[Sequence[int]],
    wanted: Sequence[tuple[Leaf, Split]],
) -> Plan:
    """A plan that also splits as results are wanted, where that fits."""
    names = dict(result.names)
    for leaf, split in wanted:
        for letter, over in zip(leaf.dims, split, strict=True):
            used = {name for group in names.values() for name in group}
            if not over or _group(letter) in names or used & {*over} or table.refusal(letter):
                continue
            trial = Plan({**names, _group(letter): over}, result.sizes)
            try:
                for one, shape in zip(leaves, shapes, strict=True):
                    _check_even(table, trial, one, shape)
            except ValueError:
                continue
            names[_group(letter)] = over
    return Plan(names, result.sizes)


def sharding_rule(
    inputs: Sequence[tuple[Leaf, Sequence[int]]],
    outputs: Sequence[tuple[Leaf, Sequence[int]]],
    table: Table,
) -> SdyShardingRule:
    """The rule by which the compiler carries splits from arrays to others of the same call.

    Arrays in which a letter has different sizes (query and key/value heads; outputs and their
    tiles) share a factor that divides all of them. An axis that cannot be split has its own factor
    in each array, so that none is split because another is.
    """
    common: dict[str, int] = {}
    for leaf, shape in (*inputs, *outputs):
        for letter, size in zip(leaf.dims, shape, strict=True):
            if size != 1 and table.refusal(letter) is None:
                group = _group(letter)
                common[group] = math.gcd(common.get(group, size), size)
    factor_sizes: dict[str, int] = {}
    own = iter(f"own{i}" for i in range(10**6))

    def mapping(leaf: Leaf, shape: Sequence[int]) -> ArrayMapping:
        axes: list[str | CompoundFactor] = []
        for letter, size in zip(leaf.dims, shape, strict=True):
            shared = common.get(_group(letter), 1)
            if size == 1 or shared == 1 or table.refusal(letter) is not None:
                axes.append(next(own))
                continue
            factor = f"of{_group(letter)}"
            if size == shared:
                axes.append(factor)
            else:
                rest = next(own)
                factor_sizes.update({factor: shared, rest: size // shared})
                axes.append(CompoundFactor(factor, rest))
        return ArrayMapping(*axes)

    operands = tuple(mapping(*x) for x in inputs)
    results = tuple(mapping(*x) for x in outputs)
    plain = {axis for array in (*operands, *results) for axis in array if isinstance(axis, str)}
    sizes: dict[str, Any] = {name: size for name, size in factor_sizes.items() if name not in plain}
    return SdyShardingRule(operands, results, **sizes)
