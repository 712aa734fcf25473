"""Low-rank adapters beside INT4 weights: what they compute, their gradients, training, files."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

from tests.oracles import int4 as oracle
from turbojax import models
from turbojax.finetune import Settings
from turbojax.finetune.checkpoint import checkpoint_manager
from turbojax.finetune.lora import LoraTrainer, token_losses
from turbojax.matmul.int4.weight import concatenate, dequantize, gate_and_up, quantize_weight
from turbojax.models import lora
from turbojax.models.checkpoint.adapters import load_adapters, save_adapters
from turbojax.models.lora import Adapter, Adapters, LoraLinear, init_adapters, with_adapters
from turbojax.models.quantized_layer import LINEARS, QuantizedLinear

CONFIG = models.TransformerConfig(
    vocab_size=256,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_length=64,
    tie_embeddings=True,
)
SETTINGS = Settings(
    steps=6, context=24, batch_size=2, learning_rate=1e-2, warmup_steps=1, precision="float32"
)


def normal(shape, seed, scale=1.0):
    return jnp.asarray(scale * np.random.default_rng(seed).normal(size=shape), jnp.float32)


def wide(x):
    return np.asarray(x.astype(jnp.float32), np.float64)


@pytest.fixture(scope="module")
def decoder():
    return models.random_quantized_decoder(CONFIG, dtype=jnp.float32)


def trained(decoder, seed=0, **options):
    """Adapters that change something."""
    adapters = init_adapters(decoder, **options)
    leaves, structure = jax.tree.flatten(adapters)
    return jax.tree.unflatten(
        structure, [normal(x.shape, seed + i, 0.1) for i, x in enumerate(leaves)]
    )


def text(size, seed=0):
    """Words that repeat, as bytes."""
    rng = np.random.default_rng(seed)
    words = [bytes(rng.integers(97, 123, 5).tolist()) for _ in range(8)]
    joined = b" ".join(words[i] for i in rng.integers(8, size=size // 6 + 1))
    return np.frombuffer(joined[:size], np.uint8)


def logits(model, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    caches = (None,) * model.config.num_layers
    hidden, _ = model.hidden(tokens, positions, models.causal_attention, caches)
    return model.logits(hidden)


TOKENS = jnp.asarray(np.random.default_rng(3).integers(0, 256, (2, 12)), jnp.int32)


# One layer ----------------------------------------------------------------------------------------


def gated_layer(gradient="exact", rank=3):
    """Of a gate, a partner and adapters for both, with the dense matrices that it stands for."""
    parts = [quantize_weight(normal((40, 130), seed, 0.1)) for seed in (1, 2)]
    bias = normal((80,), 3)
    base = QuantizedLinear(gate_and_up(*parts), bias)
    adapters = {
        name: Adapter(normal((rank, 130), seed, 0.1), normal((40, rank), seed + 1))
        for name, seed in (("gate", 4), ("up", 6))
    }
    sizes = {"gate": (40, 130), "up": (40, 130)}
    layer = lora._join(adapters, sizes, 0.5, gradient, base, "gate", "up")
    low = [0.5 * wide(adapters[name].b) @ wide(adapters[name].a) for name in ("gate", "up")]
    return layer, [wide(dequantize(part)) for part in parts], low, wide(bias)


def test_a_gated_layer_in_float64():
    """Adapters read tokens in floats, the weight their codes; the activation comes after both."""
    layer, weights, low, bias = gated_layer()
    x = normal((2, 5, 130), 8)
    got = layer(x, activation="swiglu")
    codes, scale = oracle.quantize_tokens(wide(x))
    of_weight = [codes @ w.T * scale[..., None] for w in weights]
    gate, up = (
        a + wide(x) @ w.T + b for a, w, b in zip(of_weight, low, np.split(bias, 2), strict=True)
    )
    want = gate * oracle.sigmoid(gate) * up
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    base = layer.base(x, activation="swiglu")
    assert np.linalg.norm(got - base) > 0.1 * np.linalg.norm(base)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("scale_dtype", ["e4m3", "bf16"])
def test_joined_layers(scale_dtype):
    """Of q, k and v two with adapters, of other ranks; the residual is added once."""
    options = {"scale_dtype": scale_dtype}
    parts = [quantize_weight(normal((n, 130), n, 0.1), **options) for n in (48, 16, 24)]
    base = QuantizedLinear(concatenate(parts))
    sizes = {"q": (48, 130), "k": (16, 130), "v": (24, 130)}
    adapters = {
        "q": Adapter(normal((3, 130), 1, 0.1), normal((48, 3), 2)),
        "v": Adapter(normal((5, 130), 3, 0.1), normal((24, 5), 4)),
    }
    layer = lora._join(adapters, sizes, 2.0, "e4m3", base, "q", "k", "v")
    x, residual = normal((7, 130), 5), normal((7, 88), 6)
    want = np.zeros((7, 88))
    want[:, :48] = 2 * wide(x) @ (wide(adapters["q"].b) @ wide(adapters["q"].a)).T
    want[:, 64:] = 2 * wide(x) @ (wide(adapters["v"].b) @ wide(adapters["v"].a)).T
    got = wide(layer(x, residual=residual)) - wide(base(x, residual=residual))
    np.testing.assert_allclose(got, want, atol=1e-4)
    none = lora._join({}, sizes, 2.0, "e4m3", base, "q", "k", "v")
    np.testing.assert_array_equal(none(x, residual=residual), base(x, residual=residual))


def test_gradients_in_float64():
    """Of the inputs, straight through the rounding, and of both factors of an adapter."""
    weight = quantize_weight(normal((40, 130), 1, 0.1))
    x, a, b, d = (
        normal((7, 130), 2),
        normal((3, 130), 3, 0.1),
        normal((40, 3), 4),
        normal((7, 40), 5),
    )

    def call(x, a, b):
        return LoraLinear(QuantizedLinear(weight), a, b, "exact")(x)

    d_x, d_a, d_b = jax.vjp(call, x, a, b)[1](d)
    x, a, b, d = map(wide, (x, a, b, d))
    np.testing.assert_allclose(d_x, d @ (wide(dequantize(weight)) + b @ a), atol=1e-4)
    np.testing.assert_allclose(d_a, b.T @ d.T @ x, atol=1e-4)
    np.testing.assert_allclose(d_b, d.T @ (x @ a.T), atol=1e-4)


# A model ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_new_adapters_change_nothing(decoder):
    adapters = init_adapters(decoder, rank=4, alpha=8.0)
    assert adapters.scale == 2.0
    assert adapters.targets == LINEARS
    assert adapters.num_parameters == 2 * 4 * (3 * (32 + 48) + (64 + 32) * 2 + (32 + 32) * 2)
    with_them = with_adapters(decoder, adapters)
    np.testing.assert_allclose(logits(with_them, TOKENS), logits(decoder, TOKENS), atol=2e-3)
    for a, b in zip(
        jax.tree.leaves(lora.without_adapters(with_them)), jax.tree.leaves(decoder), strict=True
    ):
        assert a is b


def assert_all_have_gradients(decoder, adapters):
    def loss(adapters):
        return jnp.mean(token_losses(with_adapters(decoder, adapters), TOKENS))

    for leaf in jax.tree.leaves(jax.jit(jax.grad(loss))(adapters)):
        assert np.linalg.norm(leaf) > 0


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("target", LINEARS)
def test_every_target_counts(decoder, target):
    """In the forward pass, and its gradient reaches every layer's adapter."""
    adapters = trained(decoder, targets=(target,))
    changed = logits(with_adapters(decoder, adapters), TOKENS)
    assert np.abs(changed - logits(decoder, TOKENS)).max() > 1e-2
    assert_all_have_gradients(decoder, adapters)


@pytest.mark.slow
def test_a_quantized_head_has_a_gradient():
    decoder = models.random_quantized_decoder(CONFIG, dtype=jnp.float32, quantize_head=True)
    adapters = trained(decoder, targets=("q",))
    assert_all_have_gradients(decoder, adapters)


@pytest.mark.slow
def test_it_generates(decoder):
    """With adapters as without: greedy tokens are those of one pass over the whole text."""
    model = with_adapters(decoder, trained(decoder))
    prompt = np.asarray(TOKENS[:1, :5])
    out = np.asarray(models.generate(model, prompt, max_new_tokens=6))
    whole = jnp.asarray(np.concatenate([prompt, out[:, -6:]], axis=1))
    np.testing.assert_array_equal(np.argmax(logits(model, whole), -1)[:, 4:-1], whole[:, 5:])


def test_wrong_calls(decoder):
    adapters = init_adapters(decoder, rank=2)
    for options, words in (
        ({"targets": ()}, "must be some of"),
        ({"targets": ("q", "q")}, "each once"),
        ({"targets": ("qkv",)}, "must be some of"),
        ({"rank": 0}, "rank"),
        ({"alpha": 0.0}, "alpha=0.0 must be positive"),
    ):
        with pytest.raises(ValueError, match=words):
            init_adapters(decoder, **options)
    with pytest.raises(TypeError, match="decoder is a Adapters, must be a QuantizedDecoder"):
        init_adapters(adapters)
    with pytest.raises(TypeError, match="adapters is a tuple, must be Adapters"):
        with_adapters(decoder, adapters.layers)
    with pytest.raises(ValueError, match="adapters of 1 layers, must be 2"):
        with_adapters(decoder, Adapters(adapters.layers[:1], 1.0))
    with pytest.raises(ValueError, match="gradient='bf16' must be one of"):
        with_adapters(decoder, adapters, gradient="bf16")
    wrong = {**adapters.layers[0], "q": adapters.layers[0]["k"]}
    with pytest.raises(ValueError, match=r"layers\[0\].q: a.shape=\(2, 32\) and b.shape=\(32, 2\)"):
        with_adapters(decoder, Adapters((wrong, adapters.layers[1]), 1.0))
    with pytest.raises(ValueError, match="adapter of 'x', must be of"):
        with_adapters(decoder, Adapters(({"x": wrong["q"]}, {}), 1.0))
    layer = dataclasses.replace(decoder.layers[1], mlp=object())
    strange = dataclasses.replace(decoder, layers=(decoder.layers[0], layer))
    with pytest.raises(NotImplementedError, match=r"layers\[1\].mlp is a object: must be a Quant"):
        with_adapters(strange, adapters)


# Training -----------------------------------------------------------------------------------------


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("gradient", ["e4m3", "exact"])
def test_training_by_hand(decoder, gradient):
    """`jax.value_and_grad` and optax on the adapters, all under `jit`; the model stays as it is."""
    before = [np.asarray(x).tobytes() for x in jax.tree.leaves(decoder)]
    adapters, optimizer = init_adapters(decoder, rank=2), optax.adam(3e-2)
    tokens = jnp.asarray(text(4 * 24)).reshape(4, 24).astype(jnp.int32)

    @jax.jit
    def step(adapters, state):
        def loss(adapters):
            model = with_adapters(decoder, adapters, gradient=gradient)
            return jnp.mean(token_losses(model, tokens))

        value, grads = jax.value_and_grad(loss)(adapters)
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            updates, state = optimizer.update(grads, state)
            return value, optax.apply_updates(adapters, updates), state

    state, losses = optimizer.init(adapters), []
    for _ in range(15):
        loss, adapters, state = step(adapters, state)
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 0.5
    assert [np.asarray(x).tobytes() for x in jax.tree.leaves(decoder)] == before


@pytest.mark.quick(first=1, slow=1)
@pytest.mark.parametrize(("weights", "parts"), [("float", 2), ("int4", 2), ("int4", 1)])
def test_loss_and_gradient_of_the_whole_batch(weights, parts):
    """In parts, of which each has another share of what counts: as added over sequences."""
    config = dataclasses.replace(CONFIG, num_layers=1)
    random = models.random_decoder if weights == "float" else models.random_quantized_decoder
    decoder, options = random(config, dtype=jnp.float32), {}
    if weights == "int4":
        options["gradient"] = "exact"
    adapters, stream = trained(decoder, rank=2), text(600)
    settings = dataclasses.replace(SETTINGS, batch_size=4, accumulate=parts)
    learn = np.random.default_rng(0).random(600) < np.arange(600) // settings.context % 4 / 4
    run = LoraTrainer(decoder, adapters, settings, stream, learn=learn, **options)

    def total(adapters, tokens, counts):
        model = with_adapters(decoder, adapters, **options)
        return jnp.sum(jnp.where(counts, token_losses(model, tokens[None])[0], 0.0))

    find, found = jax.jit(jax.value_and_grad(total)), []
    windows = [slice(i, i + settings.context + 1) for i in run._starts(0)]
    for window in windows:
        tokens = jnp.asarray(stream[window], jnp.int32)
        found.append(find(adapters, tokens, jnp.asarray(learn[window][1:])))
    counts = [learn[window][1:].sum() for window in windows]
    assert len(set(counts)) > 1  # else the parts' means would do
    _, _, frozen, *given = run._arguments(0)
    (value, _), grads = jax.jit(run._value_and_grad())(adapters, frozen, *given)
    # A float32 sum of n numbers is off by n units of rounding of their size at most.
    units = 4 * settings.tokens_per_step * 2.0**-24
    assert float(value) == pytest.approx(sum(float(x) for x, _ in found) / sum(counts), rel=units)
    for grad, *each in zip(*map(jax.tree.leaves, (grads, *(x for _, x in found))), strict=True):
        wanted = sum(map(wide, each)) / sum(counts)
        np.testing.assert_allclose(grad, wanted, rtol=0, atol=units * np.abs(wanted).max())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_the_trainer_resumes(decoder, tmp_path):
    """Adapters of a run that was interrupted are those of one that was not, bit for bit."""
    stream, settings = text(600), dataclasses.replace(SETTINGS, accumulate=2)

    def trainer():
        return LoraTrainer(decoder, init_adapters(decoder, rank=2), settings, stream)

    whole = trainer()
    losses = [float(whole.run_step()["bits"]) for _ in range(SETTINGS.steps)]
    assert losses[-1] < losses[0]
    first, second = trainer(), trainer()
    with checkpoint_manager(tmp_path) as manager:
        assert not first.restore(manager)
        for _ in range(2):
            first.run_step()
        first.save(manager)
        manager.wait_until_finished()
        assert second.restore(manager)
    assert second.step == 2
    for _ in range(SETTINGS.steps - 2):
        second.run_step()
    jax.tree.map(np.testing.assert_array_equal, whole.adapters, second.adapters)
    held_out = text(25, seed=0)[None].astype(np.int32)
    after, before = (models.token_bits(m, held_out).mean() for m in (whole.model(), decoder))
    assert after < before


def test_trainer_refusals(decoder):
    adapters = init_adapters(decoder)
    for stream, settings, words in (
        (text(600), dataclasses.replace(SETTINGS, precision="bfloat16"), "must be the decoder's"),
        (text(600), dataclasses.replace(SETTINGS, context=65), "max_length, 64"),
        (text(30), SETTINGS, "must be more than twice"),
        (np.full(600, 256), SETTINGS, "token 256 must be below 256"),
    ):
        with pytest.raises(ValueError, match=words):
            LoraTrainer(decoder, adapters, settings, stream)


# Files --------------------------------------------------------------------------------------------


def test_files_are_pefts(decoder, tmp_path):
    """Its names, shapes and settings; what is read is what was written, bit for bit."""
    adapters = trained(decoder, rank=2, alpha=3.0, targets=("q", "down"))
    save_adapters(adapters, tmp_path, base_model="some/model")
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert len(tensors) == 2 * 2 * 2
    prefix = "base_model.model.model.layers.1"
    a, b = (tensors[f"{prefix}.self_attn.q_proj.lora_{x}.weight"] for x in "AB")
    assert (a.shape, b.shape) == ((2, 32), (64, 2))
    np.testing.assert_array_equal(a, adapters.layers[1]["q"].a)
    assert tensors[f"{prefix}.mlp.down_proj.lora_B.weight"].shape == (32, 2)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA"
    assert (config["r"], config["lora_alpha"]) == (2, 3.0)
    assert config["target_modules"] == ["q_proj", "down_proj"]
    assert config["base_model_name_or_path"] == "some/model"
    loaded = load_adapters(tmp_path, 2)
    assert loaded.scale == adapters.scale
    jax.tree.map(np.testing.assert_array_equal, loaded, adapters)


def test_stored_in_sixteen_bits(decoder, tmp_path):
    adapters = trained(decoder, rank=2)
    save_adapters(adapters, tmp_path, dtype=jnp.bfloat16)
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), adapters)
    jax.tree.map(np.testing.assert_array_equal, load_adapters(tmp_path, 2), rounded)


def test_settings_of_peft(decoder, tmp_path):
    save_adapters(trained(decoder, rank=4, alpha=8.0), tmp_path)
    path = tmp_path / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "use_rslora": True, "rank_pattern": {}}))
    assert load_adapters(tmp_path, 2).scale == 4.0
    for change, error, words in (
        ({"peft_type": "IA3"}, NotImplementedError, "peft_type='IA3', not LORA"),
        ({"use_dora": True}, NotImplementedError, "use_dora=True is not supported"),
        ({"rank_pattern": {"q_proj": 2}}, NotImplementedError, "rank_pattern="),
        ({"bias": "all"}, NotImplementedError, "bias='all' is not supported"),
        ({"r": 0}, ValueError, "r=0 must be a positive integer"),
        (
            {"r": 16},
            ValueError,
            r"layer 0 has lora_A of shape \(4, 48\) and lora_B of shape \(32, 4\) of mlp.*r=16",
        ),
        ({"lora_alpha": "16"}, ValueError, "lora_alpha='16' must be a number"),
    ):
        path.write_text(json.dumps({**config, **change}))
        with pytest.raises(error, match=words):
            load_adapters(tmp_path, 2)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        load_adapters(tmp_path, 2)


def test_tensors_that_do_not_fit(decoder, tmp_path):
    save_adapters(trained(decoder, rank=2), tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    with pytest.raises(ValueError, match="is of layer 1, the model has 1"):
        load_adapters(tmp_path, 1)
    save_file({k: v for k, v in tensors.items() if k != name}, file)
    with pytest.raises(ValueError, match=r"layer 1 lacks lora_A of self_attn.q_proj"):
        load_adapters(tmp_path, 2)
    for strange in (name.replace("q_proj", "qkv_proj"), name.replace("weight", "bias")):
        save_file({**tensors, strange: tensors[name]}, file)
        with pytest.raises(NotImplementedError, match="must be of self_attn.q_proj"):
            load_adapters(tmp_path, 2)
    save_file({**tensors, name: tensors[name][0]}, file)
    with pytest.raises(ValueError, match=r"has shape \(32,\), must be a matrix"):
        load_adapters(tmp_path, 2)


def test_adapters_that_are_missing(decoder, tmp_path):
    save_adapters(trained(decoder, rank=2), tmp_path)
    file, path = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"
    tensors, config = load_file(file), json.loads(path.read_text())
    save_file({k: v for k, v in tensors.items() if ".layers.1." not in k}, file)
    with pytest.raises(ValueError, match=r"layer 1 lacks the adapter of self_attn.q_proj"):
        load_adapters(tmp_path, 2)
    for change, found in (
        ({"layers_to_transform": [0]}, [7, 0]),
        ({"layers_to_transform": 0}, [7, 0]),
        ({"target_modules": "all-linear"}, [7, 0]),
        ({"layers_to_transform": [0, 2]}, "layers_to_transform=.* must be from 0 to 1"),
        ({"layers_to_transform": "0"}, "layers_to_transform='0' must be integers"),
        ({"target_modules": {"q_proj": 1}}, "target_modules=.* must be names"),
    ):
        path.write_text(json.dumps({**config, **change}))
        if isinstance(found, list):
            assert [len(layer) for layer in load_adapters(tmp_path, 2).layers] == found
            continue
        with pytest.raises(ValueError, match=found):
            load_adapters(tmp_path, 2)
    save_file({}, file)
    with pytest.raises(ValueError, match="must hold adapters, has none"):
        load_adapters(tmp_path, 2)
    path.write_text(json.dumps(config))
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name].astype(np.int32)}, file)
    with pytest.raises(ValueError, match=r"has dtype .?I32.?, must be BF16, F16, F32, F64"):
        load_adapters(tmp_path, 2)


def test_layers_with_other_targets(decoder, tmp_path):
    """Modules are then named in full, so that none is missed where there is none."""
    first, second = trained(decoder, rank=2).layers
    uneven = Adapters(({"q": first["q"]}, {"q": second["q"], "down": second["down"]}), 1.0)
    save_adapters(uneven, tmp_path)
    loaded = load_adapters(tmp_path, 2)
    assert jax.tree.structure(loaded) == jax.tree.structure(uneven)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"][0] == "model.layers.0.self_attn.q_proj"
    file = tmp_path / "adapter_model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if "down" not in k}, file)
    with pytest.raises(ValueError, match=r"layer 1 lacks the adapter of mlp.down_proj"):
        load_adapters(tmp_path, 2)


def test_what_cannot_be_saved(decoder, tmp_path):
    with pytest.raises(TypeError, match="adapters is a QuantizedDecoder, must be Adapters"):
        save_adapters(decoder, tmp_path)
    two = Adapters(
        (init_adapters(decoder, rank=2).layers[0], init_adapters(decoder, rank=3).layers[1]), 1.0
    )
    with pytest.raises(ValueError, match=r"must have one rank, have \[2, 3\]"):
        save_adapters(two, tmp_path)
    huge = jax.tree.map(lambda x: x.at[0, 0].set(1e30), trained(decoder, rank=2))
    with pytest.raises(ValueError, match="lora_A"):
        save_adapters(huge, tmp_path, dtype=jnp.float16)
