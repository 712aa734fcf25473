"""Low-rank adapters beside floating-point weights: values, gradients, merging, training, meshes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from tests.models import hf_helpers
from tests.training.test_lora import CONFIG, SETTINGS, TOKENS, logits, normal, text, trained, wide
from turbojax import finetune, models
from turbojax.finetune.lora import LoraTrainer, token_losses
from turbojax.models.lora import (
    Adapters,
    init_adapters,
    merge_adapters,
    with_adapters,
    without_adapters,
)
from turbojax.models.quantized_layer import LINEARS

BIASED = dataclasses.replace(CONFIG, qkv_bias=True, output_bias=True, mlp_bias=True)


@pytest.fixture(scope="module")
def decoder():
    found = models.random_decoder(BIASED, dtype=jnp.float32)
    leaves, tree = jax.tree.flatten(found)  # biases are zeros there
    biased = [x + normal(x.shape, i, 0.1) if x.ndim == 1 else x for i, x in enumerate(leaves)]
    return jax.tree.unflatten(tree, biased)


def by_hand(decoder, adapters):
    """A decoder with kernels ``W + scale * (B A)^T``, summed in float64."""
    layers = []
    for params, own in zip(decoder.layers, adapters.layers, strict=True):
        params = jax.tree.map(lambda x: x, params)
        for name, adapter in own.items():
            linear = params["mlp" if name in LINEARS[4:] else "attention"][f"{name}_proj"]
            product = (adapters.scale * wide(adapter.b) @ wide(adapter.a)).T
            linear["kernel"] = jnp.asarray(wide(linear["kernel"]) + product, jnp.float32)
        layers.append(params)
    return dataclasses.replace(decoder, layers=tuple(layers))


def mean_loss(model):
    return jnp.mean(token_losses(model, TOKENS))


def test_they_add_what_merged_weights_have(decoder):
    """Logits of base and adapters are those of the sums, made by hand and by `merge_adapters`."""
    adapters = trained(decoder, rank=3)
    got = logits(with_adapters(decoder, adapters), TOKENS)
    want = logits(by_hand(decoder, adapters), TOKENS)
    assert np.abs(want - logits(decoder, TOKENS)).max() > 1
    np.testing.assert_allclose(got, want, atol=1e-3)
    merged = merge_adapters(decoder, adapters)
    np.testing.assert_allclose(logits(merged, TOKENS), want, atol=1e-3)
    assert jax.tree.structure(merged) == jax.tree.structure(decoder)


def test_gradients_are_those_of_the_merged_weights(decoder):
    """With dL/dW of the merged model, dL/dA = scale B^T dW and dL/dB = scale dW A^T, in float64."""
    adapters = trained(decoder, rank=3)

    @jax.jit
    def gradients(adapters, merged):
        ours = jax.grad(lambda x: mean_loss(with_adapters(decoder, x)))(adapters)
        layers = jax.grad(lambda x: mean_loss(dataclasses.replace(merged, layers=x)))(merged.layers)
        return ours, layers

    found, of_weights = gradients(adapters, by_hand(decoder, adapters))
    for own, given, weights in zip(found.layers, adapters.layers, of_weights, strict=True):
        assert set(own) == set(LINEARS)
        for name, adapter in own.items():
            part = weights["mlp" if name in LINEARS[4:] else "attention"]
            weight = wide(part[f"{name}_proj"]["kernel"]).T * adapters.scale
            for got, want in (
                (adapter.a, wide(given[name].b).T @ weight),
                (adapter.b, weight @ wide(given[name].a).T),
            ):
                assert np.linalg.norm(got - want) < 1e-4 * np.linalg.norm(want)
                assert np.linalg.norm(want) > 1e-4


@pytest.mark.fuzz
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.fuzz)])
def test_new_adapters_change_nothing(decoder, dtype):
    """Not a bit: `B` is zero, so the first loss is the base model's."""
    base = jax.tree.map(lambda x: x.astype(dtype), decoder)
    base = dataclasses.replace(base, dtype=jnp.dtype(dtype))
    adapters = init_adapters(base, rank=4, alpha=8.0)
    with_them = with_adapters(base, adapters)
    np.testing.assert_array_equal(logits(with_them, TOKENS), logits(base, TOKENS))
    for a, b in zip(
        jax.tree.leaves(without_adapters(with_them)), jax.tree.leaves(base), strict=True
    ):
        assert a is b
    again = with_adapters(with_them, trained(base, rank=2))
    assert again.layers[0]["mlp"]["up_proj"]["lora_a"].shape == (32, 2)
    settings = dataclasses.replace(SETTINGS, precision=dtype)
    trainer = LoraTrainer(base, adapters, settings, text(600))
    starts = trainer._starts(0)
    windows = np.stack([text(600)[i : i + SETTINGS.context + 1] for i in starts]).astype(np.int32)
    bits = models.token_bits(base, windows).mean()
    limit = 1e-5 if dtype == "float32" else 1e-2
    with jax.numpy_dtype_promotion("standard"):  # logits are float32, what they are made of not
        np.testing.assert_allclose(trainer.run_step()["bits"], bits, rtol=limit)


@pytest.mark.fuzz
@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v2-lite"])
def test_latent_attention(name, tmp_path):
    """In both of its forms; files have the names of its own linear layers."""
    file = {**hf_helpers.config(name), "first_k_dense_replace": 1, "num_hidden_layers": 2}
    base = models.random_decoder(models.TransformerConfig.from_hf(file), dtype=jnp.float32)
    with pytest.raises(NotImplementedError, match="must be of q.*, kv_a, kv_b, o"):
        init_adapters(base, targets=("gate",))
    queries = ("q",) if base.config.latent.query_rank is None else ("q_a", "q_b")
    assert set(init_adapters(base).targets) == {*queries, "kv_a", "kv_b", "o"}
    adapters = trained(base, rank=2)
    merged, beside = by_hand(base, adapters), with_adapters(base, adapters)
    tokens = TOKENS % base.config.vocab_size
    np.testing.assert_allclose(logits(beside, tokens), logits(merged, tokens), atol=1e-3)
    assert np.abs(logits(base, tokens) - logits(merged, tokens)).max() > 0.1
    prompt = np.asarray(tokens[:1, :5])
    for model in (beside, merged):
        session = models.start(model, prompt, max_length=32, cache="latent")
        np.testing.assert_allclose(session.logits, logits(merged, prompt)[:, -1], atol=1e-3)
    models.save_adapters(adapters, tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert "base_model.model.model.layers.1.self_attn.kv_a_proj_with_mqa.lora_A.weight" in tensors
    loaded = models.load_adapters(tmp_path, 2)
    jax.tree.map(np.testing.assert_array_equal, loaded, adapters)


@pytest.mark.fuzz
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_run_resumes_to_the_bit(decoder, tmp_path):
    """In parts, by Muon, with layers that are computed again and tokens that do not count."""
    tokens, learn = text(600), np.arange(600) % 3 > 0
    corpus = finetune.TokenCorpus(tokens, text(200, 1), learn=learn)
    rhythm = finetune.Rhythm(2, 2, 3, 2)
    adapters = init_adapters(decoder, rank=2, targets=("q", "down"))
    more = {"accumulate": 2, "optimizer_name": "muon", "remat": "full"}
    settings = dataclasses.replace(SETTINGS, **more)
    one, two = tmp_path / "one", tmp_path / "two"

    def run(folder, report=lambda row: None):
        return finetune.fine_tune_adapters(
            folder, decoder, adapters, settings, corpus, rhythm=rhythm, report=report
        )

    log = run(one)
    assert log["identity"]["gradient"] is None
    assert log["losses"][-1] < log["losses"][0]

    def stop(row):
        if row["step"] == 4 and "bits_per_token" in row:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(two, stop)
    assert run(two)["losses"] == log["losses"]
    files = [x / finetune.ADAPTERS_NAME / "adapter_model.safetensors" for x in (one, two)]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.fuzz
def test_folders_take_adapters(tmp_path):
    """`load_decoder` puts them beside the weights; merged into a Transformer they are a folder."""
    model = models.Transformer(BIASED, rngs=nnx.Rngs(2))
    adapters = trained(models.unstack(model), rank=2, targets=("q", "v", "down"))
    uneven = Adapters((adapters.layers[0], {"q": adapters.layers[1]["q"]}), adapters.scale)
    models.save(model, tmp_path / "base")
    models.save_adapters(uneven, tmp_path / "adapters")
    loaded = models.load_adapters(tmp_path / "adapters", 2)
    beside = models.load_decoder(tmp_path / "base", adapters=loaded)
    want = logits(by_hand(models.unstack(model), uneven), TOKENS)
    np.testing.assert_allclose(logits(beside, TOKENS), want, atol=1e-3)
    before = np.asarray(model.blocks.attention.q_proj.kernel[...])
    models.save(merge_adapters(model, uneven), tmp_path / "merged")
    np.testing.assert_array_equal(model.blocks.attention.q_proj.kernel[...], before)
    merged = models.load_decoder(tmp_path / "merged")
    np.testing.assert_allclose(logits(merged, TOKENS), want, atol=1e-3)
    prompt = np.asarray(TOKENS[:1, :5])
    one, two = (models.generate(x, prompt, max_new_tokens=6) for x in (beside, merged))
    np.testing.assert_array_equal(one, two)


def test_refusals(decoder):
    adapters = init_adapters(decoder, rank=2)
    with pytest.raises(ValueError, match="gradient='exact' is for INT4 weights: must be None"):
        with_adapters(decoder, adapters, gradient="exact")
    with pytest.raises(ValueError, match="gradient='e4m3' is for INT4 weights"):
        LoraTrainer(decoder, adapters, SETTINGS, text(600), gradient="e4m3")
    with pytest.raises(ValueError, match="remat='attention' must be 'none' or 'full'"):
        LoraTrainer(decoder, adapters, dataclasses.replace(SETTINGS, remat="attention"), text(600))
    with pytest.raises(ValueError, match="must be the decoder's dtype, float32"):
        LoraTrainer(
            decoder, adapters, dataclasses.replace(SETTINGS, precision="bfloat16"), text(600)
        )
    with pytest.raises(TypeError, match="model is a QuantizedDecoder, must be a Decoder or a Tr"):
        merge_adapters(models.random_quantized_decoder(CONFIG, dtype=jnp.float32), adapters)
    with pytest.raises(ValueError, match="must have none: without_adapters"):
        merge_adapters(with_adapters(decoder, adapters), adapters)
    with pytest.raises(ValueError, match="has adapters of .*'q_proj'.* merge_adapters"):
        models.quantize_model(with_adapters(decoder, adapters), TOKENS)
    with pytest.raises(TypeError, match="adapters is a tuple, must be Adapters"):
        merge_adapters(decoder, adapters.layers)
    with pytest.raises(ValueError, match="'kv_a',\\) must be some of \\('q', 'k', 'v'"):
        init_adapters(decoder, targets=("kv_a",))
