"""Folders of every family, in the files that transformers writes: what is read and written."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from tests.models import hf_helpers
from tests.recordings import parity_recordings as recordings
from turbojax import models
from turbojax.models.checkpoint.huggingface import (
    expected_shapes,
    load,
    load_decoder,
    load_transformer,
    save,
    to_hf_tensors,
    weight_files,
)
from turbojax.models.families.tensors import checkpoint_tensors

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module", params=list(hf_helpers.VARIANTS))
def variant(request, tmp_path_factory):
    """A checkpoint in one file, the same in several, and what it holds."""
    name = request.param
    folder = tmp_path_factory.mktemp(name)
    hf_helpers.write(name, folder / "one")
    hf_helpers.write(name, folder / "many", shard_bytes=60_000)
    assert len(list((folder / "many").glob("*.safetensors"))) > 3
    return folder, hf_helpers.tensors(name)


def same_bits(one, other) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape) and (
        np.asarray(one).tobytes() == np.asarray(other).tobytes()
    )


def arrays(model) -> dict:
    """Arrays of a model by path."""
    leaves, _ = jax.tree.flatten_with_path(nnx.to_pure_dict(nnx.state(model)))
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves}


# All of them are read and written by transformers too, in `test_parity_live_forward.py`.
FEW = list(hf_helpers.VARIANTS)[::7]


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("variant", FEW, indirect=True)
def test_one_file_and_many_hold_what_was_written(variant):
    folder, stored = variant
    model = load(folder / "one")
    assert {n: x.shape for n, x in stored.items()} == expected_shapes(model.config)
    assert model.dtype == jnp.float32
    for name, tensor in to_hf_tensors(model).items():
        assert same_bits(tensor, stored[name]), name
    sharded = arrays(load(folder / "many"))
    for path, array in arrays(model).items():
        assert same_bits(array, sharded[path]), path
    assert sum(x.size for x in sharded.values()) == model.config.num_parameters


@pytest.mark.quick(1, slow=0)
def test_layers_are_read_as_they_are_unstacked(variant):
    folder, _ = variant
    direct, unstacked = load_decoder(folder / "many"), models.unstack(load(folder / "one"))
    assert jax.tree.structure(direct) == jax.tree.structure(unstacked)
    assert all(map(same_bits, jax.tree.leaves(direct), jax.tree.leaves(unstacked)))


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("variant", FEW, indirect=True)
def test_what_is_saved_is_what_was_read(variant, tmp_path):
    folder, stored = variant
    model = load(folder / "one")
    for limit, files in ((1 << 30, 1), (60_000, None)):
        out = tmp_path / str(limit)
        save(model, out, max_shard_bytes=limit)
        assert files is None or [x.name for x in weight_files(out)] == ["model.safetensors"]
        tensors = {}
        for file in weight_files(out):
            tensors |= load_file(file)
        assert tensors.keys() == stored.keys()
        assert all(same_bits(tensors[name], x) for name, x in stored.items())
        again = arrays(load(out))
        assert all(same_bits(x, again[path]) for path, x in arrays(model).items())
        assert load(out).config == model.config


@pytest.mark.quick(1, slow=0)
def test_every_row_of_every_array_has_one_source(variant):
    folder, _ = variant
    config = load(folder / "one").config
    shapes = {path: x.shape for path, x in arrays(load(folder / "one")).items()}
    filled = {path: np.zeros(shape, int) for path, shape in shapes.items()}
    for spec in checkpoint_tensors(config):
        rows: list[int] = []
        columns: list[int] = []
        for placement in spec.placements:
            if placement.columns is not None:
                mine = range(spec.shape[-1])[placement.columns[0] :: placement.columns[1]]
                columns += mine
                target = filled[".".join(placement.path)][placement.layer]
                assert target.shape == (*spec.shape[:-1], len(mine))
                target += 1
                continue
            first, last = placement.rows or (0, spec.shape[0])
            rows += range(first, last)
            target = filled[".".join(placement.path)]
            target = target if placement.layer is None else target[placement.layer]
            target = target if placement.expert is None else target[placement.expert]
            shape = (last - first, *spec.shape[1:])
            assert target.shape == (shape[::-1] if placement.transpose else shape)
            target += 1
        assert sorted(columns) == (list(range(spec.shape[-1])) if columns else [])
        assert rows == ([] if columns else list(range(spec.shape[0])))
    assert all((x == 1).all() for x in filled.values())


def test_fused_rows_are_queries_then_keys_then_values(tmp_path):
    hf_helpers.write("phi3", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    state = arrays(load(tmp_path))
    qkv = stored["model.layers.2.self_attn.qkv_proj.weight"]
    gate_up = stored["model.layers.2.mlp.gate_up_proj.weight"]
    for path, part in {
        "attention.q_proj": qkv[:64],
        "attention.k_proj": qkv[64:96],
        "attention.v_proj": qkv[96:],
        "mlp.gate_proj": gate_up[:96],
        "mlp.up_proj": gate_up[96:],
    }.items():
        assert same_bits(np.asarray(state[f"blocks.{path}.kernel"][2]), np.array(part.T)), path


def test_the_four_norms_of_gemma(tmp_path):
    hf_helpers.write("gemma2", tmp_path)
    stored, state = load_file(tmp_path / "model.safetensors"), arrays(load(tmp_path))
    for name, path in {
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "attention_post_norm",
        "pre_feedforward_layernorm": "mlp_norm",
        "post_feedforward_layernorm": "mlp_post_norm",
    }.items():
        expected = stored[f"model.layers.1.{name}.weight"]
        assert same_bits(state[f"blocks.{path}.scale"][1], expected), name


class TestDtypes:
    def test_what_config_json_names_is_the_default(self, tmp_path):
        hf_helpers.write("llama2", tmp_path)
        edit(tmp_path, dtype="bfloat16")
        model = load(tmp_path)
        assert model.dtype == model.embedding.get_value().dtype == jnp.bfloat16
        assert load(tmp_path, dtype=jnp.float32).dtype == jnp.float32
        edit(tmp_path, dtype=None)
        assert load(tmp_path).dtype == jnp.float32

    @pytest.mark.quick(1)
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_mixed_dtypes_are_cast_as_numpy_casts(self, tmp_path, dtype):
        hf_helpers.write("qwen2", tmp_path)
        file = tmp_path / "model.safetensors"
        tensors = load_file(file)
        kinds = [ml_dtypes.bfloat16, np.float32, np.float16, np.float64]
        for i, name in enumerate(sorted(tensors)):
            tensors[name] = tensors[name].astype(kinds[i % 4])
        save_file(tensors, file)
        model, target = load(tmp_path, dtype=dtype), jnp.dtype(dtype)
        assert model.dtype == target
        for name, tensor in to_hf_tensors(model).items():
            assert same_bits(tensor, tensors[name].astype(target)), name
        decoder = load_decoder(tmp_path, dtype=dtype)
        assert decoder.dtype == target
        assert {x.dtype for x in jax.tree.leaves(decoder)} == {target}

    @pytest.mark.quick(1)
    @pytest.mark.optimized
    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    def test_every_bit_survives(self, tmp_path, dtype):
        """All 16-bit patterns, or random 32-bit ones: NaN, infinities and subnormals among them."""
        hf_helpers.write("llama2", tmp_path / "in")
        tensors = load_file(tmp_path / "in" / "model.safetensors")
        rng = np.random.default_rng(0)
        for name, tensor in tensors.items():
            count = tensor.size * jnp.dtype(dtype).itemsize
            bits = rng.integers(256, size=count, dtype=np.uint8)
            tensors[name] = bits.view(jnp.dtype(dtype)).reshape(tensor.shape)
        save_file(tensors, tmp_path / "in" / "model.safetensors")
        edit(tmp_path / "in", dtype=jnp.dtype(dtype).name)
        model = load(tmp_path / "in")
        save(model, tmp_path / "out", max_shard_bytes=60_000)
        found = {}
        for file in weight_files(tmp_path / "out"):
            found |= load_file(file)
        assert found.keys() == tensors.keys()
        assert all(same_bits(found[name], x) for name, x in tensors.items())
        decoder, unstacked = load_decoder(tmp_path / "out"), models.unstack(model)
        assert all(map(same_bits, jax.tree.leaves(decoder), jax.tree.leaves(unstacked)))

    def test_numbers_too_large_are_refused(self, tmp_path):
        hf_helpers.write("llama2", tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        name = "model.layers.1.mlp.down_proj.weight"
        tensors[name][3, 4] = 70000
        tensors["model.norm.weight"][0] = np.inf
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=f"dtype=float16 cannot hold {name}"):
            load(tmp_path, dtype=jnp.float16)
        assert np.isinf(load(tmp_path, dtype=jnp.bfloat16).norm.scale.get_value()[0])

    def test_numbers_too_large_are_not_saved(self, tmp_path):
        hf_helpers.write("llama2", tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        name = "model.layers.1.mlp.down_proj.weight"
        tensors[name][3, 4] = 70000
        tensors["model.norm.weight"][0] = np.inf
        save_file(tensors, tmp_path / "model.safetensors")
        model, before = load(tmp_path), (tmp_path / "model.safetensors").read_bytes()
        for call in (lambda: save(model, tmp_path, dtype="float16"), lambda: half(model)):
            with pytest.raises(ValueError, match=f"dtype=float16 cannot hold {name}"):
                call()
        assert (tmp_path / "model.safetensors").read_bytes() == before
        assert not list(tmp_path.glob("*.part"))
        save(model, tmp_path, dtype="bfloat16")
        assert np.isinf(load(tmp_path).norm.scale.get_value()[0])

    def test_other_dtypes_are_refused(self, tmp_path):
        hf_helpers.write("llama2", tmp_path)
        for call in (load, load_transformer, load_decoder):
            with pytest.raises(ValueError, match="dtype=int8 must be one of float32"):
                call(tmp_path, dtype=jnp.int8)
            with pytest.raises(ValueError, match="dtype='bf16' must be one of float32, bfloat16"):
                call(tmp_path, dtype="bf16")
        with pytest.raises(ValueError, match="dtype=float64 must be one of float32"):
            save(load(tmp_path), tmp_path / "out", dtype=np.float64)
        assert not (tmp_path / "out").exists()


class TestTiedEmbeddings:
    @pytest.mark.parametrize("shards", [False, True])
    def test_a_head_that_repeats_the_embedding(self, tmp_path, shards):
        hf_helpers.write("qwen2", tmp_path)
        expected = arrays(load(tmp_path))
        tensors = load_file(tmp_path / "model.safetensors")
        head = tensors["model.embed_tokens.weight"].copy()
        write_files(tmp_path, tensors, {"lm_head.weight": head}, shards)
        model = load(tmp_path)
        assert model.lm_head is None
        assert all(same_bits(x, expected[path]) for path, x in arrays(model).items())
        head[-1, 5] += 1
        write_files(tmp_path, tensors, {"lm_head.weight": head}, shards)
        with pytest.raises(ValueError, match=r"lm_head.weight differs from model.embed_tokens"):
            load(tmp_path)
        write_files(tmp_path, tensors, {"lm_head.weight": head[:-1]}, shards)
        with pytest.raises(ValueError, match="tie_word_embeddings must be false"):
            load(tmp_path)
        write_files(tmp_path, tensors, {"lm_head.weight": head}, shards)
        edit(tmp_path, tie_word_embeddings=False)
        assert same_bits(load(tmp_path).lm_head.get_value(), head)

    def test_pieces_are_all_compared(self, tmp_path, monkeypatch):
        monkeypatch.setattr("turbojax.models.checkpoint.weights._COMPARED_BYTES", 1000)
        hf_helpers.write("qwen2", tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        for row in (0, 3, 64, 127):
            head = tensors["model.embed_tokens.weight"].copy()
            head[row, -1] = 9
            write_files(tmp_path, tensors, {"lm_head.weight": head}, False)
            with pytest.raises(ValueError, match="differs"):
                load(tmp_path)
        head = tensors["model.embed_tokens.weight"].copy()
        write_files(tmp_path, tensors, {"lm_head.weight": head}, False)
        assert load(tmp_path).lm_head is None


def test_rotary_frequencies_of_old_checkpoints_are_skipped(tmp_path):
    hf_helpers.write("llama2", tmp_path)
    expected = arrays(load(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    old = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(8) for i in range(3)}
    save_file(tensors | old, tmp_path / "model.safetensors")
    assert all(same_bits(x, expected[path]) for path, x in arrays(load(tmp_path)).items())


def test_progress_counts_bytes(tmp_path):
    hf_helpers.write("phi3", tmp_path, shard_bytes=60_000)
    total = sum(4 * np.prod(x) for x in expected_shapes(load(tmp_path).config).values())
    for call in (load, load_decoder, load_transformer):
        told = []
        call(tmp_path, progress=lambda *x, told=told: told.append(x))
        done = [x for x, _ in told]
        assert done == sorted(set(done))
        assert done[-1] == total
        assert {x for _, x in told} == {total}


@pytest.mark.slow
def test_max_length_is_the_model_s(tmp_path):
    hf_helpers.write("phi3-longrope", tmp_path)
    assert load(tmp_path).config.max_length == 256
    for call in (load, load_decoder, load_transformer):
        config = call(tmp_path, max_length=24).config
        assert config == dataclasses.replace(load(tmp_path).config, max_length=24)
        with pytest.raises(ValueError, match="max_length=0 must be"):
            call(tmp_path, max_length=0)
    # Positions rotate by other angles in a model for short texts, as those of transformers do.
    ids = recordings.arrays()["short/tokens"].astype(np.int32)
    ours = load(tmp_path, max_length=24)(jnp.asarray(ids))
    assert recordings.error(np.asarray(ours), recordings.logits("phi3-longrope", "short")) < 1e-4
    with pytest.raises(ValueError, match="at most max_length=24"):
        load(tmp_path, max_length=24)(jnp.asarray(hf_helpers.tokens(1, 25)))


class TestSaving:
    def test_files_are_no_larger_than_asked_for(self, tmp_path):
        hf_helpers.write("llama2", tmp_path / "in")
        model = load(tmp_path / "in")
        save(model, tmp_path, max_shard_bytes=40_000)
        index = json.loads((tmp_path / INDEX).read_text())
        files = [x.name for x in weight_files(tmp_path)]
        assert files == sorted(x.name for x in tmp_path.glob("*.safetensors"))
        assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
        assert index["metadata"]["total_size"] == 4 * model.config.num_parameters
        for name in files:
            tensors = load_file(tmp_path / name)
            assert {n for n, file in index["weight_map"].items() if file == name} == set(tensors)
            assert sum(x.nbytes for x in tensors.values()) <= 40_000
        # One tensor may be larger.
        save(model, tmp_path, max_shard_bytes=1)
        assert len(weight_files(tmp_path)) == len(expected_shapes(model.config))
        with pytest.raises(ValueError, match="max_shard_bytes=0 must be at least 1"):
            save(model, tmp_path, max_shard_bytes=0)

    def test_one_model_replaces_another(self, tmp_path):
        hf_helpers.write("llama2", tmp_path / "a")
        hf_helpers.write("gemma2", tmp_path / "b")
        first, second = load(tmp_path / "a"), load(tmp_path / "b")
        out = tmp_path / "out"
        out.mkdir()
        (out / "tokenizer.json").write_text("kept")
        for limits in [(1 << 30, 60_000), (60_000, 1 << 30), (50_000, 90_000)]:
            save(first, out, max_shard_bytes=limits[0])
            assert load(out).config == first.config
            save(second, out, max_shard_bytes=limits[1])
            assert all(same_bits(x, arrays(second)[path]) for path, x in arrays(load(out)).items())
            weights = {x.name for x in weight_files(out)}
            assert {x.name for x in out.glob("*.safetensors*")} - {INDEX} == weights
        assert (out / "tokenizer.json").read_text() == "kept"

    def test_what_fails_leaves_the_old_model(self, tmp_path, monkeypatch):
        hf_helpers.write("llama2", tmp_path / "in")
        model = load(tmp_path / "in")
        out = tmp_path / "out"
        save(model, out, max_shard_bytes=60_000)
        before = {x.name: x.read_bytes() for x in out.iterdir()}
        calls = []

        def fail(state, path):
            calls.append(path)
            if len(calls) == 30:
                raise OSError("no space left")
            return variable(state, path)

        from turbojax.models.checkpoint import weights as loading

        variable = loading.variable
        monkeypatch.setattr(loading, "variable", fail)
        with pytest.raises(OSError, match="no space left"):
            save(model, out)
        assert {x.name: x.read_bytes() for x in out.iterdir()} == before

    @pytest.mark.quick(5, slow=0)
    @pytest.mark.parametrize("limit", [1 << 30, 60_000])
    @pytest.mark.parametrize(
        ("extra", "error", "message"),
        [
            ({"eos_token_id": np.int64(3)}, TypeError, "eos_token_id=.*3.* must be serializable"),
            ({"num_hidden_layers": 1}, ValueError, "num_hidden_layers=1 must be left out"),
            ({"quantization_config": {}}, ValueError, "quantization_config={} must be left out"),
            (
                {"rope_scaling": {"type": "linear", "factor": 2.0}},
                ValueError,
                "must not make another model of this one",
            ),
            ({"new_idea": "on"}, NotImplementedError, "new_idea='on' is not supported"),
        ],
    )
    def test_further_keys_that_cannot_be_written(self, tmp_path, limit, extra, error, message):
        hf_helpers.write("llama2", tmp_path / "in")
        model, out = load(tmp_path / "in"), tmp_path / "out"
        with pytest.raises(error, match=message):
            save(model, out, extra_config=extra, max_shard_bytes=limit)
        assert not out.exists()
        save(model, out, extra_config={"eos_token_id": [3, 4]}, max_shard_bytes=limit)
        assert json.loads((out / "config.json").read_text())["eos_token_id"] == [3, 4]
        before = {x.name: x.read_bytes() for x in out.iterdir()}
        with pytest.raises(error, match=message):
            save(model, out, extra_config=extra, max_shard_bytes=limit)
        assert {x.name: x.read_bytes() for x in out.iterdir()} == before

    def test_a_link_is_replaced_and_not_followed(self, tmp_path):
        """Folders that hold links to shared files are common."""
        hf_helpers.write("llama2", tmp_path / "in")
        shared = tmp_path / "shared"
        shutil.copyfile(tmp_path / "in" / "model.safetensors", shared)
        (tmp_path / "in" / "model.safetensors").unlink()
        (tmp_path / "in" / "model.safetensors").symlink_to(shared)
        content, model = shared.read_bytes(), load(tmp_path / "in", dtype=jnp.bfloat16)
        save(model, tmp_path / "in")
        assert shared.read_bytes() == content
        assert load(tmp_path / "in").dtype == jnp.bfloat16

    def test_what_a_family_cannot_say_is_refused(self, tmp_path):
        hf_helpers.write("llama2", tmp_path / "in")
        model = load(tmp_path / "in")
        model.config = dataclasses.replace(model.config, final_soft_cap=3.0)
        with pytest.raises(ValueError, match="final_soft_cap=3.0"):
            save(model, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def half(model) -> dict:
    return to_hf_tensors(model, dtype="float16")


def edit(folder, **changes) -> None:
    """Changes keys of a `config.json`; None removes one."""
    file = folder / "config.json"
    content = json.loads(file.read_text()) | changes
    for key in [key for key, value in changes.items() if value is None]:
        del content[key]
    file.write_text(json.dumps(content))


def write_files(folder, first, second, shards) -> None:
    """Stores tensors in one file, or in two with an index."""
    for file in folder.glob("model*"):
        file.unlink()
    if not shards:
        save_file(first | second, folder / "model.safetensors")
        return
    places = {}
    for name, tensors in (("b.safetensors", first), ("a.safetensors", second)):
        save_file(tensors, folder / name)
        places |= dict.fromkeys(tensors, name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
