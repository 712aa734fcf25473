"""An engine's step on the device: tokens of many sequences through the model, in one program.

A step is a flat batch of N tokens: first one of each sequence that is decoding, then pieces of
prompts, one after the other. All tokens are written to their sequences' pages before any of them
attends, so a piece may be cut into parts of any size: each part attends to the pages as if it were
the newest tokens of a sequence that ends with it.

Beside the pools the device keeps a `State`, which the host changes in small steps: a row when a
request comes into a slot, an entry when it gets a page. What follows from a step (lengths, chosen
tokens) is written on the device, so that no step waits until the host has read another.

In dense programs prompts that begin attend among themselves, to keys and values that are not
compressed, side by side as segments of one sequence. With 8-bit operands this is faster than
attending to pages where prompts are long, and the results lose nothing to the pages' format.
Requests of a step share scales, so a prompt's result depends, within rounding, on what else is in
the step; but NaN and infinity in one are kept from the others here.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbojax.attention import turbo as turbo_attention
from turbojax.attention.options import PLAIN, Options
from turbojax.attention.score_modifiers import ScoreModifiers, of_layer
from turbojax.caches import Attend, holds_latents
from turbojax.models.decoder import Decoder
from turbojax.models.engine.placement import SAME, pool_specs, vocabulary_of
from turbojax.models.engine.pools import (
    Pool,
    Pools,
    Windows,
    append_and_attend,
    check_call,
    decode,
    group_of,
    layers_of,
)
from turbojax.models.engine.programs import PromptProgram, note_traced
from turbojax.models.generation.sampling import greedy_rows
from turbojax.models.quantized import QuantizedDecoder
from turbojax.models.tensor_parallel.programs import on_mesh, step_program
from turbojax.numerics.config import TurboConfig


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


# Of an entering request: numbers beside its tokens and tables, and how many come in one array.
_NUMBERS, _MOST_ENTRIES, _TOKENS_OF_ENTRIES = 4, 16, 2**16


@functools.partial(jax.jit, donate_argnames="state")
def enter(state: State, entries: jax.Array) -> State:
    """Requests come into slots, see `no_entries`; `state` is donated."""
    note_traced()
    slot, length, prompt, left = entries[:, :_NUMBERS].T
    groups, _, pages = state.tables.shape
    tables = entries[:, -groups * pages :].reshape(-1, groups, pages)
    tokens = entries[:, _NUMBERS : -groups * pages]
    return State(
        tables=state.tables.at[:, slot].set(jnp.swapaxes(tables, 0, 1), mode="drop"),
        lengths=state.lengths.at[slot].set(length, mode="drop"),
        history=state.history.at[slot].set(tokens, mode="drop"),
        prompts=state.prompts.at[slot].set(prompt, mode="drop"),
        left=state.left.at[slot].set(left, mode="drop"),
    )


def no_entries(state: State) -> np.ndarray:
    """Rows for requests that enter, int32 ``[R, 4 + L + 1 + G * P]``, to be filled by `set_entry`.

    A row is the slot, the tokens in its pages, those of its prompt, how many it may get, the tokens
    that are known, and the tables. Rows with a slot past the last one, as all are at first, change
    nothing. There are fewer where texts are long.
    """
    groups, slots, pages = state.tables.shape
    tokens = state.history.shape[1]
    rows = max(min(_MOST_ENTRIES, _TOKENS_OF_ENTRIES // tokens), 1)
    entries = np.zeros((rows, _NUMBERS + tokens + groups * pages), np.int32)
    entries[:, 0] = slots
    return entries


def set_entry(
    entry: np.ndarray, numbers: tuple[int, int, int, int], tokens: np.ndarray, tables: np.ndarray
) -> None:
    """Fills in a row of `no_entries`."""
    entry[:_NUMBERS] = numbers
    entry[_NUMBERS : _NUMBERS + len(tokens)] = tokens
    entry[-tables.size :] = tables.ravel()


def apply_changes(state: State, changes: jax.Array) -> State:
    """Changes entries of the tables: ``[U, 4]``, group, slot, column and page.

    A slot past the last one changes nothing.
    """
    group, slot, column, page = changes.T
    return dataclasses.replace(
        state, tables=state.tables.at[group, slot, column].set(page, mode="drop")
    )


@functools.partial(jax.jit, donate_argnames="state")
def change(state: State, changes: jax.Array) -> State:
    """`apply_changes` as a program of its own, for more changes than a step takes."""
    note_traced()
    return apply_changes(state, changes)


def no_changes(count: int, slots: int) -> np.ndarray:
    """An array for so many changes, int32 ``[count, 4]``, to be filled in."""
    changes = np.zeros((count, 4), np.int32)
    changes[:, 1] = slots
    return changes


# Prompts that begin in a step, among themselves ---------------------------------------------------


def segments_of(slots: jax.Array, positions: jax.Array) -> jax.Array:
    """The number of each token's segment, int32 ``[N]``, ascending.

    A segment is a run of tokens at consecutive `positions` int32 ``[N]`` of one slot.
    """
    follows = (slots[1:] == slots[:-1]) & (positions[1:] == positions[:-1] + 1)
    begins = jnp.concatenate([jnp.zeros(1, jnp.int32), (~follows).astype(jnp.int32)])
    return jnp.cumsum(begins, dtype=jnp.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseTokens:
    """Queries, keys and values with zeros in place of what is not finite, and where that matters.

    They are ``[1, N, heads, H]`` and ``[1, N, K, H]``. `sees_nonfinite` bool ``[N]`` marks tokens
    that see something that is not finite in their own segment; `segments` are as in `segments_of`.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    sees_nonfinite: jax.Array
    segments: jax.Array

    @staticmethod
    def of(
        query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array
    ) -> "DenseTokens":
        """Puts zeros in place of what is not finite."""
        arrays = query, key, value
        finite = [jnp.isfinite(x) for x in arrays]
        good = functools.reduce(jnp.logical_and, (jnp.all(x[0], axis=(1, 2)) for x in finite))
        # Of a segment all from the first such token on, which see it.
        count = jnp.cumsum((~good).astype(jnp.int32), dtype=jnp.int32)
        is_first = jnp.concatenate([jnp.ones(1, bool), segments[1:] != segments[:-1]])
        before = jax.lax.cummax(jnp.where(is_first, count - (~good).astype(jnp.int32), 0))
        query, key, value = (
            jnp.where(x, y, jnp.zeros_like(y)) for x, y in zip(finite, arrays, strict=True)
        )
        return DenseTokens(query, key, value, count > before, segments)

    def spoiled(self, out: jax.Array) -> jax.Array:
        """Results ``[N, heads, H]``, NaN where `sees_nonfinite`."""
        return jnp.where(self.sees_nonfinite[:, None, None], jnp.nan, out)


@functools.partial(jax.jit, static_argnames=("config", "options"))
def attend_densely(
    tokens: DenseTokens,
    config: TurboConfig,
    options: Options,
    modifiers: ScoreModifiers,
) -> jax.Array:
    """Causal attention of each segment's tokens, without meaning where they `sees_nonfinite`.

    Of the implementation, that of attention to pages, only ``"xla"`` is followed.
    """
    ids = tokens.segments[None]
    name = "xla" if options.implementation == "xla" else None
    out, _ = turbo_attention.attend(
        tokens.query,
        tokens.key,
        tokens.value,
        config=config,
        options=dataclasses.replace(options, implementation=name),
        modifiers=ScoreModifiers(
            query_segment_ids=ids, key_value_segment_ids=ids, sinks=modifiers.sinks
        ),
    )
    return out[0]


# A step -------------------------------------------------------------------------------------------


CHANGES = 64
"""Entries of tables that a step's own program changes; more are changed before it."""


@dataclasses.dataclass(frozen=True)
class Work:
    """What a step does: numpy arrays to be filled in, which go to the device as one array.

    Attributes:
      slots: int32 ``[N]``, each token's slot; S where there is no token.
      positions: int32 ``[N]``, each token's place in its sequence; -1 for the end, where the token
        is the one that the slot got last.
      outputs: int32 ``[O]``, O = D + M, the tokens whose logits are wanted: the first D tokens, and
        the last ones of the pieces.
      owners: int32 ``[O]``, the slots that go on with what is chosen there; S for none.
      parts: int32 ``[Q, 4]``: of each part of a piece its slot, its first token in the batch, its
        number of tokens, and where in the sequence it ends; S, N, 0 and 0 for no part.
      changes: int32 ``[U, 4]``, see `apply_changes`.
    """

    slots: np.ndarray
    positions: np.ndarray
    outputs: np.ndarray
    owners: np.ndarray
    parts: np.ndarray
    changes: np.ndarray

    def packed(self) -> np.ndarray:
        """All arrays as one, see `unpack`."""
        return np.concatenate([getattr(self, f.name).ravel() for f in dataclasses.fields(self)])


def idle_work(program: PromptProgram, slots: int) -> Work:
    """A step's work without any tokens; `slots` is S."""
    size, outputs = program.tokens, program.rows + program.pieces
    parts = np.zeros((program.parts, 4), np.int32)
    parts[:, 0], parts[:, 1] = slots, size
    rows = np.minimum(np.arange(outputs, dtype=np.int32), size - 1)
    return Work(
        slots=np.full(size, slots, np.int32),
        positions=np.full(size, -1, np.int32),
        outputs=rows,
        owners=np.full(outputs, slots, np.int32),
        parts=parts,
        changes=no_changes(CHANGES, slots),
    )


def unpack(packed: jax.Array, program: PromptProgram) -> Any:
    """`Work` on the device."""
    idle = idle_work(program, 0)
    arrays, at = [], 0
    for field in dataclasses.fields(Work):
        like = getattr(idle, field.name)
        arrays.append(packed[at : at + like.size].reshape(like.shape))
        at += like.size
    made: Any = arrays
    return Work(*made)


def check_implementation(
    implementation: str | None,
    program: PromptProgram,
    pool: Pool,
    max_pages: int,
    num_heads: int,
) -> None:
    """Checks that attention to pages can run a program's calls, see `check_call`."""
    for rows, tokens in ((program.rows, 1), (program.parts, program.part)):
        if rows:
            tables = jax.ShapeDtypeStruct((rows, max_pages), jnp.int32)
            check_call(implementation, pool, tables, rows, tokens, num_heads)


@step_program(
    static_argnames=("program", "windows", "implementation", "prompts", "is_draft"),
    donate_argnames="caches",
)
def run_step(
    decoder: Decoder | QuantizedDecoder,
    caches: Pools,
    state: State,
    packed: jax.Array,
    *,
    program: PromptProgram,
    windows: Windows,
    implementation: str | None,
    prompts: TurboConfig | None = None,
    is_draft: bool = False,
) -> tuple[Pools, State, jax.Array | None, jax.Array | None]:
    """A step up to the greedy choice; `sampler.choose` goes on where more is asked for.

    `caches` are donated, `packed` is the `Work`, and `prompts` says how prompts attend among
    themselves in a dense program. With `is_draft` the weights and pools are a draft model's, which
    only has to hold the same tokens: the state stays as it is, and there are no logits.

    Returns the new pools and state; logits float32 ``[O, V]``, split and padded as
    `Vocabulary` says, which mean nothing for rows without an owner; and int32 ``[O + 1]``:
    the most likely tokens, see `sample`, then how many tokens the pools could not store so far,
    counted in one layer of each group.
    """
    note_traced()

    def run(
        decoder: Decoder | QuantizedDecoder, caches: Pools, state: State, packed: jax.Array
    ) -> tuple[Pools, State, jax.Array | None, jax.Array | None]:
        work = unpack(packed, program)
        state = apply_changes(state, work.changes)
        work = without_those_that_are_done(work, state)
        caches, hidden = through_model(
            decoder, caches, state, work, program, windows, implementation, prompts
        )
        if is_draft:
            return caches, state, None, None
        logits = decoder.local_logits(hidden)
        rows = greedy_rows(len(work.outputs))
        chosen = vocabulary_of(decoder).sample(logits, rows, "greedy")
        state = gone_on(state, work, chosen)
        dropped_tokens = count_dropped(decoder, caches, windows)
        return caches, state, logits, jnp.concatenate([chosen, dropped_tokens[None]])

    held, of_logits = pool_specs(caches, decoder.axes), vocabulary_of(decoder).spec(2)
    results = (held, SAME, of_logits, SAME)
    stepped: tuple[Pools, State, jax.Array | None, jax.Array | None]
    stepped = on_mesh(run, decoder, (held, SAME, SAME), results)(caches, state, packed)
    return stepped


def through_model(
    decoder: Decoder | QuantizedDecoder,
    caches: Pools,
    state: State,
    work: Any,
    program: PromptProgram,
    windows: Windows,
    implementation: str | None,
    prompts: TurboConfig | None = None,
) -> tuple[Pools, jax.Array]:
    """A step's tokens through the model: the new pools, and the hidden states of the outputs."""
    lengths = state.of(state.lengths, work.slots)
    positions = jnp.where(work.positions >= 0, work.positions, lengths)
    tokens = state.token_at(work.slots, positions)
    attend = _attend(work, state, positions, program, windows, implementation, prompts)
    hidden, caches = decoder.hidden(tokens[None], positions[None], attend, caches)
    return caches, hidden[0][work.outputs]


def count_dropped(
    decoder: Decoder | QuantizedDecoder, caches: Pools, windows: Windows
) -> jax.Array:
    """How many tokens the pools could not store so far, counted in one layer of each group.

    All layers of a group write to the same places, so that one of them counts for all.
    """
    dropped_tokens = [
        caches[layers[0]].dropped_tokens for layers in layers_of(decoder.config, windows)
    ]
    return jnp.sum(jnp.stack(dropped_tokens))


def without_those_that_are_done(work: Any, state: State) -> Any:
    """Removes sequences that have all their tokens, which the host may not know yet."""
    is_done = (work.positions < 0) & (state.of(state.left, work.slots) <= 0)
    no_more = state.of(state.left, work.owners) <= 0
    return dataclasses.replace(
        work,
        slots=jnp.where(is_done, state.slots, work.slots),
        owners=jnp.where(no_more, state.slots, work.owners),
    )


def gone_on(state: State, work: Any, tokens: jax.Array) -> State:
    """The state after a step: its tokens are in the pages, and its slots have their next ones."""
    lengths, owners = state.lengths.at[work.slots].add(1, mode="drop"), work.owners
    at = jnp.take(lengths, owners, mode="fill", fill_value=0)
    return dataclasses.replace(
        state,
        lengths=lengths,
        history=state.history.at[owners, at].set(tokens, mode="drop"),
        left=state.left.at[owners].add(-1, mode="drop"),
    )


def append_at(
    pool: Pool,
    key: jax.Array,
    value: jax.Array,
    tables: jax.Array,
    positions: jax.Array,
    is_real: jax.Array,
) -> Pool:
    """Writes tokens ``[1, N, K, H]``, each as a sequence of its own: one scatter for all of them.

    `tables` int32 ``[N, 1]`` has each token's page; `positions` and `is_real` are ``[N]``.
    """
    append, _ = append_and_attend(pool)
    within = positions % pool.page_size
    count = is_real.astype(jnp.int32)
    return append(pool, key[0][:, None], value[0][:, None], tables, within, new_lengths=count)


def pages_at(state: State, slots: jax.Array, positions: jax.Array, page_size: int) -> jax.Array:
    """The page of each token, int32 ``[G, N, 1]``; -1 where there is none."""
    column = positions // page_size
    found = state.tables.at[:, slots, column].get(mode="fill", fill_value=-1)
    return found[:, :, None]


def _attend(
    work: Any,
    state: State,
    positions: jax.Array,
    program: PromptProgram,
    windows: Windows,
    implementation: str | None,
    prompts: TurboConfig | None,
) -> Attend:
    """Attention of a step's tokens ``[1, N, heads, H]``."""
    rows = program.rows
    is_real = work.slots < state.slots
    # Those of the first tokens that belong to no prompt.
    decodes = is_real[:rows] & (work.positions[:rows] < 0)
    decoding = jnp.where(decodes, work.slots[:rows], state.slots)
    row_tables = state.tables_of(decoding)
    counts = decodes.astype(jnp.int32)
    held = jnp.where(decodes, positions[:rows], 0)
    parts = _Parts.of(work, state, program) if program.parts else None
    segments = segments_of(work.slots, positions)

    def attend(query, key, value, cache, options=PLAIN, sinks=None):  # type: ignore[no-untyped-def]
        group = group_of(options.local_window_size, windows)
        static, modifiers = options.complete(query.shape[3], implementation), of_layer(query, sinks)
        given: Any = {"options": static, "modifiers": modifiers}
        if not program.pieces:
            query, key, value = (x[0, :, None] for x in (query, key, value))
            where = row_tables[group], held, counts
            decoded, cache = decode(query, key, value, cache, *where, **given)
            return decoded[None, :, 0], cache
        pages = pages_at(state, work.slots, positions, cache.page_size)
        cache = append_at(cache, key, value, pages[group], positions, is_real)
        _, attend_pages = append_and_attend(cache)
        alone = None
        if prompts is not None and is_compressed(cache):
            alone = DenseTokens.of(query, key, value, segments)
            query = alone.query
        decoded, _ = attend_pages(
            query[0, :rows, None], cache, row_tables[group], held + counts, counts, **given
        )
        decoded = decoded[:, 0]
        if alone is not None and prompts is not None:
            out = attend_densely(alone, prompts, static, modifiers)
        else:
            assert parts is not None
            out = parts.attend(query[0], cache, group, attend_pages, given)
        first = jnp.where(decodes[:, None, None], decoded, out[:rows])
        # In place: a new array would be all of it once more.
        out = jax.lax.dynamic_update_slice(out, first, (0, 0, 0))
        return (out if alone is None else alone.spoiled(out))[None], cache

    return attend


def is_compressed(pool: Pool) -> bool:
    """Whether a pool holds keys and values in another form than the model's; False for latents."""
    return not holds_latents(pool) and pool.kv_dtype != "auto"


@dataclasses.dataclass(frozen=True)
class _Parts:
    """Parts of the pieces of prompts, as rows of one call.

    Attributes:
      tables: int32 ``[G, Q, P]``.
      lengths: int32 ``[Q]``, where each part ends in its sequence.
      counts: int32 ``[Q]``, its tokens.
      taken: int32 ``[Q, T]``, its tokens' numbers in the batch.
      of_token: int32 ``[N]``, the part of each token of the batch.
      within: int32 ``[N]``, its place in that part.
    """

    tables: jax.Array
    lengths: jax.Array
    counts: jax.Array
    taken: jax.Array
    of_token: jax.Array
    within: jax.Array

    @staticmethod
    def of(work: Any, state: State, program: PromptProgram) -> "_Parts":
        slot, first, count, end = work.parts.T
        tokens = jnp.arange(program.tokens, dtype=jnp.int32)
        # Parts are in the order of their tokens; those without any come last.
        of_token = jnp.sum((first[None] <= tokens[:, None]).astype(jnp.int32), axis=1) - 1
        of_token = jnp.maximum(of_token, 0)
        steps = jnp.arange(program.part, dtype=jnp.int32)
        return _Parts(
            tables=state.tables_of(slot),
            lengths=end,
            counts=count,
            taken=jnp.minimum(first[:, None] + steps[None], program.tokens - 1),
            of_token=of_token,
            within=jnp.clip(tokens - first[of_token], 0, program.part - 1),
        )

    def attend(
        self, query: jax.Array, cache: Pool, group: int, attend_pages: Any, given: Any
    ) -> jax.Array:
        """Attention of tokens ``[N, heads, H]``; results of tokens in no part mean nothing."""
        out, _ = attend_pages(
            query[self.taken], cache, self.tables[group], self.lengths, self.counts, **given
        )
        return out[self.of_token, self.within]
