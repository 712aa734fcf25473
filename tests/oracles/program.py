"""A program of several warps on a CPU: each is a thread that runs alone from barrier to barrier."""

import threading
import types

from oracles import warp

_HERE = threading.local()


def special(name):
    assert name == "tid.x"
    return warp.Int(32 * _HERE.warp + warp.LANES)


def block_barrier():
    _HERE.turn.release()
    _HERE.barrier.wait()
    _HERE.turn.acquire()


lane = types.SimpleNamespace(
    **{name: x for name, x in vars(warp).items() if not name.startswith("_")},
    special=special,
    block_barrier=block_barrier,
)
"""Stands in for `pallas_kernels.mosaic.lane`."""


def run(warps, body):
    """Runs a program: `body` once for each of its warps."""
    turn, barrier, errors = threading.Lock(), threading.Barrier(warps), []

    def one(number):
        _HERE.warp, _HERE.turn, _HERE.barrier = number, turn, barrier
        with turn:
            try:
                body()
            except threading.BrokenBarrierError:
                turn.acquire()  # for the `with` to release
            except BaseException as error:
                errors.append(error)
                barrier.abort()

    threads = [threading.Thread(target=one, args=(i,)) for i in range(warps)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
