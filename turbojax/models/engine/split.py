"""An engine on several devices: each has some heads of every page, and a part of the vocabulary.

A step is one program under `shard_map`. Tables, lengths and tokens are the same on all devices, and
so is what is chosen. The most likely token of all is found among each device's most likely one by
one small gather; only programs that need all logits gather them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from turbojax.models.engine.pool_access import Pool
from turbojax.models.generation.sampling import NOTHING, Kind, SamplingRows, sample
from turbojax.models.tensor_parallel.layout import gather_logits, hidden_axes, likeliest, share
from turbojax.models.tensor_parallel.specs import cache_specs
from turbojax.sharding import Axes

SAME = PartitionSpec()
"""Of arrays that all devices have whole."""


class Vocabulary(NamedTuple):
    """How a vocabulary of `size` tokens is split: each device has the logits of some of them.

    A tuple for the same reason as `programs.PromptProgram`.
    """

    size: int
    axes: Axes | None = None

    @property
    def padded(self) -> int:
        """Columns of an array of logits on all devices together."""
        count = 1
        if self.axes is not None:
            count = self.axes.size("heads") * self.axes.size("sequence")
        return count * share(self.size, count)

    def spec(self, ndim: int) -> PartitionSpec:
        """How logits with so many axes are split; the last axis is the vocabulary."""
        over = hidden_axes(self.axes)
        return PartitionSpec(*[None] * (ndim - 1), over) if over else SAME

    def logits(self, *shape: int) -> jax.ShapeDtypeStruct:
        """Abstract logits ``[..., V]`` as a step returns them, to trace what follows."""
        whole = (*shape, self.padded)
        if self.axes is None:
            return jax.ShapeDtypeStruct(whole, jnp.float32)
        sharding = NamedSharding(self.axes.require_mesh(), self.spec(len(whole)))
        return jax.ShapeDtypeStruct(whole, jnp.float32, sharding=sharding)

    def gathered(self, logits: jax.Array) -> jax.Array:
        """All logits ``[..., V]`` from a device's own, within `run_on`."""
        return gather_logits(logits, self.size, self.axes)

    def sample(self, logits: jax.Array, rows: SamplingRows, kind: Kind) -> jax.Array:
        """`sample` from a device's own logits ``[R, V / n]``, -inf where it has no token."""
        if kind != "greedy" or not hidden_axes(self.axes):
            return sample(self.gathered(logits), rows, kind)
        best, token = likeliest(logits, self.axes)
        return jnp.where(jnp.isnan(best) | (best == -jnp.inf), NOTHING, token)


def vocabulary_of(decoder: Any) -> Vocabulary:
    """The vocabulary of a `Decoder` or a `QuantizedDecoder`."""
    return Vocabulary(decoder.config.vocab_size, decoder.axes)


def held(caches: tuple[Pool, ...], axes: Axes | None) -> Any:
    """How pools are split, by their KV heads; None without axes.

    With more devices than KV heads several have the same pages, and queries are split over all.
    """
    return None if axes is None else cache_specs(caches, axes)


def pages_of(caches: tuple[Pool, ...], axes: Axes | None) -> Any:
    """How the arrays that `paged.read_pages` takes from each pool are split."""
    if axes is None:
        return None
    return tuple(
        {
            name: getattr(specs, name)
            for name in type(pool).PAGE_ARRAYS
            if getattr(pool, name) is not None
        }
        for pool, specs in zip(caches, cache_specs(caches, axes), strict=True)
    )


def run_on(
    run: Callable[..., Any], axes: Axes | None, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """`run` on every device of the axes' mesh, for use within `jit`; without axes `run` itself.

    `run` takes and returns a device's part of each array, split as the specs say.
    """
    if axes is None:
        return run
    # Not checked, as in `turbojax.models.tensor_parallel.programs`.
    return jax.shard_map(
        run, mesh=axes.require_mesh(), in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
