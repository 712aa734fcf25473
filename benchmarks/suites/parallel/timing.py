"""Wall time of programs on several devices."""

import time
from collections.abc import Callable
from typing import Any

import jax

from benchmarks import timing


def timed(
    call: Callable[..., Any], *arguments: Any, loops: int = 1, seconds: float = 0.5
) -> dict[str, Any]:
    """Microseconds of one of the `loops` rounds in a call: the best of several measurements.

    The best, because what else the host does only takes time.

    Args:
      call: compiled; it hands nothing on from call to call.
      arguments: of it.
      loops: rounds in a call.
      seconds: of a measurement.
    """
    with timing.alone():
        jax.block_until_ready(call(*arguments))
        once = _wall(call, arguments, 1)
        repetitions = max(1, min(50, round(seconds / once)))
        times = [_wall(call, arguments, repetitions) / loops * 1e6 for _ in range(4)]
    return {"us": min(times), "us_of_runs": times, "repetitions": repetitions, "loops": loops}


def _wall(call: Callable[..., Any], arguments: tuple[Any, ...], repetitions: int) -> float:
    start = time.perf_counter()
    for _ in range(repetitions):
        out = call(*arguments)
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / repetitions


def exchanges(compiled: jax.stages.Compiled) -> dict[str, int]:
    """How often a compiled program has each collective."""
    text = compiled.as_text() or ""
    kinds = ("all-gather", "all-reduce", "collective-permute", "all-to-all", "reduce-scatter")
    counts = {kind: text.count(f" {kind}(") + text.count(f" {kind}-start(") for kind in kinds}
    return {kind: count for kind, count in counts.items() if count}
