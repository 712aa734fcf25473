"""`Axes`: which axes of a mesh split which dimension of an op's arrays."""

import dataclasses
import math
from collections.abc import Iterable

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

Names = str | tuple[str, ...] | None
"""Axes of a mesh: one, several (the first is the outermost), or None."""

DIMENSIONS = {
    **dict.fromkeys("B", "batch"),
    **dict.fromkeys("NKF", "heads"),
    **dict.fromkeys("TSL", "sequence"),
}
"""What the letters of the tables stand for, of those that a mesh can split.

`B` sequences; `N` query heads and `K` KV heads, of which consecutive groups belong together; `T`
queries, `S` keys and `L` slots (tokens, blocks or pages) of a cache; `F` the outputs of a product,
which are split as heads are. Every other letter is an axis that each device holds whole; so is
every axis of size 1 that stands for all.
"""

_AXIS_NAMES = {"data": "batch", "model": "heads", "sequence": "sequence"}


@dataclasses.dataclass(frozen=True)
class Axes:
    """The axes of a mesh over which sequences, heads and tokens are split.

    Attributes:
      batch: over which sequences are split.
      heads: over which heads are split, and with them the hidden sizes of a model's layers (tensor
        parallelism).
      sequence: over which the tokens of each sequence are split (context parallelism).
      mesh: the mesh; None for the one of `jax.set_mesh`.

    Raises:
      TypeError: if an axis is no string.
      ValueError: if the mesh has no such axis, or one is given twice.
    """

    batch: Names = None
    heads: Names = None
    sequence: Names = None
    mesh: Mesh | AbstractMesh | None = None

    def __post_init__(self) -> None:
        for field in ("batch", "heads", "sequence"):
            names = getattr(self, field)
            names = (names,) if isinstance(names, str) else tuple(names or ())
            if not all(isinstance(name, str) for name in names):
                raise TypeError(f"{field}={names!r} must be names of axes of a mesh")
            object.__setattr__(self, field, names)
        names = self.names
        if len(set(names)) < len(names):
            raise ValueError(f"an axis splits one dimension alone, but {names} has one twice")
        if self.mesh is not None:
            _check_known(names, self.mesh)

    @classmethod
    def of(cls, mesh: Mesh | AbstractMesh) -> "Axes":
        """The axes of a mesh that are named ``"data"``, ``"model"`` and ``"sequence"``.

        Raises:
          ValueError: if one has another name.
        """
        unknown = [name for name in mesh.axis_names if name not in _AXIS_NAMES]
        if unknown:
            raise ValueError(
                f"the mesh has axes {unknown}, must have none but {', '.join(_AXIS_NAMES)}; "
                "Axes(batch=, heads=, sequence=, mesh=) takes other names"
            )
        return cls(mesh=mesh, **{_AXIS_NAMES[name]: name for name in mesh.axis_names})

    @property
    def names(self) -> tuple[str, ...]:
        """All axes, those of sequences first."""
        return (
            *self.of_dimension("batch"),
            *self.of_dimension("heads"),
            *self.of_dimension("sequence"),
        )

    def of_dimension(self, dimension: str) -> tuple[str, ...]:
        """The axes over which ``"batch"``, ``"heads"`` or ``"sequence"`` is split."""
        names: tuple[str, ...] = getattr(self, dimension)
        return names

    def require_mesh(self) -> Mesh | AbstractMesh:
        """The mesh.

        Raises:
          ValueError: if there is none, or it lacks an axis.
        """
        mesh = self.mesh
        if mesh is None:
            mesh = jax.sharding.get_abstract_mesh()
            if mesh.empty:
                raise ValueError(f"{self} has no mesh: give mesh=, or call within jax.set_mesh")
            _check_known(self.names, mesh)
        return mesh

    def size(self, dimension: str) -> int:
        """Into how many parts ``"batch"``, ``"heads"`` or ``"sequence"`` is split."""
        return self.count(self.of_dimension(dimension))

    def count(self, names: Iterable[str]) -> int:
        """Into how many parts these axes split an array."""
        names = tuple(names)
        mesh = self.require_mesh() if names else None
        return math.prod(mesh.shape[name] for name in names) if mesh is not None else 1

    def spec(self, dims: str, shape: Iterable[int] | None = None) -> PartitionSpec:
        """How an array is split whose axes have these letters; those of `DIMENSIONS` split it.

        Args:
          dims: a letter for each axis; any letter besides is allowed, too.
          shape: of the array, if known: axes of size 1 are not split.
        """
        sizes = [0] * len(dims) if shape is None else list(shape)
        return PartitionSpec(
            *(
                self._axes_of(letter) if size != 1 else None
                for letter, size in zip(dims, sizes, strict=True)
            )
        )

    def sharding(self, dims: str, shape: Iterable[int] | None = None) -> NamedSharding:
        """`spec` on the mesh, which must be one of devices."""
        mesh = self.require_mesh()
        return NamedSharding(mesh, self.spec(dims, shape))

    def _axes_of(self, letter: str) -> Names:
        names = self.of_dimension(DIMENSIONS[letter]) if letter in DIMENSIONS else ()
        return names[0] if len(names) == 1 else names or None


def _check_known(names: tuple[str, ...], mesh: Mesh | AbstractMesh) -> None:
    unknown = [name for name in names if name not in mesh.axis_names]
    if unknown:
        raise ValueError(f"the mesh has no axes {unknown}; it has {mesh.axis_names}")
