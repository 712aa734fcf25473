"""Folders of GPTQ, AWQ and compressed-tensors: read, generated from, and refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import packed_helpers as packed
import pytest
from family_helpers import least
from safetensors.numpy import load_file, save_file

from turbojax import fireq, models
from turbojax.models.checkpoint.huggingface import expected_shapes
from turbojax.models.config import model_config

FAMILIES = ("llama", "qwen2", "qwen3", "phi3")
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
    return least(family, **SIZES, **keys)


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
]


@pytest.mark.quick(4)
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
