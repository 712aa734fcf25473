"""Channel-wise against token-wise codes of real keys and values: the paper's figure 10 in our form.

Groups of the same size in both, with a minimum and a scale each, so that both take the same bytes:
64 tokens of one channel, or 64 channels of one token.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

BITS = (2, 3, 4)
AXES = {"channel": 2, "token": 4}
"""Which axis of ``[L, n, T, K, H]`` shares a minimum and a scale, by what each group belongs to."""


def group_size(size: int, largest: int = 64) -> int:
    """The largest divisor of `size` up to `largest`."""
    return max(g for g in range(1, min(size, largest) + 1) if size % g == 0)


@functools.partial(jax.jit, static_argnames=("bits", "axis", "group"))
def group_errors(x: jax.Array, *, bits: int, axis: int, group: int) -> jax.Array:
    """Relative L2 error of each layer when codes share minimum and scale along an axis.

    ``code = round((x - minimum) / scale)``, ``scale = (maximum - minimum) / (2**bits - 1)``, with
    minimum and scale in float32.

    Args:
      x: ``[L, n, T, K, H]``.
      bits: of a code.
      axis: 2 for groups of tokens of a channel, 4 for groups of channels of a token.
      group: elements of a group, a divisor of that axis.

    Returns:
      float32 ``[L]``: ``|rounded - x| / |x|`` over all of a layer.
    """
    shape = x.shape
    wide = x.astype(jnp.float32)
    grouped = wide.reshape(*shape[:axis], shape[axis] // group, group, *shape[axis + 1 :])
    low = jnp.min(grouped, axis=axis + 1, keepdims=True)
    step = (jnp.max(grouped, axis=axis + 1, keepdims=True) - low) / (2**bits - 1)
    codes = jnp.rint((grouped - low) / jnp.where(step == 0, 1, step))
    off = (low + codes * step).reshape(shape) - wide
    axes = tuple(range(1, len(shape)))
    return jnp.sqrt(jnp.sum(off * off, axes) / jnp.sum(wide * wide, axes))


def errors_by_layer(key: jax.Array, value: jax.Array) -> dict[str, dict[str, list[float]]]:
    """Errors of keys and values of all layers.

    Args:
      key: ``[L, n, T, K, H]``; tokens past the last whole group of 64 are left out.
      value: the same.

    Returns:
      ``{"key" | "value": {"channel-2" ..: [error of each layer]}}``.
    """
    group = group_size(key.shape[-1])
    tokens = key.shape[2] // group * group
    if not tokens:
        raise ValueError(f"{key.shape=} must have at least {group} tokens, a group")
    found: dict[str, dict[str, list[float]]] = {}
    for name, x in (("key", key), ("value", value)):
        found[name] = {
            f"{kind}-{bits}": np.asarray(
                group_errors(x[:, :, :tokens], bits=bits, axis=axis, group=group)
            ).tolist()
            for bits in BITS
            for kind, axis in AXES.items()
        }
    return found
