"""The text model of a Mistral Small that also reads pictures: its files, and what is refused."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.models import hf_helpers as hf
from tests.models.family_helpers import least
from tests.models.published import PUBLISHED
from turbojax import models
from turbojax.models import TransformerConfig

NAME = "mistral-no-window"
# Tensors of a checkpoint as published, and as transformers names them in memory.
PREFIXES = {
    "published": ("language_model.model.", "language_model.lm_head.", ""),
    "in memory": ("model.language_model.", "lm_head.", "model."),
}


def whole(text, **keys):
    """The `config.json` of a model around this text model."""
    inner = {key: value for key, value in text.items() if key != "architectures"}
    return {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "text_config": inner,
        "vision_config": {"model_type": "pixtral", "hidden_size": 8, "head_dim": 4},
        "image_token_index": 10,
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "spatial_merge_size": 2,
        "vision_feature_layer": -1,
        "torch_dtype": "float32",
        **keys,
    }


def write(folder, kind="published", *, without=(), **keys):
    """A folder of the whole, with tensors of what reads pictures."""
    model, head, others = PREFIXES[kind]
    content = {}
    for name, array in hf.tensors(NAME).items():
        if name in without:
            continue
        start, rest = name.split(".", 1)
        content[(head if start == "lm_head" else model) + rest] = array
    content[f"{others}vision_tower.patch_conv.weight"] = np.zeros((2, 3), np.float32)
    content[f"{others}multi_modal_projector.linear_1.weight"] = np.zeros((2, 2), np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(whole(hf.config(NAME), **keys))
    (folder / "config.json").write_text(text, encoding="utf-8")
    save_file(content, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("kind", PREFIXES)
def test_the_text_model_is_read(kind, tmp_path):
    """Bit for bit what a Mistral of the same tensors is, stacked, unstacked and in its files."""
    folder = write(tmp_path / "whole", kind)
    plain = models.load_decoder(hf.write(NAME, tmp_path / "plain"))
    found = models.load_decoder(folder)
    assert found.config == plain.config
    jax.tree.map(np.testing.assert_array_equal, found, plain)
    stored = models.open_decoder(folder)
    jax.tree.map(np.testing.assert_array_equal, stored.layers[1], plain.layers[1])
    np.testing.assert_array_equal(stored.lm_head, plain.lm_head)
    model = models.load(folder)
    models.save(model, tmp_path / "again")
    assert models.read_config(tmp_path / "again")["architectures"] == ["MistralForCausalLM"]
    jax.tree.map(np.testing.assert_array_equal, models.load_decoder(tmp_path / "again"), plain)


@pytest.mark.slow
def test_it_is_quantized_layer_by_layer(tmp_path):
    model = models.open_decoder(write(tmp_path / "whole"))
    decoder = models.quantize_model(
        model, smoothing=models.quantize.Smoothing(rpn=False, crs=False)
    )
    models.save_quantized(decoder, tmp_path / "quantized")
    loaded = models.load(tmp_path / "quantized")
    jax.tree.map(np.testing.assert_array_equal, loaded, decoder)


def test_sizes_of_published_files():
    """A head is wider than its share of the residual stream."""
    file, _, _ = PUBLISHED["Mistral-Small-3.1-24B"]
    config = TransformerConfig.from_hf(file)
    assert config.head_dim == 128 != config.hidden_size / config.num_heads
    assert config.family == "mistral"
    assert config.rope.theta == 1e9


@pytest.mark.parametrize(
    ("outside", "inside", "tied"),
    [(None, None, False), (True, None, True), (None, True, True), (False, True, False)],
)
def test_which_tables_are_tied(outside, inside, tied):
    keys = {"tie_word_embeddings": inside} if inside is not None else {}
    file = whole(least("mistral", **keys))
    if outside is not None:
        file["tie_word_embeddings"] = outside
    assert TransformerConfig.from_hf(file).tie_embeddings == tied


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"text_config": None}, ValueError, "text_config=None must be an object"),
        (
            {"text_config": {"model_type": "llama"}},
            NotImplementedError,
            "text_config: model_type='llama' is not supported: must be 'mistral'",
        ),
        (
            {"model_type": "llava"},
            NotImplementedError,
            "model_type='llava' is not supported: must be 'mistral3'",
        ),
        ({"new_idea": "on"}, NotImplementedError, "new_idea='on' is not supported"),
    ],
)
def test_refused(change, kind, message):
    with pytest.raises(kind, match=message):
        TransformerConfig.from_hf(whole(least("mistral"), **change))


def test_tensors_of_no_known_part(tmp_path):
    folder = write(tmp_path / "less", without=("model.norm.weight",))
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        models.load_decoder(folder)
    folder = write(tmp_path / "more")
    content = load_file(folder / "model.safetensors")
    content["audio_tower.weight"] = np.zeros(3, np.float32)
    save_file(content, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="audio_tower"):
        models.load_decoder(folder)
