"""Names of the axes of a kernel's launch, which must be those of no mesh.

Inside `jax.shard_map` the axes of the user's mesh are there too, and `jax.lax.axis_index` of a name
that both have is the mesh's: a kernel would take the device's number for its program's.
"""

from collections.abc import Iterable


def own(name: str) -> str:
    """The name that a launch uses for an axis of its grid or cluster."""
    return f"turbojax_kernel_{name}"


def all_own(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(own(name) for name in names)
