"""Quantized decoders: what `quantize_model` computes, how it runs, and its checkpoints."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from tests.models import tiny
from turbojax import models, smoothing
from turbojax.caches.token_scaled import cache as kv4
from turbojax.caches.token_scaled.kind import through_kv4
from turbojax.matmul.int4.weight import Int4Weight, dequantize, quantize_weight
from turbojax.models import causal_attention
from turbojax.models.generation import session as generation
from turbojax.models.layer_by_layer import calibrate
from turbojax.models.quantize import layer_params, layer_weights, quantize_from, quantize_layer
from turbojax.models.quantized import take_rows

NO_SMOOTHING = smoothing.Smoothing(cas=False, pts=False, rpn=False, crs=False)


@pytest.fixture(scope="module")
def model() -> models.Transformer:
    # Grouped queries, and sizes that are no multiples of what codes are padded to.
    return tiny.transformer(
        hidden_size=48, intermediate_size=84, num_layers=2, num_heads=6, head_dim=24, max_length=256
    )


@pytest.fixture(scope="module")
def calibration() -> np.ndarray:
    return np.asarray(tiny.tokens(3, 40, seed=9))


@pytest.fixture(scope="module")
def quantized(model, calibration) -> models.QuantizedDecoder:
    return models.quantize_model(model, calibration)


def _first_layer(decoder):
    """The decoder of that layer alone: quicker to compile."""
    config = dataclasses.replace(decoder.config, num_layers=1)
    return dataclasses.replace(decoder, layers=decoder.layers[:1], config=config)


# An oracle in float64 numpy: the decoder's mathematics from its dequantized weights.


def _e4m3(x: np.ndarray) -> np.ndarray:
    """Rounds to e4m3: 3 bits after the leading one, at least 2**-9, at most 448."""
    exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(x), 2.0**-20))), -6)
    step = 2.0 ** (exponent - 3)
    return np.clip(np.rint(x / step) * step, -448, 448)


def _bf16(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32).astype(jnp.bfloat16).astype(np.float64)


def _rounded_tokens(x: np.ndarray) -> np.ndarray:
    scale = _bf16(np.abs(x).max(-1, keepdims=True) / 448)
    return _e4m3(np.clip(x / scale, -448, 448)) * scale


def _norm(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale


def _rotate(x: np.ndarray, theta: float) -> np.ndarray:
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None] * theta ** (-np.arange(half) * 2.0 / x.shape[-1])
    cos, sin = np.cos(angle)[None, :, None], np.sin(angle)[None, :, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _oracle(decoder: models.QuantizedDecoder, tokens: jax.Array, round_tokens=_rounded_tokens):
    """float64 logits ``[B, T, V]``; attention exact."""
    c = decoder.config

    def wide(x):
        return np.asarray(dequantize(x) if isinstance(x, Int4Weight) else x, np.float64)

    hidden = wide(decoder.embedding)[np.asarray(tokens)]
    batch, length, _ = hidden.shape
    for layer in decoder.layers:
        x = round_tokens(_norm(hidden, wide(layer.attention_norm), c.norm_eps))
        heads = (x @ wide(layer.qkv.weight).T).reshape(batch, length, -1, c.head_dim)
        q, k, v = np.split(heads, [c.num_heads, c.num_heads + c.num_kv_heads], axis=2)
        q, k = _rotate(q, c.rope_theta), _rotate(k, c.rope_theta)
        k, v = (np.repeat(y, c.num_heads // c.num_kv_heads, axis=2) for y in (k, v))
        if layer.key_channel_scale is not None:
            scale = np.repeat(wide(layer.key_channel_scale), c.num_heads // c.num_kv_heads, axis=0)
            q, k = q * scale, k / scale
        scores = np.einsum("btnh,bsnh->bnts", q, k) * c.head_dim**-0.5
        scores = np.where(np.tril(np.ones((length, length), bool)), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out = np.einsum("bnts,bsnh->btnh", weights, v).reshape(batch, length, -1)
        hidden = hidden + round_tokens(out) @ wide(layer.o.weight).T
        x = round_tokens(_norm(hidden, wide(layer.mlp_norm), c.norm_eps))
        gate, up = np.split(x @ wide(layer.mlp.gate_up.weight).T, 2, axis=-1)
        inner = round_tokens(gate / (1 + np.exp(-gate)) * up)
        hidden = hidden + inner @ wide(layer.mlp.down.weight).T
    head = decoder.embedding if decoder.lm_head is None else decoder.lm_head
    hidden = _norm(hidden, wide(decoder.norm), c.norm_eps)
    if isinstance(head, Int4Weight):
        hidden = round_tokens(hidden)
    return hidden @ wide(head).T


@pytest.mark.fuzz
def test_tables_and_bfloat16_scales_compute_what_they_say(model, calibration):
    options = {"scale_dtype": "bf16", "quantize_embedding": True, "quantize_head": True}
    decoder = _first_layer(models.unstack(model))
    _assert_computes_what_its_weights_say(models.quantize_model(decoder, calibration, **options))


@pytest.mark.slow
def test_a_quantized_decoder_computes_what_its_weights_say(quantized):
    _assert_computes_what_its_weights_say(quantized)


def _assert_computes_what_its_weights_say(decoder):
    tokens = tiny.tokens(2, 20)
    expected = _oracle(decoder, tokens)
    error = np.linalg.norm(tiny.logits(decoder, tokens) - expected, axis=-1)
    without = np.linalg.norm(_oracle(decoder, tokens, lambda x: x) - expected, axis=-1)
    # Now and then float32 rounds an activation to the neighbour of what float64 does, and later
    # tokens attend to that one; a token without is exact to float32. The oracle that does not round
    # activations is further off everywhere.
    assert np.quantile(error, 0.25) < 1e-4
    assert np.linalg.norm(error) < 0.5 * np.linalg.norm(without)


@pytest.mark.slow
def test_smoothing_leaves_the_model_the_same_in_exact_arithmetic(model, calibration):
    """Smoothed, but not rounded: what `quantize_model` rounds is the model that it was given."""
    decoder = models.unstack(model)
    statistics = calibrate(decoder, calibration)
    tokens = tiny.tokens(1, 30)
    exact = tiny.logits(decoder, tokens)
    for inputs in ("constant", "all"):
        options = smoothing.Smoothing(pts=False, crs=False, cas_inputs=inputs)
        layers = tuple(
            layer_params(smoothing.smooth_layer(layer_weights(p, model.config), s, options))
            for p, s in zip(decoder.layers, statistics, strict=True)
        )
        smoothed = dataclasses.replace(decoder, layers=layers)
        changed = jax.tree.leaves(jax.tree.map(lambda a, b: jnp.any(a != b), decoder, smoothed))
        assert sum(map(bool, changed)) > 2
        np.testing.assert_allclose(tiny.logits(smoothed, tokens), exact, atol=1e-4)


@pytest.mark.slow
def test_smoothing_gives_a_model_close_to_the_exact_one(model, calibration):
    every = smoothing.Smoothing(**dict.fromkeys(("cas", "pts", "rpn", "crs"), True))
    decoder = models.quantize_model(model, calibration, smoothing=every, scale_dtype="bf16")
    assert decoder.layers[0].key_channel_scale is not None
    tokens = tiny.tokens(2, 30)
    exact = np.asarray(model(tokens), np.float64)
    error = np.linalg.norm(tiny.logits(decoder, tokens) - exact) / np.linalg.norm(exact)
    # A normal weight is off by 12 % of its size. Four matrices of each layer and the activations
    # follow one another, but they feed a residual stream that they only add to.
    assert 0.02 < error < 0.35


@pytest.mark.slow
def test_calibration_sees_the_keys_of_every_layer(model, calibration):
    decoder, seen = models.unstack(model), []

    def watch(query, key, value, cache, options=None):
        seen.append(np.asarray(key))
        return causal_attention(query, key, value, cache)

    with jax.disable_jit():
        positions = jnp.broadcast_to(jnp.arange(40)[None], (3, 40))
        decoder.hidden(jnp.asarray(calibration), positions, watch, (None, None))
    done = []
    statistics = calibrate(decoder, calibration, batch_size=2, progress=done.append)
    assert done == [80, 40] * 2
    for key, found in zip(seen, statistics, strict=True):
        assert int(found.tokens) == calibration.size
        np.testing.assert_allclose(found.absmax, np.abs(key).max((0, 1)), rtol=1e-5)
        pairs = np.hypot(key[..., :12], key[..., 12:]).max((0, 1))
        np.testing.assert_allclose(found.pair_norm, pairs, rtol=1e-5)


@pytest.mark.slow
def test_weights_beyond_the_range_of_e4m3_scales_are_scaled_down_exactly(model):
    """A power of two moves from a weight to its output: the codes are those of a smaller weight."""
    decoder = models.unstack(model)

    def enlarged(factor):
        layers = [jax.tree.map(lambda x: x, layer) for layer in decoder.layers]
        kernel = layers[0]["attention"]["q_proj"]["kernel"]
        layers[0]["attention"]["q_proj"]["kernel"] = kernel * factor
        return quantize_from(
            dataclasses.replace(decoder, layers=tuple(layers)), (None, None), NO_SMOOTHING
        )

    largest = float(jnp.abs(decoder.layers[0]["attention"]["q_proj"]["kernel"]).max())
    within = 2.0 ** np.floor(np.log2(448 / largest))
    small, large = (enlarged(f).layers[0].qkv.weight for f in (within, within * 1024))
    np.testing.assert_array_equal(small.codes, large.codes)
    rows = model.config.num_heads * model.config.head_dim
    ratio = np.asarray(dequantize(large) / jnp.where(dequantize(small) == 0, 1, dequantize(small)))
    assert set(np.unique(ratio[:rows])) == {0.0, 1024.0}
    assert set(np.unique(ratio[rows:])) <= {0.0, 1.0}


def test_taking_rows_of_a_quantized_table():
    table = quantize_weight(jax.random.normal(jax.random.key(0), (70, 40)))
    index = jnp.array([[69, 0, 3], [3, 3, 68]])
    expected = np.asarray(dequantize(table))[np.asarray(index)]
    np.testing.assert_array_equal(take_rows(table, index), expected)
    np.testing.assert_array_equal(jax.jit(take_rows)(table, index), expected)


@pytest.mark.slow
def test_one_pass_equals_decoding_token_by_token_through_the_cache(quantized):
    decoder, tokens = _first_layer(quantized), tiny.tokens(2, 24)
    caches = models.init_caches(decoder, 2, 24, "kv4")
    expected = models.token_bits(decoder, np.asarray(tokens), cache="kv4", batch_size=2)
    bits = []
    for t in range(23):
        caches, logits, _ = generation.decode_step(
            decoder, caches, tokens[:, t], jnp.full(2, t, jnp.int32), implementation=None
        )
        log_p = jax.nn.log_softmax(logits)[jnp.arange(2), tokens[:, t + 1]]
        bits.append(-np.asarray(log_p) / np.log(2))
    # Sums of another order round a code the other way now and then; the roundings to 4 bits are
    # far larger than what is left.
    exact = models.token_bits(decoder, np.asarray(tokens), cache="exact", batch_size=2)
    difference = np.abs(np.stack(bits, axis=1) - expected)
    assert np.median(difference) < 1e-4
    assert np.linalg.norm(difference) < 0.1 * np.linalg.norm(expected - exact)


@pytest.mark.fuzz
def test_prompts_of_kv4_are_attended_in_e4m3_and_cached_in_4_bits(quantized):
    tokens = tiny.tokens(2, 40)
    session = models.start(quantized, tokens, max_length=50, cache="kv4")
    layer = session.caches.layers[0]
    assert isinstance(layer, kv4.Kv4Cache)
    np.testing.assert_array_equal(layer.lengths, [40, 40])
    session.caches.layers[1].validate()
    expected = tiny.logits(quantized, tokens)[:, -1]
    # Keys and values have three bits after the first one; through the cache's codes, whose steps
    # are a seventh of the largest value, the prompts would be further off. Both have e4m3 queries.
    error = np.linalg.norm(session.logits - expected)
    through_codes = tiny.logits(quantized, tokens, through_kv4)[:, -1]
    assert 0 < error < 0.8 * np.linalg.norm(through_codes - expected)
    parts = models.start(quantized, tokens, max_length=50, cache="kv4", prefill_batch_size=1)
    for a, b in zip(jax.tree.leaves(session.caches), jax.tree.leaves(parts.caches), strict=True):
        assert np.mean(np.asarray(a, np.float32) != np.asarray(b, np.float32)) < 0.02


@pytest.mark.slow
def test_kv4_of_pooled_prompts(model):
    tokens = tiny.tokens(1, 32)
    decoder = _first_layer(models.unstack(model))
    pooled = models.pooled_by_name("window", window=16, block_size=16)
    pooled_session, session = (
        models.start(decoder, tokens, max_length=40, cache="kv4", pooled_prefill=p)
        for p in (pooled, None)
    )
    first, other = (s.caches.layers[0] for s in (pooled_session, session))
    # The first layer's keys do not depend on how prompts attend.
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_a_step_updates_kv4_caches_in_place(quantized):
    nbytes, analysis = tiny.compiled_step(quantized, 2, 2048, "kv4")
    assert analysis.alias_size_in_bytes == nbytes


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize(
    ("dtype", "scale_dtype", "tied", "options"),
    [
        (jnp.bfloat16, "bf16", True, {"quantize_embedding": True}),
        (jnp.float16, "e4m3", False, {"quantize_embedding": True, "quantize_head": True}),
    ],
)
def test_checkpoints_with_quantized_tables(tmp_path, dtype, scale_dtype, tied, options):
    config = dataclasses.replace(models.SHAPES["tiny"], tie_embeddings=tied, num_layers=1)
    model = models.random_decoder(config, dtype=dtype)
    crs = scale_dtype == "e4m3"
    decoder = models.quantize_model(
        model,
        np.arange(20)[None],
        smoothing=smoothing.Smoothing(crs=crs),
        scale_dtype=scale_dtype,
        **options,
    )
    _assert_is_read_back(decoder, tmp_path)


def _assert_is_read_back(decoder, folder):
    models.save_quantized(decoder, folder, extra_config={"bos_token_id": 3})
    loaded = models.load(folder)
    assert tiny.same(decoder, loaded)
    assert models.read_config(folder)["bos_token_id"] == 3
    assert models.load(folder, dtype=jnp.float16).dtype == jnp.float16


@pytest.mark.slow
def test_a_loaded_checkpoint_generates_the_same(quantized, tmp_path):
    decoder = _first_layer(quantized)
    models.save_quantized(decoder, tmp_path)
    loaded, tokens = models.load(tmp_path), tiny.tokens(1, 12)
    options = {"max_new_tokens": 6, "cache": "exact"}
    np.testing.assert_array_equal(
        *(models.generate(m, tokens, **options) for m in (decoder, loaded))
    )


@pytest.mark.slow
def test_which_tables_are_quantized(model, calibration):
    def tables(tied, **options):
        config = dataclasses.replace(model.config, tie_embeddings=tied, num_layers=1)
        llama = models.Transformer(config, rngs=nnx.Rngs(0))
        decoder = models.quantize_model(llama, calibration, **options)
        return tuple(type(x) for x in (decoder.embedding, decoder.lm_head))

    table, none = type(jnp.ones(1)), type(None)
    embedding, head = {"quantize_embedding": True}, {"quantize_head": True}
    assert tables(False) == (table, table)
    assert tables(True) == (table, none)
    assert tables(True, **embedding) == (Int4Weight, table)
    assert tables(True, **head) == (table, Int4Weight)
    assert tables(True, **embedding, **head) == (Int4Weight, none)
    assert tables(False, **embedding, **head) == (Int4Weight, Int4Weight)


@pytest.mark.slow
def test_progress_is_told(model, calibration):
    told = []
    models.quantize_model(model, calibration, progress=lambda *event: told.append(event))
    assert told == ([("calibration", 40)] * 3 + [("layers", 1)]) * 2


@pytest.mark.fuzz
def test_random_quantized_decoders():
    config = dataclasses.replace(models.SHAPES["tiny"], intermediate_size=100)
    decoder = models.random_quantized_decoder(config, scale_dtype="bf16", quantize_head=True)
    layer = decoder.layers[0]
    assert layer.qkv.weight.shape == (config.head_dim * 8, 64)
    assert layer.mlp.gate_up.weight.result_size == 100
    assert not np.array_equal(layer.o.weight.codes, decoder.layers[1].o.weight.codes)
    # Of standard deviation 1 / sqrt(in), but for the rounding to 4 bits.
    assert np.std(dequantize(layer.qkv.weight)) == pytest.approx(64**-0.5, rel=0.05)
    assert decoder.layers[0].qkv.weight.scale_dtype == "bf16"
    decoder = _first_layer(decoder)
    session = models.start(decoder, jnp.ones((1, 4), jnp.int32), max_length=4, cache="kv4")
    assert session.logits.dtype == jnp.float32
    assert bool(jnp.isfinite(session.logits).all())


def test_memory_of_a_large_shape():
    config = dataclasses.replace(models.SHAPES["llama-3-8b"], num_layers=1)
    decoder = jax.eval_shape(lambda: models.random_quantized_decoder(config))
    # 4 bits a weight, 8 bits a group of 128, 4 bytes an output.
    assert decoder.bits_per_weight == pytest.approx(4 + 8 / 128, abs=0.02)
    weights = config.num_parameters - 2 * config.vocab_size * config.hidden_size
    tables = 2 * 2 * config.vocab_size * config.hidden_size
    assert decoder.nbytes == pytest.approx(tables + weights * 4.07 / 8, rel=0.001)


@pytest.mark.slow
def test_bad_calls_say_what_is_wrong(model, quantized, calibration, tmp_path):
    with pytest.raises(ValueError, match="tokens=None: RPN and CRS need text"):
        models.quantize_model(model)
    with pytest.raises(ValueError, match=r"tokens in 0..64 must be within 0..63"):
        models.quantize_model(model, np.array([[0, 64]]))
    with pytest.raises(TypeError, match="tokens.dtype=float32 must be an integer"):
        models.quantize_model(model, np.ones((1, 4), np.float32))
    with pytest.raises(ValueError, match=r"tokens.shape=\(4,\) must be \[n, T\]"):
        models.quantize_model(model, np.ones(4, np.int32))
    with pytest.raises(ValueError, match=r"tokens.shape=\(1, 1\) must be \[n, T \+ 1\]"):
        models.token_bits(quantized, np.ones((1, 1), np.int32))
    with pytest.raises(ValueError, match="cache='4bit' must be one of exact, kv4"):
        models.token_bits(quantized, np.ones((1, 4), np.int32), cache="4bit")
    with pytest.raises(ValueError, match=r"tokens in 0..64 must be within 0..63"):
        models.token_bits(quantized, np.array([[0, 64]]))
    with pytest.raises(TypeError, match="tokens.dtype=float32 must be an integer"):
        models.token_bits(quantized, np.ones((1, 4), np.float32))
    for call in (
        lambda: models.quantize_model(model, calibration, batch_size=0),
        lambda: models.token_bits(quantized, calibration, batch_size=0),
    ):
        with pytest.raises(ValueError, match="batch_size=0 must be at least 1"):
            call()
    weights = layer_weights(models.unstack(model).layers[0], model.config)
    biased = dataclasses.replace(weights.q, bias=jnp.ones(len(weights.q.weight)))
    with pytest.raises(ValueError, match="all of q, k, v must have a bias, or none of them"):
        quantize_layer(dataclasses.replace(weights, q=biased))


@pytest.mark.slow
def test_models_of_another_kind_are_refused(model, quantized, calibration, tmp_path):
    for call, message in [
        (
            lambda: models.quantize_model(quantized, calibration),
            "QuantizedDecoder, must be a Transformer",
        ),
        (
            lambda: models.save(quantized, tmp_path),
            "QuantizedDecoder, must be a Transformer; save_quant",
        ),
        (lambda: models.save_quantized(model, tmp_path), "Transformer, must be a QuantizedDecoder"),
        (lambda: models.token_bits(model, calibration), "Transformer, must be a Decoder"),
    ]:
        with pytest.raises(TypeError, match=f"model is a {message}"):
            call()
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_only_uniform_layers_are_saved(quantized, tmp_path):
    first, second = quantized.layers
    bare = dataclasses.replace(second, key_channel_scale=None)
    swapped = dataclasses.replace(second, o=second.mlp.down)
    for layers, message in [
        ((first, bare), r"layers\[1\] must have"),
        ((first, swapped), r"layers\[1\] must have"),
        ((first,), "1 layers must be config.num_layers=2"),
    ]:
        with pytest.raises(ValueError, match=message):
            models.save_quantized(dataclasses.replace(quantized, layers=layers), tmp_path)
    with pytest.raises(ValueError, match="dtype=int8 must be one of float32"):
        models.save_quantized(quantized, tmp_path, dtype=jnp.int8)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_small_heads_are_refused_before_calibration(model, calibration):
    config = dataclasses.replace(model.config, head_dim=12, num_layers=1)
    small, told = models.random_decoder(config, dtype=jnp.float32), []
    with pytest.raises(ValueError, match=r"num_pairs=8 must be at most the 6 pairs .*--no-crs"):
        models.quantize_model(small, calibration, progress=lambda *event: told.append(event))
    assert told == []
    with pytest.raises(
        ValueError, match="cache='kv4' cannot hold .*: head_dim=12 must be a multiple of 8"
    ):
        models.token_bits(small, calibration, cache="kv4")
    decoder = models.quantize_model(small, calibration, smoothing=smoothing.Smoothing(num_pairs=6))
    assert models.token_bits(decoder, calibration).shape == (3, 39)


def test_bad_checkpoints_say_what_is_wrong(quantized, tmp_path):
    models.save_quantized(quantized, tmp_path)
    config = models.read_config(tmp_path)
    block = config["quantization_config"]

    def rewrite(**changes):
        content = config | {"quantization_config": block | changes}
        (tmp_path / "config.json").write_text(json.dumps(content))

    with pytest.raises(ValueError, match="is a quantized model: the weights must be floating"):
        models.load_transformer(tmp_path)
    for changes, error, message in [
        ({"quant_method": "other"}, NotImplementedError, "quant_method='other' is not supported"),
        ({"version": 3}, NotImplementedError, "version=3 must be 2 or 1"),
        ({"scale_dtype": "int8"}, ValueError, "scale_dtype='int8' must be"),
        ({"group_size": 16}, ValueError, "group_size=16 must be 128 or 64 or 32"),
        ({"zeros": 1}, ValueError, "zeros=1 must be True or False"),
        ({"activations": "int8"}, ValueError, "activations='int8' must be e4m3 or bf16"),
        ({"input_order": ["norm"]}, ValueError, "input_order=.* must be a list of qkv, o,"),
        ({"embedding": "int8"}, ValueError, "embedding='int8' must be"),
        ({"lm_head": "int8"}, ValueError, "lm_head='int8' must be"),
        ({"key_channel_scale": False}, ValueError, "unexpected tensors: layers.0.key_channel_scal"),
        ({"scale_dtype": "bf16"}, ValueError, "scales has dtype uint8, must be bfloat16"),
    ]:
        rewrite(**changes)
        with pytest.raises(error, match=message):
            models.load(tmp_path)
    for changes, message in [
        ({"quantization_config": "turbojax-fireq"}, "quantization_config='turbojax-fireq' must be"),
        ({"torch_dtype": "auto"}, "torch_dtype='auto' must be one of float32, bfloat16, float16"),
    ]:
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(ValueError, match=message):
            models.load(tmp_path)
    rewrite()
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"norm": tensors["norm"][:-1]}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"norm has shape \(47,\), must be \(48,\)"):
        models.load(tmp_path)
    del tensors["layers.1.o.codes"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="lacks layers.1.o.codes"):
        models.load(tmp_path)
