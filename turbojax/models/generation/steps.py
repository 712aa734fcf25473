"""The programs of a session: prompts through a model, new tokens, and how they are chosen."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from turbojax.caches import ImageBlocks, PooledAttention
from turbojax.models.decoder import Decoder
from turbojax.models.generation.caching import ModelCaches
from turbojax.models.generation.sampling import Kind, SamplingRows, sample
from turbojax.models.quantized import QuantizedDecoder
from turbojax.models.tensor_parallel.programs import (
    new_tokens_of,
    on_mesh,
    prompts_of,
    step_program,
)
from turbojax.models.vision.soft_tokens import SoftTokens
from turbojax.sharding import Axes
from turbojax.sharding.specs import partition_specs


@step_program(static_argnames="implementation", donate_argnames="caches")
def decode_step(
    decoder: Decoder | QuantizedDecoder,
    caches: ModelCaches,
    tokens: jax.Array,
    lengths: jax.Array,
    *,
    implementation: str | None,
) -> tuple[ModelCaches, jax.Array, jax.Array]:
    """One token of every sequence through the model; the caches are donated.

    The caches come first among the results, so that each array is written to its own memory: XLA
    gives donated memory to results of the same shape in their order. If anything else of the shape
    of a cache's array came before them, such as the lengths, every array would be copied to another
    place in each step, and a CUDA graph with the step's kernels would be recorded anew each time,
    see `docs/kernels.md`.

    A split decoder runs under one `shard_map`: each device has its sequences and heads.

    `tokens` and `lengths`, the tokens held before, are int ``[B]``. Returns the new caches, logits
    float32 ``[B, V]`` and the new lengths.
    """

    def run(
        decoder: Decoder | QuantizedDecoder,
        caches: ModelCaches,
        tokens: jax.Array,
        lengths: jax.Array,
    ) -> tuple[ModelCaches, jax.Array, jax.Array]:
        attend = new_tokens_of(decoder.axes, implementation)
        hidden, layers = decoder.hidden(tokens[:, None], lengths[:, None], attend, caches.layers)
        return ModelCaches(layers), decoder.logits(hidden[:, 0]), lengths + 1

    rows, held = _specs(decoder.axes, caches)
    return on_mesh(run, decoder, (held, rows, rows), (held, rows, rows))(caches, tokens, lengths)


@step_program(static_argnames=("count", "kind", "implementation"), donate_argnames="caches")
def next_tokens(
    decoder: Decoder | QuantizedDecoder,
    caches: ModelCaches,
    tokens: jax.Array,
    lengths: jax.Array,
    rows: SamplingRows,
    *,
    count: int,
    kind: Kind,
    implementation: str | None,
) -> tuple[ModelCaches, jax.Array, jax.Array, jax.Array]:
    """`count` new tokens of every sequence after `tokens`, in one program; the caches are donated.

    The host takes some 0.15 ms a layer to launch a step's kernels, for a small model several times
    as long as the device needs for them. Within a loop all steps have the same memory, so a CUDA
    graph is recorded once for all of them.

    `tokens` and `lengths` are as in `decode_step`; `rows` sample the first of the tokens. Returns
    the new caches, the chosen tokens int32 ``[count, B]``, the last ones as they are to be fed, and
    the new lengths.
    """

    def step(
        state: tuple[ModelCaches, jax.Array, jax.Array], i: jax.Array
    ) -> tuple[tuple[ModelCaches, jax.Array, jax.Array], jax.Array]:
        caches, fed, lengths = state
        caches, logits, lengths = decode_step(
            decoder, caches, fed, lengths, implementation=implementation
        )
        later = dataclasses.replace(rows, index=rows.index + i)
        chosen, fed = choose(logits, later, kind=kind, axes=decoder.axes)
        return (caches, fed, lengths), chosen

    state = caches, tokens, lengths
    (caches, fed, lengths), chosen = jax.lax.scan(step, state, jnp.arange(count, dtype=jnp.int32))
    return caches, chosen, fed, lengths


@step_program(static_argnames=("implementation", "pooled"), donate_argnames="caches")
def run_prompts(
    decoder: Decoder | QuantizedDecoder,
    caches: ModelCaches,
    tokens: jax.Array,
    lengths: jax.Array,
    first: jax.Array,
    images: SoftTokens | None = None,
    *,
    implementation: str | None,
    pooled: PooledAttention | None,
) -> tuple[jax.Array, ModelCaches]:
    """Prompts through the model, into a part of the caches, which are donated.

    `tokens` is int32 ``[b, T]``, padded on the right, `lengths` int32 ``[b]``, at least 1. `first`
    is the first prompt's place in the caches, or for a decoder that is split over sequences its
    place in the caches of each device. With `images` prompts attend exactly, as `ImageBlocks` says,
    whatever the caches. `pooled` is the `pooled_prefill` of `start`. Returns logits float32 ``[b,
    V]`` after each prompt, and the new caches.
    """

    def run(
        decoder: Decoder | QuantizedDecoder,
        caches: ModelCaches,
        tokens: jax.Array,
        lengths: jax.Array,
        first: jax.Array,
        images: SoftTokens | None,
    ) -> tuple[jax.Array, ModelCaches]:
        attention = pooled if images is None else ImageBlocks(images.types)
        attend = prompts_of(decoder.axes, lengths, first, implementation, attention)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
        hidden, layers = decoder.hidden(tokens, positions, attend, caches.layers, images)
        # Logits of all positions would be the largest array of all.
        last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)
        return decoder.logits(last[:, 0]), ModelCaches(layers)

    rows, held = _specs(decoder.axes, caches)
    specs = (held, rows, rows, PartitionSpec(), rows)
    return on_mesh(run, decoder, specs, (rows, held))(caches, tokens, lengths, first, images)


def _specs(axes: Axes | None, caches: ModelCaches) -> tuple[PartitionSpec, Any]:
    if axes is None:
        return PartitionSpec(), None
    return axes.spec("B"), partition_specs(caches, axes)


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
