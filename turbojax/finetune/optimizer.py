"""AdamW as all training here uses it, and the promotion of dtypes that it relies on."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import optax  # type: ignore[import-untyped]


def clipped_adamw(
    schedule: optax.Schedule, *, weight_decay: float, clip_norm: float
) -> optax.GradientTransformation:
    """AdamW with decay of matrices and embeddings, not norms, and the gradient's norm clipped."""
    return optax.chain(
        optax.clip_by_global_norm(clip_norm),
        optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=weight_decay, mask=_is_matrix),
    )


def _is_matrix(params: Any) -> Any:
    """True for kernels and embeddings, False for scales of norms and routers' corrections."""

    def of(path: Any, _: Any) -> bool:
        name = jax.tree_util.keystr(path)
        # A correction has no gradient: with decay alone it would drift away from its experts.
        return "scale" not in name and "correction" not in name

    return jax.tree.map_with_path(of, params)


@contextlib.contextmanager
def default_promotion() -> Iterator[None]:
    """JAX's default promotion of dtypes and ranks, which optax relies on."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
