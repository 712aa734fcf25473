"""`Axes`: which axes of a mesh split which dimension; `mesh_of`: what `--mesh` says."""

import jax
import pytest
from jax.sharding import PartitionSpec as P

from turbojax.parallel import Axes, mesh_of
from turbojax.sharding.notation import Leaf
from turbojax.sharding.plans import Plan

pytestmark = pytest.mark.mesh


def test_specs_by_letters():
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    axes = Axes.of(mesh)
    assert axes.spec("BTNH") == P("data", None, "model", None)
    assert axes.spec("BN", (1, 8)) == P(None, "model")
    assert (axes.size("batch"), axes.size("heads"), axes.size("sequence")) == (2, 4, 1)
    both = Axes(heads=("data", "model"), mesh=mesh)
    assert both.spec("K") == P(("data", "model"))
    assert both.size("heads") == 8


def test_parts_are_added_up_where_they_are_not_split():
    plan = Plan({"B": ("data",), "N": ("model",)}, {"data": 2, "model": 4})
    added = ((4, 8), ()), ((1, 8), ("data",)), ((4, 1), ("model",)), ((1, 1), ("data", "model"))
    for shape, names in added:
        assert plan.added(Leaf("bias", "BNTS", "BN"), (*shape, 5, 6)) == names
    assert plan.added(Leaf("slopes", "N", "BN"), (8,)) == ("data",)
    assert plan.added(Leaf("query", "BTNH"), (4, 5, 8, 16)) == ()


def test_bad_axes_are_named():
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    with pytest.raises(ValueError, match=r"no axes \['x'\]"):
        Axes(batch="x", mesh=mesh)
    with pytest.raises(ValueError, match="twice"):
        Axes(batch="data", heads="data")
    with pytest.raises(TypeError, match="names of axes"):
        Axes(batch=(1,))
    with pytest.raises(ValueError, match="no mesh"):
        Axes(batch="data").size("batch")
    with pytest.raises(ValueError, match="must have none but"):
        Axes.of(jax.make_mesh((8,), ("devices",)))


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("data=2,model=4", {"data": 2, "model": 4}),
        (" model = 2 ", {"model": 2}),
        ("model=2,sequence=4", {"sequence": 4, "model": 2}),
    ],
)
def test_a_mesh_has_the_first_devices(text, shape):
    axes = mesh_of(text)
    assert dict(axes.mesh.shape) == shape
    assert list(axes.mesh.shape) == list(shape)
    assert list(axes.mesh.devices.flat) == jax.devices()[: axes.mesh.size]
    assert axes.size("batch") == shape.get("data", 1)
    assert axes.size("heads") == shape.get("model", 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model=16", r"mesh 'model=16' needs 16 devices, there are 8 \(cpu\)"),
        ("model", "must be such as data=2,model=4, with axes of data, sequence, model"),
        ("", "must be such as"),
        ("heads=2", "must be such as"),
        ("model=-1", "must be such as"),
        ("model=1_0", "must be such as"),
        ("model=0", "model=0 must be at least 1"),
        ("model=2,model=2", "names model twice"),
        (f"model={'9' * 5000}", "must be such as"),
    ],
)
def test_bad_meshes_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        mesh_of(text)
