"""Meshes from a text such as ``data=2,model=4``, an option of commands."""

import math

import jax
import numpy as np
from jax.sharding import Mesh

from turbojax.sharding.axes import Axes

AXIS_NAMES = ("data", "sequence", "model")
"""Axes that a text may name, the outermost first: neighbouring devices share heads, which talk most
often."""


def mesh_of(text: str) -> Axes:
    """The axes of a mesh of the first devices that there are, all axes automatic.

    Args:
      text: names of `AXIS_NAMES` in any order, each with a number of devices, such as
        ``"data=2,model=4"``. With several processes these must be all devices, so that each process
        has some.

    Raises:
      ValueError: if the text is something else, or there are fewer devices.
    """
    sizes = _parse(text)
    devices = jax.devices()
    count = math.prod(sizes.values())
    kind = devices[0].device_kind
    if count > len(devices):
        raise ValueError(
            f"mesh {text!r} needs {count} devices, there {_are(len(devices))} ({kind})"
        )
    if jax.process_count() > 1 and count < len(devices):
        raise ValueError(
            f"mesh {text!r} has {count} devices, must have all {len(devices)} of the "
            f"{jax.process_count()} processes"
        )
    names = [name for name in AXIS_NAMES if name in sizes]
    shape = [sizes[name] for name in names]
    return Axes.of(Mesh(np.array(devices[:count]).reshape(shape), names))


def _parse(text: str) -> dict[str, int]:
    """The size of each axis."""
    wanted = f"must be such as data=2,model=4, with axes of {', '.join(AXIS_NAMES)}"
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, number = (x.strip() for x in part.partition("="))
        if not equals or name not in AXIS_NAMES or not _is_count(number):
            raise ValueError(f"mesh {text!r} {wanted}")
        if name in sizes:
            raise ValueError(f"mesh {text!r} names {name} twice")
        sizes[name] = int(number)
        if not sizes[name]:
            raise ValueError(f"mesh {text!r}: {name}=0 must be at least 1")
    return sizes


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def _are(count: int) -> str:
    return "is 1" if count == 1 else f"are {count}"
