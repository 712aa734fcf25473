"""One compiled program for a chain of array operations that is called eagerly."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

_P = ParamSpec("_P")
_R = TypeVar("_R")


def one_program(*static: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Compiles a function of arrays as a whole, where it is called outside `jit`.

    Operation by operation, JAX would compile each for every new shape, at some 30 ms each. Inside
    `jit` nothing changes: the function's operations become the caller's. Only for functions whose
    bits do not depend on what XLA fuses. `static` names the arguments that are not arrays.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        compiled = jax.jit(function, static_argnames=static, inline=True)
        return functools.wraps(function)(compiled)

    return decorate
