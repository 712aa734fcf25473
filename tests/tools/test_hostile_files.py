"""Files that ask for too much, or that libraries stumble over: one line that names the file."""

import hashlib
import json
import os
import re
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import save_file

import turbojax as tj
from tests.contracts.storage_helpers import filled, rewrite
from tests.models import tokenizer_helpers
from tests.models.family_helpers import least
from tests.models.published import ARCHITECTURES
from turbojax import models
from turbojax._json import parse, shown
from turbojax.finetune.comparison import read_log
from turbojax.models import TransformerConfig

DEEP = "[" * 100_000 + "]" * 100_000
CONFIG = TransformerConfig(64, 32, 48, 2, 2, 1, 16, 64)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("good")
    quantized = models.random_quantized_decoder(CONFIG)
    models.save_quantized(quantized, root / "quantized")
    models.save(models.Transformer(CONFIG, rngs=nnx.Rngs(0)), root / "float")
    tokenizer_helpers.folder("byte_level", root / "tokenizer")
    return root


def change(folder, file, **keys):
    content = json.loads((folder / file).read_text()) | keys
    (folder / file).write_text(json.dumps(content))


class TestSizes:
    @pytest.mark.parametrize("family", ARCHITECTURES)
    def test_layers_beyond_reason_are_refused_at_once(self, family):
        begun = time.perf_counter()
        with pytest.raises(ValueError, match="num_hidden_layers=1000000000 must be at most 10000"):
            TransformerConfig.from_hf(least(family, num_hidden_layers=10**9))
        assert time.perf_counter() - begun < 1

    def test_a_config_of_a_billion_layers_is_refused_at_once(self):
        begun = time.perf_counter()
        with pytest.raises(ValueError, match="num_layers=1000000000 must be at most 10000"):
            TransformerConfig(64, 32, 48, 10**9, 2, 1, 16, 64)
        assert time.perf_counter() - begun < 1

    @pytest.mark.quick(slow=1)
    @pytest.mark.parametrize("kind", ["float", "quantized"])
    def test_layers_are_compared_with_the_tensors_first(self, folders, tmp_path, kind):
        folder = shutil.copytree(folders / kind, tmp_path / kind)
        change(folder, "config.json", num_hidden_layers=9999)
        begun = time.perf_counter()
        with pytest.raises(ValueError, match=r"lacks .*layers, config.json says .*=9999"):
            models.load(folder)
        assert time.perf_counter() - begun < 5

    @pytest.mark.parametrize("key", ["vocab_size", "max_position_embeddings", "head_dim"])
    def test_no_size_is_beyond_int32(self, key):
        with pytest.raises(ValueError, match=f"{key}=10{{18}} must be at most 2147483647"):
            TransformerConfig.from_hf(least("llama", **{key: 10**18}))

    @pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta"])
    def test_integers_that_no_float_can_hold(self, key):
        with pytest.raises(ValueError, match=f"{key}=10*\\.\\.\\.0* must be"):
            TransformerConfig.from_hf(least("llama", **{key: 10**400}))

    @pytest.mark.slow
    def test_frequencies_that_are_not_finite(self, folders, tmp_path):
        folder = shutil.copytree(folders / "float", tmp_path / "float")
        change(folder, "config.json", rope_theta=1e-300, rope_parameters=None)
        with pytest.raises(ValueError, match=r"config.json: rope_theta=1e-300 .* finite rotary"):
            models.load_decoder(folder)


@pytest.mark.parametrize(
    "key", ["version", "bits", "group_size", "scale_dtype", "key_channel_scale", "lm_head"]
)
@pytest.mark.parametrize("value", ["missing", True, 4.0, [], {}])
def test_every_key_of_a_quantized_checkpoint_is_needed(folders, tmp_path, key, value):
    folder = shutil.copytree(folders / "quantized", tmp_path / "quantized")
    block = json.loads((folder / "config.json").read_text())["quantization_config"]
    if key == "key_channel_scale" and value is True:
        value = 1
    block[key] = value
    if value == "missing":
        del block[key]
    change(folder, "config.json", quantization_config=block)
    with pytest.raises((ValueError, NotImplementedError), match=f"config.json: .*{key}"):
        models.load(folder)


class TestJson:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (DEEP, "nested more than 100 levels"),
            ("[" * 200 + "]" * 200, "nested more than 100 levels"),
            ("9" * 5000, "4300 digits"),
            ('{"a": 1, "a": true}', "a is given twice, with two values"),
            ('{"a": "\\ud83d"}', "half a surrogate pair"),
            (b"\xff", "utf-8"),
            ("\ufeff{}", "BOM"),
        ],
    )
    def test_texts_that_are_refused(self, text, message):
        with pytest.raises(ValueError, match=message):
            parse(text)

    def test_texts_that_are_not(self):
        assert parse("[" * 100 + "]" * 100)
        assert parse('{"a": [1], "a": [1], "b": "\\ud83d\\ude00"}') == {"a": [1], "b": "😀"}

    def test_errors_stay_short(self):
        for value in ("a\n\x1b[2J" * 10**6, [[[["a" * 1000] * 1000] * 100] * 100], {"a": 10**400}):
            assert len(shown(value)) < 500
            assert shown(value).isprintable()

    @pytest.mark.parametrize(
        "name", ["tokenizer_config.json", "special_tokens_map.json", "generation_config.json"]
    )
    @pytest.mark.parametrize("kind", ["deep", "folder", "pipe", "loop"])
    def test_files_beside_a_tokenizer(self, folders, tmp_path, name, kind):
        folder = shutil.copytree(folders / "tokenizer", tmp_path / "tokenizer")
        (folder / name).unlink(missing_ok=True)
        if kind == "deep":
            (folder / name).write_text(DEEP)
        elif kind == "folder":
            (folder / name).mkdir()
        elif kind == "pipe":
            os.mkfifo(folder / name)
        else:
            (folder / name).symlink_to(name)
        with pytest.raises((ValueError, OSError), match=re.escape(name)):
            models.load_tokenizer(folder)

    def test_logs_of_training(self, tmp_path):
        file = tmp_path / "log.json"
        for text in (DEEP, "{}", '{"identity": {}, "losses": ["a"], "records": []}'):
            file.write_text(text)
            with pytest.raises(ValueError, match="log.json"):
                read_log(tmp_path)


class TestTokenizer:
    """The package tokenizers panics, which is no Exception, or ends the process."""

    def change(self, folders, tmp_path, **keys):
        folder = shutil.copytree(folders / "tokenizer", tmp_path / "tokenizer")
        change(folder, "tokenizer.json", **keys)
        return folder

    def test_a_special_token_that_is_not_there(self, folders, tmp_path):
        text = (folders / "tokenizer" / "tokenizer.json").read_text()
        post = json.loads(text)["post_processor"]
        post["single"][0]["SpecialToken"]["id"] = "a"
        folder = self.change(folders, tmp_path, post_processor=post)
        with pytest.raises(ValueError, match=r"tokenizer.json"):
            models.load_tokenizer(folder).encode("a")

    def test_a_regular_expression_that_never_ends(self, folders, tmp_path):
        split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated"}
        folder = self.change(folders, tmp_path, pre_tokenizer={**split, "invert": False})
        begun = time.perf_counter()
        with pytest.raises(
            ValueError, match=r"tokenizer.json cannot read this text: .*retry-limit"
        ):
            models.load_tokenizer(folder).encode("a" * 40 + "b")
        assert time.perf_counter() - begun < 10

    @pytest.mark.parametrize("escaped", [False, True])
    def test_merges_that_would_cut_a_character(self, folders, tmp_path, escaped):
        text = (folders / "tokenizer" / "tokenizer.json").read_text()
        model = json.loads(text)["model"] | {"continuing_subword_prefix": "a"}
        folder = self.change(folders, tmp_path, model=model)
        if escaped:
            file = folder / "tokenizer.json"
            file.write_text(file.read_text().replace("subword_prefix", "subword\\u005fprefix"))
        with pytest.raises(ValueError, match=r"tokenizer.json .* continuing_subword_prefix='a'"):
            models.load_tokenizer(folder)


class TestStored:
    def test_a_cache_that_asks_for_all_memory(self, tmp_path):
        models.save_cache(tmp_path / "cache", filled("exact"))
        for length, message in ((2**31 - 1, "all memory"), (10**18, "must be at most 2147483647")):

            def more(content, length=length):
                content["description"]["max_length"] = length

            path = rewrite(tmp_path / "cache", tmp_path / "hostile", change=more)
            with pytest.raises(ValueError, match=f"hostile .*{message}"):
                models.load_cache(path)

    def test_layers_that_ask_for_all_memory_together(self, tmp_path, monkeypatch):
        layer = filled("exact")
        caches = models.ModelCaches((layer,) * 3)
        models.save_cache(tmp_path / "cache", caches)
        one = sum(x.nbytes for x in jax.tree.leaves(layer))
        for there in (3 * one, None):
            monkeypatch.setattr("turbojax._device.total_memory", lambda there=there: there)
            models.load_cache(tmp_path / "cache")
        monkeypatch.setattr("turbojax._device.total_memory", lambda: 3 * one - 1)
        with pytest.raises(ValueError, match=f"asks for {3 * one} bytes, .*{3 * one - 1}, which"):
            models.load_cache(tmp_path / "cache")

    @pytest.mark.parametrize("part", ["description", "arrays", "metadata"])
    def test_a_text_that_describes_nothing(self, tmp_path, part):
        models.save_cache(tmp_path / "cache", filled("exact"))

        with safe_open(tmp_path / "cache", framework="np") as file:
            header = file.metadata()
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        content = json.loads(header["content"])
        content[part] = {**content["arrays"], "lengths": 3} if part == "arrays" else []
        header["content"] = json.dumps(content)
        header["fingerprint"] = hashlib.sha256(header["content"].encode()).hexdigest()
        path = tmp_path / "hostile"
        save_file(arrays, path, metadata=header)
        with pytest.raises(ValueError, match="hostile is damaged"):
            models.load_cache(path)

    def test_weights_name_their_file(self, tmp_path):
        weight = jnp.asarray(np.random.default_rng(0).normal(size=(64, 128)), jnp.float32)
        path = tmp_path / "weights"
        tj.fireq.save_weights({"a": tj.fireq.quantize_weight(weight)}, path)
        path.write_bytes(path.read_bytes().replace(b"gated", b"gatee"))
        with pytest.raises(ValueError, match="weights: metadata of 'a'"):
            tj.fireq.load_weights(path)
