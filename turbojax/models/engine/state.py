"""What an engine keeps on the device beside the pools: tables, lengths and tokens, by slot.

The host changes them in small steps: a row when a request comes into a slot, an entry when it gets
a page. What follows from a step (lengths, chosen tokens) is written on the device, so that no step
waits until the host has read another.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from turbojax.models.engine import compilation


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """The state of S slots, for G groups of layers and at most P pages and L tokens a request.

    Attributes:
      tables: int32 ``[G, S, P]``, pages; -1 where there is none.
      lengths: int32 ``[S]``, tokens in the pages.
      history: int32 ``[S, L + 1]``: the tokens in the pages, then the one that is fed next. What
        stands after that means nothing, except the rest of a prompt.
      prompts: int32 ``[S]``, tokens of the prompts.
      left: int32 ``[S]``, new tokens that a request may still get.
    """

    tables: jax.Array
    lengths: jax.Array
    history: jax.Array
    prompts: jax.Array
    left: jax.Array

    @property
    def slots(self) -> int:
        """S, the number of slots."""
        return self.lengths.shape[0]

    def tables_of(self, slots: jax.Array) -> jax.Array:
        """The tables int32 ``[G, R, P]`` of slots ``[R]``; -1 for a number that is no slot."""
        return jnp.take(self.tables, slots, axis=1, mode="fill", fill_value=-1)

    def of(self, values: jax.Array, slots: jax.Array) -> jax.Array:
        """The values of slots, of an array int32 ``[S]``; 0 for a number that is no slot."""
        return jnp.take(values, slots, mode="fill", fill_value=0)

    def token_at(self, slots: jax.Array, positions: jax.Array) -> jax.Array:
        """The tokens at these places, int32; 0 where there is none."""
        return jnp.maximum(self.history.at[slots, positions].get(mode="fill", fill_value=0), 0)


def new_state(num_groups: int, slots: int, max_pages: int, max_length: int) -> State:
    """The state of slots that are all empty."""
    return State(
        tables=jnp.full((num_groups, slots, max_pages), -1, jnp.int32),
        lengths=jnp.zeros(slots, jnp.int32),
        history=jnp.zeros((slots, max_length + 1), jnp.int32),
        prompts=jnp.zeros(slots, jnp.int32),
        left=jnp.zeros(slots, jnp.int32),
    )


@functools.partial(jax.jit, donate_argnames="state")
def enter(state: State, numbers: jax.Array, tokens: jax.Array, tables: jax.Array) -> State:
    """A request comes into a slot; `state` is donated.

    `numbers` are the slot, the tokens in its pages, those of its prompt, and how many it may get.
    `tokens` is int32 ``[L + 1]``, those that are known; `tables` int32 ``[G, P]``.
    """
    compilation.note()
    slot, length, prompt, left = numbers
    return State(
        tables=state.tables.at[:, slot].set(tables),
        lengths=state.lengths.at[slot].set(length),
        history=state.history.at[slot].set(tokens),
        prompts=state.prompts.at[slot].set(prompt),
        left=state.left.at[slot].set(left),
    )


def apply(state: State, changes: jax.Array) -> State:
    """Changes entries of the tables: ``[U, 4]``, group, slot, column and page.

    A slot past the last one changes nothing.
    """
    group, slot, column, page = changes.T
    return dataclasses.replace(
        state, tables=state.tables.at[group, slot, column].set(page, mode="drop")
    )


@functools.partial(jax.jit, donate_argnames="state")
def change(state: State, changes: jax.Array) -> State:
    """`apply` as a program of its own, for more changes than a step takes."""
    compilation.note()
    return apply(state, changes)


def no_changes(count: int, slots: int) -> np.ndarray:
    """An array for so many changes, int32 ``[count, 4]``, to be filled in."""
    changes = np.zeros((count, 4), np.int32)
    changes[:, 1] = slots
    return changes
