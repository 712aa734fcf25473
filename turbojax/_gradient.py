"""Refusing gradients where rounding would silently make them zero."""

from collections.abc import Callable
from typing import Any

import jax


def refuse_gradients(
    run: Callable[..., Any],
    op: str,
    *,
    because: str = "rounding to codes has derivative zero",
    **options: Any,
) -> Callable[..., Any]:
    """`run` with its options bound; raises NotImplementedError when it is differentiated.

    Args:
      run: a function of arrays and of these options.
      op: its name, for the message.
      because: the reason, for the message.
      **options: keyword arguments that are not arrays.
    """

    @jax.custom_vjp
    def call(*arrays: Any) -> Any:
        return run(*arrays, **options)

    def forward(*_: Any) -> Any:
        raise NotImplementedError(f"{op} has no gradient: {because}")

    def backward(*_: Any) -> Any:  # never reached: forward raises
        raise NotImplementedError(op)

    call.defvjp(forward, backward)
    return call
