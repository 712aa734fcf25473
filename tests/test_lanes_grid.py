"""The grids of kernels in lanes: CUDA's first axis alone takes more than 65,535 programs."""

import pytest

from pallas_kernels.mosaic import lanes


def test_the_longest_axis_is_cudas_first():
    """Pallas hands axes over in reverse."""
    mesh = lanes._mesh("kernel", {"tile": 70_000, "side": 2}, 1)
    assert mesh["grid_names"][-1] == "tile"
    assert mesh["grid"] == (2, 70_000)


def test_two_long_axes_are_refused():
    with pytest.raises(NotImplementedError, match="all axes but one of .* must be at most 65535"):
        lanes._mesh("kernel", {"tile": 70_000, "sequence": 80_000}, 1)
