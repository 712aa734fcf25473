"""Ops over a mesh with automatic or explicit axes: no collective, and the bits of one device."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import turbojax as tj
from tests.meshes.per_device_helpers import (
    AUTO,
    BATCH,
    BOTH,
    COLLECTIVES,
    EXPLICIT,
    HEADS,
    calls,
    check,
    mesh_of,
    split,
    within,
)
from turbojax import fireq
from turbojax.sharding.axes import Axes

pytestmark = pytest.mark.mesh

NAMES = (
    "turbo", "turbo gradient", "turbo bounds", "prefill", "append", "decode", "kv4 append",
    "kv4 decode", "pages", "pages append", "exact", "exact append", "latents", "latents append",
    "pooled", "pooled gradient", "int4", "tokens",
)  # fmt: skip
FAST = ("turbo gradient", "append", "decode", "pages", "int4")


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@pytest.mark.parametrize("name", FAST)
def test_it_has_the_bits_of_one_device(name, kind):
    check(calls()[name], mesh_of(2, 4, kind))


@pytest.mark.quick(slow=2)
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in FAST])
def test_others_have_the_bits_of_one_device(name, kind):
    check(calls()[name], mesh_of(2, 4, kind))


@pytest.mark.fuzz
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 2), (4, 2), (4, 1), (1, 4)])
def test_on_other_meshes(shape):
    for kind, name in itertools.product((AUTO, EXPLICIT), ("append", "decode")):
        check(calls()[name], mesh_of(*shape, kind), BOTH)


def refused(kind, splits, *, shape=(4, 64, 8, 32), kv_heads=4):
    """The message with which attention of so split arrays is refused."""
    mesh = mesh_of(2, 4, kind)
    batch, tokens, _, channels = shape
    shapes = (shape, *[(batch, tokens, kv_heads, channels)] * 2)
    arrays = [
        jax.ShapeDtypeStruct(s, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec)))
        for s, spec in zip(shapes, splits, strict=True)
    ]
    with within(mesh), pytest.raises((ValueError, NotImplementedError, RuntimeError)) as caught:
        jax.jit(tj.turbo_attention).lower(*arrays).compile()
    return str(caught.value)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_what_cannot_be_split_raises_by_name(kind):
    """Which op, which array, which axis, and why."""
    message = refused(kind, [(None, "data")] * 3)
    assert "turbo_attention cannot be split so: query" in message
    assert "axis 1, queries, over data" in message
    message = refused(kind, [(None, None, ("data", "model"))] + [()] * 2)
    # 4 heads for 8 devices; with automatic axes jax may fail before it asks.
    assert "key/value heads" in message or (kind == AUTO and "IndivisibleError" in message)
    assert "channels of a head" in refused(kind, [(None, None, None, "data")] * 3)


def test_explicit_axes_must_agree():
    assert "does not agree" in refused(EXPLICIT, [("data",), ("model",), ("model",)])


@pytest.mark.parametrize("axes", [BATCH, HEADS])
def test_automatic_axes_beside_explicit_ones_split_nothing(axes):
    """Where only some axes of a mesh are explicit, nothing is gathered over the others."""
    call, devices = calls()["decode"], mesh_of(2, 4, AUTO).devices
    mesh = jax.sharding.Mesh(devices, ("data", "model"), axis_types=(EXPLICIT, AUTO))
    with jax.set_mesh(mesh):
        program = jax.jit(call.run).lower(*split(call, mesh, axes))
        if axes is HEADS:
            with pytest.raises(RuntimeError, match="not be split over automatic axes"):
                program.compile()
        else:
            assert not re.findall(COLLECTIVES, program.compile().as_text())


@pytest.mark.slow
def test_a_mapped_axis_may_be_split_too():
    """`vmap` of an op over arrays that are split along the mapped axis, the heads, or both."""
    call, mesh = calls()["decode"], mesh_of(2, 4, AUTO)
    query, cache = jax.tree.map(lambda x: jnp.stack([x, x + x]), call.arrays)
    run = jax.jit(jax.vmap(call.run))
    heads = PartitionSpec("data", None, None, "model")
    found = run(jax.device_put(query, NamedSharding(mesh, heads)), cache)
    assert found[0].sharding.spec == heads
    for x, y in zip(found, run(query, cache), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)  # slices are summed in their order


def test_inputs_of_a_product_are_added_up():
    """One all-reduce of float32, then bias and residual, once; an activation is refused."""
    mesh = mesh_of(1, 2, AUTO)
    x, weight, bias = calls()["int4"].arrays
    by_inputs = [(None, "model"), (None, "model"), ()]
    parts = [NamedSharding(mesh, PartitionSpec(*spec)) for spec in by_inputs]
    tree = jax.tree.structure(weight)
    given = (
        jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, None, "model"))),
        jax.device_put(weight, jax.tree.unflatten(tree, parts)),
    )
    program = jax.jit(lambda x, w: fireq.matmul(x, w, bias=bias)).lower(*given).compile()
    assert set(re.findall(COLLECTIVES, program.as_text())) == {"all-reduce"}
    exact = x @ fireq.dequantize(weight).T + bias[None, None]
    ours, plain = program(*given), fireq.matmul(x, weight, bias=bias)
    # Scales of parts of a token are no coarser than those of all of it.
    assert jnp.linalg.norm(ours - exact) < 1.1 * jnp.linalg.norm(plain - exact)
    with pytest.raises(RuntimeError, match="takes whole sums"):
        jax.jit(lambda x, w: fireq.matmul(x, w, activation="silu")).lower(*given).compile()


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("name", ["append", "decode"])
def test_split_wraps_public_ops(name):
    """`tj.parallel.split`: the bits of each device's slices, as with any `shard_map`."""
    op, call = {"append": tj.append, "decode": tj.decode}[name], calls()[name]
    axes = Axes(batch="data", heads="model", mesh=mesh_of(2, 4, AUTO))
    found = jax.jit(tj.parallel.split(op, axes))(*call.arrays)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(op(*call.arrays)), strict=True):
        if name == "append":
            np.testing.assert_array_equal(x, y)
        else:
            np.testing.assert_allclose(x, y, rtol=0, atol=2e-6)


def test_split_gives_each_device_the_bias_of_its_gates():
    """In a gated weight's bias the gates come first, on every device its own."""
    axes = Axes(heads="model", mesh=mesh_of(1, 2, AUTO))
    parts = [jax.random.normal(jax.random.key(i), (2, 128, 128)) for i in range(2)]
    gate, up = (fireq.quantize_experts(part) for part in parts)
    experts = jax.vmap(fireq.gate_and_up)(gate, up)
    x, biases = jnp.ones((3, 128)), jax.random.normal(jax.random.key(2), (2, 256))

    def grouped(op):
        return lambda x, w, b: op(x, w, jnp.array([1, 2]), bias=b, activation="swiglu")

    def one(op):
        return lambda x, w, b: op(x, w, bias=b, activation="swiglu")

    first = jax.tree.map(lambda a: a[0], (experts, biases))
    for op, call, given in (
        (fireq.matmul, one, (x, *first)),
        (fireq.grouped_matmul, grouped, (x, experts, biases)),
    ):
        found = jax.jit(call(tj.parallel.split(op, axes)))(*given)
        np.testing.assert_array_equal(found, jax.jit(call(op))(*given))


def test_split_gives_each_device_its_bounds():
    query = calls()["turbo"].arrays[0]
    bounds = tj.bounds.prefix_lm(jnp.array([3, 0, 50, 7]), query.shape[1])
    split_op = tj.parallel.split(
        tj.turbo_attention, Axes(batch="data", heads="model", mesh=mesh_of(2, 4, AUTO))
    )
    found = jax.jit(split_op)(query, query, query, key_bounds=bounds)
    want = jax.jit(tj.turbo_attention)(query, query, query, key_bounds=bounds)
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-5)


def test_split_refuses_by_name():
    mesh = mesh_of(2, 4, AUTO)
    with pytest.raises(ValueError, match="must be one of"):
        tj.parallel.split(jnp.sum, BOTH)
    query = jnp.ones((3, 8, 8, 32))
    with pytest.raises(ValueError, match="3 sequences, must be a multiple of 2"):
        tj.parallel.split(tj.turbo_attention, Axes(batch="data", mesh=mesh))(query, query, query)
    with pytest.raises(NotImplementedError, match="no bias where tokens are split"):
        tj.parallel.split(tj.turbo_attention, Axes(sequence="model", mesh=mesh))(
            query, query, query, bias=jnp.zeros((1, 1, 1, 8))
        )
    with pytest.raises(NotImplementedError, match="no key_bounds where tokens are split"):
        tj.parallel.split(tj.turbo_attention, Axes(sequence="model", mesh=mesh))(
            query, query, query, key_bounds=tj.bounds.window(3, 8, 2)
        )


def test_tokens_of_a_pool_are_not_split_over_sequences():
    call, mesh = calls()["pages append"], mesh_of(2, 4, EXPLICIT)
    with within(mesh), pytest.raises(NotImplementedError, match="paged.append cannot be split so"):
        jax.jit(call.run)(*split(call, mesh, BATCH))
