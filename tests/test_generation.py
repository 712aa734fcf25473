"""Sessions, scoring and generation, on a tiny random model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import turbojax as tj
from turbojax import models
from turbojax.models import generation

CACHES = ("exact", "4bit", "2/4bit", "3bit", "2bit")


@pytest.fixture(scope="module")
def model() -> models.Llama:
    config = models.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_length=256,
    )
    return models.Llama(config, rngs=nnx.Rngs(1))


def _tokens(batch: int, length: int, seed: int = 0) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), (batch, length), 0, 64)


def test_scoring_through_the_exact_cache_equals_one_forward_pass(model):
    tokens = _tokens(2, 50)
    session = generation.start(model, tokens[:, :30], max_length=50)
    logits = generation.score(session, tokens[:, 30:])
    expected = model(tokens)[:, 29:-1]
    # The cache is bfloat16: eight bits of mantissa in K and V.
    np.testing.assert_allclose(logits, expected, atol=0.02 * float(jnp.std(expected)))


@pytest.mark.parametrize("name", CACHES)
def test_every_named_cache_stays_close_to_the_exact_one(model, name):
    tokens = _tokens(1, 120)
    kind = models.cache_by_name(name, 2)
    session = generation.start(model, tokens[:, :100], max_length=120, cache=kind)
    logits = generation.score(session, tokens[:, 100:])
    expected = model(tokens)[:, 99:-1]
    error = float(jnp.linalg.norm(logits - expected) / jnp.linalg.norm(expected))
    # At most the relative error that the codes themselves have on Gaussian tokens.
    bound = {"exact": 0.005, "4bit": 0.1, "3bit": 0.21, "2/4bit": 0.35, "2bit": 0.47}[name]
    assert error < bound


@pytest.mark.parametrize("kind", ["exact", tj.TurboConfig(block_kv=16, buffer_size=16, block_q=16)])
def test_ragged_prompts_generate_what_each_generates_alone(model, kind):
    tokens, lengths = _tokens(2, 40), (40, 7)
    together = models.generate(
        model, tokens, max_new_tokens=12, cache=kind, lengths=jnp.array(lengths)
    )
    for row, length in enumerate(lengths):
        alone = models.generate(
            model, tokens[row : row + 1, :length], max_new_tokens=12, cache=kind
        )
        np.testing.assert_array_equal(together[row], alone[0])


def test_what_stands_in_the_padding_does_not_matter(model):
    lengths = jnp.array([9, 20])
    tokens = _tokens(2, 20)
    garbage = tokens.at[0, 9:].set(63)

    def run(t):
        return models.generate(model, t, max_new_tokens=5, cache=tj.TurboConfig(), lengths=lengths)

    np.testing.assert_array_equal(run(tokens), run(garbage))


def test_generation_is_greedy(model):
    tokens = _tokens(1, 10)
    generated = models.generate(model, tokens, max_new_tokens=4)
    for i in range(4):
        text = jnp.concatenate([tokens, generated[:, :i].astype(tokens.dtype)], axis=1)
        assert int(jnp.argmax(model(text)[0, -1])) == int(generated[0, i])


def test_progress_is_called_once_a_token(model):
    seen = []
    session = generation.start(model, _tokens(1, 8), max_length=20)
    generation.score(session, _tokens(1, 5), seen.append)
    assert seen == [1] * 5


def test_nbytes_counts_all_layers(model):
    caches = models.init_caches(model, 3, 100, tj.TurboConfig())
    assert caches.nbytes == sum(x.nbytes for x in jax.tree.leaves(caches))
    layer = tj.init_cache(3, 100, 2, 16, dtype=jnp.float32)
    assert caches.nbytes == 2 * layer.nbytes


def test_bad_calls_say_what_is_wrong(model):
    tokens = _tokens(1, 10)
    with pytest.raises(ValueError, match=r"260 tokens.*max_length=256"):
        models.generate(model, tokens, max_new_tokens=250)
    with pytest.raises(ValueError, match=r"max_new_tokens=0 must be at least 1"):
        models.generate(model, tokens, max_new_tokens=0)
    with pytest.raises(ValueError, match=r"prompts of 10 tokens.*max_length=8"):
        generation.start(model, tokens, max_length=8)
    with pytest.raises(ValueError, match=r"lengths=\[0\] must be at least 1"):
        generation.start(model, tokens, max_length=20, lengths=jnp.array([0]))
    with pytest.raises(ValueError, match=r"lengths=\[11\] must be between 0 and 10"):
        generation.start(model, tokens, max_length=20, lengths=jnp.array([11]))
    with pytest.raises(ValueError, match=r"tokens.shape=\(10,\) must be \[B, T\]"):
        generation.start(model, tokens[0], max_length=20)
    with pytest.raises(ValueError, match="must be 'exact' or a TurboConfig"):
        models.init_caches(model, 1, 10, "4bit")
    with pytest.raises(ValueError, match=r"tokens in -5..99 must be within 0..63"):
        models.generate(model, jnp.array([[99, -5]]), max_new_tokens=1)
    with pytest.raises(TypeError, match="tokens.dtype=float32 must be an integer"):
        models.generate(model, jnp.ones((1, 4)), max_new_tokens=1)
    with pytest.raises(ValueError, match=r"max_length=1000 must be at most the model's 256"):
        generation.start(model, tokens, max_length=1000)
    with pytest.raises(ValueError, match=r"tokens.shape=\(2,\) must be \(1,\)"):
        generation.start(model, tokens, max_length=20).step(jnp.array([1, 2]))
    session = generation.start(model, tokens, max_length=10)
    with pytest.raises(ValueError, match="the cache is full"):
        session.step(tokens[:, 0])


def test_cache_names():
    assert models.cache_by_name("exact", 4) == "exact"
    assert models.cache_by_name("3bit", 4) == tj.TurboConfig(key_bits=3, value_bits=3)
    half = models.cache_by_name("2/4bit", 4)
    assert (half.num_low_bit_key_heads, half.num_low_bit_value_heads) == (2, 2)
    with pytest.raises(ValueError, match="'5bit' must be one of exact, 4bit"):
        models.cache_by_name("5bit", 4)
    with pytest.raises(ValueError, match="even number of KV heads, not 3"):
        models.cache_by_name("2/4bit", 3)
