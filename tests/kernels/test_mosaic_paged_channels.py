"""Codes of head dims between those of the products, to pages on Hopper: on a CPU.

What is not there is read as codes of other vectors, which meet zeros of the query, and of outputs
is dropped.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.mosaic_paged_helpers import mixed_block
from tests.kernels.test_mosaic_paged import lanes as lanes  # a fixture
from tests.kernels.test_mosaic_paged import lower, oracle, run, settings


@pytest.mark.quick(4, slow=0)
@pytest.mark.parametrize(
    ("kind", "channels", "padded"),
    [
        ("turbo_k4v4", 80, 128),
        ("turbo_k4v2", 80, 128),
        ("turbo_k3v2", 96, 128),
        ("turbo_k2v3", 160, 256),
        ("turbo_k2v3", 32, 64),
        ("turbo_k4v4", 24, 64),
    ],
)
def test_a_warp_attends_to_fewer_channels(lanes, kind, channels, padded):
    rng, block = np.random.default_rng(channels), 32
    s = dataclasses.replace(settings(kind, block=block), channels=channels)
    blocks = [mixed_block(rng, kind, block, channels) for _ in range(3)]
    memories, sides = zip(*blocks, strict=True)
    query = np.zeros((1, 1, 4, padded), np.float32)
    query[..., :channels] = rng.normal(size=(1, 1, 4, channels))
    out, _, totals = run(lanes, s, memories, query, 3 * block - 5, 1)
    whole = [np.concatenate(side) for side in zip(*sides, strict=True)]
    want, _ = oracle(query[..., :channels], whole, s, 3 * block - 5, 1)
    # Queries, and weights times norms in a block, are rounded to a 65,024th of their largest.
    error = s.scale * np.abs(whole[0]).sum(1).max() * np.abs(query).max() / 65024
    bound = (2 * error + 3 * block / 65024) * np.abs(whole[1]).max()
    np.testing.assert_allclose(out[:, :channels] / totals[:, None], want, rtol=0, atol=bound)


@pytest.mark.fuzz
@pytest.mark.parametrize(
    ("kind", "head_dim"),
    [("turbo4", 80), ("turbo4", 96), ("turbo_k3v2", 96), ("turbo_k4v2", 112), ("turbo4", 160)],
)
def test_it_lowers(kind, head_dim):
    assert "turbojax_paged_hopper" in lower(kind, head_dim=head_dim, dtype=jnp.bfloat16)
