"""Arrays inside `jax.shard_map` count as varying along the mesh axes that split them.

With ``check_vma=True``, its default, jax types arrays so. A loop's carry must have one type all the
time, although it often starts as a constant (`varying_like`); and an op with a gradient of its own
gets all of its arrays in one type (`together`): the cast's derivative sums an array's gradient over
the devices that share the array. Outside of `shard_map` nothing here does anything.
"""

from typing import Any

from pallas_kernels.varying import axes_of, cast


def varying_like(x: Any, *like: Any) -> Any:
    """A pytree whose arrays count as varying wherever one of `like` does, too.

    No operation at run time. What starts a loop has the type of what the loop adds to it then.

    Args:
      x: pytree of arrays.
      *like: pytrees of arrays.
    """
    return cast(x, axes_of(like))


def together(*arrays: Any) -> tuple[Any, ...]:
    """Pytrees of arrays, each array of which counts as varying wherever one of them does.

    No operation at run time; but a gradient of an array that was the same on several devices is
    summed over them, as it must be.
    """
    cast_arrays: tuple[Any, ...] = varying_like(arrays, arrays)
    return cast_arrays
