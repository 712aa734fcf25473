"""`Axes`: which axes of a mesh split which dimension."""

import jax
import pytest
from jax.sharding import PartitionSpec as P

from turbojax.parallel import Axes

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
