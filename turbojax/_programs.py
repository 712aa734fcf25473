"""How functions become programs: one for a chain of operations, and how a step is launched."""

import functools
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

import jax

_P = ParamSpec("_P")
_R = TypeVar("_R")

LAUNCH_ONE_BY_ONE: Mapping[str, int] = {"xla_gpu_graph_min_graph_size": 2**31 - 1}
"""Compiler options of `jax.jit` for a model's step: no CUDA graph is so large that XLA makes one.

A graph holds the addresses of what its kernels read. Where a step's arrays and scratch memory are
elsewhere each time, all of it is recorded anew before it runs, which takes the host longer than
launching the kernels does, see "Steps on the wall" in `docs/kernels.md`. Such a function cannot be
called within another `jit`; its `__wrapped__` can.
"""


def one_program(*static: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Compiles a function of arrays as a whole, where it is called outside `jit`.

    Operation by operation, JAX would compile each for every new shape, at some 30 ms each. Inside
    `jit` nothing changes: the function's operations become the caller's. Only for functions whose
    bits do not depend on what XLA fuses.

    Args:
      *static: names of arguments that are not arrays.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        compiled = jax.jit(function, static_argnames=static, inline=True)
        return functools.wraps(function)(compiled)

    return decorate
