"""Launches of kernels in lanes: their grids, and where their inputs are."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import varying
from pallas_kernels.mosaic import lanes


def test_the_longest_axis_is_cudas_first():
    """Pallas hands axes over in reverse."""
    mesh = lanes._mesh("kernel", {"tile": 70_000, "side": 2}, 1)
    assert mesh["grid_names"] == varying.all_own(["side", "tile"])
    assert mesh["grid"] == (2, 70_000)


def test_two_long_axes_are_refused():
    with pytest.raises(NotImplementedError, match="all axes but one of .* must be at most 65535"):
        lanes._mesh("kernel", {"tile": 70_000, "sequence": 80_000}, 1)


@pytest.mark.parametrize(("count", "is_copied"), [(2**18, True), (2**18 + 1, False)])
def test_small_inputs_are_kept_from_being_read_as_slices(count, is_copied):
    """XLA would record a call anew in every step of a loop that slices its input."""

    def update(x, array):
        options = {"grid": {"tile": 1}, "warpgroups": 1}
        return lanes.update(lambda *_: None, "kernel", [x], [array], **options)

    x, array = (jax.ShapeDtypeStruct((n,), jnp.float32) for n in (count, 2**20))
    jaxpr = jax.make_jaxpr(update)(x, array)
    assert str(jaxpr).count("optimization_barrier") == is_copied
