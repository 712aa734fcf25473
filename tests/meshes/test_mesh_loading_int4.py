"""Quantized checkpoints that are read onto a mesh: what `shard` makes of the whole, in parts."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from tests.meshes.test_mesh_loading import assert_same, stored_bytes
from tests.models.test_gguf_int4 import write_q4_0
from tests.models.test_packed_folders import write
from turbojax import models
from turbojax.models.checkpoint import int4_on_mesh
from turbojax.models.checkpoint.packed import reading
from turbojax.models.config import ExpertsConfig
from turbojax.models.tensor_parallel import placing
from turbojax.models.tensor_parallel.placing import shard
from turbojax.parallel import mesh_of

pytestmark = pytest.mark.mesh

# Devices' shares are whole tiles and blocks, but for the inner size of experts.
CONFIG = dataclasses.replace(
    models.SHAPES["tiny"],
    family="qwen2",
    hidden_size=128,
    intermediate_size=1024,
    head_dim=64,
    num_layers=1,
    vocab_size=512,
    qkv_bias=True,
)
CONFIGS = {
    "dense": CONFIG,
    "experts": dataclasses.replace(
        CONFIG,
        family="mixtral",
        qkv_bias=False,
        intermediate_size=384,
        experts=ExpertsConfig(count=4, per_token=2, intermediate_size=384, softmax="after"),
    ),
}


def own_process(monkeypatch, number):
    """Reads what the devices of this number need, onto the host."""
    for module in (int4_on_mesh, reading):
        monkeypatch.setattr(module, "own_numbers", lambda axes: [number])
    monkeypatch.setattr(placing, "assemble", lambda part, specs, axes: part(number))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    found = {}
    for name, config in CONFIGS.items():
        found[name] = tmp_path_factory.mktemp(name)
        decoder = models.random_quantized_decoder(
            config, quantize_head=name == "dense", dtype=jnp.float32
        )
        models.save_quantized(decoder, found[name])
    return found


@pytest.mark.fuzz
@pytest.mark.parametrize(("name", "text"), [("dense", "data=2,model=4"), ("experts", "model=2")])
def test_a_quantized_decoder_is_read_as_it_would_be_split(name, text, folders, monkeypatch):
    path, axes = folders[name], mesh_of(text)
    whole, shown = models.load_decoder(path), []
    with models.count_bytes_read() as read:
        found = models.load_decoder(path, mesh=axes, progress=lambda *x: shown.append(x))
    assert_same(found, shard(whole, axes))
    assert read.total == stored_bytes(path)
    assert shown[-1] == (read.total, read.total)
    count = axes.size("heads") * axes.size("sequence")
    own_process(monkeypatch, count - 1)
    with models.count_bytes_read() as part:
        models.load_decoder(path, mesh=axes)
    # Norms, output scales and biases are whole, and so are blocks that are shared.
    assert part.total < stored_bytes(path) * (1 / count + 0.05)


@pytest.mark.quick(1, slow=2)
@pytest.mark.parametrize(
    ("stored", "text"),
    [
        ("gptq", "model=2"),
        ("awq", "model=2"),
        pytest.param("compressed", "model=4", marks=pytest.mark.slow),
        pytest.param("gptq-sym", "model=4", marks=pytest.mark.slow),
        pytest.param("awq-gemv", "model=4", marks=pytest.mark.slow),
        pytest.param("compressed-sym", "model=2", marks=pytest.mark.slow),
    ],
)
def test_packed_weights_are_read_as_they_would_be_split(stored, text, tmp_path, monkeypatch):
    path, _ = write(tmp_path, "llama", stored, num_hidden_layers=1)
    axes = mesh_of(text)
    with models.count_bytes_read() as read:
        found = models.load_decoder(path, mesh=axes)
    assert_same(found, shard(models.load_decoder(path), axes))
    # Of AWQ's "gemv", padding is left out.
    assert read.total == stored_bytes(path) or stored == "awq-gemv"
    own_process(monkeypatch, 1)
    with models.count_bytes_read() as part:
        models.load_decoder(path, mesh=axes)
    assert part.total < 0.8 * read.total


@pytest.mark.parametrize(
    ("architecture", "text"),
    [("llama", "model=2"), pytest.param("phi3", "model=4", marks=pytest.mark.slow)],
)
def test_codes_of_a_gguf_file_are_read_as_they_would_be_split(
    architecture, text, tmp_path, monkeypatch
):
    path, _ = write_q4_0(tmp_path / "m.gguf", architecture)
    axes = mesh_of(text)
    with models.count_bytes_read() as read:
        found = models.load_decoder(path, mesh=axes, int4=True)
    whole = models.load_decoder(path, int4=True)
    assert_same(found, shard(whole, axes))
    own_process(monkeypatch, 1)
    with models.count_bytes_read() as part:
        models.load_decoder(path, mesh=axes, int4=True)
    assert part.total < 0.8 * read.total


def test_act_order_of_attention_cannot_be_split(tmp_path):
    path, _ = write(tmp_path, "llama", "gptq-act-order", num_hidden_layers=1)
    with pytest.raises(NotImplementedError, match="sorted by group"):
        models.load_decoder(path, mesh=mesh_of("model=2"))


@pytest.mark.fuzz
@pytest.mark.parametrize("name", ["dense", pytest.param("awq", marks=pytest.mark.slow)])
def test_adapters_are_split_beside_the_weights(name, folders, tmp_path):
    path = folders["dense"]
    if name == "awq":
        path, _ = write(tmp_path, "llama", name, num_hidden_layers=1)
    axes = mesh_of("model=2")
    whole = models.load_decoder(path)
    adapters = models.init_adapters(whole, targets=("q", "v", "o", "gate", "down"), rank=4)
    adapters = jax.tree.map(lambda x: x + 0.5, adapters)
    found = models.load_decoder(path, mesh=axes, adapters=adapters)
    assert_same(found, shard(models.with_adapters(whole, adapters), axes))
    assert_same(found, models.with_adapters(shard(whole, axes), adapters))
