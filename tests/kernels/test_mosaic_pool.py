"""Means of keys and values on Hopper: the kernel emulated on a CPU, against the definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mosaic.hopper.pooled import pool as kernel
from tests.kernels.kernel_helpers import lower_for_cuda
from tests.oracles import lanes
from turbojax.attention.pooled import pooling
from turbojax.attention.pooled.static import LEVELS

EPS = float(np.finfo(np.float32).eps)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize(
    ("dtype", "head_dim", "size"), [(jnp.bfloat16, 64, 104), (jnp.float16, 128, 48)]
)
def test_means(monkeypatch, dtype, head_dim, size):
    """Sums of at most eight numbers, whatever the order, rounded once to the dtype."""
    lanes.patch(monkeypatch, kernel)
    length = jnp.array([size - 3, 45, 0], jnp.int32)
    rng = np.random.default_rng(0)
    key, value = (jnp.asarray(rng.normal(size=(3, size, 2, head_dim)), dtype) for _ in range(2))
    there = (jnp.arange(size)[None] < length[:, None])[..., None, None]
    spoiled = (jnp.where(there, x, jnp.nan) for x in (key, value))
    sides = jax.jit(functools.partial(kernel.pool, multiple=64))(*spoiled, length)
    eps, tokens = float(jnp.finfo(dtype).eps), -(-size // 64) * 64
    for x, side in zip((key, value), sides, strict=True):
        for level, pooled in zip(LEVELS[1:], side, strict=True):
            want = np.asarray(jnp.swapaxes(pooling.pool(x, length, level), 1, 2), np.float32)
            assert pooled.shape == (3, 2, tokens // level, head_dim)
            got, groups = np.asarray(pooled, np.float32), want.shape[2]
            assert np.abs(got[:, :, :groups] - want).max() <= 8 * EPS + eps * np.abs(want).max()
            # Two tokens add up exactly, or round once.
            if level == 2:
                np.testing.assert_array_equal(got[:, :, :groups], want)
            assert not got[:, :, groups:].any()


def test_it_lowers():
    x = jax.ShapeDtypeStruct((2, 1000, 3, 64), jnp.bfloat16)
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
    assert kernel.NAME in lower_for_cuda(kernel.pool, x, x, lengths)
