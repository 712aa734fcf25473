"""Compiling side by side, and what needs a GPU."""

import concurrent.futures
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax

from benchmarks import timing

Lower = Callable[[], jax.stages.Lowered]


def require_gpu(what: str) -> None:
    """Raises NotImplementedError without a GPU."""
    if not timing.on_gpu():
        raise NotImplementedError(f"{what} needs a GPU, not {jax.default_backend()}")


def compile_side_by_side(lowerings: Iterable[Lower]) -> list[concurrent.futures.Future[Any]]:
    """Compiles side by side, and waits: nothing compiles while something is timed.

    Args:
      lowerings: called one after the other, since Mosaic's lowering keeps global state. What one
        raises is in its future.
    """
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return [pool.submit(lowered(lower)) for lower in lowerings]


def lowered(lower: Lower) -> Callable[[], Any]:
    """What compiles it; or what raises, when it is called, what the lowering raised."""
    try:
        return lower().compile
    except Exception as error:
        return functools.partial(_raise, error)


def _raise(error: Exception) -> None:
    raise error
