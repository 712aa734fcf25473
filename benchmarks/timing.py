"""Time on the device, and the two rates that bound it.

On a GPU a time is the sum of the kernels' times as CUPTI records them: it includes neither the
host's time nor copies that XLA leaves to the driver. So the wall time per call of many calls in a
row is reported beside it: where it is much longer, either launches or such copies take the rest.
"""

import contextlib
import dataclasses
import getpass
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from turbojax import _locks
from turbojax._pytrees import nbytes as nbytes

# Inputs are rotated over copies of this size in all: four times the L2 cache of an H100.
ROTATION_BYTES = 200 * 2**20
_MAX_COPIES = 128
# Of one measurement, so that fast calls are repeated more often than slow ones.
_TARGET_SECONDS = 0.1
# Before one: a GPU at its power limit lowers its clock, which counts for the short calls after it.
_REST_SECONDS = 0.2


@dataclasses.dataclass(frozen=True)
class Timing:
    """How long a call takes.

    Attributes:
      microseconds: median of the repetitions.
      spread: the range of the middle half of the repetitions, over the median.
      wall_microseconds: per call, of all repetitions in a row.
      clock: ``"cupti"`` (kernels on the device) or ``"wall"``.
      repetitions: how many there were.
      kernels: names and median microseconds, longest first; empty by the wall clock.
    """

    microseconds: float
    spread: float
    wall_microseconds: float
    clock: str
    repetitions: int
    kernels: tuple[tuple[str, float], ...] = ()


class Rotation:
    """Calls one compiled function with the next set of arguments each time.

    It has the methods of `jax.stages.Wrapped`, by which jax's profiler knows that there is nothing
    to compile and calls it as it is.
    """

    def __init__(self, compiled: Callable[..., Any], argument_sets: Sequence[tuple[Any, ...]]):
        self._compiled = compiled
        self._sets = itertools.cycle(argument_sets)

    def __call__(self) -> Any:
        return self._compiled(*next(self._sets))

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("a rotation is compiled already")

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("a rotation is compiled already")


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def rotated(arguments: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """The arguments and as many copies of them as it takes to outgrow the GPU's L2 cache."""
    count = -(-ROTATION_BYTES // max(1, nbytes(arguments))) if on_gpu() else 1
    copies = [jax.tree.map(jnp.copy, arguments) for _ in range(min(count, _MAX_COPIES) - 1)]
    return [arguments, *copies]


def measure(
    compiled: Callable[..., Any], arguments: tuple[Any, ...], *, repetitions: int | None = None
) -> Timing:
    return measure_call(Rotation(compiled, rotated(arguments)), repetitions=repetitions)


def measure_call(call: Rotation, *, repetitions: int | None = None) -> Timing:
    """Times what is called again and again; it may hand a state on from call to call."""
    with alone():
        return _measure_call(call, repetitions)


_is_alone = False


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """While no other process of this user measures: shares of a suite do so one at a time.

    It may be entered again inside, and does nothing there. One thread of a process measures.
    """
    global _is_alone
    if _is_alone or not _locks.EXIST:
        yield
        return
    with _locked(shared=False):
        _is_alone = True
        try:
            yield
        finally:
            _is_alone = False


@contextlib.contextmanager
def beside() -> Iterator[None]:
    """While no process of this user measures; several may make what they need at the same time.

    `alone` must not be entered inside.
    """
    if _is_alone or not _locks.EXIST:
        yield
        return
    with _locked(shared=True):
        yield


@contextlib.contextmanager
def _locked(*, shared: bool) -> Iterator[None]:
    import fcntl

    path = Path(tempfile.gettempdir()) / f"turbojax-benchmarks-{getpass.getuser()}.lock"
    with path.open("a", encoding="utf-8") as lock:
        # Given back when the file is closed.
        fcntl.flock(lock, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield


def _measure_call(call: Rotation, repetitions: int | None) -> Timing:
    if on_gpu():
        time.sleep(_REST_SECONDS)
    jax.block_until_ready(call())
    walls = [_wall(call, 1)]
    if repetitions is None:
        repetitions = min(30, max(5, round(_TARGET_SECONDS / walls[0])))
    if on_gpu():
        wall = _wall(call, repetitions)
        kernels = _cupti(call, repetitions)
        if kernels is not None:
            totals = [sum(time for _, time in launch) for launch in kernels]
            return _timing(totals, wall, "cupti", _by_kernel(kernels))
        walls = [wall]
    else:
        walls += [_wall(call, 1) for _ in range(repetitions - 1)]
    walls = [1e6 * wall for wall in walls]
    return _timing(walls, statistics.mean(walls) / 1e6, "wall", ())


def _wall(call: Rotation, repetitions: int) -> float:
    """Seconds per call of calls that follow one another without waiting."""
    start = time.perf_counter()
    for _ in range(repetitions):
        out = call()
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / repetitions


def _cupti(call: Rotation, repetitions: int) -> list[list[tuple[str, float]]] | None:
    """Microseconds of each kernel of each repetition, or None if CUPTI cannot tell them apart."""
    from jax.experimental.mosaic.gpu import profiler

    try:
        _, timings = profiler.measure(call, aggregate=False, iterations=repetitions)()
    except RuntimeError:  # the repetitions did not launch the same kernels
        return None
    if timings is None:
        return None
    return [[(name, 1e3 * time) for name, time in launch] for launch in timings]


def _by_kernel(kernels: list[list[tuple[str, float]]]) -> tuple[tuple[str, float], ...]:
    """Median over the repetitions of each launch; launches of one kernel are added."""
    medians: dict[str, float] = {}
    for launches in zip(*kernels, strict=True):
        name = launches[0][0]
        medians[name] = medians.get(name, 0) + statistics.median(time for _, time in launches)
    return tuple(sorted(medians.items(), key=lambda item: -item[1]))


def _timing(
    times: list[float], wall_seconds: float, clock: str, kernels: tuple[tuple[str, float], ...]
) -> Timing:
    median = statistics.median(times)
    quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else [median] * 3
    return Timing(
        microseconds=median,
        spread=(quartiles[2] - quartiles[0]) / median,
        wall_microseconds=1e6 * wall_seconds,
        clock=clock,
        repetitions=len(times),
        kernels=kernels,
    )


def ceilings(
    *, quick: bool = False, formats: Sequence[str] = ("bf16", "int8", "fp8")
) -> tuple[dict[str, float | None], dict[str, str]]:
    """What this device reaches at best, through XLA: rates, and why some were not measured.

    GB/s read and written are ``"copy"``, TFLOP/s of a square matrix product have the name of each
    number format; None where it did not run. If `quick`, of small arrays, for a smoke test.
    """
    rates: dict[str, float | None] = {}
    reasons: dict[str, str] = {}
    # Not a plain copy, which XLA hands to the driver, where CUPTI does not record it.
    x = jax.random.bits(jax.random.key(0), (2**20 if quick else 2**28,), jnp.uint32)
    timing = measure(jax.jit(jnp.bitwise_not).lower(x).compile(), (x,))
    rates["copy"] = 2 * nbytes(x) / timing.microseconds / 1e3
    del x
    size = 256 if quick else 8192
    for name in formats:
        try:
            timing = _matmul(name, size)
        except Exception as error:  # a device without the format; the reason is kept
            rates[name] = None
            reasons[name] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        else:
            rates[name] = 2 * size**3 / timing.microseconds / 1e6
    return rates, reasons


def _matmul(name: str, size: int) -> Timing:
    """The time of ``A B^T`` in a number format, the layout that every format supports."""
    operands, result = {
        "bf16": (jnp.bfloat16, jnp.bfloat16),
        "int8": (jnp.int8, jnp.int32),
        "fp8": (jnp.float8_e4m3fn, jnp.bfloat16),
    }[name]
    a, b = (jax.random.normal(jax.random.key(i), (size, size), jnp.float32) for i in range(2))
    scale = 30 if name == "int8" else 1
    arguments = tuple((scale * x).astype(operands) for x in (a, b))

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        contract_last = (((1,), (1,)), ((), ()))
        return jax.lax.dot_general(a, b, contract_last, preferred_element_type=result)

    return measure(jax.jit(product).lower(*arguments).compile(), arguments)
