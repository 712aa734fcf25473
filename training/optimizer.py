"""Muon for the matrices of layers, Adam for everything else."""

from typing import Any

import jax
import optax  # type: ignore[import-untyped]
from optax import contrib

# Sizes of Muon's updates beside Adam's, so that one rate fits both: Liu et al., "Muon is scalable
# for LLM training" (2025), equation 4.
_RMS = 0.2


def clipped_muon(
    schedule: optax.Schedule, *, weight_decay: float, clip_norm: float
) -> optax.GradientTransformation:
    """Muon with decay of matrices; Adam without decay of embeddings and norms; a clipped gradient.

    Both with Nesterov's momentum.

    Muon (Jordan, 2024) moves a matrix by its momentum with all singular values near 1, by five
    Newton-Schulz iterations; here times ``0.2 * sqrt(max(rows, columns))``. Stacked matrices are
    taken one by one.

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

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = inner.update(_by_path(grads), state, _by_path(params))
        names = _by_path(grads)
        return jax.tree.unflatten(jax.tree.structure(grads), [updates[x] for x in names]), state

    return optax.GradientTransformation(lambda params: inner.init(_by_path(params)), update)


def _by_path(tree: Any) -> dict[str, Any]:
    """Path -> array, in the order of the tree: optax puts marks where `nnx.State` has arrays."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def _axes_of_matrices(params: dict[str, Any]) -> dict[str, Any]:
    """Rows and columns of the kernels, which are stacked over layers; None for what is Adam's."""
    axes = contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
    return {name: axes if "kernel" in name else None for name in params}
