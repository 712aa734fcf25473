"""Statistics that smoothing needs of every layer's keys: text passes the layers, one by one."""

import jax
import numpy as np

from turbojax import _checks
from turbojax.attention.options import PLAIN
from turbojax.caches import AttentionOptions, causal_attention
from turbojax.caches.base import Cache
from turbojax.models.checkpoint.stored import StoredDecoder
from turbojax.models.decoder import Decoder, LayerParams
from turbojax.models.generation.padding import check_tokens
from turbojax.models.generation.session import Progress
from turbojax.models.layer_by_layer import LayerByLayer
from turbojax.smoothing import KeyStatistics


class Calibration:
    """Collects statistics of the keys of one layer after the other, in their order."""

    def __init__(
        self, model: Decoder | StoredDecoder, tokens: np.ndarray, *, batch_size: int = 1
    ) -> None:
        """Begins before the first layer; see `calibrate`."""
        _checks.check_sizes(batch_size=batch_size)
        if tokens.ndim != 2 or 0 in tokens.shape:
            raise ValueError(f"{tokens.shape=} must be [n, T], no axis empty")
        tokens = np.asarray(check_tokens(tokens, model.config.vocab_size))
        self._text = LayerByLayer(model, tokens, batch_size)

    def watch(self, params: LayerParams, progress: Progress | None = None) -> KeyStatistics:
        """The statistics of the next layer, whose weights these are."""
        config = self._text.config
        pairs = config.rotary_dim, config.rope_interleaved
        nothing = KeyStatistics.init(config.num_kv_heads, config.head_dim, *pairs)
        return self._text.apply(params, _watch, nothing, progress)


def calibrate(
    model: Decoder | StoredDecoder,
    tokens: np.ndarray,
    *,
    batch_size: int = 1,
    progress: Progress | None = None,
) -> tuple[KeyStatistics, ...]:
    """Runs text, int ``[n, T]``, through a model and collects each layer's key statistics."""
    calibration = Calibration(model, tokens, batch_size=batch_size)
    return tuple(calibration.watch(params, progress) for params in model.layers)


def _watch(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: Cache,
    options: AttentionOptions = PLAIN,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, Cache]:
    out, _ = causal_attention(query, key, value, None, options, sinks)
    # A rotation leaves the norm of a pair as it is, so the rotated keys serve for both.
    return out, cache.update(key, key)
