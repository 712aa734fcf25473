"""Launch settings by device and shape, as `python -m benchmarks tune` found them.

Nothing is tuned at run time: `tuning.json` beside this file is all there is.
"""

import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from turbojax._device import gpu_kind

TABLE = Path(__file__).with_name("tuning.json")
# Doublings, summed over the sizes, beyond which another shape says nothing.
_FARTHEST = 1.5

Launch = TypeVar("Launch", bound=tuple[Any, ...])


def launch(
    kernel: str, default: Launch, *, traits: Mapping[str, Any], sizes: Mapping[str, int]
) -> Launch:
    """The settings of the nearest shape that was tuned on this device, or the default.

    Args:
      kernel: its name in the table.
      default: a named tuple, what an entry's settings replace.
      traits: what an entry must have in common with the call: mode, bits, head dim, blocks.
      sizes: positive numbers, in which an entry may be up to 1.5 doublings away in all.
    """
    found = nearest(entries(), kernel, gpu_kind(), traits, sizes)
    return default if found is None else type(default)(**{**default._asdict(), **found["launch"]})  # type: ignore[attr-defined]


@functools.cache
def entries() -> tuple[dict[str, Any], ...]:
    """The table: kernel, device, traits, sizes and launch of each, and how it was found."""
    return tuple(json.loads(TABLE.read_text(encoding="utf-8"))["entries"])


def nearest(
    table: tuple[dict[str, Any], ...],
    kernel: str,
    device: str | None,
    traits: Mapping[str, Any],
    sizes: Mapping[str, int],
) -> dict[str, Any] | None:
    """The entry of this kernel, device and these traits whose sizes are nearest; None if far."""
    wanted = json.loads(json.dumps(dict(traits)))  # with lists for tuples
    best, best_distance = None, _FARTHEST
    for entry in table:
        if (entry["kernel"], entry["device"], entry["traits"]) != (kernel, device, wanted):
            continue
        if entry["sizes"].keys() != sizes.keys():
            raise ValueError(f"{kernel}: {entry['sizes']=} must have the sizes {sorted(sizes)}")
        distance = sum(abs(math.log2(size / entry["sizes"][n])) for n, size in sizes.items())
        if distance < best_distance or (distance == best_distance and best is None):
            best, best_distance = entry, distance
    return best
