"""The order of a grid's tokens by bricks: every token once, neighbours together."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj

GRIDS = [
    ((8, 8, 16), (4, 4, 8)),
    ((4, 12, 24), (4, 4, 8)),
    ((16, 48), (8, 16)),
    ((6, 10, 8), (2, 2, 8)),
    ((3, 5), (1, 1)),
    ((64,), (16,)),
    ((2, 4, 4, 4), (2, 2, 2, 2)),
]


@pytest.mark.parametrize(("shape", "brick"), GRIDS)
def test_every_block_is_a_brick_and_so_are_its_halves(shape, brick):
    order = tj.levels.grid_order(shape, brick)
    assert order.dtype == np.int32
    assert np.array_equal(np.sort(order), np.arange(math.prod(shape)))
    place = np.stack(np.unravel_index(order, shape), -1)
    size = math.prod(brick)
    while size >= 1:
        blocks = place.reshape(-1, size, len(shape))
        low, sides = blocks.min(1), np.ptp(blocks, axis=1) + 1
        # As many places as tokens, of one shape, and where a multiple of it begins.
        assert np.all(sides.prod(-1) == size)
        assert np.all(sides == sides[0])
        assert np.all(low % sides[0] == 0)
        if size == math.prod(brick):
            assert tuple(sides[0]) == brick
            numbers = np.ravel_multi_index(
                tuple((low // sides[0]).T), np.floor_divide(shape, brick)
            )
            assert np.array_equal(numbers, np.arange(len(low)))
        size //= 2


def test_what_levels_average_are_cubes():
    order = tj.levels.grid_order((8, 8, 16), (4, 4, 8))
    place = np.stack(np.unravel_index(order, (8, 8, 16)), -1)
    for size, sides in ((8, (2, 2, 2)), (4, (1, 2, 2)), (2, (1, 1, 2))):
        assert tuple(np.ptp(place[:size], axis=0) + 1) == sides
    place = np.stack(np.unravel_index(tj.levels.grid_order((8, 16), (8, 16)), (8, 16)), -1)
    assert tuple(np.ptp(place[:8], axis=0) + 1) == (2, 4)


def test_exact_attention_is_the_same_in_any_order():
    """And the way back is the inverse: of attention without a mask nothing else changes."""
    shape = (4, 4, 16)
    order = tj.levels.grid_order(shape, (4, 4, 8))
    query, key, value = (
        jax.random.normal(k, (1, 256, 2, 16)) for k in jax.random.split(jax.random.key(0), 3)
    )
    levels = jnp.ones((1, 1, 2, 2), jnp.int8)
    blocks = {"block_q": 128, "block_kv": 128}
    q, k, v = (x[:, order] for x in (query, key, value))
    out = tj.pooled_attention(q, k, v, levels, is_causal=False, **blocks)
    q, k, v = (np.asarray(x, np.float64)[0] for x in (query, key, value))
    scores = np.exp(np.einsum("tnh,snh->nts", q, k) / 4)
    exact = np.einsum("nts,snh->tnh", scores / scores.sum(-1, keepdims=True), v)
    np.testing.assert_allclose(out[0, np.argsort(order)], exact, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "brick", "error", "message"),
    [
        ((8, 8), (4, 4, 8), ValueError, r"brick=\(4, 4, 8\) must have a side for each axis of"),
        ((), (), ValueError, r"brick=\(\) must have a side for each axis"),
        ((8, 12), (4, 6), ValueError, r"brick=\(4, 6\) must have sides that are powers of two"),
        ((8, 8), (4, 0), ValueError, r"brick=\(4, 0\) must have sides that are powers of two"),
        ((8, 10), (4, 4), ValueError, r"shape=\(8, 10\) must have positive multiples of brick"),
        ((0, 8), (4, 4), ValueError, r"shape=\(0, 8\) must have positive multiples of brick"),
        ((2**16, 2**15), (1, 1), ValueError, r"must have less than 2\*\*31 tokens"),
        ((8, 8.0), (4, 4), TypeError, "float"),
    ],
)
def test_refusals(shape, brick, error, message):
    with pytest.raises(error, match=message):
        tj.levels.grid_order(shape, brick)
