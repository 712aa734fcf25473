"""`PrefixCache` by example and against a model that remembers every chain as a tuple."""

import hypothesis
import hypothesis.stateful as stateful
import hypothesis.strategies as st
import numpy as np
import pytest

from turbojax.caches.paged.allocator import PageAllocator, PoolExhausted
from turbojax.caches.paged.prefix import PrefixCache

SIZE = 4


def new(pages=12, window=None):
    pool = PageAllocator(pages, SIZE)
    return pool, PrefixCache(pool, window)


def remember(pool, prefixes, tokens, keep=False):
    """A sequence of these tokens, remembered, and ended unless it is to be kept."""
    sequence = pool.allocate(len(tokens))
    pages = pool.pages(sequence)
    prefixes.insert(tokens, pages)
    if keep:
        return sequence
    pool.free(sequence)
    return pages


def test_the_longest_beginning_in_whole_pages():
    pool, prefixes = new()
    tokens = list(range(11))
    pages = remember(pool, prefixes, tokens)
    assert (len(prefixes), pool.num_free) == (2, 10)
    for known, count in ((tokens, 2), (tokens[:8], 2), (tokens[:7], 1), (tokens[:3], 0), ([], 0)):
        assert prefixes.lookup(known) == (pages[:count], 4 * count)
    assert prefixes.lookup([*tokens[:4], 99, *tokens[5:]]) == (pages[:1], 4)
    # The second page's tokens follow nothing but the first page's.
    assert prefixes.lookup(tokens[4:]) == ((), 0)
    assert prefixes.lookup([9, 9, 9, 9, *tokens[4:8]]) == ((), 0)


def test_what_is_known_stays_where_it_is():
    pool, prefixes = new()
    first = remember(pool, prefixes, [1] * 8)
    sequence = pool.allocate(12)
    assert prefixes.insert([1] * 8 + [2] * 4, pool.pages(sequence)) == 1
    assert prefixes.lookup([1] * 8 + [2] * 4)[0] == (*first, pool.pages(sequence)[2])
    assert prefixes.insert([1] * 8, pool.pages(sequence)) == 0
    # Nobody holds the first two, but what follows them is in use.
    assert prefixes.evict(99) == 0
    assert prefixes.lookup([1] * 8) == (first, 8)
    pool.free(sequence)
    pool.validate()
    assert pool.num_free == 9
    assert prefixes.evict(99) == 3


def test_tokens_decide_and_not_their_hashes():
    """In CPython -1 and -2, and 0 and 2**61 - 1, have one hash each."""
    assert hash((-1,)) == hash((-2,))
    pool, prefixes = new()
    first = remember(pool, prefixes, [-1] * 4)
    assert prefixes.lookup([-2] * 4) == ((), 0)
    second = remember(pool, prefixes, [-2] * 4)
    assert prefixes.lookup([-1] * 4) == (first, 4)
    assert prefixes.lookup([-2] * 4) == (second, 4)
    zero = remember(pool, prefixes, np.zeros(4, np.int64))
    assert prefixes.lookup(np.full(4, 2**61 - 1)) == ((), 0)
    assert prefixes.lookup(np.zeros(4, np.uint8)) == (zero, 4)


def test_eviction_is_leaf_first_and_least_recently_used_first():
    pool, prefixes = new()
    chain = remember(pool, prefixes, [1] * 12)
    other = remember(pool, prefixes, [2] * 8)
    branch = remember(pool, prefixes, [1] * 4 + [3] * 4)[1:]
    prefixes.lookup([1] * 8)  # the chain's last page stays the least recently used

    def known():
        return {page for t in ([1] * 12, [2] * 8, [1] * 4 + [3] * 4) for page in found(t)}

    def found(tokens):
        return prefixes.lookup(tokens)[0]

    order = []
    for _ in range(6):
        before = set(prefixes_pages(prefixes))
        assert prefixes.evict(1) == 1
        order += before - set(prefixes_pages(prefixes))
    assert order == [chain[2], other[1], other[0], branch[0], chain[1], chain[0]]
    assert (known(), prefixes.evict(1), len(prefixes), pool.num_free) == (set(), 0, 0, 12)


def prefixes_pages(prefixes):
    return list(prefixes._entries)


def test_pages_that_sequences_hold_are_not_evicted():
    pool, prefixes = new()
    kept = remember(pool, prefixes, [1] * 8, keep=True)
    remember(pool, prefixes, [2] * 8)
    shared, count = prefixes.lookup([2] * 7)
    reader = pool.allocate(1, prefix_pages=shared)
    assert (count, pool.length(reader)) == (4, 5)
    assert prefixes.evict(99) == 1
    assert prefixes.lookup([2] * 8) == (shared, 4)
    assert prefixes.lookup([1] * 8)[0] == pool.pages(kept)
    pool.free(reader)
    assert prefixes.evict(99) == 1
    pool.free(kept)
    assert prefixes.evict(0) == 0
    assert prefixes.evict(99) == 2
    assert pool.num_free == 12


def test_clear_gives_back_all_pages():
    pool, prefixes = new()
    kept = remember(pool, prefixes, [1] * 8, keep=True)
    remember(pool, prefixes, [2] * 8)
    prefixes.clear()
    pool.validate()
    assert (len(prefixes), pool.num_free, prefixes.lookup([1] * 8)) == (0, 10, ((), 0))
    assert pool.holders(pool.pages(kept)[0]) == 1


def test_with_a_window_a_beginning_needs_what_the_window_reaches():
    """Five tokens are seen: the next token's window begins four before it, one page."""
    pool, prefixes = new(window=5)
    tokens = list(range(16))
    sequence = pool.allocate(16)
    pages = pool.pages(sequence)
    pool.release_before(sequence, 9)
    assert prefixes.insert(tokens, pool.pages(sequence)) == 2
    assert (len(prefixes), prefixes.lengths(tokens)) == (2, {12, 16})
    assert prefixes.lookup(tokens) == ((-1, -1, -1, pages[3]), 16)
    assert prefixes.lookup(tokens[:15]) == ((-1, -1, pages[2]), 12)
    assert prefixes.lookup(tokens[:11]) == ((), 0)
    assert prefixes.lookup([*tokens[:7], 99, *tokens[8:]]) == ((), 0)
    pool.free(sequence)
    # What is missing is filled in where somebody has it; what is there stays.
    again = pool.allocate(10)
    assert prefixes.insert(tokens[:10], pool.pages(again)) == 2
    assert prefixes.lookup(tokens[:8]) == ((-1, pool.pages(again)[1]), 8)
    assert prefixes.lengths(tokens) == {4, 8, 12, 16}
    pool.free(again)
    # Pages go in the order of their use, in the middle of a chain, too; found is what is left.
    prefixes.lookup(tokens)
    assert prefixes.evict(1) == 1
    assert prefixes.lengths(tokens) == {4, 8, 16}
    pool.validate()
    assert prefixes.evict(9) == 3
    assert (prefixes.lengths(tokens), prefixes._roots, pool.num_free) == (set(), {}, 12)


def test_a_window_longer_than_a_beginning_needs_all_of_it():
    pool, prefixes = new(window=100)
    pages = remember(pool, prefixes, [1] * 12)
    assert prefixes.lookup([1] * 11) == (pages[:2], 8)
    sequence = pool.allocate(12)
    pool.release_before(sequence, 4)
    prefixes.insert([2] * 12, pool.pages(sequence))
    assert prefixes.lengths([2] * 12) == set()


def test_a_window_of_one_token_needs_no_page():
    pool, prefixes = new(window=1)
    pages = remember(pool, prefixes, [1] * 8)
    assert prefixes.lookup([1] * 8) == ((-1, -1), 8)
    sequence = pool.allocate(1, prefix_pages=(-1, -1))
    assert pool.length(sequence) == 9
    assert prefixes.evict(9) == len(pages)


def test_the_cache_of_a_window_refuses():
    pool, prefixes = new(window=4)
    pool.allocate(8)
    with pytest.raises(ValueError, match="page=5 is free"):
        prefixes.insert([1] * 8, [-1, 5])
    with pytest.raises(ValueError, match="page=1 must not be remembered already"):
        prefixes.insert([1] * 8, [1, 1])
    assert prefixes.insert([1] * 8, [-1, -1]) == 0
    assert prefixes._roots == {}
    for window, error in ((0, ValueError), (1.5, TypeError)):
        with pytest.raises(error, match=f"window={window} must be"):
            PrefixCache(pool, window)
    with pytest.raises(ValueError, match="page=-1 must be within"):
        PrefixCache(pool).insert([1] * 8, [-1, 0])


WRONG = {
    "pages": (ValueError, lambda c: c.insert([1] * 8, [0]), "1 pages must be at least 2"),
    "free": (ValueError, lambda c: c.insert([1] * 8, [0, 5]), "page=5 is free"),
    "outside": (ValueError, lambda c: c.insert([1] * 8, [0, 12]), "page=12 must be within"),
    "rank": (ValueError, lambda c: c.lookup([[1] * 4]), r"shape \(1, 4\), must be a sequence"),
    "dtype": (TypeError, lambda c: c.lookup([1.5] * 4), "dtype float64, must be integers"),
    "text": (ValueError, lambda c: c.lookup("text"), "must be a sequence of integers"),
    "evict": (ValueError, lambda c: c.evict(-1), "pages_needed=-1 must not be negative"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_says_what_is_wrong_and_changes_nothing(name):
    error, call, message = WRONG[name]
    pool, prefixes = new()
    pool.allocate(4)
    with pytest.raises(error, match=message):
        call(prefixes)
    pool.validate()
    assert (len(prefixes), pool.holders(0)) == (0, 1)


# Against a model ---------------------------------------------------------------------------------


class Model(stateful.RuleBasedStateMachine):
    """Two tokens and pages of four make beginnings meet often; every page knows its whole chain."""

    sequences = stateful.Bundle("sequences")
    prompts = st.lists(st.sampled_from([(0,) * 4, (1,) * 4, (0, 1, 0, 1)]), max_size=4).map(
        lambda pages: [token for page in pages for token in page]
    )

    def __init__(self):
        super().__init__()
        self.pool, self.prefixes = new()
        self.chains = {}  # page -> the tokens up to its end, as whoever wrote it had them
        self.used = {}  # chain -> when it was last used
        self.clock = 0

    def touch(self, chains):
        self.clock += 1
        self.used.update(dict.fromkeys(chains, self.clock))

    def beginnings(self, tokens):
        return [tuple(tokens[:end]) for end in range(4, len(tokens) + 1, 4)]

    @stateful.rule(target=sequences, tokens=prompts, rest=st.integers(0, 3))
    def run(self, tokens, rest):
        """A prompt: what is known is shared, the rest written, and all of it remembered."""
        pages, count = self.prefixes.lookup(tokens)
        found = [c for c in self.beginnings(tokens) if c in self.used]
        assert count == len(pages) * 4 == len(found) * 4
        assert [self.chains[page] for page in pages] == found
        self.touch(found)
        new = len(tokens) - count + rest
        try:
            sequence = self.pool.allocate(new, prefix_pages=pages)
        except PoolExhausted as error:
            missing = error.needed - error.free
            if self.evict(missing) < missing or not self.still_known(pages):
                return stateful.multiple()
            sequence = self.pool.allocate(new, prefix_pages=pages)
        held = self.pool.pages(sequence)
        written = self.beginnings(tokens)[len(pages) :]
        self.chains.update(zip(held[len(pages) :], written, strict=False))
        known = set(self.used)
        new_chains = [c for c in self.beginnings(tokens) if c not in known]
        assert self.prefixes.insert(tokens + [7] * rest, held) == len(new_chains)
        self.touch(self.beginnings(tokens))
        return sequence

    def still_known(self, pages):
        return all(self.pool.holders(page) for page in pages)

    @stateful.rule(sequence=stateful.consumes(sequences))
    def end(self, sequence):
        self.pool.free(sequence)

    @stateful.rule(count=st.integers(0, 5))
    def ask_for_pages(self, count):
        self.evict(count)

    def evict(self, count):
        """Frees what it says, least recently used first, and never a page before what follows."""
        free, before = self.pool.num_free, set(self.known_pages())
        got = self.prefixes.evict(count)
        assert self.pool.num_free == free + got
        gone = before - set(self.known_pages())
        assert len(gone) == got
        left = [page for page in self.known_pages() if self.pool.holders(page) == 1]
        leaves = [page for page in left if not self.has_children(page)]
        assert got == count or not leaves
        latest = max((self.used[self.chains[page]] for page in gone), default=0)
        assert all(self.used[self.chains[page]] >= latest for page in leaves) or got < count
        for page in gone:
            del self.used[self.chains[page]]
        assert all(chain[:-4] in self.used for chain in self.used if len(chain) > 4)
        return got

    def known_pages(self):
        return prefixes_pages(self.prefixes)

    def has_children(self, page):
        chain = self.chains[page]
        return any(self.chains[p][:-4] == chain for p in self.known_pages())

    @stateful.invariant()
    def all_pages_are_accounted_for(self):
        self.pool.validate()
        assert len(self.prefixes) == len(self.used)
        assert {self.chains[page] for page in self.known_pages()} == set(self.used)
        held = {page for s in self.pool.sequences for page in self.pool.pages(s)}
        assert self.pool.num_free == 12 - len(held | set(self.known_pages()))


TestModel = Model.TestCase
TestModel.settings = hypothesis.settings(max_examples=80, stateful_step_count=40, deadline=None)


class WindowModel(stateful.RuleBasedStateMachine):
    """With a window of some pages: what is found is what was written, and all that is needed."""

    prompts = Model.prompts
    WINDOW = 6

    def __init__(self):
        super().__init__()
        self.pool, self.prefixes = new(window=self.WINDOW)
        self.chains = {}

    def beginnings(self, tokens):
        return [tuple(tokens[:end]) for end in range(4, len(tokens) + 1, 4)]

    def known(self):
        return {self.chains[page] for page in prefixes_pages(self.prefixes)}

    @stateful.rule(tokens=prompts, steps=st.lists(st.integers(1, 9), max_size=4))
    def run(self, tokens, steps):
        known = self.known()
        chain = self.beginnings(tokens)
        want = {
            4 * n
            for n in range(1, len(chain) + 1)
            if set(chain[max(4 * n - self.WINDOW + 1, 0) // 4 : n]) <= known
            and any(c[: 4 * n] == chain[n - 1] for c in known)
        }
        assert self.prefixes.lengths(tokens) == want
        pages, count = self.prefixes.lookup(tokens)
        assert count == max(want, default=0)
        first = max(count - self.WINDOW + 1, 0) // 4
        assert [self.chains.get(page) for page in pages] == [None] * first + chain[: count // 4][
            first:
        ]
        sequence = self.pool.allocate(prefix_pages=pages)
        for step in steps:
            self.pool.release_before(sequence, max(count - self.WINDOW + 1, 0))
            step = min(step, len(tokens) - count)
            self.prefixes.evict(max(-(-step // 4) - self.pool.num_free, 0))
            try:
                self.pool.extend(sequence, step)
            except PoolExhausted:
                break
            held = self.pool.pages(sequence)
            self.chains.update(
                {
                    held[i]: tuple(tokens[: 4 * i + 4])
                    for i in range(count // 4, (count + step) // 4)
                }
            )
            count += step
            self.prefixes.insert(tokens[:count], held)
            assert count // 4 * 4 in {0, *self.prefixes.lengths(tokens)}
        self.pool.free(sequence)

    @stateful.rule(count=st.integers(0, 3))
    def evict(self, count):
        free, known = self.pool.num_free, len(self.prefixes)
        assert self.prefixes.evict(count) == self.pool.num_free - free == min(count, known)

    @stateful.invariant()
    def all_pages_are_accounted_for(self):
        self.pool.validate()
        assert self.pool.num_free == 12 - len(self.prefixes)


TestWindowModel = WindowModel.TestCase
TestWindowModel.settings = hypothesis.settings(
    max_examples=80, stateful_step_count=40, deadline=None
)
