"""The optimizers of all training here, by name, and the promotion of dtypes that they rely on.

All of them bound the norm of the gradient first, and subtract their decay, times the rate, from the
weights themselves (Loshchilov and Hutter, 2019).
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import optax  # type: ignore[import-untyped]
from optax import contrib

# Sizes of Muon's updates beside Adam's, so that one rate fits both: Liu et al., "Muon is scalable
# for LLM training" (2025), equation 4.
_RMS = 0.2


def clipped_adamw(
    schedule: optax.Schedule, *, weight_decay: float, clip_norm: float
) -> optax.GradientTransformation:
    """AdamW with decay of matrices and embeddings, not norms, and the gradient's norm clipped."""
    return optax.chain(
        optax.clip_by_global_norm(clip_norm),
        optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=weight_decay, mask=_is_matrix),
    )


def clipped_lion(
    schedule: optax.Schedule, *, weight_decay: float, clip_norm: float
) -> optax.GradientTransformation:
    """Lion (Chen et al., 2023): weights move by the rate, with one moment; decay as AdamW's."""
    return optax.chain(
        optax.clip_by_global_norm(clip_norm),
        optax.lion(schedule, weight_decay=weight_decay, mask=_is_matrix),
    )


def clipped_adafactor(
    schedule: optax.Schedule, *, weight_decay: float, clip_norm: float
) -> optax.GradientTransformation:
    """Adafactor (Shazeer and Stern, 2018): rows and columns of second moments; decay as AdamW's.

    Rates are not relative to the size of the weights, so that they are of the size of AdamW's. An
    array of stacked layers is one array where updates are bounded.
    """

    def decay(step: jax.Array) -> jax.Array:
        return weight_decay * schedule(step)

    return optax.chain(
        optax.clip_by_global_norm(clip_norm),
        optax.adafactor(
            schedule,
            multiply_by_parameter_scale=False,
            weight_decay_rate=decay,  # optax adds it after the rate
            weight_decay_mask=_is_matrix,
        ),
    )


def clipped_sgd(
    schedule: optax.Schedule, *, weight_decay: float, clip_norm: float
) -> optax.GradientTransformation:
    """Gradient descent with a momentum of 0.9; decay as AdamW's."""
    return optax.chain(
        optax.clip_by_global_norm(clip_norm),
        optax.trace(0.9),
        optax.add_decayed_weights(weight_decay, mask=_is_matrix),
        optax.scale_by_learning_rate(schedule),
    )


def clipped_muon(
    schedule: optax.Schedule, *, weight_decay: float, clip_norm: float
) -> optax.GradientTransformation:
    """Muon with decay of matrices; Adam without decay of embeddings and norms; a clipped gradient.

    Matrices are the kernels of layers, or both of each adapter.

    Both with Nesterov's momentum.

    Muon (Jordan, 2024) moves a matrix by its momentum with all singular values near 1, by five
    Newton-Schulz iterations; here times ``0.2 * sqrt(max(rows, columns))``. Stacked matrices are
    taken one by one. Its `init` raises ValueError if there are neither kernels of layers nor
    adapters.

    Args:
      schedule: step -> learning rate, of both.
      weight_decay: the decay.
      clip_norm: bound on the global norm of the gradient.
    """
    inner = optax.chain(
        optax.clip_by_global_norm(clip_norm),
        contrib.muon(
            schedule,
            weight_decay=weight_decay,
            adam_b2=0.95,
            consistent_rms=_RMS,
            muon_weight_dimension_numbers=_axes_of_matrices,
        ),
    )

    def init(params: Any) -> Any:
        named = _by_path(params)
        if not any(_is_kernel(name) for name in named):
            raise ValueError(
                "optimizer 'muon' must be another one: there are no kernels of layers or adapters"
            )
        return inner.init(named)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = inner.update(_by_path(grads), state, _by_path(params))
        names = _by_path(grads)
        return jax.tree.unflatten(jax.tree.structure(grads), [updates[x] for x in names]), state

    return optax.GradientTransformation(init, update)


OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "adamw": clipped_adamw,
    "lion": clipped_lion,
    "adafactor": clipped_adafactor,
    "sgd": clipped_sgd,
    "muon": clipped_muon,
}
"""By name, each a function as `clipped_adamw`."""

MOMENTS = {"adamw": 2, "lion": 1, "adafactor": 0, "sgd": 1, "muon": 1}
"""Numbers that an optimizer keeps for each weight of a large matrix, at least."""


def _is_matrix(params: Any) -> Any:
    """True for kernels and embeddings; False for scales of norms, biases, sinks and corrections."""

    def of(path: Any, _: Any) -> bool:
        name = jax.tree_util.keystr(path)
        # A router's correction has no gradient: with decay alone it would leave its experts.
        return not any(other in name for other in ("scale", "bias", "sinks", "correction"))

    return jax.tree.map_with_path(of, params)


def _by_path(tree: Any) -> dict[str, Any]:
    """Path -> array, in the order of the tree: optax puts marks where `nnx.State` has arrays."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


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
