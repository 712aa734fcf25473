"""INT4 weights of several experts: one `Int4Weight` with a leading axis on every array."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from turbojax import _checks
from turbojax.matmul.int4.weight import BLOCK, Int4Weight, ScaleDtype, gate_and_up, quantize_weight


def stack_experts(weights: Sequence[Int4Weight]) -> Int4Weight:
    """Stacks the weights of experts along a new leading axis.

    Args:
      weights: at least one, alike in all sizes and dtypes.

    Returns:
      A weight with a leading axis of experts on every array, as `grouped_matmul` takes it.

    Raises:
      ValueError: if there is none, or they are not alike.
    """
    if not weights:
        raise ValueError("weights must hold at least one weight")
    traits = [
        (jax.tree.structure(w), [(x.shape, x.dtype) for x in jax.tree.leaves(w)]) for w in weights
    ]
    for i, trait in enumerate(traits):
        if trait != traits[0]:
            raise ValueError(
                f"weights must be alike in sizes and dtypes; those of expert {i} are {trait}, of "
                f"expert 0 {traits[0]}"
            )
    stacked: Int4Weight = jax.tree.map(lambda *x: jnp.stack(x), *weights)
    return stacked


def expert_of(weight: Int4Weight, expert: int) -> Int4Weight:
    """One expert's weight of a stack."""
    one: Int4Weight = jax.tree.map(lambda x: x[expert], weight)
    return one


def quantize_experts(
    w: jax.Array,
    up: jax.Array | None = None,
    *,
    group_size: int = BLOCK,
    scale_dtype: ScaleDtype = "e4m3",
) -> Int4Weight:
    """Quantizes the weights of experts, one after the other: `quantize_weight` of each.

    Args:
      w: bfloat16, float16 or float32 ``[E, out, in]``; of a gated product the gates.
      up: of a gated product what gates are multiplied with, in `w`'s shape; then each expert has a
        gated weight, see `gate_and_up`.
      group_size: as in `quantize_weight`.
      scale_dtype: as in `quantize_weight`.

    Returns:
      A weight with a leading axis of experts on every array.

    Raises:
      TypeError: if a dtype is not supported.
      ValueError: if a shape or option is none of these.
    """
    w = jnp.asarray(w)
    _checks.check_float_dtype("w", w)
    if w.ndim != 3 or 0 in w.shape:
        raise ValueError(f"{w.shape=} must be [experts, out, in], no axis empty")

    def one(w: jax.Array) -> Int4Weight:
        return quantize_weight(w, group_size=group_size, scale_dtype=scale_dtype)

    # One at a time: in float32 all at once would be several times the weights.
    if up is None:
        return jax.lax.map(one, w)
    up = jnp.asarray(up)
    _checks.check_float_dtype("up", up)
    if up.shape != w.shape:
        raise ValueError(f"{up.shape=} must be {w.shape}, that of w")
    return jax.lax.map(lambda pair: gate_and_up(one(pair[0]), one(pair[1])), (w, up))
