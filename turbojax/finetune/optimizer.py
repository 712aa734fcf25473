"""The optimizers and schedules of all training here, by name.

Optimizers bound the norm of the gradient first, and subtract their decay, times the rate, from the
weights themselves (Loshchilov and Hutter, 2019).
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]
from optax import contrib

from turbojax._pytrees import leaves_by_path

# Sizes of Muon's updates beside Adam's, so that one rate fits both: Liu et al., "Muon is scalable
# for LLM training" (2025), equation 4.
_RMS = 0.2


Rule = Callable[[optax.Schedule, float], tuple[optax.GradientTransformation, ...]]
"""From a schedule and a decay to what follows on the clipped gradient."""


def _adamw(schedule: optax.Schedule, decay: float) -> tuple[optax.GradientTransformation, ...]:
    """AdamW with decay of matrices and embeddings, not norms."""
    return (optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=decay, mask=_is_matrix),)


def _lion(schedule: optax.Schedule, decay: float) -> tuple[optax.GradientTransformation, ...]:
    """Lion (Chen et al., 2023): weights move by the rate, with one moment; decay as AdamW's."""
    return (optax.lion(schedule, weight_decay=decay, mask=_is_matrix),)


def _adafactor(schedule: optax.Schedule, decay: float) -> tuple[optax.GradientTransformation, ...]:
    """Adafactor (Shazeer and Stern, 2018): rows and columns of second moments; decay as AdamW's.

    Rates are not relative to the size of the weights, so that they are of the size of AdamW's. An
    array of stacked layers is one array where updates are bounded.
    """
    return (
        optax.adafactor(
            schedule,
            multiply_by_parameter_scale=False,
            weight_decay_rate=lambda step: decay * schedule(step),  # optax adds it after the rate
            weight_decay_mask=_is_matrix,
        ),
    )


def _sgd(schedule: optax.Schedule, decay: float) -> tuple[optax.GradientTransformation, ...]:
    """Gradient descent with a momentum of 0.9; decay as AdamW's."""
    decayed = optax.add_decayed_weights(decay, mask=_is_matrix)
    return optax.trace(0.9), decayed, optax.scale_by_learning_rate(schedule)


def _muon(schedule: optax.Schedule, decay: float) -> tuple[optax.GradientTransformation, ...]:
    """Muon with decay of matrices; Adam without decay of embeddings and norms.

    Matrices are the kernels of layers, or both of each adapter. Both have Nesterov's momentum.
    Muon (Jordan, 2024) moves a matrix by its momentum with all singular values near 1, by five
    Newton-Schulz iterations; here times ``0.2 * sqrt(max(rows, columns))``. Stacked matrices are
    taken one by one.
    """
    return (
        contrib.muon(
            schedule,
            weight_decay=decay,
            adam_b2=0.95,
            consistent_rms=_RMS,
            muon_weight_dimension_numbers=_axes_of_matrices,
        ),
    )


def _clipped(rule: Rule, schedule: optax.Schedule, *, weight_decay: float, clip_norm: float) -> Any:
    """The optimizer of a rule, with the gradient's norm clipped."""
    return optax.chain(optax.clip_by_global_norm(clip_norm), *rule(schedule, weight_decay))


def _muon_by_path(schedule: optax.Schedule, **more: float) -> optax.GradientTransformation:
    """Muon, which is given arrays by their paths.

    Its `init` raises ValueError if there are neither kernels of layers nor adapters.
    """
    inner = _clipped(_muon, schedule, **more)

    def init(params: Any) -> Any:
        named = leaves_by_path(params)
        if not any(_is_kernel(name) for name in named):
            raise ValueError(
                "optimizer 'muon' must be another one: there are no kernels of layers or adapters"
            )
        return inner.init(named)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = inner.update(leaves_by_path(grads), state, leaves_by_path(params))
        names = leaves_by_path(grads)
        return jax.tree.unflatten(jax.tree.structure(grads), [updates[x] for x in names]), state

    return optax.GradientTransformation(init, update)


OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "adamw": functools.partial(_clipped, _adamw),
    "lion": functools.partial(_clipped, _lion),
    "adafactor": functools.partial(_clipped, _adafactor),
    "sgd": functools.partial(_clipped, _sgd),
    "muon": _muon_by_path,
}
"""By name: from a schedule, with `weight_decay` and `clip_norm`, to the optimizer."""

MOMENTS = {"adamw": 2, "lion": 1, "adafactor": 0, "sgd": 1, "muon": 1}
"""Numbers that an optimizer keeps for each weight of a large matrix, at least."""


def _is_matrix(params: Any) -> Any:
    """True for kernels and embeddings; False for scales of norms, biases, sinks and corrections."""

    def of(path: Any, _: Any) -> bool:
        name = jax.tree_util.keystr(path)
        # A router's correction has no gradient: with decay alone it would leave its experts.
        return not any(other in name for other in ("scale", "bias", "sinks", "correction"))

    return jax.tree.map_with_path(of, params)


def _is_kernel(name: str) -> bool:
    """Whether this is the path of a kernel, or of `a` or `b` of an `Adapter`."""
    return "kernel" in name or name.endswith((".a", ".b"))


def _axes_of_matrices(params: dict[str, Any]) -> dict[str, Any]:
    """Rows and columns of the kernels, which are stacked over layers; None for what is Adam's."""

    def axes(x: Any) -> Any:
        return contrib.MuonDimensionNumbers(reduction_axis=x.ndim - 2, output_axis=x.ndim - 1)

    return {name: axes(x) if _is_kernel(name) else None for name, x in params.items()}


@contextlib.contextmanager
def default_promotion() -> Iterator[None]:
    """JAX's default promotion of dtypes and ranks, which optax relies on."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


SCHEDULES = ("cosine", "linear", "constant", "wsd")
DECAY_FRACTION = 0.1
"""Share of the steps after the warm-up in which ``"wsd"`` falls, unless another is given."""


def shape_of(
    name: str, steps: int, final_rate: float, decay_fraction: float | None
) -> Callable[[jax.Array], jax.Array]:
    """What the peak is multiplied by at each of `steps` after the warm-up.

    ``"cosine"`` and ``"linear"`` fall from 1 to `final_rate`; ``"wsd"`` (warm-up, stable, decay; Hu
    et al., "MiniCPM", 2024) stays at 1 and falls linearly in the last part; ``"constant"`` stays.
    Steps are float32, counted from the end of the warm-up: at negative ones it is 1.
    """
    steps = max(1, steps)
    if name == "constant":
        return optax.constant_schedule(1.0)
    if name == "linear":
        return optax.linear_schedule(1.0, final_rate, steps)
    if name == "wsd":
        fraction = DECAY_FRACTION if decay_fraction is None else decay_fraction
        last = max(1, round(fraction * steps))
        return optax.linear_schedule(1.0, final_rate, last, transition_begin=steps - last)

    def cosine(step: jax.Array) -> jax.Array:
        fallen = 0.5 + 0.5 * jnp.cos(jnp.pi * jnp.clip(step / steps, 0.0, 1.0))
        return final_rate + (1 - final_rate) * fallen

    return cosine
