"""What attention keeps for its gradient, by name, for policies of `jax.checkpoint`.

In `turbojax.turbo_attention`, `turbojax.pooled_attention` and attention over a ring
(`turbojax.parallel.ContextAttention`) these arrays have names (`jax.ad_checkpoint`). Where a policy
saves them, the backward pass does not attend again; queries, keys and values it makes anew.
"""

from typing import Any, Literal

import jax
from jax.ad_checkpoint import checkpoint_name

ATTENTION_OUTPUT = "turbojax_attention_output"
"""The output, ``[B, T, N, Hv]`` in its dtype."""

ATTENTION_LSE = "turbojax_attention_lse"
"""The log-sum-exp of the scores, float32 ``[B, T, N]``."""

ATTENTION_LEVELS = "turbojax_attention_levels"
"""The levels of pooled attention, int8, one for every pair of blocks: as they were chosen."""

save_attention = jax.checkpoint_policies.save_only_these_names(
    ATTENTION_OUTPUT, ATTENTION_LSE, ATTENTION_LEVELS
)
"""A policy of `jax.checkpoint` that saves what attention keeps, and nothing else."""

Remat = bool | Literal["attention"]
"""What of a layer is computed again in the backward pass: nothing, all, or all but attention."""


def named_results(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The output and the log-sum-exp under their names."""
    return checkpoint_name(out, ATTENTION_OUTPUT), checkpoint_name(lse, ATTENTION_LSE)


def save_all_but_gathered(primitive: Any, *args: Any, **params: Any) -> bool:
    """A policy of `jax.checkpoint` that saves everything except what is gathered from devices.

    The gathering may be inside a function with a gradient of its own.
    """
    inner = (getattr(value, "jaxpr", None) for value in params.values())
    names = [eqn.primitive.name for jaxpr in inner if jaxpr is not None for eqn in jaxpr.eqns]
    return not any("all_gather" in name for name in (primitive.name, *names))
