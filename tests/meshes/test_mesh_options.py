"""`mesh_of`: what `--mesh` says."""

import jax
import pytest

from turbojax.parallel import mesh_of

pytestmark = pytest.mark.mesh


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
