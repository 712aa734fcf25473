"""What an engine gives the device: pools, slots, the programs of its steps, pages that move.

A sequence's pages move between the pools of all layers and host memory bit for bit.
"""

import concurrent.futures
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import paged
from turbojax.models.engine import sampler, speculation
from turbojax.models.engine.placement import SAME, page_specs, pool_specs, run_on, vocabulary_of
from turbojax.models.engine.pools import Pool, Pools, Windows
from turbojax.models.engine.programs import PromptProgram, decode_program, note_traced
from turbojax.models.engine.requests import Sequence
from turbojax.models.engine.sampler import Chosen, no_processors, wanted_of
from turbojax.models.engine.scheduler import Piece, Plan
from turbojax.models.engine.speculation import Draft, NGram, Speculation
from turbojax.models.engine.step import (
    CHANGES,
    State,
    Work,
    change,
    check_implementation,
    enter,
    idle_work,
    no_changes,
    no_entries,
    run_step,
    set_entry,
)
from turbojax.models.engine.together import Together, run_together
from turbojax.models.generation.sampling import Kind, SamplingRows, greedy_rows, kind_of
from turbojax.numerics.config import TurboConfig
from turbojax.sharding import Axes

Content = list[tuple[dict[str, np.ndarray], ...]]
"""Pages in host memory: groups of pages, of each group the layers, of each layer the arrays."""

Layers = tuple[tuple[int, ...], ...]
"""Of each group those that have the same pages."""

# One shape, compiled once; the last group is filled up with -1, which names no page.
_GROUP = 16


def read_pages(caches: Pools, pages: tuple[int, ...], axes: Axes | None = None) -> list[Any]:
    """Starts to copy pages for `fetch_pages`; they may be overwritten at once."""
    return [_read(caches, group, axes) for group in _cut_up(pages)]


def fetch_pages(copies: list[Any]) -> Content:
    """Waits for what `read_pages` began, and brings it to host memory."""
    return [jax.device_get(group) for group in copies]


def write_pages(
    caches: Pools,
    pages: tuple[int, ...],
    content: Content,
    axes: Axes | None = None,
) -> Pools:
    """Writes what was read to other pages, as many as were read; the caches are donated."""
    for group, arrays in zip(_cut_up(pages), content, strict=True):
        caches = _write(caches, group, arrays, axes)
    return caches


def content_bytes(content: list[Content]) -> int:
    """Bytes held in host memory by a sequence's pages of all groups."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(content))


def _cut_up(pages: tuple[int, ...]) -> list[np.ndarray]:
    padded = np.array([*pages, *[-1] * (-len(pages) % _GROUP)], np.int32)
    return list(padded.reshape(-1, _GROUP))


@functools.partial(jax.jit, static_argnames="axes")
def _read(caches: Pools, pages: jax.Array, axes: Axes | None) -> Any:
    note_traced()

    def run(caches: Pools, pages: jax.Array) -> Any:
        return tuple(paged.read_pages(cache, pages) for cache in caches)

    specs = (pool_specs(caches, axes), SAME)
    return run_on(run, axes, specs, page_specs(caches, axes))(caches, pages)


@functools.partial(jax.jit, static_argnames="axes", donate_argnames="caches")
def _write(caches: Pools, pages: jax.Array, content: Any, axes: Axes | None) -> Pools:
    note_traced()

    def run(caches: Pools, pages: jax.Array, content: Any) -> Pools:
        return tuple(
            paged.write_pages(cache, pages, arrays)
            for cache, arrays in zip(caches, content, strict=True)
        )

    held = pool_specs(caches, axes)
    specs = (held, SAME, page_specs(caches, axes))
    written: Pools = run_on(run, axes, specs, held)(caches, pages, content)
    return written


# Steps --------------------------------------------------------------------------------------------


Weights = Any
"""A `Decoder` or a `QuantizedDecoder`."""


@dataclasses.dataclass(frozen=True, eq=False)
class Programs:
    """The steps that an engine runs, in few sizes.

    `prompts` ascend in size, and of one size the dense program comes first. `decoding` are the rows
    of the programs without prompts, ascending; empty where one program does all. `dense` says how
    prompts attend among themselves. `together` are those of several tokens, if there are any.
    """

    prompts: tuple[PromptProgram, ...]
    decoding: tuple[int, ...]
    windows: Windows
    implementation: str | None = None
    dense: TurboConfig | None = None
    speculation: Speculation | None = None
    together: Together | None = None

    @property
    def static(self) -> dict[str, Any]:
        """The static arguments of every program of a model."""
        return {"windows": self.windows, "implementation": self.implementation}

    def static_of(self, program: PromptProgram) -> dict[str, Any]:
        """The static arguments of a call of `run_step`."""
        prompts = self.dense if program.is_dense else None
        return {"program": program, "prompts": prompts, **self.static}

    def of(self, plan: Plan) -> PromptProgram:
        """The smallest program that a plan fits."""
        if not plan.pieces and self.decoding:
            return decode_program(self.rows(len(plan.decoding)))
        sizes = [piece.count for piece in plan.pieces]
        is_dense = self.dense is not None and all(piece.begin == 0 for piece in plan.pieces)
        return next(x for x in self.prompts if x.fits(sizes) and x.is_dense <= is_dense)

    def rows(self, count: int) -> int:
        """Rows of the smallest program without prompts for so many sequences."""
        return next(size for size in self.decoding if size >= count)


@dataclasses.dataclass
class Step:
    """A step that was given to the device.

    `rows` are those of `sequences`, which get one token each, or as many as `counts` says at most,
    `more` of them besides the first, which may be guesses. `found` is int32, see `run_step` and
    `speculation.accept`; `chosen` replaces its tokens where more was wanted.
    """

    rows: list[int]
    sequences: list[Sequence]
    found: jax.Array
    chosen: Chosen | None = None
    prompt_tokens: int = 0
    more: int = 0
    is_guessed: bool = False
    counts: list[int] = dataclasses.field(default_factory=list)


class Device:
    """Pools and slots on the device; `slots` are empty at first.

    `layers` are those of each group; `draft` has the weights, pools and layers of a draft model.
    """

    def __init__(
        self,
        decoder: Weights,
        caches: Pools,
        slots: State,
        programs: Programs,
        layers: Layers,
        draft: tuple[Weights, Pools, Layers] | None = None,
    ) -> None:
        self.caches, self.programs = caches, programs
        self._decoder, self._state = decoder, slots
        self._vocabulary = vocabulary_of(decoder)
        self._layers = layers
        self._draft: Weights = None
        self.draft_caches: Pools = ()
        if draft is not None:
            self._draft, self.draft_caches, draft_layers = draft
            after = len(caches)
            self._layers = tuple(
                (*one, *(after + i for i in other))
                for one, other in zip(layers, draft_layers, strict=True)
            )

    @property
    def _slots(self) -> int:
        return self._state.slots

    # Pages to and from the host -------------------------------------------------------------------

    def nbytes(self, pages: tuple[tuple[int, ...], ...]) -> int:
        """Bytes of pages of each group, in all of its layers."""
        every = self.caches + self.draft_caches
        return sum(
            len(numbers) * sum(every[layer].page_bytes for layer in of_group)
            for numbers, of_group in zip(pages, self._layers, strict=True)
        )

    def read(self, pages: tuple[tuple[int, ...], ...]) -> list[list[Any]]:
        """Starts to copy pages of each group; `fetch_pages` waits for them."""
        every = self.caches + self.draft_caches
        return [
            read_pages(tuple(every[layer] for layer in of_group), numbers, self._decoder.axes)
            for of_group, numbers in zip(self._layers, pages, strict=True)
        ]

    def write(self, pages: tuple[tuple[int, ...], ...], content: list[Content]) -> None:
        """Writes what was read to other pages."""
        every = list(self.caches + self.draft_caches)
        for of_group, numbers, copies in zip(self._layers, pages, content, strict=True):
            pools = tuple(every[layer] for layer in of_group)
            written = write_pages(pools, numbers, copies, self._decoder.axes)
            for layer, pool in zip(of_group, written, strict=True):
                every[layer] = pool
        count = len(self.caches)
        self.caches, self.draft_caches = tuple(every[:count]), tuple(every[count:])

    # Steps ----------------------------------------------------------------------------------------

    def enter(self, entering: list[tuple[Sequence, int, np.ndarray]]) -> None:
        """Sequences come into their slots, each with so many tokens in its pages ``[G, P]``."""
        while entering:
            entries = no_entries(self._state)
            for entry, (sequence, held, tables) in zip(entries, entering, strict=False):
                request = sequence.request
                left = request.max_new_tokens - len(sequence.new_tokens)
                numbers = sequence.slot, held, len(request.tokens), left
                set_entry(entry, numbers, sequence.tokens, tables)
            self._state = enter(self._state, entries)
            entering = entering[len(entries) :]

    def run(self, plan: Plan, changes: list[tuple[int, int, int, int]]) -> Step:
        """Gives the device a step, after the changes of the tables, see `apply_changes`."""
        few = self._apply_all_but(changes)
        if plan.more:
            return self._several(plan, few)
        program = self.programs.of(plan)
        work = idle_work(program, self._slots)
        work.changes[: len(few)] = few if few else 0
        rows, sequences = self._fill(work, program, plan)
        step = self._choose(rows, sequences, work.owners, self._model_step(work, program))
        step.prompt_tokens = sum(piece.count for piece in plan.pieces)
        return step

    def _apply_all_but(
        self, changes: list[tuple[int, int, int, int]]
    ) -> list[tuple[int, int, int, int]]:
        """Changes tables until the changes that are left fit into a step, and returns those."""
        while len(changes) > CHANGES:
            self._state = change(self._state, np.array(changes[:CHANGES], np.int32))
            changes = changes[CHANGES:]
        return changes

    def _fill(
        self, work: Work, program: PromptProgram, plan: Plan
    ) -> tuple[list[int], list[Sequence]]:
        """Writes a plan into a step's work; returns `Step.rows` and `Step.sequences`."""
        count, is_fixed = len(plan.decoding), not self.programs.decoding
        slots = np.array([sequence.slot for sequence in plan.decoding], np.int32)
        # Where bits must not depend on what else runs, a slot's row is always the same.
        at = slots if is_fixed else np.arange(count)
        work.slots[at] = work.owners[at] = slots
        rows, sequences = at.tolist(), list(plan.decoding)
        first, part = program.rows if is_fixed else count, 0
        for i, piece in enumerate(plan.pieces):
            end = first + piece.count
            sequence = piece.sequence
            work.slots[first:end] = sequence.slot
            work.positions[first:end] = np.arange(piece.begin, piece.begin + piece.count)
            if program.parts:
                part = _cut(work.parts, part, piece, first, program)
            output = program.rows + i
            work.outputs[output] = end - 1
            if piece.begin + piece.count == len(sequence.prompt):
                work.owners[output] = sequence.slot
                rows.append(output)
                sequences.append(sequence)
            first = end
        return rows, sequences

    def _model_step(self, work: Work, program: PromptProgram) -> tuple[jax.Array, jax.Array]:
        packed = work.packed()
        static = self.programs.static_of(program)
        if self._draft is not None:
            decoding = work.owners[: program.rows]
            if np.any(decoding < self._slots):
                self.draft_caches = speculation.catch_up(
                    self._draft,
                    self.draft_caches,
                    self._state,
                    decoding,
                    **self.programs.static,
                )
            self.draft_caches, *_ = run_step(
                self._draft, self.draft_caches, self._state, packed, is_draft=True, **static
            )
        self.caches, self._state, logits, found = run_step(
            self._decoder, self.caches, self._state, packed, **static
        )
        assert logits is not None
        assert found is not None
        return logits, found

    def _choose(
        self,
        rows: list[int],
        sequences: list[Sequence],
        owners: np.ndarray,
        step: tuple[jax.Array, jax.Array],
    ) -> Step:
        """Chooses again for rows that want more than the most likely token."""
        logits, found = step
        numbered = zip(rows, sequences, strict=True)
        others = [(row, sequence) for row, sequence in numbered if not sequence.is_plain]
        if not others:
            found.copy_to_host_async()
            return Step(rows, sequences, found)
        wanted = wanted_of(sequence.request for _, sequence in others).usual
        sampling = greedy_rows(len(owners))
        processors = no_processors(len(owners), self._vocabulary.size, wanted)
        for row, sequence in others:
            sampling.set(row, sequence.request.sampling, 0)
            _set_processors(processors, row, sequence)
        slots = self._state
        history, chosen = sampler.choose(
            logits,
            slots.history,
            slots.lengths,
            slots.prompts,
            owners,
            sampling,
            processors,
            wanted=wanted,
            vocabulary=self._vocabulary,
        )
        self._state = dataclasses.replace(slots, history=history)
        return Step(rows, sequences, found, chosen)

    def _several(self, plan: Plan, changes: list[tuple[int, int, int, int]]) -> Step:
        """Gives the device a step of several tokens, see `together` and `speculation`."""
        programs, count = self.programs, len(plan.decoding)
        size = (programs.together.rows_for if programs.together else programs.rows)(count)
        slots = np.full(size, self._slots, np.int32)
        slots[:count] = [sequence.slot for sequence in plan.decoding]
        rows, kind = greedy_rows(len(slots)), kind_of(x.request.sampling for x in plan.decoding)
        if kind != "greedy":
            for row, sequence in enumerate(plan.decoding):
                rows.set(row, sequence.request.sampling, 0)
        table = no_changes(CHANGES, self._slots)
        table[: len(changes)] = changes if changes else 0
        if programs.together:
            self.caches, self._state, found = run_together(
                self._decoder,
                self.caches,
                self._state,
                slots,
                table,
                rows,
                count=programs.together.tokens,
                kind=kind,
                **programs.static,
            )
        else:
            found = self._guess(slots, table, rows, kind)
        found.copy_to_host_async()
        return Step(
            list(range(count)),
            plan.decoding,
            found,
            more=plan.more,
            is_guessed=programs.speculation is not None,
            counts=plan.counts,
        )

    def _guess(
        self, slots: np.ndarray, table: np.ndarray, rows: SamplingRows, kind: Kind
    ) -> jax.Array:
        how, static = self.programs.speculation, self.programs.static
        if isinstance(how, Draft):
            self.draft_caches, guesses, there = speculation.draft(
                self._draft,
                self.draft_caches,
                self._state,
                slots,
                table,
                rows,
                count=how.tokens,
                kind=kind,
                **static,
            )
        else:
            assert isinstance(how, NGram)
            guesses, there = speculation.look_up(
                self._state, slots, count=how.tokens, longest=how.longest, shortest=how.shortest
            )
        self.caches, self._state, logits, counts, dropped_tokens = speculation.verify(
            self._decoder, self.caches, self._state, slots, table, guesses, there, **static
        )
        self._state, found = speculation.accept(
            self._state,
            logits,
            slots,
            guesses,
            counts,
            dropped_tokens,
            rows,
            kind=kind,
            vocabulary=self._vocabulary,
        )
        return found

    # Compiling ahead ------------------------------------------------------------------------------

    def compile(
        self, progress: Callable[[int, int], None] | None = None, *, only_greedy: bool = False
    ) -> int:
        """Compiles all programs and returns how many there are, see `Engine.compile`."""
        tasks = list(self._lowered("greedy" if only_greedy else "restrict"))
        workers = min(len(tasks), os.cpu_count() or 1)
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            # XLA compiles without Python's lock.
            waiting = [pool.submit(lowered.compile) for lowered in tasks]
            for done, future in enumerate(concurrent.futures.as_completed(waiting), start=1):
                future.result()
                if progress is not None:
                    progress(done, len(tasks))
        return len(tasks)

    def _lowered(self, most: Kind) -> Iterable[Any]:
        """Every program, traced."""
        slots, programs = self._state, self.programs
        yield enter.lower(slots, no_entries(slots))
        yield change.lower(slots, np.zeros((CHANGES, 4), np.int32))
        decoding = [decode_program(rows) for rows in programs.decoding]
        for program in (*programs.prompts, *decoding):
            packed = idle_work(program, self._slots).packed()
            static = programs.static_of(program)
            yield run_step.lower(self._decoder, self.caches, slots, packed, **static)
            if self._draft is not None:
                yield run_step.lower(
                    self._draft, self.draft_caches, slots, packed, is_draft=True, **static
                )
        if most != "greedy":
            yield from self._lowered_choices((*programs.prompts, *decoding))
        kinds = get_args(Kind) if most != "greedy" else ("greedy",)
        if programs.speculation is not None:
            for rows in programs.decoding:
                for kind in kinds:
                    yield from self._lowered_guesses(rows, programs.speculation, kind)
        if programs.together is not None:
            table = no_changes(CHANGES, self._slots)
            for rows in programs.together.rows:
                for kind in kinds:
                    yield run_together.lower(
                        self._decoder,
                        self.caches,
                        slots,
                        np.zeros(rows, np.int32),
                        table,
                        greedy_rows(rows),
                        count=programs.together.tokens,
                        kind=kind,
                        **programs.static,
                    )

    def _lowered_choices(self, programs: Iterable[PromptProgram]) -> Iterable[Any]:
        """The programs that follow a step where more is wanted than the most likely tokens."""
        slots, vocabulary = self._state, self._vocabulary
        for outputs in sorted({program.rows + program.pieces for program in programs}):
            logits = vocabulary.logits(outputs)
            owners = np.zeros(outputs, np.int32)
            for wanted in sampler.USUAL:
                yield sampler.choose.lower(
                    logits,
                    slots.history,
                    slots.lengths,
                    slots.prompts,
                    owners,
                    greedy_rows(outputs),
                    no_processors(outputs, vocabulary.size, wanted),
                    wanted=wanted,
                    vocabulary=vocabulary,
                )

    def _lowered_guesses(self, rows: int, how: Speculation, kind: Kind) -> Iterable[Any]:
        """The programs of a step of guesses; those that all kinds share come with ``"greedy"``."""
        slots, table = np.zeros(rows, np.int32), np.zeros((CHANGES, 4), np.int32)
        static = self.programs.static
        sampling, count = greedy_rows(rows), how.tokens
        if isinstance(how, Draft):
            if kind == "greedy":
                yield speculation.catch_up.lower(
                    self._draft, self.draft_caches, self._state, slots, **static
                )
            yield speculation.draft.lower(
                self._draft,
                self.draft_caches,
                self._state,
                slots,
                table,
                sampling,
                count=count,
                kind=kind,
                **static,
            )
        elif kind == "greedy":
            yield speculation.look_up.lower(
                self._state, slots, count=count, longest=how.longest, shortest=how.shortest
            )
        guesses, there = self._like((rows, count)), self._like((rows,))
        if kind == "greedy":
            yield speculation.verify.lower(
                self._decoder, self.caches, self._state, slots, table, guesses, there, **static
            )
        yield speculation.accept.lower(
            self._state,
            self._vocabulary.logits(rows, count + 1),
            slots,
            guesses,
            self._like((rows,)),
            self._like(()),
            sampling,
            kind=kind,
            vocabulary=self._vocabulary,
        )

    def _like(self, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        """The shape of an int32 result that another program takes, placed where the slots are."""
        slots = self._state.lengths
        sharding = slots.sharding if slots.committed else None
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)


def check_programs(
    programs: Programs, pools: Iterable[Pool], max_pages: int, num_heads: int
) -> None:
    """Checks that attention to pages can run all programs' calls, see `check_call`."""
    for pool in pools:
        for program in (*programs.prompts, *map(decode_program, programs.decoding)):
            check_implementation(programs.implementation, program, pool, max_pages, num_heads)


def _set_processors(processors: sampler.LogitsProcessors, row: int, sequence: Sequence) -> None:
    """Fills in a row; a constraint that fails allows nothing, which ends its own request alone."""
    if sequence.constraint is None:
        processors.set(row, sequence.request)
        return
    try:
        processors.set(row, sequence.request, sequence.constraint.allowed())
    except Exception as error:
        sequence.warn_of(error)
        assert processors.masks is not None
        processors.masks[row] = 0


def _cut(parts: np.ndarray, part: int, piece: Piece, first: int, program: PromptProgram) -> int:
    """Cuts a piece that begins at token `first` into `parts` from row `part` on; the next row."""
    for done in range(0, piece.count, program.part):
        size = min(program.part, piece.count - done)
        parts[part] = piece.sequence.slot, first + done, size, piece.begin + done + size
        part += 1
    return part
