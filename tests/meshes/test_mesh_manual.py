"""Ops and caches inside `jax.shard_map`: the bits that a device's slices give by themselves."""

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from tests.contracts.manual_cases import CASES, index_of, spec_of

pytestmark = pytest.mark.mesh

OTHER_MESHES = [(1, 1), (1, 2), (2, 2), (2, 4)]
ON_OTHERS = ("turbo gradient", "scan over layers", "pages of codes")
LONG = ("progressive of two bits", "mapped", "k8v4", "codecs")


def check(name, shape):
    """Runs a case on a mesh of this shape, and on one device part by part."""
    call, arguments = CASES[name]()
    sizes = dict(zip(("data", "model"), shape, strict=True))
    mesh = jax.make_mesh(shape, tuple(sizes), axis_types=(AxisType.Auto,) * 2)
    specs = jax.tree.map(spec_of, (arguments, jax.eval_shape(call, *arguments)))
    split = jax.shard_map(call, mesh=mesh, in_specs=specs[0], out_specs=specs[1])  # checks vma
    got = jax.jit(split)(*arguments)
    alone = jax.jit(call)
    found = {}
    # Along an axis that splits nothing all devices do the same.
    used = {axis for spec in jax.tree.leaves(specs[0]) for axis in spec}
    for at in itertools.product(*(range(n if axis in used else 1) for axis, n in sizes.items())):
        device = dict(zip(sizes, at, strict=True))
        mine = jax.tree.map(lambda x, at=device: x[index_of(x, at, sizes)], arguments)
        want = jax.tree_util.tree_leaves_with_path(alone(*mine))
        for (path, part), whole in zip(want, jax.tree.leaves(got), strict=True):
            index = index_of(whole, device, sizes)
            key = jax.tree_util.keystr(path), str(index)
            found.setdefault(key, (np.asarray(whole)[index], []))[1].append(np.asarray(part))
    for (path, _), (result, parts) in found.items():
        check_equal(result, parts, path)


def check_equal(result, parts, name):
    """What several devices have together is the same on all, or a gradient, which is their sum."""
    if all(part.tobytes() == parts[0].tobytes() for part in parts):
        assert result.tobytes() == parts[0].tobytes(), name
        return
    wide = np.stack(parts).astype(np.float64)
    bound = len(parts) * np.finfo(np.float32).eps * np.abs(wide).sum(0)
    assert result.dtype == np.float32
    assert (np.abs(result - wide.sum(0)) <= bound).all(), name


@pytest.mark.quick(1, slow=2)
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.slow) if x in LONG else x for x in CASES]
)
def test_eight_devices(name):
    check(name, (4, 2))


@pytest.mark.quick(slow=2)
@pytest.mark.parametrize("shape", OTHER_MESHES)
@pytest.mark.parametrize("name", ON_OTHERS)
def test_other_meshes(name, shape):
    check(name, shape)
