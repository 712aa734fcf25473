"""`TurboAttention` under Flax's transforms: nothing changes but where and when it is computed."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import turbojax as tj
from tests.flax.flax_helpers import (
    CHANNELS,
    HEADS,
    KINDS,
    KV_HEADS,
    ROUNDING,
    SMALL,
    WIDTH,
    equal,
    leaves,
    module,
    tokens,
)

prefill = nnx.jit(lambda layer, x, lengths: layer.prefill(x, lengths))
decode = nnx.jit(lambda layer, x: layer.decode(x))


def filled(kind="4bit", length=20, **options):
    layer = module(cache=KINDS[kind], **options)
    layer.init_cache(2, 48)
    prefill(layer, tokens(length), jnp.array([length, 3]))
    return layer


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("kind", ["exact", "4bit"])
def test_jit(kind):
    """One program for all steps, which give what steps outside `jit` give, state included."""
    layer = filled(kind)
    eager = module(cache=KINDS[kind])
    eager.init_cache(2, 48)
    eager.prefill(tokens(20), jnp.array([20, 3]))
    traces = []

    @nnx.jit
    def step(layer, x):
        traces.append(1)
        return layer.decode(x)

    for seed in range(3):
        x = tokens(1, seed=seed + 1)
        np.testing.assert_allclose(step(layer, x), eager.decode(x), rtol=0, atol=ROUNDING)
    assert len(traces) == 1
    assert layer.cache.lengths.tolist() == [23, 6]
    # Codes may differ where float32 sums, differently fused, lie on a step's edge.
    for got, want in zip(leaves(layer.cache), leaves(eager.cache), strict=True):
        if got.dtype == np.float32:
            np.testing.assert_allclose(got, want, rtol=0, atol=ROUNDING)
        else:
            assert np.mean(got != want) < 0.01


@pytest.mark.slow
def test_init_cache_under_jit():
    layer = filled()
    nnx.jit(lambda layer: layer.init_cache(2, 48))(layer)
    assert layer.cache.lengths.tolist() == [0, 0]
    new = module(cache=SMALL)
    nnx.jit(lambda layer: layer.init_cache(2, 48))(new)
    equal(new.cache, layer.cache)


@pytest.mark.slow
def test_split_and_merge():
    layer, x = filled(), tokens(1)
    graph, weights, cache, rest = nnx.split(layer, nnx.Param, nnx.Cache, ...)
    assert not jax.tree.leaves(rest)
    assert {path[0] for path, _ in nnx.to_flat_state(weights)} == {f"{c}_proj" for c in "qkvo"}
    assert [path for path, _ in nnx.to_flat_state(cache)] == [("kv_cache",)]

    @jax.jit
    def step(weights, cache, x):
        layer = nnx.merge(graph, weights, cache)
        out = layer.decode(x)
        return out, nnx.state(layer, nnx.Cache)

    first, second = step(weights, cache, x), step(weights, cache, x)
    equal(first, second)
    # The state that was passed in stays as it was: nothing is shared with what `jit` returns.
    assert layer.cache.lengths.tolist() == [20, 3]
    np.testing.assert_array_equal(decode(layer, x), first[0])
    equal(nnx.state(layer, nnx.Cache), first[1])


@pytest.mark.slow
def test_donation():
    layer, other = filled(), filled()
    held = jax.tree.leaves(layer.cache)
    step = nnx.jit(lambda layer, x: layer.decode(x), donate_argnums=0)
    x = tokens(1)
    np.testing.assert_array_equal(step(layer, x), decode(other, x))
    assert all(x.is_deleted() for x in held)
    np.testing.assert_array_equal(step(layer, x), decode(other, x))
    equal(layer.cache, other.cache)


@pytest.mark.slow
def test_gradient_of_turbo_attention():
    """Straight through the rounding: along the exact one."""
    x = tokens(20)

    def loss(layer):
        return jnp.square(layer(x)).sum()

    exact = leaves(nnx.grad(loss)(module(cache="exact")))
    turbo = leaves(nnx.grad(loss)(module(cache=SMALL)))
    for a, b in zip(exact, turbo, strict=True):
        assert np.vdot(a, b) > 0.99 * np.linalg.norm(a) * np.linalg.norm(b)


@pytest.mark.fuzz
def test_stacked_layers():
    """Made by `nnx.vmap`, applied by `nnx.scan`, caches and all: as one after the other."""
    count, x = 2, tokens(12)

    @nnx.split_rngs(splits=count)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def create(rngs):
        layer = tj.flax.TurboAttention(WIDTH, HEADS, KV_HEADS, CHANNELS, cache=SMALL, rngs=rngs)
        layer.init_cache(2, 32)
        return layer

    @nnx.jit
    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def prefill_all(layer, hidden):
        return hidden + layer.prefill(hidden)

    @nnx.jit
    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def decode_all(layer, hidden):
        return hidden + layer.decode(hidden)

    stack = create(nnx.Rngs(0))
    assert stack.kv_cache.get_value().lengths.shape == (count, 2)
    graph, state = nnx.split(stack)
    layers = [
        nnx.merge(graph, jax.tree.map(lambda x, i=i: jnp.array(x[i]), state)) for i in range(count)
    ]
    out, hidden = prefill_all(stack, x), x
    for layer in layers:
        hidden = hidden + prefill(layer, hidden, None)
    np.testing.assert_allclose(out, hidden, rtol=0, atol=ROUNDING)
    out, hidden = decode_all(stack, x[:, :1]), x[:, :1]
    for layer in layers:
        hidden = hidden + decode(layer, hidden)
    # The caches' codes come from sums that may round differently: a step of 4 bits.
    np.testing.assert_allclose(out, hidden, rtol=0, atol=0.05)
    assert stack.kv_cache.get_value().lengths.tolist() == [[13, 13]] * count


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["exact", "fp8_e4m3"])
def test_orbax_parameters_and_cache(kind, tmp_path):
    """Generation goes on from disk as if nothing had happened; 8-bit floats included."""
    layer, x = filled(kind), tokens(1, seed=7)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "all", nnx.state(layer))

    def empty():
        layer = module(seed=1, cache=KINDS[kind])
        layer.init_cache(2, 48)
        return layer

    graph, state = nnx.split(empty())
    with ocp.StandardCheckpointer() as checkpointer:
        back = nnx.merge(graph, checkpointer.restore(tmp_path / "all", on_cpu(state)))
    equal(nnx.state(back), nnx.state(layer))
    np.testing.assert_array_equal(decode(back, x), decode(layer, x))
    equal(nnx.state(back), nnx.state(layer))


def on_cpu(state):
    """What a checkpoint shall be restored to: shapes, dtypes and a device."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state)
