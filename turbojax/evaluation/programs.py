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
    """What XLA is told; None where there is no GPU, or it knows no such option."""
    return accepted_options(_ALIKE) if jax.default_backend() == "gpu" else None


def repeatable(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a function with `jax.jit`, compiled with `_ALIKE` on a GPU.

    The device is looked for when the function is first called.

    Args:
      **options: of `jax.jit`.
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
