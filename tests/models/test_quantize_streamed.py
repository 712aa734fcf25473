"""Models that are quantized as their layers are read from a checkpoint, one in memory at a time."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models import hf_helpers as hf
from tests.models import tiny
from turbojax import models, smoothing
from turbojax.models import quantize
from turbojax.models.checkpoint.weights import StoredDecoder

CONFIG = tiny.config(
    hidden_size=128, intermediate_size=384, num_layers=6, head_dim=32, family="qwen3", qk_norm=True
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    models.save(models.Transformer(CONFIG, rngs=nnx.Rngs(0)), path)
    return path


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(64, size=(2, 16))


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("name", ["gemma3", "llama-biased", "phi3-longrope", "qwen2"])
def test_an_opened_decoder_holds_what_a_loaded_one_does(name, tmp_path):
    hf.write(name, tmp_path, shard_bytes=20000)
    loaded, opened = models.load_decoder(tmp_path), models.open_decoder(tmp_path)
    assert (opened.config, opened.dtype, len(opened.layers)) == (
        loaded.config,
        loaded.dtype,
        len(loaded.layers),
    )
    assert tiny.same(opened.layers[-1], loaded.layers[-1])
    assert tiny.same(tuple(opened.layers), loaded.layers)
    assert tiny.same(tuple(opened.layers[1:]), loaded.layers[1:])
    tables = [(x.embedding, x.norm, x.lm_head) for x in (opened, loaded)]
    assert tiny.same(*tables)
    with pytest.raises(IndexError):
        opened.layers[len(loaded.layers)]
    half = models.open_decoder(tmp_path, dtype=jnp.bfloat16, max_length=32)
    assert (half.dtype, half.config.max_length) == (jnp.bfloat16, 32)
    assert half.layers[0]["mlp_norm"]["scale"].dtype == jnp.bfloat16


@pytest.mark.slow
def test_a_streamed_model_is_the_same_and_takes_little_memory(folder, tokens, monkeypatch):
    """Besides the quantized model: one layer in its dtype and some of its matrices in float32."""
    options = {"smoothing": smoothing.Smoothing(num_pairs=4), "batch_size": 2}
    wanted = models.quantize_model(models.load_decoder(folder), tokens, **options)
    opened = models.open_decoder(folder)
    layer = sum(x.nbytes for x in jax.tree.leaves(opened.layers[0]))
    gc.collect()
    before = {id(x) for x in jax.live_arrays()}
    peak, told = [0], []

    def look() -> None:
        peak[0] = max(peak[0], sum(x.nbytes for x in jax.live_arrays() if id(x) not in before))

    def watched(function):
        def call(*args, **kwargs):
            look()
            result = function(*args, **kwargs)
            look()
            return result

        return call

    for name in ("quantize_weight", "smooth_layer", "layer_weights", "join_layer"):
        monkeypatch.setattr(quantize, name, watched(getattr(quantize, name)))
    got = models.quantize_model(
        opened, tokens, progress=lambda *x: (look(), told.append(x)), **options
    )
    assert tiny.same(got, wanted)
    assert told == [("calibration", 32), ("layers", 1)] * 6
    # The layer before and after a matrix of it changes, in float32.
    floats = 6 * layer
    assert layer < peak[0] < got.nbytes + 2 * layer < floats


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("name", ["gemma2", "phi3-longrope"])
def test_bits_of_an_opened_decoder_are_those_of_a_loaded_one(name, tmp_path):
    """With kv4, more windows than a batch, and texts to which LongRoPE gives its short factors."""
    hf.write(name, tmp_path)
    windows, told = hf.tokens(3, 20), []
    loaded, opened = models.load_decoder(tmp_path), models.open_decoder(tmp_path)
    options = {"cache": "kv4", "batch_size": 2}
    got = models.token_bits(opened, windows, progress=told.append, **options)
    np.testing.assert_allclose(got, models.token_bits(loaded, windows, **options), atol=1e-3)
    assert len(told) == len(opened.layers)
    assert sum(told) == 3 * 19


@pytest.mark.slow
def test_tables_of_an_opened_decoder_are_read_once(folder, tokens, monkeypatch):
    """With a head of its own, which none of the models above has."""
    loaded, opened = models.load_decoder(folder), models.open_decoder(folder)
    read, one = [], StoredDecoder._one
    monkeypatch.setattr(StoredDecoder, "_one", lambda *given: read.append(given[1]) or one(*given))
    got = models.token_bits(opened, tokens)
    assert sorted(read) == ["embedding", "lm_head", "norm"]
    np.testing.assert_allclose(got, models.token_bits(loaded, tokens), atol=1e-3)


@pytest.mark.slow
def test_a_checkpoint_that_changes_meanwhile_is_refused(folder, tokens, tmp_path):
    models.save(models.load_transformer(folder), tmp_path)
    opened = models.open_decoder(tmp_path)
    models.save(models.Transformer(CONFIG, rngs=nnx.Rngs(1)), tmp_path)
    with pytest.raises(ValueError, match="changed while it was read"):
        models.quantize_model(opened, tokens)


@pytest.mark.slow
def test_quantized_checkpoints_are_not_opened(tmp_path):
    models.save_quantized(models.random_quantized_decoder(CONFIG), tmp_path)
    with pytest.raises(ValueError, match="is a quantized model: the weights must be floating"):
        models.open_decoder(tmp_path)
