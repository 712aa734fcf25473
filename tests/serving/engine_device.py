"""A device made of numpy, so that the engine's host side runs alone, thousands of steps a second.

The device stores tokens in pages and predicts from all the tokens that it reads back through the
tables it is given. A wrong page, a page overwritten too soon, a token fed twice or a wrong prefix
changes what a request gets. What was donated is spoilt, so that nobody uses it again.
"""

import contextlib
import dataclasses
import functools
import random
from collections.abc import Iterator
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from tests.serving.engine_arrays import (
    NOBODYS,
    SPOILT,
    UNWRITTEN,
    bias_of,
    donated,
    for_host,
    sampling_of,
    seen_densely,
    with_changes,
)
from tests.serving.engine_texts import VOCABULARY, chosen_from, logits_of, next_token, penalized
from turbojax import models
from turbojax.models.engine import (
    Draft,
    Engine,
    NGram,
    device,
    engine,
    sampler,
    speculation,
)
from turbojax.models.engine.sampler import Chosen
from turbojax.models.engine.step import unpack
from turbojax.models.generation.sampling import NOTHING

PAGE = 16
CONFIG = models.TransformerConfig(
    vocab_size=VOCABULARY,
    hidden_size=16,
    intermediate_size=16,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=16,
    max_length=256,
)


class FakeDevice:
    """What the functions below `Device` do, for tokens instead of keys and values.

    Each group of layers has pages of its own, and so has a draft model. A slot of a page holds the
    number of a text: the token that was written, after all those that came before it as its group
    saw them then, which is what a real layer's keys and values depend on.

    Args:
      made: the engine.
      right: how often a guess is what the greedy text goes on with, 0..1.

    Attributes:
      programs: that ran.
      wanted: that were chosen by.
      behind: how often the draft model did not find the text that it was to continue.
    """

    def __init__(self, made: Engine, right: float = 0.7) -> None:
        self.made = made
        sizes = [group.allocator.num_pages for group in made._groups]
        self.pages = [np.full((count, PAGE), UNWRITTEN) for count in sizes]
        self.draft_pages = [pages.copy() for pages in self.pages]
        self.texts: list[tuple[int, ...]] = []
        self.numbers: dict[tuple[int, ...], int] = {}
        self.programs: set = set()
        self.wanted: set = set()
        self.behind = 0
        self._right, self._rng = right, random.Random(0)
        made._device._state = jax.tree.map(np.array, made._device._state)

    def number(self, text: tuple[int, ...]) -> int:
        """Of a text."""
        if text not in self.numbers:
            self.numbers[text] = len(self.texts)
            self.texts.append(text)
        return self.numbers[text]

    # Slots ----------------------------------------------------------------------------------------

    def enter(self, given, entries):
        after = donated(given)
        groups, slots, pages = after.tables.shape
        entered = [entry for entry in entries if entry[0] < slots]
        assert len({entry[0] for entry in entered}) == len(entered) > 0
        for (slot, length, prompt, left), rest in ((entry[:4], entry[4:]) for entry in entered):
            assert slot >= 0
            tokens, tables = np.split(rest, [after.history.shape[1]])
            after.tables[:, slot], after.history[slot] = tables.reshape(groups, pages), tokens
            after.lengths[slot], after.prompts[slot], after.left[slot] = length, prompt, left
        return after

    def change(self, given, changes):
        return with_changes(donated(given), changes)

    # Tokens in pages ------------------------------------------------------------------------------

    def write(self, pages, tables, where):
        """Writes tokens (slot, position, token) that follow those before them in their slots."""
        written = []
        for slot, position, token in where:
            for group, table in enumerate(tables[:, slot]):
                page, at = table[position // PAGE], position % PAGE
                assert page >= 0
                written.append((group, page, at))
                is_there = not position or table[(position - 1) // PAGE] >= 0
                before = self.before(pages[group], table, position) if is_there else (UNWRITTEN,)
                pages[group][page, at] = self.number((*before, int(token)))
        assert len(set(written)) == len(written), "two tokens at one place"

    def before(self, pages, table, position):
        """The text up to a position, which is that of the token before it."""
        if not position:
            return ()
        page = table[(position - 1) // PAGE]
        assert page >= 0
        number = pages[page, (position - 1) % PAGE]
        return self.texts[number] if number >= 0 else (UNWRITTEN,)

    def read(self, tables, slot, windows, first, end):
        """The text of a slot, from what its tokens from `first` on see in all groups' pages."""
        held = set()
        for pages, table, window in zip(self.pages, tables[:, slot], windows, strict=True):
            text = self.before(pages, table, end)
            assert len(text) == end
            for position in range(0 if window is None else max(first - window + 1, 0), end):
                assert self.before(pages, table, position + 1) == text[: position + 1]
            held.add(text)
        assert len(held) == 1, "groups of layers hold other tokens"
        (text,) = held
        # The token after the last may be none, until the host knows: it is fed as 0.
        assert min(text, default=0) >= 0, "a token that nobody wrote"
        return text

    def run_step(
        self,
        decoder,
        caches,
        given,
        packed,
        *,
        program,
        windows,
        implementation,
        prompts=None,
        is_draft=False,
    ):
        del decoder, implementation
        assert packed.dtype == np.int32
        work = unpack(packed, program)
        after = with_changes(jax.tree.map(np.array, given), work.changes)
        count = len(after.lengths)
        where = [None] * program.tokens
        for i, (slot, position) in enumerate(zip(work.slots, work.positions, strict=True)):
            # Right guesses may have ended it, of which the host does not know yet.
            if slot < count and (position >= 0 or after.left[slot] > 0):
                place = after.lengths[slot] if position < 0 else position
                assert position >= 0 or i < program.rows
                where[i] = slot, place, max(after.history[slot, place], 0)
        pages = self.draft_pages if is_draft else self.pages
        self.write(pages, after.tables, [token for token in where if token is not None])
        if is_draft:
            return caches, given, None, None
        self.programs.add(program)
        assert program.is_dense == (prompts is not None)
        seen = self._seen(work, program, after.tables, where, windows)
        for token in where:
            if token is not None:
                after.lengths[token[0]] += 1
        logits = np.full((len(work.outputs), VOCABULARY), np.nan)
        found = np.full(len(work.outputs) + 1, NOBODYS)
        found[-1] = 0
        for row, (i, owner) in enumerate(zip(work.outputs, work.owners, strict=True)):
            if owner == count or not after.left[owner]:
                continue
            assert where[i][0] == owner
            assert where[i][1] + 1 == after.lengths[owner], "not the last token of its slot"
            logits[row] = logits_of(seen[i])
            found[row] = chosen_from(logits[row])
            after.history[owner, after.lengths[owner]] = found[row]
            after.left[owner] -= 1
        return caches, after, logits, for_host(found)

    def _seen(self, work, program, tables, where, windows):
        """The text that each token of a step sees, as rows and parts are cut."""
        seen = {}
        for i in range(program.rows):
            if where[i] is not None and work.positions[i] < 0:
                slot, position, _ = where[i]
                seen[i] = self.read(tables, slot, windows, position, position + 1)
        if program.is_dense:
            seen |= seen_densely(work, where)
        parts = [(slot, first, size, end) for slot, first, size, end in work.parts if size]
        assert [first for _, first, _, _ in parts] == sorted(first for _, first, _, _ in parts)
        for slot, first, size, end in parts:
            assert size <= program.part
            of_part = [(slot, end - size + i) for i in range(size)]
            assert [token[:2] for token in where[first : first + size]] == of_part
            text = self.read(tables, slot, windows, end - size, end)
            for i in range(size):
                assert program.is_dense or first + i not in seen
                seen[first + i] = text[: end - size + i + 1]
        assert set(seen) == {i for i, token in enumerate(where) if token is not None}
        return seen

    def run_together(
        self,
        decoder,
        caches,
        given,
        slots,
        changes,
        rows,
        *,
        count,
        kind,
        windows,
        implementation,
    ):
        del decoder, kind, implementation
        after = with_changes(donated(given), changes)
        shown = np.full((len(slots), count + 2), NOTHING)
        shown[:, :2] = 0
        for row, slot in enumerate(slots):
            if slot == len(after.lengths):
                continue
            new = shown[row, :2] = min(count, after.left[slot])
            for i in range(new):
                length = after.lengths[slot]
                fed = slot, length, max(after.history[slot, length], 0)
                self.write(self.pages, after.tables, [fed])
                text = self.read(after.tables, slot, windows, length, length + 1)
                index = length + 1 - after.prompts[slot]
                token = chosen_from(logits_of(text), *sampling_of(rows, row), index)
                after.lengths[slot] += 1
                after.left[slot] -= 1
                after.history[slot, length + 1] = shown[row, 2 + i] = token
        return caches, after, for_host([*shown.ravel(), 0])

    # Choosing -------------------------------------------------------------------------------------

    def choose(
        self, logits, history, lengths, prompts, slots, rows, modifiers, *, wanted, vocabulary=None
    ):
        self.wanted.add(wanted)
        after = history.copy()
        history[:] = SPOILT
        tokens = np.full(len(slots), NOBODYS, np.int32)
        top = np.full((len(slots), 20), -1, np.int32)
        values = np.full((len(slots), 21), np.nan)
        for row, slot in enumerate(slots):
            if slot == len(lengths):
                continue
            text, prompt = after[slot, : lengths[slot]], prompts[slot]
            changed = logits[row].copy()
            for token, value in bias_of(modifiers, row):
                changed[token] += value
            if modifiers.penalties is not None:
                changed = penalized(changed, text, prompt, modifiers.penalties[row])
            if modifiers.masks is not None:
                bits = modifiers.masks[row, 0] >> np.arange(VOCABULARY, dtype=np.uint32) & 1
                changed = np.where(bits == 1, changed, -np.inf)
            tokens[row] = chosen_from(changed, *sampling_of(rows, row), len(text) - prompt)
            after[slot, lengths[slot]] = tokens[row]
            shifted = logits[row] - np.log(np.sum(np.exp(logits[row])))
            top[row, :VOCABULARY] = order = np.argsort(-shifted, kind="stable")
            values[row, :VOCABULARY], values[row, 20] = shifted[order], shifted[tokens[row]]
        if not wanted.logprobs:
            return after, Chosen(tokens)
        return after, Chosen(tokens, values[:, 20], top, values[:, :20])

    # Guessing -------------------------------------------------------------------------------------

    def look_up(self, given, slots, *, count, longest, shortest):
        del longest, shortest
        guesses = np.full((len(slots), count), NOBODYS, np.int32)
        found = np.zeros(len(slots), np.int32)
        for row, slot in enumerate(slots):
            if slot < len(given.lengths):
                text = given.history[slot, : given.lengths[slot] + 1].clip(0).tolist()
                guesses[row] = self._guesses(text, count)
                found[row] = self._rng.choice([0, 1, count, count])
        return guesses, found

    def _guesses(self, text, count):
        """Some of them right."""
        text, length = list(text), len(text)
        for _ in range(count):
            right = max(next_token(text), 0)
            is_right = self._rng.random() < self._right
            text.append(right if is_right else self._rng.randrange(VOCABULARY))
        return text[length:]

    def draft(
        self,
        decoder,
        caches,
        given,
        slots,
        changes,
        rows,
        *,
        count,
        kind,
        windows,
        implementation,
    ):
        del decoder, rows, kind, windows, implementation
        held = with_changes(jax.tree.map(np.array, given), changes)
        guesses, found = self.look_up(held, slots, count=count, longest=0, shortest=0)
        for row, slot in enumerate(slots):
            if slot == len(held.lengths):
                continue
            length, left = held.lengths[slot], held.left[slot]
            found[row] = np.clip(left - 1, 0, count)
            if not found[row]:
                continue
            last = length - 1
            text = held.history[slot, : length + 1].clip(0).tolist()
            # Behind a window the place before the last may be gone: that costs right guesses alone.
            before = [
                self.before(pages, table, last)
                if not last or table[(last - 1) // PAGE] >= 0
                else ()
                for pages, table in zip(self.draft_pages, held.tables[:, slot], strict=True)
            ]
            self.behind += set(before) != {tuple(text[:last])}
            fed = [*text[last:], *guesses[row, : found[row] - 1]]
            where = [(slot, last + i, token) for i, token in enumerate(fed)]
            self.write(self.draft_pages, held.tables, where)
        return caches, guesses, found

    def catch_up(self, decoder, caches, given, slots, *, windows, implementation):
        del decoder, windows, implementation
        for slot in slots:
            if slot < len(given.lengths) and given.lengths[slot]:
                last = given.lengths[slot] - 1
                where = [(slot, last, max(given.history[slot, last], 0))]
                self.write(self.draft_pages, given.tables, where)
        return caches

    def verify(
        self, decoder, caches, given, slots, changes, guesses, found, *, windows, implementation
    ):
        del decoder, implementation
        after = with_changes(donated(given), changes)
        size = guesses.shape[1] + 1
        counts = np.zeros(len(slots), np.int32)
        logits = np.full((len(slots), size, VOCABULARY), np.nan)
        for row, slot in enumerate(slots):
            if slot == len(after.lengths):
                continue
            length = after.lengths[slot]
            counts[row] = min(found[row] + 1, after.left[slot])
            fed = [max(after.history[slot, length], 0), *guesses[row]][: counts[row]]
            where = [(slot, length + i, token) for i, token in enumerate(fed)]
            self.write(self.pages, after.tables, where)
            if not counts[row]:
                continue
            text = self.read(after.tables, slot, windows, length, length + counts[row])
            for i in range(counts[row]):
                logits[row, i] = logits_of(text[: length + i + 1])
        return caches, after, logits, counts, np.int32(0)

    def accept(
        self, given, logits, slots, guesses, counts, dropped_tokens, rows, *, kind, vocabulary
    ):
        del kind, vocabulary
        after, size = donated(given), logits.shape[1]
        shown = np.full((len(slots), size + 2), NOTHING)
        shown[:, 0], shown[:, 1] = counts, 0
        for row, slot in enumerate(slots):
            if slot == len(after.lengths):
                continue
            for i in range(counts[row]):
                index = after.lengths[slot] + 1 - after.prompts[slot]
                token = chosen_from(logits[row, i], *sampling_of(rows, row), index)
                after.lengths[slot] += 1
                after.left[slot] -= 1
                after.history[slot, after.lengths[slot]] = shown[row, 2 + i] = token
                shown[row, 1] += 1
                if i + 1 == size or token != guesses[row, i]:
                    break
        return after, for_host([*shown.ravel(), dropped_tokens])

    # Pages to and from the host -------------------------------------------------------------------

    def group_of(self, caches):
        """Whose pools these are, and how many of them are a draft model's."""
        every = self.made._device.caches + self.made._device.draft_caches
        [group] = [
            group
            for group, layers in enumerate(self.made._device._layers)
            if len(layers) == len(caches)
            and all(every[i] is x for i, x in zip(layers, caches, strict=True))
        ]
        return group

    def read_pages(self, caches, pages, axes=None):
        group = self.group_of(caches)
        both = self.pages[group], self.draft_pages[group]
        return [of_model[list(pages)].copy() for of_model in both]

    def write_pages(self, caches, pages, content, axes=None):
        group = self.group_of(caches)
        for of_model, values in zip((self.pages, self.draft_pages), content, strict=True):
            assert len(values) == len(pages)
            of_model[group][list(pages)] = values
        return caches


@functools.cache
def _model(windows: tuple[int | None, ...]) -> models.Decoder:
    config = dataclasses.replace(CONFIG, num_layers=len(windows), local_windows=windows)
    return models.random_decoder(config, dtype=jnp.float32)


def make(
    pages: int,
    slots: int,
    step_tokens: int,
    prefixes: bool,
    results: bool = False,
    windows: tuple[int | None, ...] = (None,),
    window_pages: int | None = None,
    *,
    guesses: int = 0,
    drafts: bool = False,
    dense: bool = False,
    right: float = 0.7,
    **options,
) -> tuple[Engine, FakeDevice]:
    """An engine and its device.

    Args:
      pages: of the pool.
      slots: of the engine.
      step_tokens: see `Engine`.
      prefixes: whether they are kept.
      results: whether those of results are, too.
      windows: of the layers.
      window_pages: see `Engine`.
      guesses: tokens that are guessed at a time.
      drafts: whether by a draft model.
      dense: whether prompts attend among themselves, as on a GPU.
      right: see `FakeDevice`.
      options: of `Engine`.
    """
    how = None
    if guesses:
        how = Draft(_model(windows), guesses) if drafts else NGram(guesses)
    no_reason = None if dense else "not here"
    with mock.patch.object(engine, "needs_gpu", return_value=no_reason):
        made = Engine(
            _model(windows),
            num_pages=pages,
            window_pages=window_pages,
            page_size=PAGE,
            kv_dtype="fp8_e4m3" if dense else "auto",
            max_sequences=slots,
            step_tokens=step_tokens,
            prefix_caching=prefixes,
            cache_results=results,
            speculation=how,
            **options,
        )
    return made, FakeDevice(made, right)


@contextlib.contextmanager
def on(fake: FakeDevice) -> Iterator[None]:
    """Engines run on this device inside."""
    with contextlib.ExitStack() as stack:
        for module, name, function in (
            (device, "run_step", fake.run_step),
            (device, "run_together", fake.run_together),
            (device, "enter", fake.enter),
            (device, "change", fake.change),
            (sampler, "choose", fake.choose),
            (speculation, "look_up", fake.look_up),
            (speculation, "draft", fake.draft),
            (speculation, "catch_up", fake.catch_up),
            (speculation, "verify", fake.verify),
            (speculation, "accept", fake.accept),
            (device, "read_pages", fake.read_pages),
            (device, "write_pages", fake.write_pages),
        ):
            stack.enter_context(mock.patch.object(module, name, function))
        yield


def step(made: Engine, fake: FakeDevice) -> list:
    with on(fake):
        return made.step()
