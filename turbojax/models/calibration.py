"""One pass over text that gathers what smoothing needs to know of every layer's keys."""

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks
from turbojax.kv import AttentionOptions, causal_attention
from turbojax.kv.base import Cache
from turbojax.models.decoder import Decoder, for_length
from turbojax.models.generation.padding import check_tokens
from turbojax.models.generation.session import Progress
from turbojax.ops.options import PLAIN
from turbojax.smoothing import KeyStatistics


def calibrate(
    model: Decoder,
    tokens: np.ndarray,
    *,
    batch_size: int = 1,
    progress: Progress | None = None,
) -> tuple[KeyStatistics, ...]:
    """Runs windows of text through a model and watches its keys.

    Args:
      model: the model, not quantized.
      tokens: int ``[n, T]``, windows of real text.
      batch_size: windows that run at once.
      progress: called with the number of tokens after each batch.

    Returns:
      The statistics of each layer.

    Raises:
      TypeError: if tokens or the batch size are not integers.
      ValueError: if the shape does not fit, a token is not in the vocabulary, or `batch_size` is
        not positive.
    """
    _checks.check_sizes(batch_size=batch_size)
    if tokens.ndim != 2 or 0 in tokens.shape:
        raise ValueError(f"{tokens.shape=} must be [n, T], no axis empty")
    tokens = np.asarray(check_tokens(tokens, model.config.vocab_size))
    config = model.config
    statistics = (KeyStatistics.init(config.num_kv_heads, config.head_dim),) * config.num_layers
    for first in range(0, len(tokens), batch_size):
        part = jnp.asarray(tokens[first : first + batch_size])
        statistics = jax.block_until_ready(_watch(model, part, statistics))
        if progress is not None:
            progress(part.size)
    return statistics


@jax.jit
def _watch(
    model: Decoder, tokens: jax.Array, statistics: tuple[KeyStatistics, ...]
) -> tuple[KeyStatistics, ...]:
    """The statistics take the place of the caches: each layer gets its own and returns it."""

    def attend(
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        cache: Cache,
        options: AttentionOptions = PLAIN,
    ) -> tuple[jax.Array, Cache]:
        out, _ = causal_attention(query, key, value, None, options)
        # A rotation leaves the norm of a pair as it is, so the rotated keys serve for both.
        return out, cache.update(key, key)

    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    short = for_length(model, tokens.shape[1])
    return short.hidden(tokens, positions, attend, statistics)[1]
