"""Arrays of the device made of numpy: donated ones, those for the host, rows of choices."""

import jax
import numpy as np

from tests.serving.engine_texts import VOCABULARY
from turbojax.models.engine.step import State

# What stands where nobody may look.
SPOILT, UNWRITTEN, NOBODYS = -77, -99, -7


class Array(np.ndarray):
    """An array as a step gives it to the host."""

    def copy_to_host_async(self) -> None:
        pass

    def is_ready(self) -> bool:
        return True


def for_host(values: object) -> np.ndarray:
    return np.asarray(values, np.int32).view(Array)


def donated(given: State) -> State:
    """A copy; the original is spoilt."""
    copy = jax.tree.map(np.array, given)
    for array in jax.tree.leaves(given):
        array[:] = SPOILT
    return copy


def with_changes(given: State, changes) -> State:
    slots, columns = given.tables.shape[1:]
    for group, slot, column, page in changes:
        if slot < slots and column < columns:
            given.tables[group, slot, column] = page
    return given


def seen_densely(work, where):
    """Prompts that begin in a step see themselves, and no pages."""
    seen, text, last = {}, (), None
    for i, token in enumerate(where):
        if token is None or work.positions[i] < 0:
            continue
        slot, position, value = token
        if last != (slot, position - 1):
            assert position == 0, "the middle of a prompt in a dense step"
            text = ()
        seen[i] = text = (*text, int(value))
        last = slot, position
    return seen


def bias_of(modifiers, row):
    if modifiers.bias_tokens is None:
        return []
    pairs = zip(modifiers.bias_tokens[row], modifiers.bias_values[row], strict=True)
    return [(token, value) for token, value in pairs if token < VOCABULARY]


def sampling_of(rows, row):
    return rows.temperature[row], rows.top_k[row], int(rows.seed[row])
