"""`PageAllocator` by example and against a model: who holds which page, and nobody else does."""

import collections

import hypothesis
import hypothesis.stateful as stateful
import hypothesis.strategies as st
import numpy as np
import pytest

from turbojax.caches.paged.allocator import PageAllocator, PageCopy, PoolExhausted, PoolStatistics

SIZE = 16


def new(pages=8, size=SIZE):
    return PageAllocator(pages, size)


# By example --------------------------------------------------------------------------------------


def test_a_sequence_holds_just_the_pages_it_needs():
    pool = new()
    sequence = pool.allocate()
    assert (pool.length(sequence), pool.pages(sequence), pool.num_free) == (0, (), 8)
    for tokens, pages in ((1, 1), (15, 1), (0, 1), (1, 2), (40, 4)):
        assert pool.extend(sequence, tokens) == []
        assert len(pool.pages(sequence)) == pages
        pool.validate()
    assert pool.length(sequence) == 57
    assert pool.num_free == 4
    assert pool.occupancy == 0.5
    pool.free(sequence)
    assert (pool.num_free, pool.occupancy, pool.sequences) == (8, 0.0, ())


def test_a_fork_shares_all_and_copies_a_partial_page_when_it_writes():
    pool = new()
    first = pool.allocate(20)
    second = pool.fork(first)
    full, partial = pool.pages(first)
    assert pool.pages(second) == (full, partial)
    assert (pool.holders(full), pool.holders(partial), pool.num_free) == (2, 2, 6)
    assert pool.extend(second, 0) == []
    (copy,) = pool.extend(second, 3)
    assert copy == PageCopy(source=partial, destination=pool.pages(second)[1])
    assert pool.pages(second)[0] == full
    assert pool.pages(first) == (full, partial)
    assert copy.destination != partial
    # The first is alone on its last page now, and writes in place.
    assert pool.extend(first, 20) == []
    assert pool.pages(first)[:2] == (full, partial)
    pool.validate()
    pool.free(first)
    assert (pool.holders(full), pool.holders(partial)) == (1, 0)
    pool.free(second)
    assert pool.num_free == 8


def test_full_pages_are_shared_without_a_copy():
    pool = new()
    first = pool.allocate(32)
    second = pool.fork(first)
    assert pool.extend(second, 1) == []
    assert pool.pages(second)[:2] == pool.pages(first)
    third = pool.allocate(5, prefix_pages=pool.pages(first))
    assert pool.length(third) == 37
    assert pool.pages(third)[:2] == pool.pages(first)
    assert [pool.holders(page) for page in pool.pages(third)] == [3, 3, 1]
    pool.free(first)
    pool.free(second)
    assert pool.num_free == 5
    pool.validate()


def test_what_does_not_fit_changes_nothing():
    pool = new(4)
    first = pool.allocate(40)
    second = pool.fork(first)

    def state():
        return pool.pages(first), pool.pages(second), pool.num_free, pool.sequences

    before = state()
    with pytest.raises(PoolExhausted, match="2 pages are needed and 1 are free") as error:
        pool.allocate(17)
    assert (error.value.needed, error.value.free) == (2, 1)
    with pytest.raises(PoolExhausted, match="2 pages are needed and 1 are free"):
        pool.allocate(17, prefix_pages=pool.pages(first)[:2])
    # The copy of the page that is written to counts.
    with pytest.raises(PoolExhausted, match="2 pages are needed and 1 are free"):
        pool.extend(second, 9)
    assert state() == before
    pool.validate()
    assert len(pool.extend(second, 8)) == 1
    with pytest.raises(PoolExhausted, match="1 pages are needed and 0 are free"):
        pool.extend(first, 9)
    assert pool.extend(first, 8) == []


def test_block_tables():
    pool = new()
    first, second = pool.allocate(40), pool.allocate()
    table = pool.block_tables([second, first, None, first], 4)
    assert table.dtype == np.int32
    row = [*pool.pages(first), -1]
    np.testing.assert_array_equal(table, [[-1] * 4, row, [-1] * 4, row])
    assert pool.block_tables([], 2).shape == (0, 2)
    with pytest.raises(ValueError, match="max_pages=2 must be at least 3, what sequence 0 holds"):
        pool.block_tables([first], 2)


def test_retained_pages_outlive_their_sequences():
    pool = new()
    sequence = pool.allocate(20)
    pages = pool.pages(sequence)
    pool.retain(pages[0])
    pool.retain(pages[0])
    assert pool.holders(pages[0]) == 3
    pool.validate()
    pool.free(sequence)
    assert pool.num_free == 7
    pool.release(pages[0])
    assert pool.num_free == 7
    # A partial page that someone retains is copied before it is written.
    again = pool.allocate(3)
    pool.retain(pool.pages(again)[0])
    assert len(pool.extend(again, 1)) == 1
    pool.release(pages[0])
    with pytest.raises(ValueError, match=f"page={pages[0]} must be retained"):
        pool.release(pages[0])
    pool.validate()


def test_pages_before_a_window_go_while_the_sequence_goes_on():
    pool = new()
    sequence = pool.allocate(40)
    pages = pool.pages(sequence)
    assert pool.release_before(sequence, 15) == 0
    assert pool.release_before(sequence, 17) == 1
    assert pool.pages(sequence) == (-1, *pages[1:])
    assert (pool.length(sequence), pool.num_free, pool.holders(pages[0])) == (40, 6, 0)
    assert pool.release_before(sequence, 31) == pool.release_before(sequence, 0) == 0
    np.testing.assert_array_equal(pool.block_tables([sequence], 4), [[-1, *pages[1:], -1]])
    # What it lets go is the next to be taken, also by itself.
    assert pool.extend(sequence, 20) == []
    assert pool.pages(sequence) == (-1, *pages[1:], pages[0])
    assert pool.release_before(sequence, 60) == 2
    assert pool.pages(sequence) == (-1, -1, -1, pages[0])
    assert pool.statistics(10) == PoolStatistics(8, 7, 0, 1, tokens=12, bytes=10)
    pool.validate()
    # A full one goes as a whole, and the sequence goes on from there.
    pool.extend(sequence, 4)
    assert pool.release_before(sequence, 64) == 1
    assert (pool.pages(sequence), pool.num_free) == ((-1,) * 4, 8)
    assert pool.extend(sequence, 1) == []
    pool.validate()
    pool.free(sequence)
    assert pool.num_free == 8


def test_released_pages_that_are_shared_stay_with_their_other_holders():
    pool = new()
    first = pool.allocate(40)
    pages = pool.pages(first)
    second = pool.fork(first)
    pool.retain(pages[1])
    assert pool.release_before(first, 32) == 2
    assert [pool.holders(page) for page in pages] == [1, 2, 2]
    assert (pool.pages(second), pool.num_free) == (pages, 5)
    # A fork of what is left shares that, and its last page is copied as ever.
    third = pool.fork(first)
    assert pool.pages(third) == (-1, -1, pages[2])
    (copy,) = pool.extend(third, 1)
    assert pool.pages(third) == (-1, -1, copy.destination)
    assert pool.pages_of_sequences() == 4  # three and the copy; what is retained alone is none
    pool.free(second)
    assert [pool.holders(page) for page in pages] == [0, 1, 1]
    assert pool.pages_of_sequences() == 2
    pool.validate()
    # A sequence may begin with pages that are gone.
    fourth = pool.allocate(20, prefix_pages=(-1, pages[1]))
    assert pool.length(fourth) == 52
    assert pool.pages(fourth)[:2] == (-1, pages[1])
    fifth = pool.allocate(3, prefix_pages=[-1, -1])
    assert (pool.length(fifth), pool.pages(fifth)[:2]) == (35, (-1, -1))
    pool.validate()


def test_statistics():
    pool = new()
    first = pool.allocate(20)
    pool.extend(pool.fork(first), 3)
    want = PoolStatistics(num_pages=8, free=5, shared=1, sequences=2, tokens=43, bytes=3000)
    assert pool.statistics(page_bytes=1000) == want
    assert want.used == 3
    assert pool.statistics().bytes is None


def test_ids_are_never_used_again():
    pool = new()
    ids = []
    for _ in range(3):
        ids += [pool.allocate(1), pool.allocate(1)]
        ids.append(pool.fork(ids[-1]))
        pool.free(ids[-2])
    assert len(set(ids)) == 9


def freed(pool):
    sequence = pool.allocate(20)
    pool.free(sequence)
    return sequence


WRONG = {
    "pages": (ValueError, lambda p: new(0), "num_pages=0 must be at least 1"),
    "size": (TypeError, lambda p: new(1, 16.0), "page_size=16.0 must be an integer"),
    "tokens": (ValueError, lambda p: p.allocate(-1), "tokens=-1 must not be negative"),
    "fraction": (TypeError, lambda p: p.extend(0, 1.5), "tokens=1.5 must be an integer"),
    "prefix": (ValueError, lambda p: p.allocate(1, [7]), "page=7 is free"),
    "outside": (ValueError, lambda p: p.allocate(1, [8]), r"page=8 must be within 0\.\.7"),
    "free twice": (KeyError, lambda p: p.free(freed(p)), "there is no sequence 1: it was freed"),
    "extend": (KeyError, lambda p: p.extend(freed(p), 1), "there is no sequence 1"),
    "fork": (KeyError, lambda p: p.fork(99), "there is no sequence 99"),
    "table": (KeyError, lambda p: p.block_tables([0, 99], 4), "there is no sequence 99"),
    "columns": (ValueError, lambda p: p.block_tables([0], 0), "max_pages=0 must be at least 1"),
    "retain": (ValueError, lambda p: p.retain(5), "page=5 is free"),
    "release": (ValueError, lambda p: p.release_before(0, -1), "tokens=-1 must not be negative"),
    "release all": (ValueError, lambda p: p.release_before(0, 21), "tokens=21 must be at most 20"),
    "release free": (KeyError, lambda p: p.release_before(7, 0), "there is no sequence 7"),
    "release part": (TypeError, lambda p: p.release_before(0, 2.0), "tokens=2.0 must be an int"),
    "hole": (ValueError, lambda p: p.allocate(1, [0, -1]), r"page=-1 must be within 0\.\.7"),
    "holders": (ValueError, lambda p: p.holders(-1), "page=-1 must be within"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_says_what_is_wrong_and_changes_nothing(name):
    error, call, message = WRONG[name]
    pool = new()
    pool.allocate(20)
    with pytest.raises(error, match=message):
        call(pool)
    pool.validate()
    assert (pool.num_free, pool.sequences) == (6, (0,))


def test_validate_finds_what_is_broken():
    pool = new()
    sequence = pool.allocate(20)
    pool._shares[pool.pages(sequence)[0]] += 1
    with pytest.raises(ValueError, match="page 0 has 1 sequences, 2 are on record"):
        pool.validate()
    pool = new()
    pool._free.append(3)
    with pytest.raises(ValueError, match="are listed as free"):
        pool.validate()
    pool = new()
    pool._idle[3] = 1
    with pytest.raises(ValueError, match=r"pages \[3\] are listed as idle, must be \[\]"):
        pool.validate()
    pool = new()
    pool._sequences[pool.allocate(20)].length = 40
    with pytest.raises(ValueError, match="sequence 0 has 2 pages for 40 tokens"):
        pool.validate()
    pool = new()
    pool._sequences[pool.allocate(20)].pages[0] = -1
    with pytest.raises(ValueError, match=r"sequence 0 misses pages \[0\], 0 are released"):
        pool.validate()


# Against a model ---------------------------------------------------------------------------------


class Model(stateful.RuleBasedStateMachine):
    """Pages as dicts from slot to token: a write to a shared page would show in the other one."""

    sequences = stateful.Bundle("sequences")

    def __init__(self):
        super().__init__()
        self.pool = new(10, 4)
        self.pages = [{} for _ in range(10)]
        self.tokens, self.first = {}, {}
        self.retained = collections.Counter()
        self.count = 0

    def write(self, sequence, tokens):
        """Writes fresh tokens at the end, as a cache would."""
        start = self.pool.length(sequence) - tokens
        pages = self.pool.pages(sequence)
        for position in range(start, start + tokens):
            self.count += 1
            self.pages[pages[position // 4]][position % 4] = self.count
            self.tokens[sequence].append(self.count)

    @stateful.rule(target=sequences, tokens=st.integers(0, 14))
    def allocate(self, tokens):
        needed, free = -(-tokens // 4), self.pool.num_free
        if needed > free:
            with pytest.raises(PoolExhausted):
                self.pool.allocate(tokens)
            return stateful.multiple()
        sequence = self.pool.allocate(tokens)
        assert self.pool.num_free == free - needed
        self.tokens[sequence], self.first[sequence] = [], 0
        self.write(sequence, tokens)
        return sequence

    @stateful.rule(target=sequences, parent=sequences, pages=st.integers(0, 4))
    def allocate_with_prefix(self, parent, pages):
        pages = min(pages, self.pool.length(parent) // 4)
        sequence = self.pool.allocate(prefix_pages=self.pool.pages(parent)[:pages])
        self.tokens[sequence] = self.tokens[parent][: 4 * pages]
        self.first[sequence] = min(self.first[parent], pages)
        return sequence

    @stateful.rule(sequence=sequences, tokens=st.integers(0, 14))
    def release_before(self, sequence, tokens):
        length, pages = self.pool.length(sequence), self.pool.pages(sequence)
        if tokens > length:
            with pytest.raises(ValueError, match="must be at most"):
                self.pool.release_before(sequence, tokens)
            return
        first = max(self.first[sequence], tokens // 4)
        gone = self.pool.release_before(sequence, tokens)
        assert gone == first - self.first[sequence]
        self.first[sequence] = first
        assert self.pool.pages(sequence) == (-1,) * first + pages[first:]
        self.poison(page for page in pages[:first] if page >= 0)

    @stateful.rule(sequence=sequences, tokens=st.integers(0, 9))
    def extend(self, sequence, tokens):
        length, pages = self.pool.length(sequence), self.pool.pages(sequence)
        shared = tokens > 0 and length % 4 > 0 and self.pool.holders(pages[-1]) > 1
        needed = -(-(length + tokens) // 4) - len(pages) + shared
        if needed > self.pool.num_free:
            with pytest.raises(PoolExhausted):
                self.pool.extend(sequence, tokens)
            assert (self.pool.length(sequence), self.pool.pages(sequence)) == (length, pages)
            return
        copies = self.pool.extend(sequence, tokens)
        assert len(copies) == shared
        for copy in copies:
            assert copy.source == pages[-1]
            assert self.pool.holders(copy.destination) == 1
            self.pages[copy.destination] = dict(self.pages[copy.source])
        self.write(sequence, tokens)

    @stateful.rule(target=sequences, sequence=sequences)
    def fork(self, sequence):
        free = self.pool.num_free
        child = self.pool.fork(sequence)
        assert self.pool.num_free == free
        self.tokens[child] = list(self.tokens[sequence])
        self.first[child] = self.first[sequence]
        return child

    @stateful.rule(sequence=stateful.consumes(sequences))
    def free(self, sequence):
        pages = [page for page in self.pool.pages(sequence) if page >= 0]
        self.pool.free(sequence)
        del self.tokens[sequence]
        self.poison(pages)
        with pytest.raises(KeyError):
            self.pool.free(sequence)

    @stateful.rule(sequence=sequences)
    def retain(self, sequence):
        for page in self.pool.pages(sequence)[self.first[sequence] :][:1]:
            self.pool.retain(page)
            self.retained[page] += 1

    @stateful.precondition(lambda self: self.retained)
    @stateful.rule(data=st.data())
    def release(self, data):
        page = data.draw(st.sampled_from(sorted(self.retained)))
        self.pool.release(page)
        self.retained -= collections.Counter([page])
        self.poison([page])

    def poison(self, pages):
        for page in pages:
            if self.pool.holders(page) == 0:
                self.pages[page] = dict.fromkeys(range(4), -1)

    @stateful.invariant()
    def every_sequence_reads_its_own_tokens(self):
        self.pool.validate()
        assert self.pool.sequences == tuple(self.tokens)
        held = set(self.retained)
        for sequence, tokens in self.tokens.items():
            pages = self.pool.pages(sequence)
            assert self.pool.length(sequence) == len(tokens)
            first = 4 * self.first[sequence]
            read = [self.pages[pages[i // 4]][i % 4] for i in range(first, len(tokens))]
            assert read == tokens[first:]
            assert len(pages) == -(-len(tokens) // 4)
            held |= set(pages) - {-1}
        assert self.pool.num_free == 10 - len(held)
        total = sum(len(self.tokens[s]) - 4 * self.first[s] for s in self.tokens)
        assert self.pool.statistics().tokens == total


TestModel = Model.TestCase
TestModel.settings = hypothesis.settings(max_examples=150, stateful_step_count=50, deadline=None)
