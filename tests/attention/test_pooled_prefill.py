"""Generation whose prompts attend with pooled attention: sessions, caches, padding, the command."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from typer.testing import CliRunner

import turbojax as tj
from turbojax import models
from turbojax.app.main import app
from turbojax.levels import LocalWindow, SimilarityCap, Threshold
from turbojax.models import PooledAttention, pooled_by_name
from turbojax.models.generation import session as generation

COMPRESSED = tj.TurboConfig(block_kv=16, buffer_size=16, block_q=16)
EVERYTHING = PooledAttention(LocalWindow(4096, (4096, 4096, None)), 32, 32)
LOCAL = pooled_by_name("window", window=32, block_size=32)


@pytest.fixture(scope="module")
def model() -> models.Transformer:
    config = models.TransformerConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_length=256,
    )
    return models.Transformer(config, rngs=nnx.Rngs(1))


@pytest.fixture(scope="module")
def shallow(model) -> models.Transformer:
    """One layer: quicker to compile."""
    return models.Transformer(dataclasses.replace(model.config, num_layers=1), rngs=nnx.Rngs(1))


def _tokens(batch: int, length: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(256, size=(batch, length), dtype=np.int32))


@pytest.mark.slow
def test_level_1_everywhere_generates_what_exact_attention_does(shallow):
    tokens, lengths = _tokens(2, 200), jnp.array([200, 3])
    options = {"max_length": 256, "lengths": lengths}
    dense = models.start(shallow, tokens, **options)
    pooled = models.start(shallow, tokens, **options, pooled_prefill=EVERYTHING)
    # Sums in another order, in float32.
    bound = 1e-5 * float(jnp.max(jnp.abs(dense.logits)))
    np.testing.assert_allclose(pooled.logits, dense.logits, atol=bound)
    one, two = (np.stack(list(generation.stream(s, 8))) for s in (dense, pooled))
    np.testing.assert_array_equal(one, two)


@pytest.mark.fuzz
def test_prompt_is_cached_token_by_token(model):
    """What the first layer caches does not depend on attention, whatever the levels are."""
    tokens = _tokens(1, 200)
    dense = models.start(model, tokens, max_length=208, cache=COMPRESSED)
    pooled = models.start(model, tokens, max_length=208, cache=COMPRESSED, pooled_prefill=LOCAL)
    for a, b in zip(
        jax.tree.leaves(dense.caches.layers[0]),
        jax.tree.leaves(pooled.caches.layers[0]),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
    assert int(pooled.caches.layers[1].lengths[0]) == 200
    assert float(jnp.max(jnp.abs(pooled.logits - dense.logits))) > 1e-3


@pytest.mark.fuzz
def test_logits_are_those_of_a_forward_pass_with_pooled_attention(shallow):
    """All prompts at once, or in turn."""
    tokens = _tokens(2, 150)
    expected = shallow(tokens, attend=LOCAL)[:, -1]
    bound = 1e-5 * float(jnp.max(jnp.abs(expected)))
    options = {"max_length": 160, "pooled_prefill": LOCAL}
    whole = models.start(shallow, tokens, **options)
    parts = models.start(shallow, tokens, prefill_batch_size=1, **options)
    for session in (whole, parts):
        np.testing.assert_allclose(session.logits, expected, atol=bound)
    for one, two in zip(whole.caches.layers, parts.caches.layers, strict=True):
        # Sums in another order may round to the next bfloat16.
        for a, b in ((one.key, two.key), (one.value, two.value)):
            a, b = (np.asarray(x, np.float32) for x in (a, b))
            np.testing.assert_allclose(a, b, rtol=2**-7, atol=bound)
        np.testing.assert_array_equal(one.lengths, two.lengths)


@pytest.mark.fuzz
def test_a_padded_prompt_generates_what_it_generates_alone(shallow):
    tokens, lengths = _tokens(2, 100), (100, 7)
    pooled = PooledAttention(SimilarityCap(LocalWindow(16, (32, 64, None))), 16, 16)
    options = {"max_length": 120, "cache": COMPRESSED, "pooled_prefill": pooled}

    def generate(tokens, lengths):
        session = models.start(shallow, tokens, lengths=jnp.array(lengths), **options)
        return np.stack(list(generation.stream(session, 20)), axis=1)

    together, alone = generate(tokens, lengths), generate(tokens[1:, :7], (7,))
    np.testing.assert_array_equal(together[1], alone[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_kv": 12}, "block_kv=12 must be a multiple of 8"),
        ({"implementation": "cuda"}, "cuda"),
        ({"policy": "window"}, "policy is a str, must be one of turbojax.levels"),
    ],
)
def test_bad_options_are_refused(change, message):
    with pytest.raises((ValueError, TypeError), match=message):
        PooledAttention(**{"policy": LocalWindow(), **change})


def test_names():
    pooled = pooled_by_name("window", window=64, block_size=32, implementation="xla")
    assert pooled == PooledAttention(LocalWindow(64, (64, 64, None)), 32, 32, "xla")
    assert pooled_by_name("window") == PooledAttention(LocalWindow())
    bounds = (0.62, 0.77, 0.89, 0.97)
    chosen = PooledAttention(Threshold(bounds), query_samples=8, key_means=8)
    assert pooled_by_name("threshold") == chosen
    with pytest.raises(ValueError, match="policy 'best' must be one of threshold, topk, window"):
        pooled_by_name("best")
    with pytest.raises(ValueError, match="window=-1"):
        pooled_by_name("window", window=-1)
    with pytest.raises(ValueError, match="window=64 is for policy 'window', not 'topk'"):
        pooled_by_name("topk", window=64)


@pytest.mark.slow
def test_command(model, tmp_path):
    models.save(model, tmp_path)
    base = ["generate", "a" * 200, "--model", str(tmp_path), "--max-new-tokens", "4", "--json"]
    options = ["--prefill", "window", "--prefill-window", "16", "--prefill-block-size", "16"]
    result = CliRunner().invoke(app, [*base, "--cache", "exact", *options])
    assert result.exit_code == 0, result.stderr
    tokens = jnp.array([[0, *b"a" * 200]])
    pooled = pooled_by_name("window", window=16, block_size=16)
    loaded = models.load(tmp_path, dtype=jnp.float32)
    expected = models.generate(loaded, tokens, max_new_tokens=4, pooled_prefill=pooled)
    text = bytes(expected[0].tolist()).decode("utf-8", "replace")
    assert json.loads(result.stdout)["text"] == text
    for wrong, message in (
        (["--prefill", "best"], "prefill 'best' must be one of dense, threshold, topk, window"),
        (["--prefill-window", "9"], "are for pooled attention, not 'dense'"),
    ):
        result = CliRunner().invoke(app, [*base, *wrong])
        assert result.exit_code == 2
        assert message in result.stderr
