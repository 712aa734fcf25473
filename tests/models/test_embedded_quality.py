"""What compressed caches cost on real text, decoded byte by byte by the embedded model.

A sample that a CPU has time for. docs/paged.md says what all held-out modules cost: 0.0106 bits
per byte through turbo4, where this sample has 0.0126.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax
from turbojax import evaluation, models
from turbojax.finetune.documents import read_held_out

CONTEXT, DECODED = 1215, 192
FILES = ("argparse.py", "configparser.py", "ipaddress.py", "statistics.py")


@pytest.fixture(scope="module")
def model() -> models.Transformer:
    return models.load(dtype=jnp.float32)


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    """One window of each of four held-out modules; decoding begins after 1024 bytes."""
    cut = evaluation.windows(read_held_out(FILES), CONTEXT, 1)
    return np.concatenate([cut[file] for file in FILES])


@pytest.fixture(scope="module")
def exact_bits(model, tokens) -> np.ndarray:
    """Of one forward pass without any cache, in float32."""
    logits = model(jnp.asarray(tokens[:, :-1]))[:, -DECODED:]
    log_p = jax.nn.log_softmax(logits, axis=-1)
    targets = jnp.asarray(tokens[:, -DECODED:])
    return -np.asarray(jnp.take_along_axis(log_p, targets[..., None], axis=-1))[..., 0] / np.log(2)


@pytest.fixture(scope="module")
def exact_run(model, tokens) -> evaluation.ExactRun:
    """The first two windows through an exact cache; prompts take longest."""
    return evaluation.ExactRun(model, tokens[:2], prompt=CONTEXT + 1 - DECODED, batch_size=2)


@pytest.mark.optimized
@pytest.mark.slow
def test_the_default_keeps_its_error_bound_in_every_layer(model, tokens):
    """That of docs/numerics.md: relative L2 of a layer's output, 0.07."""

    def attend(query, key, value, cache, options=None):
        exact = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        got = turbojax.turbo_attention(query, key, value, is_causal=True)
        return exact, jnp.linalg.norm(got - exact) / jnp.linalg.norm(exact)

    _, errors = model(tokens[:1, :-1], attend=attend, caches=jnp.zeros(model.config.num_layers))
    assert errors.shape == (8,)
    assert 0.01 < errors.max() < 0.07


@pytest.mark.optimized
@pytest.mark.slow
def test_the_model_knows_python(exact_bits):
    assert exact_bits.shape == (len(FILES), DECODED)
    assert exact_bits.mean() < 1.1


@pytest.mark.optimized
@pytest.mark.quick(slow=1)
@pytest.mark.parametrize(
    ("name", "limit", "ratio"), [("4bit", 0.01, 3.2), ("2/4bit", 0.06, 4.0), ("turbo4", 0.02, 3.7)]
)
def test_a_compressed_cache_costs_little(model, exact_run, exact_bits, name, limit, ratio):
    exact_bits, method = exact_bits[:2], evaluation.method(name, model.config)
    found = evaluation.score(
        model, exact_run.tokens, method, prompt=exact_run.prompt, exact=exact_run
    )
    bits = found.bits
    cost = bits.mean() - exact_bits.mean()
    # The exact cache's are those of one pass without any, but for rounding.
    np.testing.assert_allclose(found.exact_bits, exact_bits, atol=2e-3)
    assert cost < limit
    # And it is not the exact cache in disguise.
    assert np.abs(bits - exact_bits).max() > 1e-3
    exact_bytes = 4 * np.prod([model.config.num_layers, CONTEXT, model.config.num_kv_heads, 64])
    assert exact_bytes / found.cache_bytes > ratio
