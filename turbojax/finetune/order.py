"""The order of the data: a function of the step, so that resuming is exact."""

import functools

import numpy as np


def window_starts(index: np.ndarray, *, num_bytes: int, context: int, seed: int) -> np.ndarray:
    """Where windows begin, int32 ``[n]``, given their numbers from 0 in an endless sequence.

    Every epoch visits all windows once, in a new order and cut at a new offset, both by `seed`. The
    stream has `num_bytes` bytes, of which a window predicts `context`. Raises ValueError if the
    stream holds no two windows, or its positions do not fit int32.
    """
    # One window is lost to the offset, one byte to the shift between inputs and targets.
    num_windows = (num_bytes - 1) // context - 1
    if num_windows < 1:
        raise ValueError(f"{num_bytes=} must be more than twice {context=}")
    if num_bytes >= 2**31:
        raise ValueError(f"{num_bytes=} must be below 2**31")
    starts = np.empty(index.shape, np.int32)
    for epoch in np.unique(index // num_windows):
        order, offset = _epoch(seed, context, int(epoch), num_windows)
        here = index // num_windows == epoch
        starts[here] = order[index[here] % num_windows] * context + offset
    return starts


@functools.lru_cache(maxsize=4)
def _epoch(seed: int, context: int, epoch: int, num_windows: int) -> tuple[np.ndarray, int]:
    generator = np.random.default_rng([seed, context, epoch])
    return generator.permutation(num_windows), int(generator.integers(context))
