"""Which tiles each of a launch's programs takes, where some tiles have more to do than others.

Programs that take every n-th tile of a causal call are left with up to 3 % more or less to do than
others, as the sizes fall out. All sizes are known when a call is traced, so tiles are given out
then: the largest first, each to the program that has least so far (Graham, 1969).
"""

import functools
import heapq

import numpy as np

# Past so many tiles a program, taking them in turn is as even, and a table would be large.
_MOST_ROUNDS = 64
# What a tile costs besides its steps, in steps.
_OVERHEAD = 1.3
# By how much the program with most to do must have less to do than in turn.
_GAIN = 0.005


@functools.lru_cache(maxsize=64)
def causal(rows: int, tiles: int, programs: int) -> np.ndarray | None:
    """For each program how many tiles it takes, and their numbers: int32 ``[programs, 1 + most]``.

    Tiles are numbered as `pipeline.TileScheduler` does with `zigzag`: number `n` has
    ``tiles - n // rows`` steps. None where that schedule is as good.
    """
    if rows * tiles > _MOST_ROUNDS * programs:
        return None
    costs = tiles - np.arange(rows * tiles) // rows + _OVERHEAD
    heap = [(0.0, program) for program in range(programs)]
    lists: list[list[int]] = [[] for _ in range(programs)]
    for number, cost in enumerate(costs):
        load, program = heap[0]
        lists[program].append(number)
        heapq.heapreplace(heap, (load + float(cost), program))
    longest = max(load for load, _ in heap)
    if longest > (1 - _GAIN) * _longest_in_turn(costs, programs):
        return None
    table = np.zeros((programs, 1 + max(len(x) for x in lists)), np.int32)
    for program, numbers in enumerate(lists):
        table[program, 0] = len(numbers)
        table[program, 1 : 1 + len(numbers)] = numbers
    return table


def _longest_in_turn(costs: np.ndarray, programs: int) -> float:
    """What the program with most to do takes with every other round backwards."""
    rounds = np.pad(costs, (0, -len(costs) % programs)).reshape(-1, programs)
    rounds[1::2] = rounds[1::2, ::-1]
    return float(rounds.sum(0).max())
