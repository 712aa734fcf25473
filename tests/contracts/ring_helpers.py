"""What the tests of attention over a ring share: one mesh, one set of small arrays."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import turbojax as tj

BATCH, TOKENS, HEADS, KV_HEADS, CHANNELS, BLOCK = 2, 64, 4, 2, 8, 8
OF_TOKENS = P(None, "sequence")
EPS = float(jnp.finfo(jnp.float32).eps)


def config_of(mode, **options):
    """Numerics with blocks of 8 tokens."""
    return tj.TurboConfig(mode=mode, block_q=BLOCK, block_kv=BLOCK, buffer_size=BLOCK, **options)


@functools.cache
def operands(dtype=jnp.float32):
    """Query, key, value, sinks, segments and a cotangent of the output."""
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = [(BATCH, TOKENS, n, CHANNELS) for n in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    q, k, v, d = (jax.random.normal(x, s, dtype) for x, s in zip(keys, shapes, strict=False))
    ids = jnp.sort(jax.random.randint(keys[4], (BATCH, TOKENS), 0, 3), axis=1)
    return q, k, v, jnp.linspace(-1.0, 1.0, HEADS), ids.astype(jnp.int32), d


def mesh_of(devices, names=("sequence",), shape=None):
    """A mesh of the first devices."""
    shape = shape or (devices,)
    kinds = (jax.sharding.AxisType.Auto,) * len(shape)
    return jax.make_mesh(shape, names, devices=jax.devices()[:devices], axis_types=kinds)


def over(devices, call, specs, out_specs=OF_TOKENS, mesh=None):
    """`call` inside `shard_map`, with jax's checks."""
    mesh = mesh or mesh_of(devices)
    return jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=out_specs)


def collectives(compiled):
    """The kinds of collective operations of a compiled program."""
    kinds = "all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute"
    return set(re.findall(rf"({kinds})(?:-start)?\(", compiled.as_text()))


def both(one, many, *arrays, mesh=None):
    """Results and gradients of a function on one device, and of one over several.

    Each takes query, key, value, sinks and what there is more, and returns an output. Also returns
    the compiled program of the latter. With a mesh its queries, keys and values are split over it.
    """
    *_, d_out = operands()

    def with_gradients(f):
        def call(d_out, *arrays):
            out, pull = jax.vjp(lambda *x: f(*x, *arrays[4:]), *arrays[:4])
            return out, *pull(d_out)

        return jax.jit(call)

    wanted = with_gradients(one)(d_out, *arrays)
    given = (d_out, *arrays)
    if mesh is not None:
        sharding = jax.sharding.NamedSharding(mesh, OF_TOKENS)
        given = (*jax.device_put(given[:4], sharding), *given[4:])
    program = with_gradients(many).lower(*given).compile()
    return wanted, program(*given), program


def assert_close(got, wanted, devices):
    """Equal up to the order of float32 sums.

    A sum of `T` terms is off by at most ``T eps`` times the sum of their magnitudes, and every
    merge of parts rounds four times more; magnitudes are taken as twice the largest result.
    """
    bound = (TOKENS + 4 * devices) * EPS
    for x, y in zip(got, wanted, strict=True):
        x, y = np.asarray(x), np.asarray(y)
        np.testing.assert_allclose(x, y, rtol=0, atol=2 * bound * np.abs(y).max())
