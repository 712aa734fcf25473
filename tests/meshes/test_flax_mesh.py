"""`TurboAttention` over several devices: what one device computes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Run by a process of its own: how many devices a CPU is, jax asks once.
DEVICES = " --xla_force_host_platform_device_count=4"
MESH = """
import jax, jax.numpy as jnp, numpy as np
from flax import linen as nn, nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from tests.flax.flax_helpers import CHANNELS, HEADS, KV_HEADS, ROUNDING, SMALL, WIDTH, tokens
import turbojax as tj

assert len(jax.devices()) == 4
sizes = (WIDTH, HEADS, KV_HEADS, CHANNELS)
options = {"cache": SMALL, "qkv_bias": True, "output_bias": True}
x, new = tokens(20), tokens(1, seed=1)

@nnx.jit
def run(layer, x, new):
    layer.init_cache(2, 48)
    return layer(x), layer.prefill(x, jnp.array([20, 3])), layer.decode(new)

@nnx.jit
def slope(layer, x):
    return nnx.grad(lambda layer: jnp.square(layer(x)).sum())(layer)

one = tj.flax.TurboAttention(*sizes, **options, rngs=nnx.Rngs(0))
mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
with jax.set_mesh(mesh):
    many = nnx.jit(
        lambda: tj.flax.TurboAttention(
            *sizes, **options, sharding=(None, "model"), rngs=nnx.Rngs(0)
        )
    )()
    specs = {
        path: x.get_value().sharding.spec for path, x in nnx.to_flat_state(nnx.state(many))
    }
    for name in "qkv":
        assert specs[f"{name}_proj", "kernel"] == P(None, "model"), specs
        assert specs[f"{name}_proj", "bias"] == P("model"), specs
    assert specs["o_proj", "kernel"] in (P("model", None), P("model")), specs
    split = lambda x: jax.device_put(x, NamedSharding(mesh, P("data")))
    got = run(many, split(x), split(new))
    gradient = slope(many, split(x))
want = run(one, x, new)
for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=ROUNDING)
# A head's numbers are one device's: the same codes to the bit, wherever they were made.
for a, b in zip(*(jax.tree.leaves(m.cache) for m in (many, one)), strict=True):
    np.testing.assert_array_equal(a, b)
for a, b in zip(*map(jax.tree.leaves, (gradient, slope(one, x))), strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=64 * ROUNDING)

twin = tj.flax.linen.TurboAttention(*sizes, **options, sharding=(None, "model"))
with jax.set_mesh(mesh):
    boxed = jax.jit(twin.init)(jax.random.key(0), x)
    spec = nn.get_partition_spec(boxed)["params"]
    assert spec["q_proj"]["kernel"] == P(None, "model") == spec["v_proj"]["kernel"]
    assert spec["k_proj"]["bias"] == P("model")
    assert spec["o_proj"]["kernel"] == P("model", None)
    plain = jax.tree.map(
        lambda x, s: jax.device_put(x, NamedSharding(mesh, s)),
        nn.unbox(boxed)["params"],
        spec,
    )
    out = jax.jit(twin.apply)({"params": plain}, split(x))
alone = jax.tree.map(np.asarray, plain)
single = tj.flax.linen.TurboAttention(*sizes, **options)
np.testing.assert_allclose(out, single.apply({"params": alone}, x), rtol=0, atol=ROUNDING)
print("equal")
"""


@pytest.mark.fuzz
def test_over_a_mesh():
    """Heads over two devices and sequences over two: what one device computes."""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", MESH],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + DEVICES,
            "PYTHONPATH": str(root),
            "JAX_NUMPY_DTYPE_PROMOTION": "strict",
            "JAX_NUMPY_RANK_PROMOTION": "raise",
        },
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "equal"
