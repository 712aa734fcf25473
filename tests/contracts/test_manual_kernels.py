"""Kernels inside `jax.shard_map` that checks where arrays vary: each lowers for a GPU."""

import contextlib
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import turbojax as tj
from benchmarks.device.sanitizer_cases import CASES
from pallas_kernels.varying import axes_of
from tests.kernels.kernel_helpers import gpu_type
from turbojax import _device
from turbojax.sharding import as_carried, together, varying_like

# jax-triton is not installed where these run.
NAMES = [name for name, case in CASES.items() if case.needs is None]


@contextlib.contextmanager
def eight_gpus(axis):
    kinds = {"axis_types": (AxisType.Auto,), "abstract_device": gpu_type()}
    with (
        mock.patch.object(_device, "gpu_compute_capability", return_value=9.0),
        jax.sharding.use_abstract_mesh(AbstractMesh((8,), (axis,), **kinds)),
    ):
        yield


def lower(call, arguments, axis="data"):
    """Lowers a call on each of eight GPUs, with arrays that differ from GPU to GPU."""

    def body(*local):
        out = call(*(jax.lax.pcast(x, axis, to="varying") for x in local))
        assert all(axes_of(x) == {axis} for x in jax.tree.leaves(out))
        return jax.tree.map(lambda x: x[None], out)

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    with eight_gpus(axis):
        split = jax.jit(jax.shard_map(body, in_specs=P(), out_specs=P(axis)))
        return split.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("name", NAMES)
def test_lowers(name):
    text = lower(*CASES[name].build())
    assert "mosaic_gpu" in text or "triton" in text
    assert "all_gather" not in text
    assert "all_reduce" not in text


def test_one_sequence_whose_heads_are_split():
    """What kernels write of it varies, but not its lengths and other counts."""
    cache = tj.init_cache(1, 256, 16, 64)
    specs = jax.tree.map(lambda x: P(None, "data") if x.ndim > 1 else P(), cache)
    x, of_x = jnp.ones((1, 1, 16, 64), jnp.bfloat16), P(None, None, "data")
    split = {"in_specs": (specs, of_x), "out_specs": specs}
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (cache, x))
    with eight_gpus("data"):
        append = jax.jit(jax.shard_map(lambda cache, x: tj.append(cache, x, x), **split))
        text = append.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 2
    assert "all_gather" not in text


def test_where_jax_refuses_updates_other_kernels_append(monkeypatch):
    """As jax does from 0.11 on, of arrays that vary."""
    monkeypatch.setattr(_device, "_REFUSES_UPDATES", (0, 0))
    arguments = tj.init_cache(2, 256, 4, 64), jnp.ones((2, 1, 4, 64), jnp.bfloat16)
    text = lower(lambda cache, x: tj.append(cache, x, x), arguments)
    assert "mosaic_gpu" not in text
    assert "triton" in text
    with pytest.raises(NotImplementedError, match=r"along the mesh axes \['data'\].*check_vma"):
        lower(lambda cache, x: tj.append(cache, x, x, implementation="mosaic_gpu"), arguments)
    with eight_gpus("data"):
        traced = jax.jit(lambda cache, x: tj.append(cache, x, x)).trace(*arguments)
        assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize(
    ("name", "axis"),
    [
        ("paged, prompt, turbo4, parts, Hopper", "sequence"),
        ("experts, Hopper", "program"),
        ("cache, decode, Hopper", "pair"),
        ("paged, turbo4, Hopper", "tile"),
    ],
)
def test_axes_of_a_mesh_may_be_called_as_those_of_kernels(name, axis):
    """The number of a program must not become that of a device."""
    case = CASES[name].build()
    names = axis, "elsewhere"
    one, other = (lower(*case, axis=x).replace(f'"{x}"', "") for x in names)
    assert one == other


def inside(call, *arrays):
    """`call` of an array that varies over "data", and of others that do not: its results' axes."""
    found = []

    def body(x, *rest):
        found.append(jax.tree.map(axes_of, call(x, *rest)))
        return x

    mesh = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": (P("data"), *[P()] * (len(arrays) - 1)), "out_specs": P("data")}
    jax.eval_shape(jax.shard_map(body, mesh=mesh, **specs), *arrays)
    return found[0]


def test_types_inside_shard_map():
    x, y = jnp.ones((4, 3)), jnp.ones(3)
    assert inside(lambda x, y: (x, y), x, y) == ({"data"}, frozenset())
    assert inside(together, x, y) == ({"data"}, {"data"})
    assert inside(lambda x, y: varying_like({"y": y}, x), x, y) == {"y": {"data"}}
    assert inside(lambda x, y: varying_like(y, y), x, y) == frozenset()


def test_carry_takes_the_types_of_its_step():
    def call(x, y):
        def step(carry, item):
            a, b, count = carry
            return (b, a + x[0] * item, count + 1), None

        # The second is made of `x`, and after another step so is the first.
        carry = as_carried(step, (y, y, jnp.int32(0)), jnp.float32(1))
        return jax.lax.scan(step, carry, jnp.ones(2))[0]

    assert inside(call, jnp.ones((4, 3)), jnp.ones(3)) == ({"data"}, {"data"}, frozenset())


def test_nothing_is_done_elsewhere():
    x, y = jnp.ones((4, 3)), jnp.ones(3)
    assert together(x, y)[1] is y
    assert varying_like(y, x) is y
    assert as_carried(lambda carry: pytest.fail("was traced"), y) is y
