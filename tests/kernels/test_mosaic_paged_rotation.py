"""Paged attention for Hopper, on a CPU: turbo4's table of centroids, and its rotation."""

import numpy as np
import pytest

from pallas_kernels.mosaic.hopper.paged import rotation, turbo4
from tests.kernels.test_mosaic_paged import lanes as lanes  # a fixture
from tests.kernels.test_mosaic_paged import settings
from tests.oracles import warp
from turbojax import polar


def test_every_code_is_its_centroid(lanes):
    table, _, _ = polar.integer_centroids(4)
    products = turbo4.Turbo4.of(128, settings("turbo4"))
    rng = np.random.default_rng(4)
    codes = rng.integers(16, size=(32, 8))
    word = warp.Int((codes << (4 * np.arange(8))).sum(1))
    found = np.concatenate([warp._bytes(x) for x in products.look_up(word)], axis=1)
    np.testing.assert_array_equal(found, np.asarray(table)[codes])


@pytest.mark.parametrize("channels", [2, 4, 8])
def test_rotations_have_the_bits_of_the_definition(lanes, channels):
    size = 32 * channels
    made = polar.rotation(size, seed=3)
    x = np.random.default_rng(size).normal(size=(1, size)).astype(np.float32)
    given = x.reshape(32, channels)
    signs = warp.Pointer(np.asarray(made.signs).view(np.uint8))
    signs = signs.at(warp.Int(warp.LANES * channels * 4))
    numbers = [warp.Float(given[:, i]) for i in range(channels)]
    for ours, definition in (
        (rotation.rotated, polar.rotate),
        (rotation.unrotated, polar.unrotate),
    ):
        found = np.stack([v.value for v in ours(numbers, signs, lanes.number)], 1)
        np.testing.assert_array_equal(found.reshape(1, size), np.asarray(definition(x, made)))
