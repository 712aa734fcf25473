"""Several new tokens of each sequence in one launch, where nothing else is to be done.

The host takes some 0.15 ms a layer to launch a step, whatever its size: for a small model, or few
sequences, several times as long as the device needs. In a loop on the device all steps have the
same memory, so that their kernels are recorded as one CUDA graph, once. The price is that whatever
comes meanwhile waits for all of them.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from turbojax.models.decoder import Decoder
from turbojax.models.engine.placement import SAME, pool_specs, vocabulary_of
from turbojax.models.engine.pools import Pools, Windows
from turbojax.models.engine.programs import decode_program, note_traced
from turbojax.models.engine.step import (
    State,
    Work,
    apply_changes,
    count_dropped,
    gone_on,
    through_model,
    without_those_that_are_done,
)
from turbojax.models.generation.sampling import NOTHING, Kind, SamplingRows
from turbojax.models.quantized import QuantizedDecoder
from turbojax.models.tensor_parallel.programs import on_mesh, step_program

# Rows of the programs: few, as each is compiled for each kind of sampling. More sequences keep the
# device busy for longer than the host takes.
_ROWS = (1, 8, 64)
MOST_ROWS = _ROWS[-1]
"""Sequences that may have several tokens in a launch."""


class Together(NamedTuple):
    """How many tokens a launch gives, and the rows of its programs, ascending."""

    tokens: int
    rows: tuple[int, ...]

    @staticmethod
    def of(tokens: int, slots: int) -> "Together":
        """For an engine of so many slots."""
        return Together(tokens, (*(x for x in _ROWS if x < slots), min(slots, MOST_ROWS)))

    def rows_for(self, count: int) -> int:
        """Rows of the smallest program for so many sequences, of at most `rows[-1]`."""
        return next(size for size in self.rows if size >= count)


@step_program(
    static_argnames=("count", "kind", "windows", "implementation"),
    donate_argnames=("caches", "state"),
)
def run_together(
    decoder: Decoder | QuantizedDecoder,
    caches: Pools,
    state: State,
    slots: jax.Array,
    changes: jax.Array,
    rows: SamplingRows,
    *,
    count: int,
    kind: Kind,
    windows: Windows,
    implementation: str | None,
) -> tuple[Pools, State, jax.Array]:
    """`count` steps, each of one token of every sequence in `slots` int32 ``[R]``.

    `caches` and `state` are donated, `changes` are as in `apply_changes`, and the `index` of `rows`
    is ignored. Returns the new pools and state, and int32 ``[R * (count + 2) + 1]`` as
    `speculation.accept` does, all tokens of a request being new.
    """
    note_traced()

    def run(
        decoder: Decoder | QuantizedDecoder,
        caches: Pools,
        state: State,
        slots: jax.Array,
        changes: jax.Array,
        rows: SamplingRows,
    ) -> tuple[Pools, State, jax.Array]:
        state = apply_changes(state, changes)
        new = jnp.minimum(state.of(state.left, slots), count)
        size = slots.shape[0]
        program, vocabulary = decode_program(size), vocabulary_of(decoder)
        nothing, every = jnp.zeros((0, 4), jnp.int32), jnp.arange(size, dtype=jnp.int32)
        ends: Any = slots, jnp.full(size, -1, jnp.int32), every, slots, nothing, nothing
        given = Work(*ends)

        def step(before: tuple[Pools, State], _: None) -> tuple[tuple[Pools, State], jax.Array]:
            caches, state = before
            work = without_those_that_are_done(given, state)
            caches, hidden = through_model(
                decoder, caches, state, work, program, windows, implementation
            )
            index = state.of(state.lengths, slots) + 1 - state.of(state.prompts, slots)
            chosen = vocabulary.sample(
                decoder.local_logits(hidden), dataclasses.replace(rows, index=index), kind
            )
            return (caches, gone_on(state, work, chosen)), chosen

        (caches, state), chosen = jax.lax.scan(step, (caches, state), None, length=count)
        is_new = jnp.arange(count, dtype=jnp.int32)[None] < new[:, None]
        tokens = jnp.where(is_new, chosen.T, NOTHING)
        shown = jnp.concatenate([new[:, None], new[:, None], tokens], axis=1)
        found = jnp.concatenate([shown.ravel(), count_dropped(decoder, caches, windows)[None]])
        return caches, state, found

    held = pool_specs(caches, decoder.axes)
    done: tuple[Pools, State, jax.Array]
    done = on_mesh(run, decoder, (held, *[SAME] * 4), (held, SAME, SAME))(
        caches, state, slots, changes, rows
    )
    return done
