"""`TurboAttention` and masks of Flax's modules over several devices: what one device computes."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import turbojax as tj
from tests.flax.flax_helpers import CHANNELS, HEADS, KV_HEADS, ROUNDING, SMALL, WIDTH, tokens
from tests.flax.test_flax_masks import FNS, KEYS, LEFT, finish, operands
from turbojax.flax import _masks

pytestmark = [pytest.mark.mesh, pytest.mark.fuzz]

SIZES = (WIDTH, HEADS, KV_HEADS, CHANNELS)
OPTIONS = {"cache": SMALL, "qkv_bias": True, "output_bias": True}


@pytest.fixture(scope="module")
def mesh():
    devices = jax.devices()[:4]
    return jax.make_mesh(
        (2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=devices
    )


def split(mesh, x):
    return jax.device_put(x, NamedSharding(mesh, P("data")))


@nnx.jit
def run(layer, x, new):
    layer.init_cache(2, 48)
    return layer(x), layer.prefill(x, jnp.array([20, 3])), layer.decode(new)


@nnx.jit
def slope(layer, x):
    return nnx.grad(lambda layer: jnp.square(layer(x)).sum())(layer)


def test_over_a_mesh(mesh):
    """Heads over two devices and sequences over two: what one device computes."""
    x, new = tokens(20), tokens(1, seed=1)
    one = tj.flax.TurboAttention(*SIZES, **OPTIONS, rngs=nnx.Rngs(0))
    with jax.set_mesh(mesh):
        many = nnx.jit(
            lambda: tj.flax.TurboAttention(
                *SIZES, **OPTIONS, sharding=(None, "model"), rngs=nnx.Rngs(0)
            )
        )()
        specs = {
            path: x.get_value().sharding.spec for path, x in nnx.to_flat_state(nnx.state(many))
        }
        for name in "qkv":
            assert specs[f"{name}_proj", "kernel"] == P(None, "model"), specs
            assert specs[f"{name}_proj", "bias"] == P("model"), specs
        assert specs["o_proj", "kernel"] in (P("model", None), P("model")), specs
        got = run(many, split(mesh, x), split(mesh, new))
        gradient = slope(many, split(mesh, x))
    for a, b in zip(got, run(one, x, new), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=ROUNDING)
    # A head's numbers are one device's: the same codes to the bit, wherever they were made.
    for a, b in zip(*(jax.tree.leaves(m.cache) for m in (many, one)), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(*map(jax.tree.leaves, (gradient, slope(one, x))), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=64 * ROUNDING)


def test_linen_over_a_mesh(mesh):
    x = tokens(20)
    twin = tj.flax.linen.TurboAttention(*SIZES, **OPTIONS, sharding=(None, "model"))
    with jax.set_mesh(mesh):
        boxed = jax.jit(twin.init)(jax.random.key(0), x)
        spec = nn.get_partition_spec(boxed)["params"]
        assert spec["q_proj"]["kernel"] == P(None, "model") == spec["v_proj"]["kernel"]
        assert spec["k_proj"]["bias"] == P("model")
        assert spec["o_proj"]["kernel"] == P("model", None)
        plain = jax.tree.map(
            lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), nn.unbox(boxed)["params"], spec
        )
        out = jax.jit(twin.apply)({"params": plain}, split(mesh, x))
    alone = jax.tree.map(np.asarray, plain)
    single = tj.flax.linen.TurboAttention(*SIZES, **OPTIONS)
    np.testing.assert_allclose(out, single.apply({"params": alone}, x), rtol=0, atol=ROUNDING)


def test_masks_are_reported_over_a_mesh(mesh, capfd):
    """By one device; XLA makes nothing whole on all of them, of which it would warn."""
    good, bad = jnp.asarray(KEYS), jnp.asarray(LEFT)

    def call(q, k, v, mask):
        return FNS[False](q, k, v, mask=mask)

    with jax.set_mesh(mesh):
        specs = {"in_specs": P("data"), "out_specs": P("data"), "check_vma": False}
        mapped = jax.shard_map(call, mesh=mesh, **specs)
        for program, first in ((jax.jit(call), 1), (jax.jit(mapped), 0)):
            _masks._warned.clear()
            for mask, said in ((good, 0), (bad, 1), (bad, 0)):
                arrays = [split(mesh, x) for x in (*operands(), mask)]
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    out = finish(program, *arrays)
                found = [str(w.message) for w in caught if w.category is tj.flax.MaskWarning]
                assert len(found) == said, found
                assert all(f"the first one is {first}" in text for text in found), found
                assert jnp.isfinite(out[0]).all()
                assert jnp.isnan(out[1]).all() == (mask is bad)
    assert "rematerialization" not in capfd.readouterr().err
