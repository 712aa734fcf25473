"""gpt-oss: experts in MXFP4, clamped and with biases; sinks; INT4 experts made of them."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.models import hf_helpers as hf
from tests.models.family_helpers import least
from turbojax import fireq, models, smoothing
from turbojax.models import TransformerConfig
from turbojax.models.checkpoint import mxfp4
from turbojax.models.checkpoint.folder import stored_tensors
from turbojax.models.families import ExpertsConfig
from turbojax.models.feed_forward import Experts
from turbojax.rotary import YarnScaling

NAME = "gpt-oss"
BLOCKS = "model.layers.1.mlp.experts.gate_up_proj_blocks"
NOTHING = smoothing.Smoothing(cas=False, pts=False, rpn=False, crs=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return hf.write(NAME, tmp_path_factory.mktemp(NAME))


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A checkpoint with experts in MXFP4, and the tensors that it means."""
    path = tmp_path_factory.mktemp("mxfp4")
    tensors, meant = hf.tensors(NAME), {}
    for name in [x for x in tensors if x.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales = rounded(tensors.pop(name))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        meant[name] = oracle(blocks, scales)
    file = {**hf.config(NAME), "quantization_config": {"quant_method": "mxfp4"}}
    (path / "config.json").write_text(json.dumps(file))
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path, meant


def rounded(x):
    """Blocks and scales of numbers ``[E, in, out]``."""
    groups = np.swapaxes(x, 1, 2).reshape(x.shape[0], x.shape[2], -1, 32)
    exponents = np.floor(np.log2(np.abs(groups).max(-1))) - 2
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = np.concatenate([numbers, -numbers])
    away = np.abs((groups / 2.0 ** exponents[..., None])[..., None] - numbers)
    codes = away.argmin(-1).astype(np.uint8)
    blocks, scales = codes[..., ::2] | codes[..., 1::2] << 4, (exponents + 127).astype(np.uint8)
    # Files take what lies there, whatever an array's strides are.
    return np.ascontiguousarray(blocks), np.ascontiguousarray(scales)


def oracle(blocks, scales):
    """float64 ``[E, in, out]``: sign, two bits of exponent, one of fraction; low bits first."""
    codes = np.stack([blocks % 16, blocks // 16], -1).astype(np.int64)
    sign, exponent, fraction = codes // 8, codes // 2 % 4, codes % 2
    positive = np.where(exponent == 0, fraction / 2, (1 + fraction / 2) * 2.0 ** (exponent - 1))
    numbers = (1 - 2 * sign) * positive
    numbers = numbers.reshape(*scales.shape, 32) * 2.0 ** (scales.astype(float)[..., None] - 127)
    return np.swapaxes(numbers.reshape(*scales.shape[:2], -1), 1, 2)


def test_every_code_and_every_exponent():
    blocks = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16).repeat(255, 1)
    scales = np.arange(255, dtype=np.uint8).reshape(1, 255, 1).repeat(16, 2)
    got = mxfp4.dequantize(blocks, scales)
    assert got.dtype == ml_dtypes.bfloat16
    want = np.swapaxes(oracle(blocks, scales), 1, 2)
    largest = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
    inside = np.abs(want) <= largest
    np.testing.assert_array_equal(got.astype(np.float64)[inside], want[inside])
    assert np.isinf(got.astype(np.float64)[~inside]).all()
    assert (~inside).mean() < 0.01
    assert np.isnan(mxfp4.dequantize(blocks[:, :1], np.full((1, 1, 16), 255, np.uint8))).all()


def test_parts_of_experts_are_parts_of_the_whole(packed):
    """Inputs that begin and end within a group."""
    path, meant = packed
    stored = mxfp4.unpacked(stored_tensors(path))
    for name, want in meant.items():
        experts, inputs, outputs = want.shape
        box = (1, experts), (inputs // 2 + 3, inputs - 5), (1, outputs - 1)
        part = want[tuple(slice(*of_axis) for of_axis in box)]
        np.testing.assert_array_equal(stored[name].read_box(box).astype(np.float64), part)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_in_mxfp4_are_read_exactly(packed, dtype):
    path, meant = packed
    decoder = models.load_decoder(path, dtype=dtype)
    assert decoder.dtype == jnp.dtype(dtype)
    for name, want in meant.items():
        mlp = decoder.layers[int(name.split(".")[2])]["mlp"]
        if name.endswith("down_proj"):
            got = np.asarray(mlp["down_proj"]["kernel"], np.float64)
        else:
            parts = [np.asarray(mlp[x]["kernel"], np.float64) for x in ("gate_proj", "up_proj")]
            got = np.stack(parts, -1).reshape(want.shape)
        np.testing.assert_array_equal(got, want)
    stored = models.open_decoder(path, dtype=dtype)
    jax.tree.map(np.testing.assert_array_equal, tuple(stored.layers), decoder.layers)
    whole = models.unstack(models.load(path, dtype=dtype))
    jax.tree.map(np.testing.assert_array_equal, whole.layers, decoder.layers)


@pytest.mark.slow
def test_mxfp4_is_saved_as_the_numbers_it_means(packed, tmp_path):
    path, meant = packed
    models.save(models.load(path), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, want in meant.items():
        np.testing.assert_array_equal(tensors[name].astype(np.float64), want)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda x: x.pop(BLOCKS), ValueError, "lacks model.layers.1.mlp.*_blocks, of a tensor in"),
        (
            lambda x: x.update({BLOCKS: x[BLOCKS][..., :8]}),
            ValueError,
            "must be .* its first three",
        ),
        (
            lambda x: x.update({BLOCKS: x[BLOCKS].astype(np.int32)}),
            NotImplementedError,
            "_blocks has dtype I32, which is not supported: must be U8",
        ),
        (
            lambda x: x.update({y: x[y][:3] for y in (BLOCKS, BLOCKS.replace("blocks", "scales"))}),
            ValueError,
            r"gate_up_proj has shape \(3, 64, 192\), must be \(4, 64, 192\)",
        ),
    ],
)
def test_damaged_files(packed, tmp_path, change, error, message):
    path, _ = packed
    shutil.copy(path / "config.json", tmp_path / "config.json")
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(error, match=message):
        models.load_decoder(tmp_path)


def layer_of(params, x, config):
    """A layer of experts token by token, in float64."""
    mlp = jax.tree.map(lambda a: np.asarray(a, np.float64), params["mlp"])
    experts, out = config.experts, []
    for token in np.asarray(x, np.float64):
        scores = token @ mlp["router"]["kernel"] + mlp["router"]["bias"]
        chosen = np.argsort(-scores)[: experts.per_token]
        weights = np.exp(scores[chosen] - scores.max())
        total = 0.0
        for e, weight in zip(chosen, weights / weights.sum(), strict=True):
            gate, up = (
                token @ mlp[name]["kernel"][e] + mlp[name]["bias"][e]
                for name in ("gate_proj", "up_proj")
            )
            gate, up = np.minimum(gate, 2.0), np.clip(up, -2.0, 2.0)
            inner = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
            total += weight * (inner @ mlp["down_proj"]["kernel"][e] + mlp["down_proj"]["bias"][e])
        out.append(total)
    return np.stack(out)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("count", [1, 9, 40])
def test_experts_against_an_oracle(folder, count):
    """One by one and in tiles; some gates are clamped."""
    from flax import nnx

    decoder = models.load_decoder(folder)
    config, params = decoder.config, decoder.layers[1]
    assert config.experts.swiglu_limit == 2.0
    x = np.random.default_rng(1).normal(size=(count, 64)).astype(np.float32)
    dtypes = {"dtype": jnp.float32, "param_dtype": jnp.float32}
    graph = nnx.graphdef(nnx.eval_shape(lambda: Experts(config, rngs=nnx.Rngs(0), **dtypes)))
    layer = nnx.merge(graph, params["mlp"])
    want = layer_of(params, x, config)
    np.testing.assert_allclose(np.asarray(layer(jnp.asarray(x)[None]))[0], want, atol=2e-5)
    sizes = jnp.array([count // 3, 0, count - count // 3, 0], jnp.int32)
    np.testing.assert_allclose(
        layer.of_sorted(jnp.asarray(x), sizes), layer.in_tiles(jnp.asarray(x), sizes, 4), atol=2e-5
    )


@pytest.mark.parametrize("size", [0.02, 1.0])
def test_what_int4_of_mxfp4_loses(size):
    """The figures of docs/models.md."""
    weights = size * np.random.default_rng(0).standard_normal((1, 512, 256))

    def in_int4(x):
        wide = fireq.dequantize(fireq.quantize_weight(jnp.asarray(x[0].T, jnp.float32)))
        return np.asarray(wide, np.float64).T[None]

    def off(x):
        return np.linalg.norm(x - weights) / np.linalg.norm(weights)

    numbers = oracle(*rounded(weights))
    assert 0.11 <= off(numbers) <= 0.12
    assert off(in_int4(weights)) == pytest.approx(0.12, abs=0.002)
    assert 0.15 <= off(in_int4(numbers)) <= 0.19


@pytest.mark.slow
def test_quantized_saved_and_loaded(folder, tmp_path):
    quantized = models.quantize_model(models.open_decoder(folder), smoothing=NOTHING)
    models.save_quantized(quantized, tmp_path)
    again = models.load(tmp_path)
    assert jax.tree.structure(again) == jax.tree.structure(quantized)
    jax.tree.map(np.testing.assert_array_equal, again, quantized)
    shapes = jax.eval_shape(
        lambda: models.random_quantized_decoder(quantized.config, dtype=jnp.float32)
    )
    assert jax.tree.structure(shapes) == jax.tree.structure(quantized)


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({}, YarnScaling(32.0, 4096, truncate=False)),
        ({"rope_scaling": {}}, YarnScaling(32.0, 4096, truncate=False)),
        ({"rope_parameters": {}}, None),
    ],
)
def test_rope_of_files_that_say_nothing(keys, scaling):
    """As transformers: YaRN, but where `rope_parameters` are there and empty."""
    config = TransformerConfig.from_hf(least("gpt_oss", **keys))
    assert (config.rope_theta, config.rope_scaling) == (150_000.0, scaling)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts_per_token": 3}, "experts_per_token=3 must be num_experts_per_tok=2"),
        ({"num_local_experts": 0}, "num_local_experts=0 must be at least 1"),
        ({"swiglu_limit": 0}, "swiglu_limit=0 must be positive"),
        ({"swiglu_alpha": None}, "swiglu_alpha=None must be positive"),
    ],
)
def test_wrong_files(change, message):
    with pytest.raises(ValueError, match=message):
        TransformerConfig.from_hf({**hf.config(NAME), **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": "tanh"}, "experts.scores='tanh' must be 'softmax' or 'sigmoid'"),
        ({"scores": "sigmoid", "softmax": "after"}, "experts.softmax='after' must be 'before'"),
        ({"groups": 5}, "experts.groups=5 must be an integer of 1 to 4"),
        ({"groups": 3}, "groups=3 must share 4 experts evenly"),
        ({"scaling": 0.0}, "experts.scaling=0.0 must be a positive, finite number"),
        ({"shared_size": 0}, "experts.shared_size=0 must be an integer of 1"),
        ({"has_biases": 1}, "experts.has_biases=1 must be true or false"),
        ({"swiglu_limit": -1.0}, "experts.swiglu_limit=-1.0 must be a positive, finite number"),
    ],
)
def test_wrong_experts(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(ExpertsConfig(4, 2, 8), **change)


def test_what_experts_say_of_themselves():
    """Files hold digests of it: what was added says nothing where it is as before."""
    plain = "ExpertsConfig(count=4, per_token=2, intermediate_size=8, softmax='before', "
    plain += "normalize=False, dense_layers=())"
    assert repr(ExpertsConfig(4, 2, 8)) == plain
    assert "groups=2" in repr(ExpertsConfig(4, 2, 8, groups=2))
