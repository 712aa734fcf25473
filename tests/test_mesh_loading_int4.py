"""Quantized checkpoints that are read onto a mesh: what `shard` makes of the whole, in parts."""

import dataclasses

import jax.numpy as jnp
import pytest
from test_mesh_loading import assert_same, stored_bytes

from turbojax import models
from turbojax.models.checkpoint import int4_on_mesh
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
    monkeypatch.setattr(int4_on_mesh, "own_numbers", lambda axes: [number])
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
