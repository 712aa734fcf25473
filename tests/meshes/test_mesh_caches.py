"""Caches over a mesh: how they are split, and that no device ever holds a whole one."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import turbojax as tj
from turbojax import fireq, k8v4, paged, parallel
from turbojax.caches.exact import cache as exact
from turbojax.caches.kinds import init_layer_cache
from turbojax.caches.progressive.update import store_prompt
from turbojax.sharding import creation

pytestmark = pytest.mark.mesh

GROUPS = tj.TurboConfig(
    block_kv=16,
    block_q=16,
    buffer_size=16,
    num_low_bit_key_heads=1,
    num_low_bit_value_heads=1,
    heads_per_group=2,
)


@pytest.fixture(scope="module")
def axes() -> parallel.Axes:
    names = ("data", "model", "sequence")
    return parallel.Axes.of(jax.make_mesh((2, 2, 2), names, axis_types=(AxisType.Auto,) * 3))


def make(axes):
    """Caches of every class."""
    sizes = (4, 512, 4, 32)
    return [
        exact.init_cache(*sizes, axes=axes),
        fireq.init_cache(*sizes, axes=axes),
        k8v4.init_cache(*sizes, axes=axes),
        tj.init_cache(*sizes, config=GROUPS, axes=axes),
        tj.init_latent_cache(4, 512, 64, 32, kv_dtype="fp8_e4m3", axes=axes),
        tj.init_paged_cache(8, 16, 4, 32, axes=axes),
        tj.init_latent_pages(8, 16, 64, 32, axes=axes),
        init_layer_cache(*sizes, kind="turbo4", axes=axes),
    ]


def test_devices_make_their_own_parts(axes, monkeypatch):
    programs = []
    program = creation.program

    def kept(*args, **given):
        programs.append(program(*args, **given))
        return programs[-1]

    monkeypatch.setattr(creation, "program", kept)
    for cache, whole in zip(make(axes), make(None), strict=True):
        assert jax.tree.structure(cache) == jax.tree.structure(whole)
        arrays = jax.tree.leaves(cache)
        for array, spec in zip(arrays, jax.tree.leaves(cache.partition_specs(axes)), strict=True):
            assert array.sharding.is_equivalent_to(NamedSharding(axes.mesh, spec), array.ndim)
        # A device's memory, from the start to the end: its own part.
        of_device = sum(
            math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in arrays
        )
        memory = programs.pop(0).lower().compile().memory_analysis()
        used = memory.output_size_in_bytes + memory.temp_size_in_bytes
        assert used <= 1.05 * of_device + 2048, type(cache).__name__
        assert of_device < 0.6 * whole.nbytes


def test_specs_of_every_array(axes):
    cache = tj.init_cache(4, 512, 4, 32, config=GROUPS, axes=axes)
    specs = parallel.partition_specs(cache, axes)
    assert specs.key.codes == (P("data", "model", "sequence", None, None),) * 2
    assert specs.key.buffer == P("data", "model", "sequence", None)
    assert specs.value.buffer_scale == P("data", ("model", "sequence"))
    assert specs.lengths == P("data")
    pool = paged.init_cache(8, 16, 4, 32)
    assert pool.partition_specs(axes).key == P(("data", "sequence"), "model", None, None)
    stacked = jax.tree.map(lambda x: jnp.stack([x] * 3), exact.init_cache(4, 16, 4, 32))
    assert stacked.partition_specs(axes).key == P(None, "data", "sequence", "model", None)
    one = exact.init_cache(1, 16, 4, 32)
    assert one.partition_specs(axes).key == P(None, "sequence", "model", None)


def test_scales_that_are_given_reach_their_heads(axes):
    scale = jnp.arange(1, 5, dtype=jnp.float32)
    cache = tj.init_cache(2, 512, 4, 32, key_scale=scale, axes=axes)
    for shard in cache.key.buffer_scale.addressable_shards:
        assert np.round(shard.data[0]).tolist() in ([1, 2], [3, 4])


def test_what_cannot_be_split_is_named(axes):
    with pytest.raises(ValueError, match=r"ExactCache.key: axis 0 of shape \(3, 64, 4, 32\)"):
        exact.init_cache(3, 64, 4, 32, axes=axes)
    with pytest.raises(ValueError, match="a multiple of 2"):
        fireq.init_cache(4, 300, 4, 32, axes=axes)
    mixed = dataclasses.replace(GROUPS, heads_per_group=None)
    with pytest.raises(ValueError, match="heads_per_group=None must divide the 2 KV heads"):
        tj.init_cache(4, 512, 4, 32, config=mixed, axes=axes)
    with pytest.raises(TypeError, match="must be a cache"):
        parallel.partition_specs({}, axes)


@pytest.mark.slow
def test_groups_of_heads(axes):
    """Each has as many of few bits, whatever the others are; one device has whole ones."""
    del axes
    scale = jnp.array([1, 9, 20, 30], jnp.float32)[None, None, :, None]
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(1, 32, 4, 32)), jnp.float32)
    # Channels unlike each other have priority (the gap of a channel, and how it varies).
    key = x * scale
    lengths = jnp.array([32], jnp.int32)
    whole = tj.init_cache(1, 64, 4, 32, config=GROUPS, dtype=jnp.float32)
    whole = store_prompt(whole, key, x, lengths)
    assert np.sort(np.asarray(whole.key.head_slots).reshape(2, 2)).tolist() == [[0, 1], [0, 1]]
    assert sorted(np.asarray(whole.key.places)[0].tolist()) == [0, 1, 2, 3]
    whole.validate()
    both = tj.dequantize(whole)
    for first in (0, 2):
        own = slice(first, first + 2)
        half = tj.init_cache(1, 64, 2, 32, config=GROUPS, dtype=jnp.float32)
        half = store_prompt(half, key[:, :, own], x[:, :, own], lengths)
        for mine, of_all in zip(tj.dequantize(half), both, strict=True):
            np.testing.assert_array_equal(mine, of_all[:, :, own])
        np.testing.assert_array_equal(half.key.head_slots, whole.key.head_slots[:, own])
    query = jnp.asarray(rng.normal(size=(1, 1, 4, 32)), jnp.float32)
    out = tj.decode(query, whole, implementation="xla")
    mine = tj.decode(query[:, :, 2:], half, implementation="xla")
    np.testing.assert_array_equal(mine, out[:, :, 2:])


def test_configs_in_groups():
    two = tj.TurboConfig(num_low_bit_key_heads=4, num_low_bit_value_heads=2)
    assert two.grouped(8, 2) == dataclasses.replace(
        two, heads_per_group=4, num_low_bit_key_heads=2, num_low_bit_value_heads=1
    )
    with pytest.raises(ValueError, match="multiples of groups=4"):
        two.grouped(8, 4)
    with pytest.raises(ValueError, match="multiple of heads_per_group=3"):
        tj.TurboConfig(heads_per_group=3).groups_of(8)
    with pytest.raises(ValueError, match="heads_per_group=1 must be"):
        tj.TurboConfig(heads_per_group=1, num_low_bit_key_heads=2)
