"""Programs that are compiled alike every time, so that results repeat bit for bit."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from turbojax.models.tensor_parallel.programs import accepted_options

# On a GPU XLA measures several ways to multiply matrices and takes the fastest: in another process
# that may be another one, which adds in another order. The first that fits is always the same, and
# compiles sooner; steps of few tokens are bound by memory either way.
_ALIKE = {"xla_gpu_autotune_level": 0}


@functools.cache
def _options() -> dict[str, Any] | None:
    """XLA's options; None where there is no GPU, or XLA does not know them."""
    return accepted_options(_ALIKE) if jax.default_backend() == "gpu" else None


def repeatable(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a function with `jax.jit(**options)`, compiled with `_ALIKE` on a GPU.

    Whether there is a GPU is checked when the function is first called.
    """

    def decorate(run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.cache
        def program() -> Any:
            return jax.jit(run, compiler_options=_options(), **options)

        @functools.wraps(run)
        def call(*arrays: Any, **static: Any) -> Any:
            return program()(*arrays, **static)

        return call

    return decorate
