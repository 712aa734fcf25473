"""Caches of split decoders: every device makes its own."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax

from turbojax.models.tensor_parallel.specs import cache_specs
from turbojax.sharding import Axes


@functools.partial(jax.jit, static_argnums=(0, 1))
def init_split(make: Callable[[], Any], axes: Axes) -> Any:
    """The caches that each device makes for itself, as one: no device holds more than its part.

    `make`, for the sequences and KV heads of one device, must be hashable, and equal to others that
    make the same.
    """
    return jax.shard_map(
        make,
        mesh=axes.require_mesh(),
        in_specs=(),
        out_specs=cache_specs(jax.eval_shape(make), axes),
        check_vma=False,
    )()


def whole_slots(max_length: int, slots: Iterable[int], axes: Axes | None) -> int:
    """The next length of caches that gives all devices of the sequence's axis as many slots.

    `slots` says how many tokens a slot of each layer holds.
    """
    count = 1 if axes is None else axes.size("sequence")
    if count == 1:
        return max_length
    multiple = count * math.lcm(*slots)
    return -(-max_length // multiple) * multiple


def check_batch(batch_size: int, axes: Axes | None) -> None:
    """Raises ValueError unless there are as many sequences on all devices."""
    count = 1 if axes is None else axes.size("batch")
    if batch_size % count:
        assert axes is not None
        raise ValueError(
            f"{batch_size} sequences must be a multiple of {count}, the devices of the axes "
            f"{axes.of_dimension('batch')}"
        )
