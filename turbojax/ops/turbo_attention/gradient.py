"""Gradients of `turbo_attention`: straight through its rounding; which implementation runs them."""

from collections.abc import Callable
from typing import Any

import jax

from turbojax._gradient import refuse_gradients
from turbojax._registry import Implementation, Registry
from turbojax.config import TurboConfig
from turbojax.ops.options import Options
from turbojax.ops.turbo_attention import gradient_reference, mosaic_gradient

GRADIENT = Registry(
    "the gradient of turbo_attention",
    (
        Implementation("mosaic_gpu", mosaic_gradient.gradient, mosaic_gradient.unsupported),
        Implementation("xla", gradient_reference.gradient),
    ),
)


def straight_through(
    run: Callable[..., tuple[jax.Array, jax.Array]],
    *,
    config: TurboConfig,
    options: Options,
    implementation: str | None = None,
    is_ragged: bool = True,
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """`run` with its options bound, differentiable in reverse mode.

    The forward pass is `run`; it keeps its inputs and what it returns. `gradient_reference` says
    what the backward pass is.

    Args:
      run: an implementation of `turbo_attention`: a function of query ``[B, T, N, H]``, key and
        value ``[B, S, K, H]``, int32 query and key lengths ``[B]``, and of the options.
      config: numerics.
      options: of the call.
      implementation: what was asked for. Where the gradient has none of this name, it is chosen.
      is_ragged: whether lengths may be less than the arrays'.

    Returns:
      A function of the five arrays. It gives what `run` gives; gradients have the dtype of the
      input they belong to. A second derivative raises NotImplementedError, forward mode (`jvp`)
      raises jax's TypeError about `custom_vjp`.
    """

    def gradient(*arrays: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        query, key, value = arrays[:3]
        static: dict[str, Any] = {"config": config, "options": options}
        name = GRADIENT.beside(implementation)
        chosen = GRADIENT.select(name, query=query, key=key, value=value, **static)
        result: tuple[jax.Array, jax.Array, jax.Array]
        result = chosen.run(*arrays, **static, is_ragged=is_ragged)
        return result

    differentiate_once = refuse_gradients(
        gradient,
        "the gradient of turbo_attention",
        because="only first derivatives are supported",
    )

    @jax.custom_vjp
    def call(*arrays: Any) -> tuple[jax.Array, jax.Array]:
        return run(*arrays, config=config, options=options)

    def forward(*arrays: Any) -> Any:
        # `call`, not `run`: a second derivative must not find its own way through the rounding.
        results = call(*arrays)
        return results, (*arrays, *results)

    def backward(arrays: Any, cotangents: Any) -> Any:
        return *differentiate_once(*arrays, *cotangents), None, None  # lengths are integers

    call.defvjp(forward, backward)
    return call
