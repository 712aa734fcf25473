"""Training with `turbo_attention`: a tiny Llama learns as it does with exact attention."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import turbojax as tj

TINY = tj.models.TransformerConfig(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_length=64,
    tie_embeddings=True,
)
STEPS = 30


def train(attention):
    """Losses of a tiny Llama that learns to repeat what it read 12 tokens before.

    Next tokens are random but for that repetition: only attention can find them.
    """
    model = tj.models.Transformer(TINY, rngs=nnx.Rngs(params=0))
    half = np.random.default_rng(39).integers(0, TINY.vocab_size, (8, 12))
    tokens = jnp.asarray(np.concatenate([half, half, half], axis=1), jnp.int32)
    graph, params = nnx.split(model)
    optimizer = optax.adam(1e-2)
    options = {} if attention is None else {"attend": attention}

    def objective(params):
        logits = nnx.merge(graph, params)(tokens, **options)[:, 11:-1]
        wanted = tokens[:, 12:]
        return optax.losses.softmax_cross_entropy_with_integer_labels(logits, wanted).mean()

    @jax.jit
    def step(state, _):
        params, moments = state
        value, gradient = jax.value_and_grad(objective)(params)
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integers
            updates, moments = optimizer.update(gradient, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    _, losses = jax.lax.scan(step, (params, optimizer.init(params)), length=STEPS)
    return np.asarray(losses)


CONFIGS = {
    "default": tj.TurboConfig(),
    "8-bit gradient": tj.TurboConfig(gradient="8bit"),
    "paper": tj.TurboConfig.paper(),
}


@pytest.mark.fuzz
def test_training_with_8_bit_attention_learns_like_exact_attention():
    """The loss falls as far in as many steps."""
    exact = train(None)
    assert exact[-1] < 0.5 * exact[0]
    for name, config in CONFIGS.items():

        def attend(query, key, value, cache=None, options=None, config=config):
            return tj.turbo_attention(query, key, value, config=config, is_causal=True), cache

        losses = train(attend)
        assert losses[-1] < 0.5 * losses[0], name
        np.testing.assert_allclose(losses, exact, rtol=0.1, atol=0.05, err_msg=name)
