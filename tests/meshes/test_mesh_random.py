"""Random decoders that are born on a mesh: each device makes its own part."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from turbojax import models
from turbojax.matmul.int4.weight import dequantize
from turbojax.models import random_weights
from turbojax.models.tensor_parallel.specs import shardings
from turbojax.parallel import mesh_of

pytestmark = pytest.mark.mesh

# Neither the vocabulary nor the inner size is a multiple of four.
CONFIG = dataclasses.replace(
    models.SHAPES["tiny"], vocab_size=510, intermediate_size=98, num_layers=1
)


def assert_shardings(decoder):
    for found, wanted in zip(
        jax.tree.leaves(decoder), jax.tree.leaves(shardings(decoder)), strict=True
    ):
        assert found.sharding.is_equivalent_to(wanted, found.ndim)


def test_a_split_decoder_has_the_weights_of_one_device():
    whole = models.random_decoder(CONFIG, dtype=jnp.float32)
    split = models.random_decoder(CONFIG, dtype=jnp.float32, axes=mesh_of("data=2,model=4"))
    # Two KV heads on four devices.
    assert dict(split.axes.mesh.shape) == {"data": 2, "model": 2, "sequence": 2}
    assert_shardings(split)
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(split), strict=True):
        inside = tuple(slice(size) for size in one.shape)
        np.testing.assert_array_equal(np.asarray(other)[inside], one)
        assert np.count_nonzero(other) == np.count_nonzero(one)  # the rest is zeros


def test_no_device_makes_more_than_its_part():
    config = dataclasses.replace(CONFIG, hidden_size=512, intermediate_size=2048)

    def used(axes):
        make = random_weights._program("dense", config, jnp.dtype(jnp.float32), axes)
        return make.lower(jax.random.key(0)).compile().memory_analysis()

    whole, part = used(None), used(mesh_of("model=2"))
    assert part.output_size_in_bytes < 0.55 * whole.output_size_in_bytes
    # Bits of random numbers and what is made of them.
    assert part.temp_size_in_bytes < 0.55 * whole.temp_size_in_bytes


@pytest.mark.slow
def test_each_device_rounds_its_own_weights():
    axes = mesh_of("data=2,model=4")
    decoder = models.random_quantized_decoder(CONFIG, axes=axes, quantize_head=True)
    assert_shardings(decoder)
    layer = decoder.layers[0]
    for name in ("codes", "scales", "output_scale"):
        arrays = getattr(layer.qkv.weight, name).addressable_shards
        assert len({str(x.index) for x in arrays}) == 4
    parts = []
    for i in range(4):
        [codes, scales, factor] = (
            np.split(np.asarray(getattr(layer.qkv.weight, name)), 4)[i]
            for name in ("codes", "scales", "output_scale")
        )
        one = dataclasses.replace(
            layer.qkv.weight,
            codes=jnp.asarray(codes),
            scales=jnp.asarray(scales),
            output_scale=jnp.asarray(factor),
        )
        one.validate()
        parts.append(np.asarray(dequantize(one)))
    queries, keys = ([x[rows] for x in parts] for rows in (slice(0, 16), slice(16, None)))
    assert len({x.tobytes() for x in queries}) == 4
    # Two devices share a KV head.
    assert [x.tobytes() == keys[0].tobytes() for x in keys] == [True, True, False, False]
    # Beyond the vocabulary there is nothing: 510 of 4 * 128.
    assert np.count_nonzero(np.asarray(decoder.lm_head.output_scale)) == 510
