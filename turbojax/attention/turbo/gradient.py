"""Gradients of `turbo_attention` straight through its rounding, and what computes them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from turbojax._gradient import refuse_gradients
from turbojax._registry import Implementation, Registry
from turbojax.attention.options import Options
from turbojax.attention.score_modifiers import ScoreModifiers
from turbojax.attention.sinks import sees_only_sink, sink_gradient
from turbojax.attention.turbo import gradient_reference, mosaic_gradient
from turbojax.attention.turbo.operands import Backward
from turbojax.numerics.config import TurboConfig
from turbojax.remat import named_results
from turbojax.sharding import tables
from turbojax.sharding.per_device import like, per_device

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
    is_ragged: bool = True,
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Binds the options of `run` and makes it differentiable in reverse mode.

    The forward pass is `run`, a module's function, which keeps its inputs and its results, these
    under the names of `turbojax.remat`. The backward pass is what `gradient_reference` describes,
    by the implementation of the same name, or a chosen one where the gradient has none of that
    name.

    Gradients have the dtype of the input they belong to. A second derivative raises
    NotImplementedError, forward mode (`jvp`) raises jax's TypeError about `custom_vjp`.
    """
    static: dict[str, Any] = {"config": config, "options": options}
    differentiate_once = refuse_gradients(
        per_device(tables.TURBO_GRADIENT, _gradient, **static, is_ragged=is_ragged),
        "the gradient of turbo_attention",
        because="only first derivatives are supported",
    )

    attend = per_device(tables.TURBO, run, **static)

    @jax.custom_vjp
    def call(*arrays: Any) -> tuple[jax.Array, jax.Array]:
        results: tuple[jax.Array, jax.Array] = attend(*arrays)
        return results

    def forward(*arrays: Any) -> Any:
        # `call`, not `run`: a second derivative must not find its own way through the rounding.
        results = named_results(*call(*arrays))
        return results, (*arrays, *results)

    def backward(arrays: Any, cotangents: Any) -> Any:
        *gradients, d_modifiers = differentiate_once(*arrays, *cotangents)
        *gradients, d_modifiers = like((*gradients, d_modifiers), (*arrays[:3], arrays[5]))
        return *gradients, None, None, d_modifiers  # lengths are integers

    call.defvjp(forward, backward)
    return call


def _gradient(
    *saved: Any,
    config: TurboConfig,
    options: Options,
    is_ragged: bool,
) -> tuple[jax.Array, jax.Array, jax.Array, ScoreModifiers]:
    """The backward pass, from what was kept and the cotangents."""
    *operands, modifiers = saved[:6]
    arrays = Backward(*operands, *saved[6:])
    static: dict[str, Any] = {"config": config, "options": options, "modifiers": modifiers}
    name = GRADIENT.beside(options.implementation)
    given = {"query": arrays.query, "key": arrays.key, "value": arrays.value}
    run = GRADIENT.select(name, **given, **static).run
    *gradients, d_modifiers = run(arrays, **static, is_ragged=is_ragged)
    if modifiers.sinks is not None:
        sinks = _of_sinks(modifiers.sinks, arrays)
        d_modifiers = dataclasses.replace(d_modifiers, sinks=sinks)
    d_query, d_key, d_value = gradients
    return d_query, d_key, d_value, d_modifiers


def _of_sinks(sinks: jax.Array, x: Backward) -> jax.Array:
    """The sinks' gradient, so that implementations need not know sinks."""
    real = jnp.arange(x.out.shape[1])[None] < x.query_length[:, None]
    delta = jnp.sum(x.d_out.astype(jnp.float32) * x.out.astype(jnp.float32), axis=-1)
    delta = jnp.where(sees_only_sink(x.out, x.residual, sinks), 0, delta) - x.d_residual
    return sink_gradient(x.residual, sinks, delta, real)
