"""Steps of sessions whose sequences are split over devices: which run together, what is chosen."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from turbojax.models.generation.sampling import Kind, SamplingRows, sample
from turbojax.sharding import Axes


def parts(
    batch_size: int, count: int | None, axes: Axes | None
) -> Iterator[tuple[int, slice | np.ndarray]]:
    """The sequences that run together: the first one's number on its device, and all of them.

    Each device has consecutive sequences, and equally many in every part.
    """
    if count is None or count >= batch_size:
        yield 0, slice(None)
        return
    devices = 1 if axes is None else axes.size("batch")
    rows = np.arange(batch_size).reshape(devices, -1)
    each = max(count // devices, 1)
    for first in range(0, rows.shape[1], each):
        yield first, rows[:, first : first + each].reshape(-1)


@functools.partial(jax.jit, static_argnums=1)
def joined(logits: list[jax.Array], axes: Axes | None) -> jax.Array:
    """Logits of all parts, in the order of the sequences, see `parts`."""
    if axes is None:
        return jnp.concatenate(logits)
    rows = axes.spec("B")
    join = jax.shard_map(
        lambda parts: jnp.concatenate(parts),
        mesh=axes.require_mesh(),
        in_specs=(rows,),
        out_specs=rows,
        check_vma=False,
    )
    return join(logits)


@functools.partial(jax.jit, static_argnames=("kind", "axes"))
def choose(
    logits: jax.Array, rows: SamplingRows, *, kind: Kind, axes: Axes | None
) -> tuple[jax.Array, jax.Array]:
    """The next tokens, int32 ``[B]``, and the same to feed, with token 0 where there is none.

    With axes every device has all tokens, so that any process can read them.
    """
    if axes is None:
        chosen = sample(logits, rows, kind)
        return chosen, jnp.maximum(chosen, 0)
    each, whole = axes.spec("B"), PartitionSpec()
    choose = jax.shard_map(
        functools.partial(sample, kind=kind),
        mesh=axes.require_mesh(),
        in_specs=(each, each),
        out_specs=each,
        check_vma=False,
    )
    chosen = choose(logits, rows)
    chosen = jax.lax.with_sharding_constraint(chosen, NamedSharding(axes.require_mesh(), whole))
    return chosen, jnp.maximum(chosen, 0)
