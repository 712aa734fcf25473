"""Text on its way through a model, layer by layer.

All windows pass a layer before the next one is needed, so that layers may come from a file, one at
a time. Between layers the windows' residual streams are kept.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks
from turbojax.attention.options import PLAIN
from turbojax.caches import Attend, AttentionOptions, causal_attention
from turbojax.caches.base import Cache
from turbojax.models.checkpoint.weights import StoredDecoder
from turbojax.models.config import TransformerConfig
from turbojax.models.decoder import Decoder, LayerParams, apply_block, for_length
from turbojax.models.generation.padding import check_tokens
from turbojax.models.generation.session import Progress
from turbojax.models.transformer import embed
from turbojax.rotary import Rope
from turbojax.smoothing import KeyStatistics


class LayerByLayer:
    """Windows of text that have passed some of a model's layers.

    `hidden` has the residual stream ``[b, T, D]`` of each batch; `config` is for texts of this
    length.
    """

    def __init__(
        self, model: Decoder | StoredDecoder, tokens: np.ndarray, batch_size: int = 1
    ) -> None:
        """Begins before the first layer with tokens int ``[n, T]``; reads no layer of the model."""
        self.config: TransformerConfig = for_length(model, tokens.shape[1]).config
        self.passed = 0
        self._dtype = model.dtype
        table = model.embedding
        self.hidden = [
            embed(table, jnp.asarray(tokens[i : i + batch_size]), self.config, model.dtype)
            for i in range(0, len(tokens), batch_size)
        ]

    def apply(
        self,
        params: LayerParams,
        attend: Attend,
        cache: Cache = None,
        progress: Progress | None = None,
    ) -> Cache:
        """Takes the windows through the next layer and returns the last batch's cache.

        `attend` must be the same function in all calls, or each compiles anew. The first batch gets
        `cache`, each other one what the batch before returned. `progress` gets the number of tokens
        after each batch.
        """
        options = self.config.attention_options(self.passed)
        rope = self.config.rope_of(self.passed)
        for i, hidden in enumerate(self.hidden):
            self.hidden[i], cache = jax.block_until_ready(
                _apply(params, hidden, cache, attend, options, rope, self.config, self._dtype)
            )
            if progress is not None:
                progress(hidden.shape[0] * hidden.shape[1])
        self.passed += 1
        return cache


@functools.partial(
    jax.jit, static_argnames=("attend", "options", "rope", "config", "dtype"), donate_argnums=1
)
def _apply(
    params: LayerParams,
    hidden: jax.Array,
    cache: Cache,
    attend: Attend,
    options: AttentionOptions,
    rope: Rope | None,
    config: TransformerConfig,
    dtype: np.dtype,
) -> tuple[jax.Array, Cache]:
    positions = jnp.broadcast_to(jnp.arange(hidden.shape[1])[None], hidden.shape[:2])
    angles = None if rope is None else rope.angles(positions)
    return apply_block(
        params, hidden, angles, attend, cache, options, rope, config=config, dtype=dtype
    )


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
