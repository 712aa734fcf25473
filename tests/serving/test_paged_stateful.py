"""Allocator, prefix cache and pool together, thousands of operations against dense arrays.

A token's key and value follow from its number and its position, so the model is a list of numbers
per sequence. Pages are full of NaN unless they hold something: what is read from a page that is
free, foreign or not yet written shows.
"""

import functools

import hypothesis
import hypothesis.stateful as stateful
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tests.oracles.paged as oracle
from turbojax import paged, polar
from turbojax.caches.paged.pool import page_arrays

PAGES, SIZE, HEADS, HEAD_DIM = 11, 16, 2, 16
MAX_PAGES, CHUNK, ROWS, SEQUENCES = 5, 24, 4, 8
ROOM = MAX_PAGES * SIZE
NUMBERS = 6
# As in bfloat16 pages, a token of fp8 is one array, and its codec is tested by itself.
KINDS = ["auto", "turbo4"]

append = jax.jit(paged.append, donate_argnums=0)
copy_pages = jax.jit(paged.copy_pages, donate_argnums=0)
write_pages = jax.jit(paged.write_pages, donate_argnums=0)
read_pages = jax.jit(paged.read_pages)
gather = jax.jit(paged.gather, static_argnames="dtype")
attention = jax.jit(functools.partial(paged.attention, implementation="xla"))

# Prompts that begin alike: for a page, for two, not at all; one holds another's page elsewhere.
PROMPTS = np.random.default_rng(1).integers(0, NUMBERS, (4, ROOM))
PROMPTS[1, :16] = PROMPTS[0, :16]
PROMPTS[2, :37] = PROMPTS[0, :37]
PROMPTS[3, 16:32] = PROMPTS[0, :16]


def new(kind, pages):
    return paged.init_cache(pages, SIZE, HEADS, HEAD_DIM, kv_dtype=kind, dtype=jnp.float32)


@functools.cache
def bank(kind):
    """Keys and values ``[NUMBERS, ROOM, K, H]``, and what this kind of cache makes of them."""
    rng = np.random.default_rng(2)
    sides = rng.normal(size=(2, NUMBERS, ROOM, HEADS, HEAD_DIM)).astype(np.float32)
    cache = new(kind, NUMBERS * MAX_PAGES)
    tables = np.arange(NUMBERS * MAX_PAGES).reshape(NUMBERS, MAX_PAGES)
    cache = paged.append(cache, *map(jnp.asarray, sides), tables, np.zeros(NUMBERS, np.int32))
    held = paged.gather(cache, tables, np.full(NUMBERS, ROOM), dtype=jnp.float32)
    return sides, np.stack(held)


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", KINDS)
def test_the_bank_is_what_the_codec_makes_of_it(kind):
    """Up to the rounding of a norm to float16; no two tokens are nearly the same."""
    sides, held = bank(kind)
    signs = np.asarray(polar.rotation(HEAD_DIM).signs, np.float64)
    want = oracle.through(sides, kind, signs=signs)
    length = np.linalg.norm(want, axis=-1, keepdims=True)
    assert (np.abs(held - want) <= 2.0**-10 * length).all()
    flat = held.reshape(-1, HEAD_DIM)
    assert len(np.unique(flat, axis=0)) == len(flat)


@functools.cache
def poison(kind):
    """Content for all pages that no token has."""
    content = read_pages(new(kind, PAGES), np.full(PAGES, -1))
    return {
        name: np.full(x.shape, np.nan if np.issubdtype(x.dtype, np.floating) else 255, x.dtype)
        for name, x in content.items()
    }


class Model(stateful.RuleBasedStateMachine):
    kind: str
    live = stateful.Bundle("live")
    away = stateful.Bundle("away")

    def __init__(self):
        super().__init__()
        self.pool = paged.PageAllocator(PAGES, SIZE)
        self.prefixes = paged.PrefixCache(self.pool)
        self.cache = new(self.kind, PAGES)
        self.numbers = {}
        self.empty = set()
        self.poison_free_pages()

    # What a server does ----------------------------------------------------------------------

    @stateful.precondition(lambda self: len(self.numbers) < SEQUENCES)
    @stateful.rule(target=live, prompt=st.integers(0, 3), length=st.integers(0, ROOM - 10))
    def start(self, prompt, length):
        """A prompt, chunk by chunk, after the pages that are known already."""
        numbers = PROMPTS[prompt, :length].tolist()
        pages, known = self.prefixes.lookup(numbers[:-1])
        sequence = self.pool.allocate(prefix_pages=pages)
        self.numbers[sequence] = numbers[:known]
        while known < length:
            step = min(CHUNK, length - known)
            if not self.extend({sequence: numbers[known : known + step]}, rows=1, width=CHUNK):
                self.pool.free(sequence)
                del self.numbers[sequence]
                self.poison_free_pages()
                return stateful.multiple()
            known += step
        return sequence

    @stateful.rule(data=st.data(), count=st.integers(1, ROWS), number=st.integers(0, NUMBERS - 1))
    def decode(self, data, count, number):
        """One token each for some sequences, the other rows idle."""
        able = [s for s, numbers in self.numbers.items() if len(numbers) < ROOM]
        if not able:
            return
        some = data.draw(st.lists(st.sampled_from(able), min_size=1, max_size=count, unique=True))
        self.extend({sequence: [number] for sequence in some}, rows=ROWS, width=1)

    def extend(self, more, rows, width):
        """Writes more tokens for the sequences that get pages; says how many did."""
        sequences, copies = [], []
        for sequence, numbers in more.items():
            before = (self.pool.pages(sequence), self.pool.num_free)
            try:
                copies += self.pool.extend(sequence, len(numbers))
            except paged.PoolExhausted:
                assert (self.pool.pages(sequence), self.pool.num_free) == before
                continue
            sequences.append(sequence)
        padding = [paged.PageCopy(-1, -1)] * (ROWS - len(copies))
        pairs = np.array([(c.source, c.destination) for c in copies + padding])
        self.cache = copy_pages(self.cache, pairs[:, 0], pairs[:, 1])
        self.write({s: more[s] for s in sequences}, rows, width)
        self.empty = self.free_pages()
        return len(sequences)

    def write(self, more, rows, width):
        (keys, values), _ = bank(self.kind)
        padding = [None] * (rows - len(more))
        tables = self.pool.block_tables([*more, *padding], MAX_PAGES)
        chosen = np.zeros((2, rows, width, HEADS, HEAD_DIM), np.float32)
        lengths, counts = np.zeros((2, rows), np.int32)
        for row, (sequence, numbers) in enumerate(more.items()):
            lengths[row], counts[row] = len(self.numbers[sequence]), len(numbers)
            positions = lengths[row] + np.arange(len(numbers))
            for side, x in enumerate((keys, values)):
                chosen[side, row, : len(numbers)] = x[numbers, positions]
            self.numbers[sequence] += numbers
        key, value = map(jnp.asarray, chosen)
        self.cache = append(self.cache, key, value, tables, lengths, new_lengths=counts)

    @stateful.precondition(lambda self: len(self.numbers) < SEQUENCES)
    @stateful.rule(target=live, sequence=live)
    def fork(self, sequence):
        child = self.pool.fork(sequence)
        self.numbers[child] = list(self.numbers[sequence])
        return child

    @stateful.rule(sequence=stateful.consumes(live))
    def free(self, sequence):
        self.pool.free(sequence)
        del self.numbers[sequence]
        self.poison_free_pages()

    @stateful.rule(sequence=live)
    def remember(self, sequence):
        self.prefixes.insert(self.numbers[sequence], self.pool.pages(sequence))

    @stateful.rule(count=st.integers(1, 4))
    def evict(self, count):
        free = self.pool.num_free
        assert self.prefixes.evict(count) == self.pool.num_free - free <= count
        self.poison_free_pages()

    @stateful.rule(number=st.integers(0, NUMBERS - 1))
    def attend(self, number):
        """What the last tokens see is what a softmax over the dense arrays gives."""
        rows = [s for s, numbers in self.numbers.items() if numbers]
        if not rows:
            return
        _, held = bank(self.kind)
        (queries, _), _ = bank(self.kind)
        query = np.broadcast_to(queries[number, 0][:, None], (HEADS, 2, HEAD_DIM))
        padded = [*rows, *[None] * (SEQUENCES - len(rows))]
        tables = self.pool.block_tables(padded, MAX_PAGES)
        lengths = np.array([0 if s is None else self.pool.length(s) for s in padded], np.int32)
        asked = jnp.asarray(np.tile(query.reshape(1, 1, 2 * HEADS, HEAD_DIM), (SEQUENCES, 1, 1, 1)))
        got = np.asarray(attention(asked, self.cache, tables, lengths))
        for row, sequence in enumerate(rows):
            numbers = self.numbers[sequence]
            key, value = held[:, numbers, np.arange(len(numbers))].astype(np.float64)
            scores = np.einsum("kgh,skh->kgs", query, key) / np.sqrt(HEAD_DIM)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            want = np.einsum("kgs,skh->kgh", weights / weights.sum(-1, keepdims=True), value)
            # In float32, of scores and values up to some tens.
            np.testing.assert_allclose(
                got[row, 0].reshape(want.shape), want, rtol=0, atol=2.0**-14 * np.abs(value).max()
            )
        assert not got[len(rows) :].any()

    @stateful.rule(target=away, sequence=stateful.consumes(live))
    def swap_out(self, sequence):
        """The pages go to host memory."""
        pages = self.pool.block_tables([sequence], MAX_PAGES)[0]
        content = jax.tree.map(np.asarray, read_pages(self.cache, pages))
        numbers = self.numbers[sequence]
        self.free(sequence)
        return numbers, content

    @stateful.precondition(lambda self: len(self.numbers) < SEQUENCES)
    @stateful.rule(target=live, swapped=away)
    def swap_in(self, swapped):
        """They come back, to other pages, as often as one likes."""
        numbers, content = swapped
        try:
            sequence = self.pool.allocate(len(numbers))
        except paged.PoolExhausted:
            return stateful.multiple()
        pages = self.pool.block_tables([sequence], MAX_PAGES)[0]
        self.cache = write_pages(self.cache, pages, content)
        self.numbers[sequence] = list(numbers)
        self.empty = self.free_pages()
        return sequence

    # What must hold --------------------------------------------------------------------------

    def free_pages(self):
        return {page for page in range(PAGES) if self.pool.holders(page) == 0}

    def poison_free_pages(self):
        pages = np.full(PAGES, -1)
        newly = sorted(self.free_pages() - self.empty)
        pages[: len(newly)] = newly
        self.cache = write_pages(self.cache, pages, poison(self.kind))
        self.empty = self.free_pages()

    @stateful.invariant()
    def no_page_leaks(self):
        self.pool.validate()
        held = set(self.prefixes._entries)
        held |= {page for sequence in self.numbers for page in self.pool.pages(sequence)}
        assert self.pool.num_free == PAGES - len(held)
        assert int(self.cache.dropped_tokens) == 0

    @stateful.invariant()
    def every_sequence_reads_its_own_tokens(self):
        """To the bit, whatever pages they came to lie in."""
        _, held = bank(self.kind)
        rows = [*self.numbers, *[None] * (SEQUENCES - len(self.numbers))]
        tables = self.pool.block_tables(rows, MAX_PAGES)
        lengths = np.array([0 if s is None else self.pool.length(s) for s in rows], np.int32)
        sides = gather(self.cache, tables, lengths, dtype=jnp.float32)
        want = np.zeros((2, SEQUENCES, ROOM, HEADS, HEAD_DIM), np.float32)
        for row, numbers in enumerate(self.numbers.values()):
            assert lengths[row] == len(numbers)
            want[:, row, : len(numbers)] = held[:, numbers, np.arange(len(numbers))]
        for got, x in zip(sides, want, strict=True):
            np.testing.assert_array_equal(got, x)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("kind", KINDS)
def test_against_dense_arrays(kind):
    """A thousand operations where they are cheap, and hundreds on codes and their norms."""
    machine = type("Model", (Model,), {"kind": kind})
    examples = 20 if kind == "auto" else 8
    settings = hypothesis.settings(max_examples=examples, stateful_step_count=50, deadline=None)
    stateful.run_state_machine_as_test(machine, settings=settings)


def test_the_pool_is_as_large_as_the_test_needs():
    """So small that it overflows, so large that sequences share and diverge."""
    assert PAGES < SEQUENCES * MAX_PAGES
    assert all(x.shape[0] == PAGES for x in page_arrays(new("turbo4", PAGES)).values())
