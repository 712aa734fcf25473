"""A model that is small enough for any test."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from turbojax import models
from turbojax.models.generation.steps import decode_step

_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 1,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "max_length": 64,
}


def config(**changes) -> models.TransformerConfig:
    """One layer of four heads, but for these fields."""
    return models.TransformerConfig(**{**_SIZES, **changes})


def transformer(seed: int = 1, **changes) -> models.Transformer:
    return models.Transformer(config(**changes), rngs=nnx.Rngs(seed))


def tokens(batch: int, length: int, seed: int = 0) -> jax.Array:
    # From numpy: jax would compile a generator for every shape.
    return jnp.asarray(np.random.default_rng(seed).integers(64, size=(batch, length)), jnp.int32)


def logits(decoder, text, attend=models.causal_attention) -> np.ndarray:
    """float64, of whole texts, by a `Decoder` or a `QuantizedDecoder`."""
    positions = jnp.broadcast_to(jnp.arange(text.shape[1])[None], text.shape)
    nothing = (None,) * decoder.config.num_layers
    run = jax.jit(decoder.hidden, static_argnums=2)
    hidden, _ = run(jnp.asarray(text, jnp.int32), positions, attend, nothing)
    return np.asarray(decoder.logits(hidden), np.float64)


def relative(got, want) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def same(one, other) -> bool:
    """Whether two pytrees are alike to the bit."""
    leaves = [jax.tree.leaves(x) for x in (one, other)]
    return jax.tree.structure(one) == jax.tree.structure(other) and all(
        a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()
        for a, b in zip(*leaves, strict=True)
    )


def compiled_step(decoder, batch: int, max_length: int, kind):
    """Bytes of caches, and the memory of a step through them, without any cache being made."""
    caches = jax.eval_shape(lambda: models.init_caches(decoder, batch, max_length, kind))
    given = jax.ShapeDtypeStruct((batch,), jnp.int32)
    lowered = decode_step.lower(decoder, caches, given, given, implementation=None)
    return caches.nbytes, lowered.compile().memory_analysis()
