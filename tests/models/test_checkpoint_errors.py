"""Folders that are no checkpoint, or a damaged one: every error names the file and the cause."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from tests.models import tiny
from turbojax import models
from turbojax.models.checkpoint.huggingface import (
    load,
    load_decoder,
    load_transformer,
    save,
    weight_files,
)

CONFIG = tiny.config(
    vocab_size=48,
    hidden_size=24,
    intermediate_size=40,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=12,
    max_length=32,
)
INDEX = "model.safetensors.index.json"
K_PROJ = "model.layers.1.self_attn.k_proj.weight"
LOADERS = [load, load_transformer, load_decoder]


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> dict[str, Path]:
    """A model in one file, and in several."""
    model = models.Transformer(CONFIG, rngs=nnx.Rngs(0))
    root = tmp_path_factory.mktemp("originals")
    save(model, root / "one")
    save(model, root / "many", max_shard_bytes=8000)
    return {name: root / name for name in ("one", "many")}


@pytest.fixture
def one(originals, tmp_path) -> Path:
    return Path(shutil.copytree(originals["one"], tmp_path / "one"))


@pytest.fixture
def many(originals, tmp_path) -> Path:
    return Path(shutil.copytree(originals["many"], tmp_path / "many"))


def holder(folder: Path, name: str) -> Path:
    """The file that holds a tensor."""
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


def refused(folder, error, message) -> None:
    for loader in LOADERS:
        with pytest.raises(error, match=message):
            loader(folder)


class TestPaths:
    def test_nothing_there(self, tmp_path):
        refused(tmp_path / "nowhere", FileNotFoundError, "nowhere' must be 'embedded' or a folder")
        with pytest.raises(FileNotFoundError, match="there is no such folder"):
            weight_files(tmp_path / "nowhere")

    @pytest.mark.slow
    def test_a_file(self, one):
        file = one / "model.safetensors"
        refused(file, NotADirectoryError, "model.safetensors' must be .* a folder.*, not a file")

    def test_an_empty_folder(self, tmp_path):
        refused(tmp_path, FileNotFoundError, "is no checkpoint: it must hold config.json")

    def test_a_folder_without_weights(self, one):
        (one / "model.safetensors").unlink()
        refused(one, FileNotFoundError, f"must hold model.safetensors or {INDEX}")

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
    def test_pickles(self, one, name):
        (one / "model.safetensors").rename(one / name)
        refused(one, FileNotFoundError, rf"{name} is not read, .*one'\)\.save_pretrained\(...\)")


class TestJson:
    @pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe", b'{"a": }'])
    def test_not_readable(self, many, content):
        for name in (INDEX, "config.json"):
            (many / name).write_bytes(content)
            refused(many, ValueError, f"{name} is not readable JSON")

    def test_another_kind(self, many):
        for name in (INDEX, "config.json"):
            (many / name).write_text("[1]")
            refused(many, ValueError, f"{name} must hold a JSON object, not list")

    @pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": ["a"]}])
    def test_an_index_without_places(self, many, index):
        (many / INDEX).write_text(json.dumps(index))
        refused(many, ValueError, f"{INDEX} must hold a weight_map, from tensors to files")

    @pytest.mark.parametrize("place", ["../model.safetensors", "/etc/passwd", "a/b", 3, "", ".."])
    def test_an_index_that_leaves_the_folder(self, many, place):
        (many / INDEX).write_text(json.dumps({"weight_map": {K_PROJ: place}}))
        refused(many, ValueError, f"places {K_PROJ} in .*, must be a file beside it")

    def test_an_architecture_that_is_not_known(self, one):
        config = json.loads((one / "config.json").read_text())
        changed = {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}
        (one / "config.json").write_text(json.dumps(config | changed))
        refused(one, NotImplementedError, r"architectures=\['MambaForCausalLM'\] is not supported")

    def test_a_dtype_that_is_not_known(self, one):
        config = json.loads((one / "config.json").read_text())
        (one / "config.json").write_text(json.dumps(config | {"torch_dtype": "auto"}))
        refused(one, ValueError, "torch_dtype='auto' must be one of float32, bfloat16, float16")
        assert load(one, dtype=jnp.bfloat16).dtype == jnp.bfloat16


class TestShards:
    def test_a_shard_is_missing(self, many):
        file = holder(many, K_PROJ)
        file.unlink()
        refused(many, FileNotFoundError, f"many' lacks {file.name}, which {INDEX} names")
        for other in many.glob("*.safetensors"):
            other.unlink()
        refused(many, FileNotFoundError, r"00002-of-\d+.safetensors, \S+ and \d more, which")

    @pytest.mark.parametrize("kept", [0, 5, 100, -100, -1])
    def test_a_shard_is_cut_short(self, many, kept):
        file = holder(many, K_PROJ)
        file.write_bytes(file.read_bytes()[:kept])
        refused(many, ValueError, f"{file.name} is not a readable safetensors file, or was cut")

    def test_a_shard_lacks_what_the_index_places_there(self, many):
        file = holder(many, K_PROJ)
        tensors = load_file(file)
        del tensors[K_PROJ]
        save_file(tensors, file)
        refused(many, ValueError, f"{file.name} lacks {K_PROJ}, which {INDEX} places there")

    def test_a_tensor_is_in_another_shard_than_the_index_says(self, many):
        index = json.loads((many / INDEX).read_text())
        right, wrong = holder(many, K_PROJ), holder(many, "lm_head.weight")
        assert right != wrong
        index["weight_map"][K_PROJ] = wrong.name
        (many / INDEX).write_text(json.dumps(index))
        refused(many, ValueError, f"{wrong.name} lacks {K_PROJ}")

    def test_two_shards_hold_a_tensor(self, many):
        file, other = holder(many, K_PROJ), holder(many, "lm_head.weight")
        save_file(load_file(other) | {K_PROJ: load_file(file)[K_PROJ]}, other)
        refused(many, ValueError, f"{file.name} and .*{other.name} both hold {K_PROJ}")

    def test_one_file_goes_before_an_index(self, many, one):
        """As it does for transformers."""
        (many / INDEX).write_text("no index")
        shutil.copyfile(one / "model.safetensors", many / "model.safetensors")
        assert [file.name for file in weight_files(many)] == ["model.safetensors"]
        assert load(many).config == CONFIG

    def test_an_index_of_one_file(self, one):
        (one / "model.safetensors").rename(one / "weights.safetensors")
        places = dict.fromkeys(load_file(one / "weights.safetensors"), "weights.safetensors")
        (one / INDEX).write_text(json.dumps({"weight_map": places}))
        assert load(one).config == CONFIG


class TestTensors:
    def test_missing_and_unexpected(self, many):
        file = holder(many, K_PROJ)
        tensors = load_file(file)
        save_file(tensors | {"model.layers.2.mlp.up_proj.weight": tensors[K_PROJ]}, file)
        message = f"{file.name} holds unexpected tensors: model.layers.2.mlp.up_proj.weight$"
        refused(many, ValueError, message)
        index = json.loads((many / INDEX).read_text())
        del index["weight_map"][K_PROJ], tensors[K_PROJ]
        save_file(tensors, file)
        (many / INDEX).write_text(json.dumps(index))
        refused(many, ValueError, f"{INDEX} lacks {K_PROJ}, which config.json asks for$")

    def test_many_missing_are_counted(self, one):
        file = one / "model.safetensors"
        norms = {name: x for name, x in load_file(file).items() if "input_layernorm" in name}
        save_file(norms, file)
        refused(one, ValueError, "model.safetensors lacks lm_head.weight, .* and 16 more")

    def test_biases_that_config_json_does_not_have(self, one):
        file = one / "model.safetensors"
        bias = {"model.layers.0.self_attn.q_proj.bias": np.zeros(24, np.float32)}
        save_file(load_file(file) | bias, file)
        refused(one, ValueError, "unexpected tensors: model.layers.0.self_attn.q_proj.bias")

    @pytest.mark.parametrize("shape", [(11, 24), (24, 12), (288,), (12, 24, 1)])
    def test_another_shape(self, many, shape):
        file = holder(many, K_PROJ)
        tensors = load_file(file)
        tensors[K_PROJ] = np.zeros(shape, np.float32)
        save_file(tensors, file)
        got = str(shape).replace("(", r"\(").replace(")", r"\)")
        refused(many, ValueError, rf"{file.name}: {K_PROJ} has shape {got}, must be \(12, 24\)")

    @pytest.mark.parametrize(
        ("dtype", "name"),
        [(np.int8, "I8"), (np.int32, "I32"), (bool, "BOOL"), (ml_dtypes.float8_e4m3fn, "F8_E4M3")],
    )
    def test_another_dtype(self, many, dtype, name):
        file = holder(many, K_PROJ)
        tensors = load_file(file)
        tensors[K_PROJ] = tensors[K_PROJ].astype(dtype)
        save_file(tensors, file)
        message = f"{file.name}: {K_PROJ} has dtype {name}, which is not supported: must be BF16"
        refused(many, NotImplementedError, message)

    def test_nan_is_no_error(self, one):
        file = one / "model.safetensors"
        tensors = load_file(file)
        tensors[K_PROJ][3, 4] = np.nan
        save_file(tensors, file)
        for dtype in (None, jnp.float16):
            kernel = load(one, dtype=dtype).blocks.attention.k_proj.kernel.get_value()
            assert np.argwhere(np.isnan(kernel)).tolist() == [[1, 4, 3]]


def test_a_damaged_header_is_an_error_or_changes_nothing_of_the_rest(one):
    """One byte after the other replaced: no other error comes out, and it names the file."""
    file = one / "model.safetensors"
    content = bytearray(file.read_bytes())
    length = int.from_bytes(content[:8], "little")
    rng = np.random.default_rng(0)
    outcomes = set()
    for place in rng.choice(8 + length, size=150, replace=False):
        damaged = content.copy()
        damaged[place] = rng.integers(32, 127)
        file.write_bytes(damaged)
        try:
            load_decoder(one)
            outcomes.add("loaded")
        except (ValueError, NotImplementedError) as error:
            outcomes.add((type(error), str(file) in str(error)))
    assert (ValueError, True) in outcomes
    assert all(outcome == "loaded" or outcome[1] for outcome in outcomes)


def overwrite(source: Path, target: Path) -> None:
    """Other numbers of the same size in the same file."""
    content = bytearray(source.read_bytes())
    content[-1] ^= 1
    target.write_bytes(content)


class TestReplaced:
    """A checkpoint is replaced while it is read: never half of one model and half of another."""

    @pytest.mark.parametrize("change", ["replaced", "overwritten", "removed", "cut short"])
    def test_weights(self, originals, many, change):
        def progress(done, total):
            if done == total or not file.exists():
                return
            match change:
                case "replaced":
                    shutil.copyfile(file, many / "new")
                    (many / "new").rename(file)
                case "overwritten":
                    overwrite(file, file)
                case "removed":
                    file.unlink()
                case "cut short":
                    file.write_bytes(file.read_bytes()[:-8])

        # Read last, and so after the change.
        last = weight_files(originals["many"])[-1].name
        for loader in LOADERS[::2]:
            shutil.copytree(originals["many"], many, dirs_exist_ok=True)
            file = many / last
            with pytest.raises(ValueError, match=rf"{last} changed while it was read"):
                loader(many, progress=progress)

    @pytest.mark.slow
    def test_by_another_model(self, one):
        other = models.Transformer(CONFIG, rngs=nnx.Rngs(1))
        with pytest.raises(ValueError, match="one changed while it was read"):
            load(one, progress=lambda *_: save(other, one))
        assert load(one).config == CONFIG

    def test_once(self, one):
        """The second try reads the new model."""
        other = models.Transformer(CONFIG, rngs=nnx.Rngs(1))
        saves = iter([lambda: save(other, one)])
        loaded = load(one, progress=lambda *_: next(saves, lambda: None)())
        assert np.array_equal(loaded.embedding.get_value(), other.embedding.get_value())

    @pytest.mark.parametrize(
        ("text", "error"), [("{}", "names no architecture"), (None, "it must hold config.json")]
    )
    def test_config_json(self, one, monkeypatch, text, error):
        """After it was read, and before the weights' headers: the second try says what is there."""
        from turbojax.models.checkpoint import folder as _folder

        find, file = _folder.stored_tensors, one / "config.json"

        def late(folder):
            file.unlink(missing_ok=True) if text is None else file.write_text(text)
            return find(folder)

        monkeypatch.setattr(_folder, "stored_tensors", late)
        with pytest.raises((NotImplementedError, FileNotFoundError), match=error):
            load(one)
