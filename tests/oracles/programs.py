"""Programs of a cluster in numpy: warps that share memory, barriers, copies and matrix units.

Beside `oracles.warp`, whose functions for one warp they take.
"""

import functools
import threading
import time

import ml_dtypes
import numpy as np

from tests.oracles import warp


class RoundRobin:
    """Runs one function for each warp, given its number; `barrier` is what they wait at."""

    def __init__(self, bodies):
        self._bodies, self._errors = bodies, []
        self._running, self._own = threading.Lock(), threading.local()
        self._barriers = {}

    @property
    def number(self):
        """Of the running warp."""
        return self._own.number

    def barrier(self, name, count):
        """Waits until `count` warps are at the barrier of this name."""
        meeting = self._barriers.setdefault(name, threading.Barrier(count))
        self._running.release()
        try:
            meeting.wait(60)
        finally:
            self._running.acquire()

    def until(self, condition):
        """Lets others run until it holds."""
        for _ in range(10_000):
            if condition():
                return
            self._running.release()
            time.sleep(0.001)
            self._running.acquire()
        raise TimeoutError("a warp waits for what no other does")

    def _start(self, number):
        self._own.number = number
        with self._running:
            try:
                self._bodies[number]()
            except BaseException as error:
                self._errors.append(error)
                for meeting in self._barriers.values():
                    meeting.abort()

    def run(self):
        """Until all are through; raises what the first raised."""
        threads = [
            threading.Thread(target=self._start, args=(i,)) for i in range(len(self._bodies))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]


GROUP = 128


class Fragments:
    """Stands in for `lane.fragments` in code of whole warpgroups."""

    @staticmethod
    def row_and_place():
        thread = warp.thread()
        return ((thread >> 5) & 3) * 16 + ((thread >> 2) & 7), thread & 3


def start_product(words, tokens, columns, minus=()):
    """A warp's 16 rows of a warpgroup's product of e4m3."""
    g, t = warp.LANES // 4, warp.LANES % 4
    left = _left(words) - (_left(minus) if minus else 0)
    [first] = set(tokens.offset)
    assert first % 1024 == 0
    n, byte = np.arange(columns)[:, None], np.arange(GROUP)
    place = n * GROUP + ((byte // 16 ^ n % 8) * 16 + byte % 16)
    right = tokens.memory[first + place].view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    out = (left @ right.T).astype(np.float32)
    return [
        warp.Float(out[g + 8 * half, 8 * j + 2 * t + e])
        for j in range(columns // 8)
        for half in range(2)
        for e in range(2)
    ]


def _left(words):
    """A warp's rows of a left operand."""
    g, t = warp.LANES // 4, warp.LANES % 4
    left = np.zeros((16, 8 * len(words)))
    for i, word in enumerate(words):
        step, half, further = i // 4, i % 2, i % 4 // 2
        numbers = word.value[:, None].view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        for b in range(4):
            left[g + 8 * half, 32 * step + 16 * further + 4 * t + b] = numbers[:, b]
    return left


class Copies:
    """The copy engine, whose copies are done at once, and its barriers."""

    def __init__(self, scheduler):
        self._scheduler, self._missing, self._phases = scheduler, {}, {}
        self._arrivals, self._arrived_before = {}, {}

    @staticmethod
    def _places(barrier):
        active = np.flatnonzero(warp.STATE.active[-1])
        return [(lane, (id(barrier.memory), barrier.offset[lane])) for lane in active]

    def init(self, barrier, arrivals=1):
        self._arrivals |= {at: arrivals for _, at in self._places(barrier)}

    def arrive(self, barrier):
        for _, at in self._places(barrier):
            count = self._arrived_before.get(at, 0) + 1
            is_last = count == self._arrivals[at]
            self._arrived_before[at] = 0 if is_last else count
            self._phases[at] = self._phases.get(at, 0) + is_last

    def expect(self, barrier, size):
        for lane, at in self._places(barrier):
            assert self._missing.get(at, 0) == 0, "a slot is filled before it was waited for"
            self._missing[at] = int(warp._signed(size)[lane])

    def copy(self, source, target, size, barrier):
        for lane, at in self._places(barrier):
            count = int(warp._signed(size)[lane])
            source_at, target_at = source.offset[lane], target.offset[lane]
            assert source_at % 16 == target_at % 16 == count % 16 == 0
            found = source.memory[source_at:][:count]
            assert len(found) == count, "a copy past the end"
            target.memory[target_at:][:count] = found
            self._arrived(at, count)

    def _arrived(self, at, count):
        self._missing[at] -= count
        assert self._missing[at] >= 0, "more bytes than were expected"
        if self._missing[at] == 0:
            self._phases[at] = self._phases.get(at, 0) + 1

    def copy_box(self, source, column, rows, target, barrier):
        """Of `source`, whose memory is ``[M, K]``."""
        row, byte = np.arange(rows)[:, None], np.arange(GROUP)
        places = row * GROUP + ((byte // 16 ^ row % 8) * 16 + byte % 16)
        for lane, at in self._places(barrier):
            first = int(warp._signed(column)[lane])
            box = np.zeros((rows, GROUP), np.uint8)
            found = source.memory[:rows, first:][:, :GROUP]
            box[: found.shape[0], : found.shape[1]] = found
            assert target.offset[lane] % 1024 == 0
            target.memory[target.offset[lane] + places] = box
            self._arrived(at, box.size)

    def wait(self, barrier, parity):
        at = id(barrier.memory), barrier.offset[0]
        self._scheduler.until(lambda: self._phases.get(at, 0) & 1 != int(parity.value[0]))


class ClusterPointer:
    """Stands in for `lane.ClusterPointer`."""

    memories = ()

    @classmethod
    def of(cls, pointer, rank):
        return warp.Pointer(cls.memories[rank], pointer.offset)


def _floats(place):
    return [x.as_float() for x in place.words(4)]


def run(monkeypatch, body, *, programs, warps, shared):
    """Runs a cluster's programs.

    Args:
      monkeypatch: pytest's.
      body: ``body(rank, memory)`` of a warp: of program `rank`, with its shared memory.
      programs: of the cluster.
      warps: of a program.
      shared: bytes of a program's memory.
    """
    memories = [np.full(shared, 0x7F, np.uint8) for _ in range(programs)]
    ClusterPointer.memories = memories

    def of_warp(number):
        rank = number // warps
        with np.errstate(all="ignore"):
            body(rank, warp.Pointer(memories[rank]))

    scheduler = RoundRobin([functools.partial(of_warp, i) for i in range(programs * warps)])
    copies = Copies(scheduler)

    def rank():
        return scheduler.number // warps

    there = {
        "thread": lambda: warp.Int(warp.LANES + 32 * (scheduler.number % warps)),
        "block_barrier": lambda: scheduler.barrier(("all", rank()), warps),
        "named_barrier": lambda n, count: scheduler.barrier((int(n.value[0]), rank()), count // 32),
        "cluster_barrier": lambda: scheduler.barrier("cluster", programs * warps),
        "arrive_at_cluster": lambda: None,
        "wait_for_cluster": lambda: scheduler.barrier("cluster", programs * warps),
        "fragments": Fragments,
        "start_product": start_product,
        "finish": list,
        "init_barrier": copies.init,
        "arrive": copies.arrive,
        "publish_barriers": lambda: None,
        "expect_bytes": copies.expect,
        "copy": copies.copy,
        "copy_box": copies.copy_box,
        "wait": copies.wait,
    }
    for name, f in there.items():
        monkeypatch.setattr(warp, name, f, raising=False)
    monkeypatch.setattr(warp.Pointer, "floats", _floats, raising=False)
    scheduler.run()
