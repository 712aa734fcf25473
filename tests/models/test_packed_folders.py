"""Folders of GPTQ, AWQ and compressed-tensors: read, generated from, and refused."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.models import packed_helpers as packed
from tests.models import tiny
from tests.models.family_helpers import least
from turbojax import models
from turbojax.models.checkpoint.huggingface import expected_shapes
from turbojax.models.checkpoint.packed import reading
from turbojax.models.config import model_config

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
PROMPT = np.array([[5, 17, 40, 3, 88, 61]])


def config(family, **keys):
    return least(family, **{**SIZES, **keys})


def floats(hf, folder, seed=0):
    """The tensors of a random model of 16-bit floats; linear layers are replaced by packed ones."""
    rng = np.random.default_rng(seed)
    content = {}
    for name, shape in expected_shapes(model_config(folder, hf)).items():
        mean, std = (1.0, 0.1) if "norm" in name else (0.0, 0.2)
        content[name] = (mean + std * rng.standard_normal(shape)).astype(np.float16)
    return content


def write(folder, family, stored, **keys):
    """A folder of packed layers, and the plain one of the same model beside it."""
    hf = config(family, torch_dtype="float16", **keys)
    plain = packed.write_folder(folder / "packed", hf, floats(hf, folder), packed.FORMATS[stored])
    (folder / "plain").mkdir()
    packed.write_config(folder / "plain", hf)
    save_file(plain, folder / "plain" / "model.safetensors", {"format": "pt"})
    return folder / "packed", folder / "plain"


PAIRS = [
    ("llama", "gptq"),
    ("llama", "awq"),
    ("llama", "compressed"),
    ("qwen2", "gptq-sym"),
    ("qwen2", "awq-gemv"),
    ("qwen2", "compressed-sym"),
    ("qwen3", "awq"),
    ("qwen2", "gptq-act-order"),
    ("phi3", "gptq-act-order"),
    ("phi3", "gptq"),
    ("cohere2", "gptq"),
    ("olmo2", "awq"),
    ("glm4", "compressed"),
    ("granite", "gptq-sym"),
]


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize(("family", "stored"), PAIRS)
def test_a_folder_computes_what_its_plain_weights_do(tmp_path, family, stored):
    folder, plain = write(tmp_path, family, stored, tie_word_embeddings=family == "qwen3")
    loaded = models.load(folder, dtype=jnp.float32)
    assert isinstance(loaded, models.QuantizedDecoder)
    exact = models.load_decoder(plain, dtype=jnp.float32)
    scores = [models.start(x, PROMPT, max_length=32).logits for x in (loaded, exact)]
    np.testing.assert_allclose(*scores, rtol=0, atol=1e-4 * float(jnp.abs(scores[1]).max()))
    texts = [models.generate(x, PROMPT, max_new_tokens=8) for x in (loaded, exact)]
    assert texts[0].tolist() == texts[1].tolist()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of GPTQ, Llama's, and the plain one of the same weights."""
    return write(tmp_path_factory.mktemp("gptq"), "llama", "gptq")


def changed(folders, path, *, config=None, tensors=None, drop=()):
    """A copy of the folder of GPTQ with other keys of its quantization, and other tensors."""
    hf = json.loads((folders[0] / "config.json").read_text())
    hf["quantization_config"] |= config or {}
    content = load_file(folders[0] / "model.safetensors") | (tensors or {})
    packed.write_config(path, hf)
    save_file({k: x for k, x in content.items() if k not in drop}, path / "model.safetensors")
    return path


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.slow
def test_what_is_the_same_model(folders, tmp_path):
    tensors = load_file(folders[0] / "model.safetensors")
    expected = models.load(folders[0])
    without = [name for name in tensors if name.endswith("g_idx")]
    zeros = {f"{Q}.bias": np.zeros(64, np.float16)}
    told = []
    for i, changes in enumerate(
        (
            {"drop": without},
            {"tensors": zeros | {"model.layers.1.self_attn.rotary_emb.inv_freq": np.ones(8, "f4")}},
            {"config": {"desc_act": True, "format": "gptq", "meta": {"quantizer": ["x:1"]}}},
        )
    ):
        (tmp_path / str(i)).mkdir()
        folder = changed(folders, tmp_path / str(i), **changes)
        found = models.load(folder, progress=lambda *x: told.append(x))
        assert tiny.same(found, expected)
        assert told[-1][0] == told[-1][1]


REFUSED = {
    "bits": ({"bits": 8}, "bits=8 is not supported: must be 4"),
    "bits, no integer": ({"bits": 4.0}, "bits=4.0 is not supported"),
    "head": ({"lm_head": True}, "lm_head=True is not supported"),
    "groups": ({"group_size": 16}, "group_size=16 is not supported: must be 32, 64, a multiple"),
    "marlin": ({"checkpoint_format": "marlin"}, "checkpoint_format='marlin' is not supported"),
    "dynamic": ({"dynamic": {"-:.*down.*": {}}}, "dynamic=.* is not supported: must be left out"),
    "method": ({"quant_method": "bitsandbytes"}, "quant_method='bitsandbytes' is not supported"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_quantization(folders, tmp_path, case):
    keys, message = REFUSED[case]
    with pytest.raises(NotImplementedError, match=message):
        models.load(changed(folders, tmp_path, config=keys))


def test_refused_tensors(folders, tmp_path):
    tensors = load_file(folders[0] / "model.safetensors")
    down = "model.layers.1.mlp.down_proj"
    groups = tensors[f"{down}.g_idx"]
    cases = {
        "q_proj is not quantized, which is not supported": {
            "drop": [f"{Q}.qweight"],
            "tensors": {f"{Q}.weight": np.zeros((64, 64), np.float16)},
        },
        "lm_head is quantized, which is not supported": {
            "drop": ["lm_head.weight"],
            "tensors": {"lm_head.qweight": np.zeros((8, 97), np.int32)},
        },
        "dtype F32, which is not supported: must be BF16, F16": {
            "tensors": {f"{Q}.scales": tensors[f"{Q}.scales"].astype(np.float32)}
        },
    }
    wrong = {
        "lacks model.layers.0.self_attn.q_proj.qzeros": {"drop": [f"{Q}.qzeros"]},
        "q_proj.qweight has shape .*, must be .8, 64.": {
            "tensors": {f"{Q}.qweight": np.zeros((16, 64), np.int32)}
        },
        "unexpected tensors: model.layers.0.self_attn.q_proj.bias": {
            "tensors": {f"{Q}.bias": np.ones(64, np.float16)}
        },
        f"{down}: groups from 0 to 3 must be 0 to 2": {
            "tensors": {f"{down}.g_idx": groups + groups // 2}
        },
        f"{down}: the group index must give every group 64 inputs": {
            "tensors": {f"{down}.g_idx": np.where(np.arange(192) == 5, 1, groups).astype("i4")}
        },
    }
    for error, found in ((NotImplementedError, cases), (ValueError, wrong)):
        for message, changes in found.items():
            with pytest.raises(error, match=message):
                models.load(changed(folders, tmp_path, **changes))


def test_refused_compressed_tensors():
    good = packed.compressed_config(128)
    [group] = good["config_groups"].values()
    other = {**group, "weights": {**group["weights"], "num_bits": 8}}
    [small] = packed.compressed_config(32)["config_groups"].values()
    kv = {"num_bits": 8, "type": "float"}
    for error, message, keys in (
        (NotImplementedError, "format='int-quantized'", {"format": "int-quantized"}),
        (NotImplementedError, "kv_cache_scheme", {"kv_cache_scheme": kv}),
        (NotImplementedError, "format='2of4", {"sparsity_config": {"format": "2of4-sparse"}}),
        (
            NotImplementedError,
            "transform_config",
            {"transform_config": {"config_groups": {"r": 1}}},
        ),
        (NotImplementedError, "num_bits=8", {"config_groups": {"a": group, "b": other}}),
        (
            NotImplementedError,
            "input_activations",
            {"config_groups": {"a": {**group, "input_activations": kv}}},
        ),
        (
            NotImplementedError,
            "b differs from the first group",
            {"config_groups": {"a": group, "b": small}},
        ),
        (ValueError, "config_groups=None must be an object", {"config_groups": None}),
        (ValueError, "config_groups must hold a group", {"config_groups": {}}),
    ):
        with pytest.raises(error, match=message):
            reading.parse({**good, **keys})


def test_refused_awq():
    for keys in (
        {"version": "gemv_fast"},
        {"version": "marlin"},
        {"zero_point": False},
        {"bits": 3},
    ):
        [(key, value)] = keys.items()
        with pytest.raises(NotImplementedError, match=f"{key}={value!r} is not supported"):
            reading.parse(packed.awq_config(64, **{key: value}))
    with pytest.raises(ValueError, match="192 inputs must be a multiple of group_size=128"):
        reading.parse(packed.awq_config(128)).parts(64, 192)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("stored", ["gptq-act-order", "compressed", "gptq-sym"])
def test_saved_as_our_own(tmp_path, stored):
    folder, _ = write(tmp_path, "qwen2", stored)
    loaded = models.load(folder)
    models.save_quantized(loaded, tmp_path / "own")
    again = models.load(tmp_path / "own", dtype=loaded.dtype)
    assert tiny.same(again, loaded)


def test_saved_orders_are_checked(tmp_path):
    folder, _ = write(tmp_path, "llama", "gptq-act-order")
    models.save_quantized(models.load(folder), tmp_path / "own")
    file = tmp_path / "own" / "model.safetensors"
    tensors = load_file(file)
    tensors["layers.0.down.inputs"][3] = 2**30
    save_file(tensors, file)
    with pytest.raises(ValueError, match="layers.0.down.inputs must hold every input once"):
        models.load(tmp_path / "own")


@pytest.mark.slow
def test_tokens_in_8_bits(folders):
    loaded = models.load(folders[0], dtype=jnp.float32)
    rounded = loaded.with_activations("e4m3")
    one, other = (models.start(x, PROMPT, max_length=32).logits for x in (loaded, rounded))
    assert 1e-3 < float(jnp.linalg.norm(one - other) / jnp.linalg.norm(one)) < 0.5
    back = rounded.with_activations("bf16")
    assert jax.tree.structure(back) == jax.tree.structure(loaded)
    with pytest.raises(ValueError, match="activations='f16' must be one of"):
        loaded.with_activations("f16")
