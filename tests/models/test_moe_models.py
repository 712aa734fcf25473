"""Mixtral and Qwen3-MoE: experts in the float decoder, rounded to INT4, saved, beside adapters."""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models import moe_helpers as moe
from tests.models import tiny
from tests.models.moe_helpers import CONFIGS, logits, relative
from turbojax import models, smoothing
from turbojax.flax.norms import rms_norm
from turbojax.matmul.grouped.tiles import most_tiles
from turbojax.matmul.int4.experts import expert_of
from turbojax.matmul.int4.weight import dequantize
from turbojax.models import TransformerConfig
from turbojax.models.families import ExpertsConfig
from turbojax.models.feed_forward import Experts, apply_experts, tile_of
from turbojax.models.layer_by_layer import calibrate
from turbojax.models.quantize import layer_params, layer_weights
from turbojax.models.quantized_layer import QuantizedExperts, QuantizedMlp
from turbojax.quantizers import quantize_tokens

MIXED = "qwen3-moe-mixed"
NAMES = [*CONFIGS]
REST = [name for name in NAMES if name != MIXED]
FEW = [
    MIXED,
    pytest.param(REST[0], marks=pytest.mark.slow),
    *(pytest.param(name, marks=pytest.mark.fuzz) for name in REST[1:]),
]
SMOOTHING = smoothing.Smoothing(num_pairs=3)
NOTHING = smoothing.Smoothing(cas=False, pts=False, rpn=False, crs=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return functools.cache(lambda name: moe.write(CONFIGS[name], tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="module")
def decoder(folder):
    return functools.cache(lambda name: models.load_decoder(folder(name)))


@pytest.fixture(scope="module")
def quantized(decoder):
    return functools.cache(
        lambda name: models.quantize_model(decoder(name), moe.tokens(2, 24, 5), smoothing=SMOOTHING)
    )


def experts_of(decoder, number):
    """A layer's experts as they run."""
    dtypes = {"dtype": decoder.dtype, "param_dtype": decoder.dtype}
    module = Experts(decoder.config, rngs=nnx.Rngs(0), **dtypes)
    nnx.update(module, decoder.layers[number]["mlp"])
    return module


@pytest.mark.quick(2, slow=0)
@pytest.mark.parametrize("count", [1, 2, 50])
@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", MIXED])
def test_a_layer_is_as_the_oracle(decoder, name, count):
    """Of one token and two, too, where most experts have none."""
    config, params = CONFIGS[name], decoder(name).layers[1]["mlp"]
    x = np.random.default_rng(count).standard_normal((1, count, config.hidden_size))
    x = x.astype(np.float32)
    got = jax.jit(experts_of(decoder(name), 1))(jnp.asarray(x))
    kernels = [params[f"{part}_proj"]["kernel"] for part in ("gate", "up", "down")]
    want = moe.oracle(x[0], params["router"]["kernel"], *kernels, config.experts)
    np.testing.assert_allclose(got[0], want, atol=2e-5 * np.abs(want).max())


@pytest.mark.fuzz
@pytest.mark.parametrize("sizes", [(0, 7, 0, 21, 1, 0), (29, 0, 0, 0, 0, 0), (5, 5, 5, 5, 5, 4)])
def test_tiles_compute_what_ragged_products_do(decoder, sizes):
    """And their gradients; NaN stays in its row."""
    mlp = experts_of(decoder("qwen3-moe"), 1)
    graph, state = nnx.split(mlp)
    x = np.random.default_rng(0).standard_normal((29, 64)).astype(np.float32)
    group_sizes = jnp.asarray(sizes, jnp.int32)

    def run(state, x, tile):
        made = nnx.merge(graph, state)
        if tile is None:
            return made.of_sorted(x, group_sizes)
        return made.in_tiles(x, group_sizes, tile)

    def loss(state, x, tile):
        return jnp.sum(jnp.sin(run(state, x, tile)))

    want = jax.grad(loss, argnums=(0, 1))(state, x, None)
    bad = x.copy()
    bad[9, 3] = np.nan
    for tile in (1, 4, 8):
        got = run(state, x, tile)
        np.testing.assert_allclose(got, run(state, x, None), atol=1e-4)
        found = jax.grad(loss, argnums=(0, 1))(state, x, tile)
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-4), found, want)
        other = run(state, bad, tile)
        assert np.isnan(other[9]).all()
        np.testing.assert_array_equal(np.delete(other, 9, 0), np.delete(got, 9, 0))


def test_tiles_where_experts_are_many():
    """No more than twice as many as experts, and never where `ragged_dot` does less."""
    assert tile_of(0, 128) is None
    assert tile_of(8, 128) == 1
    assert tile_of(128, 128) is None
    for rows, experts, tile in ((16384, 128, 128), (4096, 8, 512), (2**17, 128, 1024)):
        assert tile_of(rows, experts) == tile
        assert most_tiles(rows, experts, tile) <= 2 * experts


def test_memory_of_many_experts():
    """A prompt through experts takes memory for its rows, not for them once for each expert."""
    size, count, length = 64, 64, 2048
    experts = ExpertsConfig(count, 8, 32)
    config = dataclasses.replace(CONFIGS["qwen3-moe"], experts=experts)
    dtypes = {"dtype": jnp.float32, "param_dtype": jnp.float32}
    graph, state = nnx.split(nnx.eval_shape(lambda: Experts(config, rngs=nnx.Rngs(0), **dtypes)))
    x = jax.ShapeDtypeStruct((1, length, size), jnp.float32)
    run = jax.jit(lambda state, x: nnx.merge(graph, state)(x)).lower(state, x).compile()
    rows = 4 * 8 * length * size
    assert run.memory_analysis().temp_size_in_bytes < 24 * rows < count * rows
    assert run.cost_analysis()["flops"] < 4 * 2 * 8 * length * 3 * size * 32


def test_a_token_that_is_not_finite_changes_no_other(decoder):
    mlp = experts_of(decoder("qwen3-moe"), 1)
    x = np.random.default_rng(0).standard_normal((1, 9, 64)).astype(np.float32)
    bad = x.copy()
    bad[0, 4, 7] = np.nan
    one, other = (np.asarray(mlp(jnp.asarray(a)))[0] for a in (x, bad))
    assert np.isnan(other[4]).all()
    np.testing.assert_array_equal(np.delete(one, 4, 0), np.delete(other, 4, 0))


@pytest.mark.slow
def test_no_tokens(decoder):
    assert experts_of(decoder("mixtral"), 0)(jnp.zeros((1, 0, 64))).shape == (1, 0, 64)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("name", NAMES)
def test_the_three_ways_to_read_a_folder_agree(folder, decoder, name, tmp_path):
    """Layer by layer, and stacked, in two stacks if layers are unlike; saved and read again."""
    stored = models.open_decoder(folder(name))
    for number, layer in enumerate(decoder(name).layers):
        assert jax.tree.structure(stored.layers[number]) == jax.tree.structure(layer)
        jax.tree.map(np.testing.assert_array_equal, stored.layers[number], layer)
    model = models.load(folder(name))
    unstacked = models.unstack(model)
    jax.tree.map(np.testing.assert_array_equal, unstacked.layers, decoder(name).layers)
    text = moe.tokens(2, 12)
    got = np.asarray(model(jnp.asarray(text)))
    np.testing.assert_allclose(got, logits(decoder(name), text), atol=1e-4)
    models.save(model, tmp_path, max_shard_bytes=60_000)
    again = models.load_decoder(tmp_path)
    assert again.config == decoder(name).config
    jax.tree.map(np.testing.assert_array_equal, again.layers, decoder(name).layers)
    size = sum(x.size for x in jax.tree.leaves(decoder(name)))
    assert CONFIGS[name].num_parameters == size


def test_parameters_are_counted(decoder):
    assert CONFIGS[MIXED].num_parameters == sum(x.size for x in jax.tree.leaves(decoder(MIXED)))


@pytest.mark.slow
def test_gradients_reach_router_and_experts(folder):
    graph, state = nnx.split(models.load(folder("qwen3-moe")))
    text = jnp.asarray(moe.tokens(1, 8))

    def loss(state):
        return jnp.mean(jax.nn.logsumexp(nnx.merge(graph, state)(text), axis=-1))

    found = nnx.to_pure_dict(jax.grad(loss)(state))["blocks"]["mlp"]
    for part in ("router", "gate_proj", "down_proj"):
        assert np.isfinite(found[part]["kernel"]).all()
        assert np.abs(found[part]["kernel"]).max() > 0


@pytest.mark.fuzz
@pytest.mark.parametrize("name", FEW)
def test_smoothing_is_exact(decoder, name):
    """CAS, PTS, RPN, folded into experts and router: the float decoder's logits."""
    float_decoder, config = decoder(name), CONFIGS[name]
    options = dataclasses.replace(SMOOTHING, crs=False, rpn=False, pts=False)
    seen = calibrate(float_decoder, moe.tokens(2, 24, 5))
    layers = tuple(
        layer_params(smoothing.smooth_layer(layer_weights(params, config), x, options))
        for params, x in zip(float_decoder.layers, seen, strict=True)
    )
    text = moe.tokens(2, 20)
    exact = logits(float_decoder, text)
    changed = dataclasses.replace(float_decoder, layers=layers)
    assert relative(logits(changed, text), exact) < 1e-4
    router = [x.layers[1]["mlp"]["router"]["kernel"] for x in (float_decoder, changed)]
    assert np.abs(router[0] - router[1]).max() > 0.01


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PlainExperts:
    """Of dequantized weights, every expert of every token, in float32; tokens rounded or not."""

    experts: QuantizedExperts
    rounds: bool = dataclasses.field(metadata={"static": True})

    def __call__(self, hidden, norm, config, *, residual=None):
        count = config.experts.count
        gate_up = jnp.stack([dequantize(expert_of(self.experts.gate_up, e)) for e in range(count)])
        down = jnp.stack([dequantize(expert_of(self.experts.down, e)) for e in range(count)])

        def product(x, w):
            if self.rounds:
                tokens = quantize_tokens(x)
                x = tokens.codes.astype(jnp.float32) * tokens.scale.astype(jnp.float32)[..., None]
            return jnp.einsum("mi,moi->mo", x, w, precision="highest")

        def compute(x, sizes):
            mine = jnp.repeat(jnp.arange(count), sizes, total_repeat_length=len(x))
            gate, up = jnp.split(product(x, gate_up[mine]), 2, axis=-1)
            return product(jax.nn.silu(gate) * up, down[mine])

        normed = rms_norm(hidden, norm, config.norm_eps)
        out = apply_experts(normed, self.experts.router, config.experts, compute)
        return out if residual is None else out + residual


@pytest.mark.fuzz
@pytest.mark.parametrize("name", FEW)
def test_quantized_experts_compute_what_their_weights_say(quantized, name):
    decoder, text = quantized(name), moe.tokens(2, 30, 3)
    got = logits(decoder, text)

    def plain(layer, rounds):
        if isinstance(layer.mlp, QuantizedMlp):
            return layer
        return dataclasses.replace(layer, mlp=PlainExperts(layer.mlp, rounds))

    want, unrounded = (
        logits(
            dataclasses.replace(decoder, layers=tuple(plain(x, rounds) for x in decoder.layers)),
            text,
        )
        for rounds in (True, False)
    )
    error = np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)
    # Now and then a sum in another order rounds an activation to its neighbour.
    assert np.quantile(error, 0.1) < 1e-4
    assert relative(got, want) < 0.5 * relative(unrounded, want)


@pytest.mark.fuzz
@pytest.mark.parametrize("name", FEW)
def test_quantized_layer_by_layer_saved_and_loaded(folder, quantized, name, tmp_path):
    decoder = quantized(name)
    streamed = models.quantize_model(
        models.open_decoder(folder(name)), moe.tokens(2, 24, 5), smoothing=SMOOTHING
    )
    models.save_quantized(decoder, tmp_path)
    loaded = models.load(tmp_path)
    for other in (streamed, loaded):
        assert tiny.same(other, decoder)
    assert 4 < decoder.bits_per_weight < 16
    file = json.loads((tmp_path / "config.json").read_text())
    file["quantization_config"]["activations"] = "bf16"
    (tmp_path / "config.json").write_text(json.dumps(file))
    with pytest.raises(NotImplementedError, match="must be 'e4m3' and .* of a model with experts"):
        models.load(tmp_path)


@pytest.mark.slow
def test_scales_of_16_bits(decoder, tmp_path):
    decoder = models.quantize_model(decoder(MIXED), smoothing=NOTHING, scale_dtype="bf16")
    assert decoder.layers[1].mlp.gate_up.scale_dtype == "bf16"
    models.save_quantized(decoder, tmp_path)
    jax.tree.map(np.testing.assert_array_equal, models.load(tmp_path), decoder)


@pytest.mark.fuzz
@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("kind", ["float", "quantized"])
def test_texts_continue_through_caches_as_in_one_pass(decoder, quantized, name, kind):
    model = decoder(name) if kind == "float" else quantized(name)
    prompts = moe.tokens(2, 12, 8)
    texts = models.generate(model, prompts, max_new_tokens=5, cache="exact")
    whole = np.concatenate([prompts, np.asarray(texts)], axis=1)
    np.testing.assert_array_equal(texts, logits(model, whole).argmax(-1)[:, 11:-1])


@pytest.mark.fuzz
@pytest.mark.parametrize("kind", ["float", "quantized"])
def test_the_engine_serves_them(decoder, quantized, kind):
    """Prompts of other lengths, side by side, and in chunks: the texts of `generate`."""
    model = decoder(MIXED) if kind == "float" else quantized(MIXED)
    prompts = [[int(x) for x in moe.tokens(1, count, count)[0]] for count in (12, 3)]
    engine = models.Engine(model, num_pages=8, page_size=16, max_sequences=2, step_tokens=8)
    numbers = [engine.add(models.Request(prompt, 5)) for prompt in prompts]
    found = engine.run()
    for number, prompt in zip(numbers, prompts, strict=True):
        [want] = models.generate(model, np.array([prompt]), max_new_tokens=5, cache="exact")
        assert found[number].tokens == tuple(int(x) for x in want)


@pytest.mark.fuzz
def test_adapters_of_attention_beside_experts(quantized):
    decoder, text = quantized(MIXED), moe.tokens(1, 10)
    adapters = models.init_adapters(decoder, rank=2)
    assert adapters.targets == ("q", "k", "v", "o")
    shaken = jax.tree.map(lambda x: x + 0.05, adapters)

    def mean(adapters):
        model = models.with_adapters(decoder, adapters)
        positions = jnp.arange(10)[None]
        nothing = (None,) * moe.LAYERS
        hidden, _ = model.hidden(jnp.asarray(text), positions, models.causal_attention, nothing)
        return jnp.mean(jax.nn.logsumexp(model.logits(hidden), axis=-1))

    gradient = jax.grad(mean)(shaken)
    # Those of the first layer pass all experts.
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(gradient.layers[0]["v"]))
    model = models.with_adapters(decoder, shaken)
    assert relative(logits(model, text), logits(decoder, text)) > 0.01
    plain = models.without_adapters(model)
    assert jax.tree.structure(plain) == jax.tree.structure(decoder)
    with pytest.raises(NotImplementedError, match="adapters of gate in layer 1 are not supported"):
        models.init_adapters(decoder, targets=("q", "gate"))
    wrong = tuple({"up": models.Adapter(jnp.ones((1, 64)), jnp.ones((96, 1)))} for _ in range(3))
    with pytest.raises(NotImplementedError, match="adapters of up in layer 1 are not supported"):
        models.with_adapters(decoder, models.Adapters(wrong, 1.0))


@pytest.mark.fuzz
def test_unrounded_tokens_are_refused(quantized):
    with pytest.raises(NotImplementedError, match="activations='bf16' is not supported of a dec"):
        quantized(MIXED).with_activations("bf16")
    assert quantized(MIXED).with_activations("e4m3").config == CONFIGS[MIXED]


def test_packed_folders_are_refused(folder, tmp_path):
    file = json.loads((folder("mixtral") / "config.json").read_text())
    file["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 128}
    file["quantization_config"] |= {"zero_point": True, "version": "gemm"}
    (tmp_path / "config.json").write_text(json.dumps(file))
    with pytest.raises(NotImplementedError, match="is not supported of a model with experts"):
        models.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "dense"),
    [
        ({}, ()),
        ({"mlp_only_layers": [1]}, (1,)),
        ({"decoder_sparse_step": 2}, (0, 2)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [2, 7]}, (0, 2)),
        ({"num_experts": None, "num_local_experts": 6}, ()),
        ({"decoder_sparse_step": 4}, None),
        ({"num_experts": 0}, None),
        ({"mlp_only_layers": [0, 1, 2]}, None),
    ],
)
def test_which_layers_have_experts(change, dense):
    config = TransformerConfig.from_hf({**CONFIGS["qwen3-moe"].to_hf(), **change})
    assert (config.experts and config.experts.dense_layers) == dense
    assert [config.has_experts(i) for i in range(3)] == [
        dense is not None and i not in dense for i in range(3)
    ]
    assert TransformerConfig.from_hf(config.to_hf()) == config


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qwen3-moe", {"num_experts_per_tok": 7}, "num_experts_per_tok=7 must be at most the 6"),
        ("qwen3-moe", {"num_local_experts": 5}, "num_experts and num_local_experts must be equal"),
        ("qwen3-moe", {"num_experts": 10**9}, "num_experts=1000000000 must be at most 10000"),
        ("qwen3-moe", {"moe_intermediate_size": 0}, "moe_intermediate_size=0 must be an integer"),
        ("qwen3-moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0 must be an integer"),
        ("qwen3-moe", {"mlp_only_layers": ["1"]}, r"mlp_only_layers=\['1'\] must be a list of num"),
        ("qwen3-moe", {"mlp_only_layers": {}}, "mlp_only_layers={} must be a list of numbers"),
        ("qwen3-moe", {"mlp_only_layers": 0}, "mlp_only_layers=0 must be a list of numbers"),
        ("qwen3-moe", {"norm_topk_prob": 1}, "norm_topk_prob=1 must be true or false"),
        ("mixtral", {"num_experts_per_tok": 0}, "num_experts_per_tok=0 must be an integer of at"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts=0 must be at least 1"),
        ("mixtral", {"num_local_experts": "8"}, "num_local_experts='8' must be an integer"),
    ],
)
def test_wrong_files(name, change, message):
    with pytest.raises(ValueError, match=message):
        TransformerConfig.from_hf({**CONFIGS[name].to_hf(), **change})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("mixtral", {"mlp_bias": True}, "must be None with mlp_bias=True"),
        ("mixtral", {"family": "llama"}, "must be None with mlp_bias=False and family='llama'"),
        (MIXED, {"num_layers": 2, "local_windows": ()}, r"dense_layers=\(0, 2\) must be some of 2"),
    ],
)
def test_wrong_configurations(name, change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIGS[name], **change)


def test_experts_of_another_kind():
    experts = dataclasses.asdict(CONFIGS["mixtral"].experts)
    with pytest.raises(TypeError, match="must be an ExpertsConfig or None"):
        dataclasses.replace(CONFIGS["mixtral"], experts=experts)


def test_experts_that_files_do_not_hold(folder, tmp_path):
    """Refused before thousands of names are made for each layer."""
    shutil.copytree(folder("qwen3-moe"), tmp_path, dirs_exist_ok=True)
    file = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(file | {"num_experts": 10_000}))
    for read in (models.load, models.load_decoder, models.open_decoder):
        with pytest.raises(ValueError, match=r"holds \d+ tensors, .* asks for 90000 of experts"):
            read(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": 0}, "experts.count=0 must be an integer of 1"),
        ({"count": 10_001}, "experts.count=10001 must be at most 10000"),
        ({"per_token": 5}, "experts.per_token=5 must be at most experts.count=4"),
        ({"softmax": "none"}, "experts.softmax='none' must be 'before' or 'after'"),
        ({"dense_layers": (1, 0)}, r"experts.dense_layers=\(1, 0\) must be a tuple of numbers"),
        ({"dense_layers": [1]}, r"experts.dense_layers=\[1\] must be a tuple of numbers"),
        ({"normalize": 1}, "experts.normalize=1 must be true or false"),
    ],
)
def test_wrong_experts(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(ExpertsConfig(4, 2, 8), **change)


def test_what_a_family_cannot_say_is_not_written():
    wide = dataclasses.replace(CONFIGS["mixtral"], experts=ExpertsConfig(4, 2, 40, softmax="after"))
    with pytest.raises(ValueError, match="a config.json of family 'mixtral' cannot say experts="):
        wide.to_hf()
