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

    `op` and `because` are the name and the reason in the message; `options` are no arrays.
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
