"""Arrays inside `jax.shard_map` count as varying along the mesh axes that split them.

With ``check_vma=True``, its default, jax types arrays so. A loop's carry must have one type all the
time, although it often starts as a constant (`varying_like`); and an op with a gradient of its own
gets all of its arrays in one type (`together`): the cast's derivative sums an array's gradient over
the devices that share the array. Outside of `shard_map` nothing here does anything.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax

from pallas_kernels.varying import axes_of, axes_of_type, cast

Tree = TypeVar("Tree")


def varying_like(x: Tree, *like: Any) -> Tree:
    """A pytree whose arrays count as varying wherever one of `like` does, too.

    No operation at run time. It gives the start of a loop the type of what the loop adds to it.

    Args:
      x: pytree of arrays.
      *like: pytrees of arrays.
    """
    typed: Tree = cast(x, axes_of(like))
    return typed


def together(*arrays: Any) -> tuple[Any, ...]:
    """Pytrees of arrays, each array of which counts as varying wherever one of them does.

    No operation at run time; but a gradient of an array that was the same on several devices is
    summed over them, as it must be.
    """
    return varying_like(arrays, arrays)


def as_carried(step: Callable[..., tuple[Tree, Any]], carry: Tree, *inputs: Any) -> Tree:
    """The carry of a `jax.lax.scan` in the type in which `step` returns it.

    For carries with several kinds of arrays, such as caches: each array varies only where it must.
    Inside `shard_map`, traces `step` once or a few times.

    Args:
      step: ``step(carry, *inputs)`` returns the next carry, and something else.
      carry: pytree of arrays.
      *inputs: of one step.
    """
    if not _manual_axes():
        return carry
    while True:
        types, _ = jax.eval_shape(step, carry, *inputs)
        typed: Tree = jax.tree.map(lambda x, kind: cast(x, axes_of_type(kind)), carry, types)
        leaves = zip(jax.tree.leaves(typed), jax.tree.leaves(carry), strict=True)
        if all(axes_of(x) == axes_of(y) for x, y in leaves):
            return typed
        carry = typed


def _manual_axes() -> tuple[str, ...]:
    """The mesh axes that a `shard_map` around here has split."""
    mesh = jax.sharding.get_abstract_mesh()
    return () if mesh.empty else tuple(mesh.manual_axes)
