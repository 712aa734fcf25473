"""Teacher-forced scoring of whole windows in one pass, as if through a cache."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from turbojax import _checks
from turbojax.caches import cache_by_name, init_layer_cache
from turbojax.caches.kinds import KINDS
from turbojax.models.checkpoint.weights import StoredDecoder
from turbojax.models.config import TransformerConfig
from turbojax.models.decoder import Decoder, final_norm, for_length
from turbojax.models.generation.padding import check_tokens
from turbojax.models.generation.session import Progress
from turbojax.models.layer_by_layer import LayerByLayer
from turbojax.models.quantized import QuantizedDecoder
from turbojax.models.tensor_parallel.programs import on_mesh
from turbojax.models.tensor_parallel.specs import check_batch
from turbojax.models.transformer import project

_ATTEND = {name: kind.in_one_pass for kind in KINDS for name in kind.names if kind.in_one_pass}


AnyModel = Decoder | QuantizedDecoder | StoredDecoder


def caches_of(model: AnyModel) -> tuple[str, ...]:
    """The caches that `token_bits` knows and that can hold a model's heads."""
    return tuple(name for name in _ATTEND if _refusal(model, name) is None)


def _refusal(model: AnyModel, cache: str) -> str | None:
    """Why a cache cannot hold a model's heads, or None: ``"kv4"`` packs 8 channels at a time."""
    sizes = (1, 1, model.config.num_kv_heads, model.config.head_dim)
    kind = cache_by_name(cache, model.config.num_kv_heads)
    try:
        jax.eval_shape(lambda: init_layer_cache(*sizes, kind=kind, dtype=model.dtype))
    except ValueError as error:
        return str(error)
    return None


def token_bits(
    model: AnyModel,
    tokens: np.ndarray,
    *,
    cache: str = "exact",
    batch_size: int = 4,
    progress: Progress | None = None,
) -> np.ndarray:
    """Information content of every token but the first of each window.

    Args:
      model: the model. For a `StoredDecoder` each layer is read once; all windows pass it before
        the next one is read.
      tokens: int ``[n, T + 1]``.
      cache: ``"exact"``, or ``"kv4"`` for keys, values and queries as decoding through a `Kv4Cache`
        has them: any name whose kind has `turbojax.caches.Kind.in_one_pass`.
      batch_size: windows that run at once.
      progress: called after each batch, or each layer, with how many tokens were done since the
        last call.

    Returns:
      float32 ``[n, T]``, bits.

    Raises:
      TypeError: if the model is of another type, or tokens or the batch size are not integers.
      ValueError: if the shape does not fit, a token is not in the vocabulary, `batch_size` is not
        positive, there is no such cache, or it cannot hold the model's heads.
    """
    if not isinstance(model, AnyModel):
        raise TypeError(
            f"model is a {type(model).__name__}, must be a Decoder (see unstack), a "
            "QuantizedDecoder or a StoredDecoder"
        )
    _checks.check_sizes(batch_size=batch_size)
    if tokens.ndim != 2 or len(tokens) < 1 or tokens.shape[1] < 2:
        raise ValueError(f"{tokens.shape=} must be [n, T + 1] with n and T at least 1")
    if cache not in _ATTEND:
        raise ValueError(f"{cache=} must be one of {', '.join(_ATTEND)}")
    if refusal := _refusal(model, cache):
        raise ValueError(f"{cache=} cannot hold the model's heads: {refusal}")
    tokens = np.asarray(check_tokens(tokens, model.config.vocab_size))
    if isinstance(model, StoredDecoder):
        return _layer_by_layer(model, tokens, cache, batch_size, progress)
    check_batch(batch_size, model.axes)
    model, bits = for_length(model, tokens.shape[1] - 1), []
    for first in range(0, len(tokens), batch_size):
        part = tokens[first : first + batch_size]
        # One shape, compiled once: the last batch is filled up with its own first window.
        full = np.concatenate([part, np.repeat(part[:1], batch_size - len(part), axis=0)])
        bits.append(np.asarray(_bits(model, jnp.asarray(full), cache=cache))[: len(part)])
        if progress is not None:
            progress(part.shape[0] * (part.shape[1] - 1))
    return np.concatenate(bits)


@functools.partial(jax.jit, static_argnames="cache")
def _bits(model: Decoder | QuantizedDecoder, tokens: jax.Array, *, cache: str) -> jax.Array:
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    positions = jnp.broadcast_to(jnp.arange(inputs.shape[1])[None], inputs.shape)
    nothing = (None,) * model.config.num_layers

    def run(
        model: Decoder | QuantizedDecoder,
        inputs: jax.Array,
        positions: jax.Array,
        targets: jax.Array,
    ) -> jax.Array:
        hidden, _ = model.hidden(inputs, positions, _ATTEND[cache], nothing)
        return _information(model.logits(hidden), targets)

    rows = PartitionSpec() if model.axes is None else model.axes.spec("B")
    return on_mesh(run, model, (rows, rows, rows), rows)(inputs, positions, targets)


def _layer_by_layer(
    model: StoredDecoder,
    tokens: np.ndarray,
    cache: str,
    batch_size: int,
    progress: Progress | None,
) -> np.ndarray:
    """`token_bits` of a model of which one layer is in memory at a time."""
    text = LayerByLayer(model, tokens[:, :-1], batch_size)
    scored, layers = tokens[:, 1:].size, len(model.layers)
    for i, params in enumerate(model.layers):
        text.apply(params, _ATTEND[cache])
        if progress is not None:
            progress(scored * (i + 1) // layers - scored * i // layers)
    # Only once, as a `StoredDecoder` reads the file at every access.
    norm, head = model.norm, model.embedding if model.config.tie_embeddings else model.lm_head
    assert head is not None
    bits = []
    for i, hidden in enumerate(text.hidden):
        targets = jnp.asarray(tokens[i * batch_size : (i + 1) * batch_size, 1:])
        bits.append(np.asarray(_last_bits(hidden, norm, head, targets, config=model.config)))
    return np.concatenate(bits)


@functools.partial(jax.jit, static_argnames="config")
def _last_bits(
    hidden: jax.Array,
    norm: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    *,
    config: TransformerConfig,
) -> jax.Array:
    normed = final_norm(hidden, norm, config, config.norm_offset)
    return _information(project(normed, head, hidden.dtype, config), targets)


def _information(logits: jax.Array, targets: jax.Array) -> jax.Array:
    log_p = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]
    return chosen * (-1 / math.log(2))
