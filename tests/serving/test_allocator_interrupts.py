"""Pages stay accounted for when calls are interrupted at any line: each is done, or is not."""

import copy
import random

import numpy as np
import pytest

from tests.tools.interrupting import Lines, lines_of
from turbojax.caches.paged import allocator
from turbojax.caches.paged.allocator import PageAllocator, PoolExhausted
from turbojax.caches.paged.prefix import PrefixCache

PAGES, SIZE = 24, 4
PREFIXES = ("insert", "evict", "clear", "lookup")
OPERATIONS = (
    *("allocate", "allocate", "share", "extend", "extend", "fork", "free", "free"),
    *(
        "retain",
        "release",
        "insert",
        "insert",
        "lookup",
        "evict",
        "release_before",
        "release_before",
    ),
)


class Pool:
    """An allocator, its prefix cache, and what each sequence's tokens are."""

    def __init__(self, window=None):
        self.pages = PageAllocator(PAGES, SIZE)
        self.prefixes = PrefixCache(self.pages, window)

    def held(self):
        """Who holds what, as the public sees it, but for `retain`."""
        pages = self.pages
        sequences = {s: (pages.pages(s), pages.length(s)) for s in pages.sequences}
        return sequences, tuple(pages._retained)

    def remembered(self):
        """The tokens up to the end of each remembered page, that was used last comes last."""
        found = {}
        entries = self.prefixes._entries.items()
        for page, entry in sorted(entries, key=lambda item: item[1].used):
            chain = []
            while entry is not None:
                chain[:0] = np.frombuffer(entry.tokens, np.int64).tolist()
                entry = entry.parent
            found[page] = tuple(chain)
        return found

    def check(self):
        """No page is lost, none both free and held; tree and order are as they are described."""
        self.pages.validate()
        held = {page for s in self.pages.sequences for page in self.pages.pages(s)} - {-1}
        held |= {page for page in range(PAGES) if self.pages._retained[page]}
        remembered = self.remembered()
        assert self.pages.num_free == PAGES - len(held | set(remembered))
        self.check_tree()
        if self.prefixes._window is not None:
            return
        for page, tokens in remembered.items():
            found, count = self.prefixes.lookup(tokens)
            assert (found[-1], count) == (page, len(tokens))
        order = list(self.remembered().values())
        for i, tokens in enumerate(order):
            assert tokens[:-SIZE] not in order[:i]

    def check_tree(self):
        """It holds the pages on record, each once, and leads to nothing else."""
        self.prefixes.lookup([])  # what an interrupt left is put in order
        found, nodes = {}, list(self.prefixes._roots.values())
        for node in nodes:
            nodes += node.children.values()
            assert node.page != -1 or node.children
            found.update({node.page: node} if node.page != -1 else {})
        assert found == dict(self.prefixes._entries)


def tokens_of(pool, sequence):
    """By the pages' numbers and places, so that sequences with equal pages have equal tokens."""
    pages = pool.pages.pages(sequence)
    return [page for page in pages for _ in range(SIZE)][: pool.pages.length(sequence)]


def operation(rng, pool):
    """One by chance, to be called with a copy of the pool as well."""
    name = rng.choice(OPERATIONS) if rng.random() > 0.01 else "clear"
    some = rng.choice(pool.pages.sequences or (0,))
    count = rng.randrange(14)
    kept = [page for page in range(PAGES) if pool.pages._retained[page]]
    page = rng.choice(kept or [0])

    def call(pool):
        pages, prefixes = pool.pages, pool.prefixes
        if name in ("clear", "evict"):
            return prefixes.clear() if name == "clear" else prefixes.evict(count % 4)
        if name == "allocate":
            return pages.allocate(count)
        if name == "release":
            return pages.release(page)
        if some not in pages.sequences:
            return None
        if name == "extend":
            return pages.extend(some, count)
        if name == "release_before":
            return pages.release_before(some, min(count, pages.length(some)))
        if name in ("insert", "lookup"):
            tokens = tokens_of(pool, some)
            insert = name == "insert"
            return prefixes.insert(tokens, pages.pages(some)) if insert else prefixes.lookup(tokens)
        full = pages.pages(some)[: pages.length(some) // SIZE]
        if name == "share":
            return pages.allocate(count, prefix_pages=full)
        if name == "retain":
            full = [page for page in full if page != -1]
            return pages.retain(full[0]) if full else None
        return getattr(pages, name)(some)

    return name, call


def attempt(call, pool):
    try:
        return call(pool)
    except (PoolExhausted, ValueError) as error:
        return str(error)


def between(found, before, after):
    """Of calls that remember or forget several pages: some of them."""
    lesser, greater = sorted((before, after), key=len)
    return lesser.items() <= found.items() <= greater.items()


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.fuzz)])
def test_any_operation_interrupted_at_any_line(count, window, record_property):
    rng = random.Random(count)
    pool = Pool(window)
    interrupts = refused = 0
    for _ in range(count):
        name, call = operation(rng, pool)
        whole = copy.deepcopy(pool)
        before, known = pool.held(), pool.remembered()
        if rng.random() < 0.5:
            lines = lines_of(lambda call=call, whole=whole: attempt(call, whole), "turbojax/caches")
            where = (
                Lines(rng.randrange(lines), where="turbojax/caches")
                if lines
                else Lines(0, where="-")
            )
        else:
            attempt(call, whole)
            where = Lines(None, where="-")
        try:
            with where:
                refused += isinstance(attempt(call, pool), str)
        except KeyboardInterrupt:
            interrupts += 1
            # Whoever did not get a sequence's number has no sequence.
            assert pool.held() == before
            if name in PREFIXES:
                assert between(pool.remembered(), known, whole.remembered())
            else:
                assert pool.remembered() == known
        else:
            assert pool.held() == whole.held()
            assert pool.remembered() == whole.remembered()
        pool.check()
        if len(pool.pages.sequences) > 12 or pool.pages.num_free == 0:
            for sequence in pool.pages.sequences[::2]:
                pool.pages.free(sequence)
    assert interrupts > count // 4
    assert refused > count // 100
    record_property("counted", f"allocator: {count:,} operations, {interrupts:,} interrupts")


def scanned(pool, count):
    """What `evict` is to free: as a scan of all pages finds them, the least recently used first."""
    gone = []
    entries = pool.prefixes._entries.values()
    for entry in sorted(entries, key=lambda entry: entry.used):
        follows = pool.prefixes._window is None and any(
            child.page not in gone for child in entry.children.values()
        )
        if len(gone) < count and not follows and pool.pages.holders(entry.page) == 1:
            gone.append(entry.page)
    return gone


@pytest.mark.parametrize("window", [None, 6])
def test_evictions_are_those_of_a_scan(window):
    rng = random.Random(1)
    pool = Pool(window)
    evictions = 0
    for _ in range(1500):
        attempt(operation(rng, pool)[1], pool)
        if len(pool.pages.sequences) > 12 or rng.random() < 0.2:
            for sequence in pool.pages.sequences[::3]:
                pool.pages.free(sequence)
        if rng.random() < 0.3:
            before, wanted = set(pool.prefixes._entries), rng.randrange(5)
            expected = scanned(pool, wanted)
            assert pool.prefixes.evict(wanted) == len(expected)
            assert before - set(pool.prefixes._entries) == set(expected)
            evictions += len(expected)
        assert len(pool.prefixes._queue) <= len(pool.prefixes)
        of_sequences = {page for s in pool.pages.sequences for page in pool.pages.pages(s)} - {-1}
        assert pool.pages.pages_of_sequences() == len(of_sequences)
    assert evictions > 50


def test_interrupted_twice():
    """Also while what an interrupt left is put in order."""
    pool = Pool()
    sequence = pool.pages.allocate(14)
    pool.prefixes.insert(tokens_of(pool, sequence), pool.pages.pages(sequence))
    for first in range(lines_of(lambda: copy.deepcopy(pool).pages.free(0), allocator.__file__)):
        for second in range(12):
            again = copy.deepcopy(pool)
            with pytest.raises(KeyboardInterrupt), Lines(first, where=allocator.__file__):
                again.pages.free(sequence)
            try:
                with Lines(second, where=allocator.__file__):
                    assert again.pages.num_free == PAGES - 4
            except KeyboardInterrupt:
                pass
            assert again.held() == pool.held()
            again.check()


def test_a_page_is_remembered_once():
    pool = Pool()
    sequence = pool.pages.allocate(8)
    pages = pool.pages.pages(sequence)
    pool.prefixes.insert([1] * 8, pages)
    with pytest.raises(ValueError, match="page=0 must not be remembered already"):
        pool.prefixes.insert([2] * 8, pages)
    with pytest.raises(ValueError, match="must not be remembered already"):
        pool.prefixes.insert([3] * 8, [pages[0], pages[0]])
    assert len(pool.prefixes) == 2
    pool.check()


def test_keepers():
    pages, kept = PageAllocator(3, SIZE), {}
    pages.add_keeper(kept)
    sequence = pages.allocate(SIZE)
    pages.keep(kept, 0, "what it is")
    assert (kept, pages.holders(0)) == ({0: "what it is"}, 2)
    with pytest.raises(ValueError, match="page=0 must not be kept already"):
        pages.keep(kept, 0, "again")
    with pytest.raises(ValueError, match="page=2 is free"):
        pages.keep(kept, 2, "free")
    pages.free(sequence)
    pages.validate()
    assert pages.num_free == 2
    pages.drop(kept, 0)
    assert (kept, pages.num_free) == ({}, 3)
    with pytest.raises(KeyError, match="page=0 must be kept before it is dropped"):
        pages.drop(kept, 0)
    with pytest.raises(ValueError, match="must be none"):
        pages.add_keeper({1: None})
