"""Checkpoints read onto a mesh: every byte once, and only what a process's devices hold."""

import json

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file

from tests.models import hf_helpers
from tests.models.test_gpt_oss import rounded
from turbojax import models
from turbojax.models.checkpoint import folder, on_mesh
from turbojax.models.tensor_parallel.placing import shard
from turbojax.models.tensor_parallel.specs import shardings
from turbojax.parallel import Axes, mesh_of

pytestmark = pytest.mark.mesh


def stored_bytes(path) -> int:
    """Of all tensors of a checkpoint."""
    return sum(x.nbytes for x in folder.stored_tensors(path).values())


def assert_same(found, wanted):
    """The same arrays, split alike."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for (path, one), other in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True
    ):
        name = jax.tree_util.keystr(path)
        assert one.dtype == other.dtype, name
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim), name
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other), err_msg=name)


NAMES = ("qwen2", "phi3", "gpt-oss", "mixtral", "deepseek-v3")
"""With biases; with joined tensors; with experts in one, and in many; with latent attention."""


def cases():
    return [
        name if name in NAMES else pytest.param(name, marks=pytest.mark.slow)
        for name in sorted(hf_helpers.VARIANTS)
    ]


@pytest.mark.quick(2, slow=2)
@pytest.mark.parametrize("name", cases())
def test_a_decoder_is_read_as_it_would_be_split(name, tmp_path):
    path = hf_helpers.write(name, tmp_path)
    axes = mesh_of("data=2,model=4")
    with models.count_bytes_read() as read:
        found = models.load_decoder(path, dtype="float32", mesh=axes)
    assert_same(found, shard(models.load_decoder(path, dtype="float32"), axes))
    assert_same(found, jax.device_put(found, shardings(found)))
    assert read.total == stored_bytes(path)


class Process:
    """What a process with some of the devices would read: arrays stay on the host."""

    def __init__(self, monkeypatch, devices):
        self.devices = frozenset(devices)
        monkeypatch.setattr(on_mesh, "local_devices", lambda sharding: self.devices)
        monkeypatch.setattr(on_mesh, "assemble", self.assemble)
        monkeypatch.setattr(on_mesh, "_transposed", lambda sharding: lambda x: x)

    def assemble(self, shape, sharding, parts):
        assert parts.keys() == self.devices
        return next(iter(parts.values()))


@pytest.mark.parametrize("name", ["phi3", "gpt-oss", "deepseek-v3"])
def test_a_process_reads_what_its_devices_hold(name, tmp_path, monkeypatch):
    path = hf_helpers.write(name, tmp_path)
    axes = mesh_of("data=2,model=2")
    whole = models.load_decoder(path, dtype="float32")
    parts = shard(whole, axes)
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(parts))
    for column in (0, 1):
        devices = axes.mesh.devices[:, column]
        Process(monkeypatch, devices)
        with models.count_bytes_read() as read:
            models.load_decoder(path, dtype="float32", mesh=axes)
        monkeypatch.undo()
        assert read.total == held
        assert 0.4 < read.total / stored_bytes(path) < 0.6


def test_layers_that_stay_in_files_are_split_when_they_are_read(tmp_path):
    path = hf_helpers.write("phi3", tmp_path)
    axes = mesh_of("model=4")
    stored = models.open_decoder(path, dtype="float32", mesh=axes)
    whole = models.load_decoder(path, dtype="float32", mesh=axes)
    assert stored.axes == whole.axes
    assert_same(stored.layers[1], whole.layers[1])
    assert_same(stored.lm_head, whole.lm_head)


def test_experts_in_mxfp4_are_read_in_parts(tmp_path):
    tensors, config = hf_helpers.tensors("gpt-oss"), hf_helpers.config("gpt-oss")
    for name in [x for x in tensors if x.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales = rounded(tensors.pop(name))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    # 48 inputs of each device, in groups of 32.
    axes = mesh_of("model=2")
    found = models.load_decoder(tmp_path, dtype="float32", mesh=axes)
    assert_same(found, shard(models.load_decoder(tmp_path, dtype="float32"), axes))


def test_tied_tables_are_compared_in_parts(tmp_path, monkeypatch):
    path = hf_helpers.write("llama3.1", tmp_path)
    tensors = load_file(path / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = other = table.copy()
    axes = Axes.of(jax.make_mesh((4,), ("sequence",)))
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    models.load_decoder(path, mesh=axes)
    other[-1, -1] += 1
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="lm_head.weight differs from"):
        models.load_decoder(path, mesh=axes)
    Process(monkeypatch, axes.mesh.devices[:2])  # The last rows are not its own.
    models.load_decoder(path, mesh=axes)


@pytest.mark.parametrize(
    ("mesh", "error", "message"),
    [
        ("model=2", TypeError, "mesh is a str, must be a jax.sharding.Mesh or Axes"),
        (Axes(heads="model"), ValueError, "has no mesh"),
        (((8,), ("model",)), ValueError, "num_heads=4 must be a multiple of 8"),
        (((3,), ("model",)), ValueError, "num_heads=4 must be a multiple of 3"),
        (((2,), ("x",)), ValueError, r"the mesh has axes \['x'\], must have none but data"),
    ],
)
def test_bad_meshes_are_refused(mesh, error, message, tmp_path):
    path = hf_helpers.write("qwen2", tmp_path)
    if isinstance(mesh, tuple):
        count, names = mesh
        mesh = Mesh(np.array(jax.devices()[: count[0]]), names)
    with pytest.raises(error, match=message):
        models.load_decoder(path, mesh=mesh)


@pytest.mark.parametrize("text", ["model=2", "data=2", "data=2,model=2"])
def test_a_transformer_is_split_as_it_trains(text, tmp_path):
    path = hf_helpers.write("mixtral", tmp_path)
    axes = mesh_of(text)
    whole = models.load_transformer(path, dtype="float32")
    with models.count_bytes_read() as read:
        found = models.load_transformer(path, dtype="float32", mesh=axes.mesh)
    assert read.total == stored_bytes(path)
    for (place, one), other in zip(
        jax.tree_util.tree_leaves_with_path(nnx.state(found)),
        jax.tree.leaves(nnx.state(whole)),
        strict=True,
    ):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
        if "_proj" in jax.tree_util.keystr(place):
            assert one.addressable_shards[0].data.size * axes.mesh.size == one.size, place
