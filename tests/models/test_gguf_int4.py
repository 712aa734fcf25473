"""GGUF files of type Q4_0 whose codes become INT4 weights: the values of the package `gguf`."""

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from typer.testing import CliRunner

import turbojax as tj
from tests.models.gguf_helpers import (
    ARCHITECTURES,
    TIED,
    byte_level_metadata,
    config_of,
    converted,
    hf_tensors,
    name_of,
    write,
)
from turbojax import models
from turbojax.app import options
from turbojax.app.evaluate.run import EvalSettings, _find
from turbojax.app.main import app
from turbojax.models.checkpoint.huggingface import float_bytes

TOKENS = np.array([[5, 17, 240, 3, 88, 61, 7, 9, 120]])
LINEAR = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj")
LINEAR += ("gate_up_proj", "down_proj")


def is_linear(name: str) -> bool:
    return name.endswith(".weight") and name.split(".")[-2] in LINEAR


def blocks(shape: tuple[int, int], seed: int) -> np.ndarray:
    """Any codes; scales of either sign, among them 0, a subnormal one and the smallest."""
    rng = np.random.default_rng(seed)
    outputs, inputs = shape
    raw = rng.integers(0, 256, (outputs, inputs // 32, 18), dtype=np.uint8)
    scales = rng.standard_normal((outputs, inputs // 32)).astype(np.float16) * np.float16(0.02)
    scales[0, 0], scales[1, 0], scales[2, 0] = 0, -(2.0**-20), 2.0**-24
    raw[..., :2] = scales[..., None].view(np.uint8)
    return raw.reshape(outputs, -1)


def write_q4_0(path, architecture, *, kinds=None, metadata=None):
    """A file as `llama-quantize` writes it, and the bytes of its layers by Hugging Face's names."""
    shape = config_of(path.parent, architecture)
    tensors = hf_tensors(shape)
    raw = {
        name: blocks(array.shape, i)
        for i, (name, array) in enumerate(tensors.items())
        if is_linear(name)
    }
    own = {name_of(name, architecture): Kind.Q4_0 for name in raw}
    own |= {"token_embd.weight": Kind.Q8_0, "output.weight": Kind.Q4_0} | (kinds or {})
    stored = {
        name_of(name, architecture): converted(name, raw.get(name, array), architecture)
        for name, array in tensors.items()
    }
    for name, kind in (kinds or {}).items():
        if stored[name].dtype == np.uint8:
            floats = gguf.quants.dequantize(stored[name], Kind.Q4_0)
            stored[name] = floats if kind == Kind.F32 else gguf.quants.quantize(floats, kind)
    return write(path, architecture, stored, kinds=own, metadata=metadata), raw


def values(raw, layer, *names):
    """What the package has of some linear layers that are there, one below the other."""
    prefix = f"model.layers.{layer}."
    found = [raw[f"{prefix}{x}.weight"] for x in names if f"{prefix}{x}.weight" in raw]
    return np.concatenate([gguf.quants.dequantize(x, Kind.Q4_0) for x in found])


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return write_q4_0(tmp_path_factory.mktemp("llama") / "m.gguf", "llama")


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_are_those_of_the_package(tmp_path, architecture):
    path, raw = write_q4_0(tmp_path / "m.gguf", architecture)
    plain = models.load_decoder(path, dtype="float32")
    found = models.load_decoder(path, dtype="float32", int4=True)
    assert isinstance(plain, models.Decoder)
    assert isinstance(found, models.QuantizedDecoder)
    for i, layer in enumerate(found.layers):
        for linear, *names in (
            (layer.qkv, *(f"self_attn.{x}_proj" for x in ("q", "k", "v", "qkv"))),
            (layer.o, "self_attn.o_proj"),
            (layer.mlp.gate_up, *(f"mlp.{x}_proj" for x in ("gate", "up", "gate_up"))),
            (layer.mlp.down, "mlp.down_proj"),
        ):
            weight = linear.weight
            assert (weight.group_size, weight.scale_dtype, weight.zeros) == (32, "f16", None)
            expected = values(raw, i, *names)
            assert np.asarray(tj.fireq.dequantize(weight)).tobytes() == expected.tobytes()
    for name in ("embedding", "norm", "lm_head"):
        one, other = getattr(found, name), getattr(plain, name)
        assert (one is None) == (other is None) == (name == "lm_head" and architecture in TIED)
        if one is not None:
            other = other + plain.config.norm_offset if name == "norm" else other
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    scores = [np.asarray(models.start(x, TOKENS, max_length=16).logits) for x in (found, plain)]
    np.testing.assert_allclose(*scores, rtol=0, atol=1e-4 * np.abs(scores[1]).max())


def test_dtypes_and_lengths_are_those_of_other_loads(llama):
    path, _ = llama
    found = models.load(path, int4=True, max_length=48)
    assert (found.dtype, found.embedding.dtype, found.config.max_length) == (
        *(jnp.bfloat16, jnp.bfloat16, 48),
    )
    assert found.layers[0].qkv.activations == "bf16"
    plain = models.load(path, int4=False)
    assert isinstance(plain, models.Transformer)
    # Small matrices are padded more.
    size, whole = (float_bytes(path, jnp.dtype(jnp.bfloat16), int4=x) for x in (True, False))
    assert found.nbytes * 0.7 < size < found.nbytes < whole


def test_it_is_written_and_read_again(llama, tmp_path):
    path, _ = llama
    model = models.load(path, int4=True)
    models.save_quantized(model, tmp_path / "own")
    again = models.load(tmp_path / "own")
    assert jax.tree.structure(again) == jax.tree.structure(model)
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(model), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_adapters_are_put_beside_the_codes(llama):
    path, _ = llama
    model = models.load_decoder(path, int4=True)
    adapters = models.init_adapters(model, targets=("q", "down"), rank=2)
    found = models.load_decoder(path, int4=True, adapters=adapters)
    expected = models.with_adapters(model, adapters)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    floats = models.load_decoder(path, adapters=adapters)
    assert (
        floats.layers[0]["mlp"]["down_proj"]["lora_b"].shape == adapters.layers[0]["down"].b.T.shape
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("blk.1.ffn_down.weight", Kind.Q4_1),
        ("blk.0.attn_k.weight", Kind.Q8_0),
        ("blk.1.attn_output.weight", Kind.F32),
    ],
)
def test_other_types_are_refused_by_name(tmp_path, name, kind):
    path, _ = write_q4_0(tmp_path / "m.gguf", "llama", kinds={name: kind})
    message = f"m.gguf: {name} has type {kind.name}, .* all linear layers must have type Q4_0"
    with pytest.raises(NotImplementedError, match=message):
        models.load(path, int4=True)
    assert isinstance(models.load_decoder(path), models.Decoder)


def test_missing_and_misshapen_layers_are_refused(tmp_path):
    for key, value, message in (
        ("llama.block_count", 3, "lacks model.layers.2"),
        ("llama.feed_forward_length", 128, r"gate_proj.blocks has shape \(96, 2, 18\), must be"),
    ):
        path, _ = write_q4_0(tmp_path / f"{value}.gguf", "llama", metadata={key: value})
        with pytest.raises(ValueError, match=message):
            models.load(path, int4=True)


def test_what_is_no_gguf_file_is_refused(tmp_path):
    for path in ("embedded", tmp_path):
        with pytest.raises(ValueError, match="is no GGUF file, whose codes int4 takes"):
            models.load(path, int4=True)
        with pytest.raises(ValueError, match="is no GGUF file"):
            models.load_decoder(path, int4=True)


@pytest.fixture(scope="module")
def readable(tmp_path_factory):
    """A file with a tokenizer."""
    path = tmp_path_factory.mktemp("text") / "m.gguf"
    return str(write_q4_0(path, "llama", metadata=byte_level_metadata())[0])


def test_commands_find_the_codes(readable):
    found = options.find(readable, None, "int4", None, None)
    floats = options.find(readable, None, "float", None, None)
    assert found.weight_bytes < floats.weight_bytes
    assert isinstance(found.load().decoder, models.QuantizedDecoder)
    assert isinstance(floats.load().decoder, models.Decoder)
    assert _find(EvalSettings(model=readable, weights="int4")).weight_bytes == found.weight_bytes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--weights", "int3"], "'int3' must be one of float, int4"),
        (["--model", "embedded", "--weights", "int4"], "and for a GGUF file as --model"),
    ],
)
def test_commands_refuse_other_weights(readable, arguments, message):
    for command in (["generate", "hello"], ["eval", "--text", __file__]):
        result = CliRunner().invoke(app, [*command, "--model", readable, *arguments])
        assert result.exit_code == 2
        assert message in result.stderr
