"""Which tiles the Hopper kernels load, of segments or bounds: plain JAX, held to numpy's search."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mosaic.hopper import segments
from turbojax.bounds import image_blocks


def search(own, own_length, rows, other, other_length, columns):
    """For each tile what must be visited, and what every pair of is of one segment."""
    for begin in range(0, len(own), rows):
        mine = own[begin : min(begin + rows, own_length)]
        seen = np.isin(other[:other_length], mine)
        yield mine, np.flatnonzero(seen), columns


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize(("rows", "columns"), [(128, 64), (64, 128)])
def test_bounds_hold_all_that_is_visible(is_sorted, rows, columns):
    rng = np.random.default_rng(0)
    tokens, size = 700, 900
    own, other = (
        rng.integers(-2, 5, (3, n // 50 + 1)).repeat(50, 1)[:, :n] for n in (tokens, size)
    )
    if is_sorted:
        own, other = np.sort(own), np.sort(other)
    own_lengths, other_lengths = np.array([tokens, 300, 0]), np.array([size, 70, 500])
    got = segments.bounds(
        jnp.asarray(own, jnp.int32),
        jnp.asarray(own_lengths, jnp.int32),
        rows,
        jnp.asarray(other, jnp.int32),
        jnp.asarray(other_lengths, jnp.int32),
        columns,
    )
    assert got.shape == (3, 4, -(-tokens // rows))
    for b in range(3):
        rest = search(own[b], own_lengths[b], rows, other[b], other_lengths[b], columns)
        for tile, (mine, seen, _) in enumerate(rest):
            start, stop, full_start, full_stop = np.asarray(got[b, :, tile])
            if len(seen):
                assert start <= seen[0]
                assert stop > seen[-1]
                if is_sorted:  # no tile more than needed, but where it has ids of more segments
                    assert seen[0] - start < columns
                    assert stop - seen[-1] <= columns
            elif is_sorted and not len(mine):
                assert stop <= start
            inside = other[b, full_start : min(full_stop, other_lengths[b])]
            assert np.isin(inside, mine).all()
            if full_start < full_stop:
                assert len(set(mine)) == 1


def test_packed_sequences_cost_what_is_visible():
    """Eight segments of 1,024: each tile walks over its own segment, and masks nothing."""
    ids = jnp.asarray(np.arange(8192) // 1024, jnp.int32)[None]
    lengths = jnp.asarray([8192], jnp.int32)
    start, stop, full_start, full_stop = segments.bounds(ids, lengths, 128, ids, lengths, 128)[0]
    own = np.arange(64) // 8 * 1024
    for x in (start, full_start):
        np.testing.assert_array_equal(x, own)
    for x in (stop, full_stop):
        np.testing.assert_array_equal(x, own + 1024)


def test_the_first_full_tiles_are_those_that_follow_each_other():
    ids = jnp.asarray(np.repeat([0, 0, 1, 0], 64), jnp.int32)[None]
    lengths = jnp.asarray([256], jnp.int32)
    found = segments.bounds(ids, lengths, 64, ids, lengths, 64)[0]
    np.testing.assert_array_equal(found[:, 0], [0, 256, 0, 128])
    np.testing.assert_array_equal(found[:, 2], [128, 192, 128, 192])


@pytest.mark.quick(2, slow=0)
@pytest.mark.parametrize("shift", [None, 200])
@pytest.mark.parametrize(("before", "after"), [(None, None), (None, 0), (300, 0)])
def test_tiles_with_most_to_do_come_first(shift, before, after):
    rng = np.random.default_rng(1)
    own = jnp.asarray(np.sort(rng.integers(0, 4, (2, 1100)), axis=1), jnp.int32)
    lengths = jnp.asarray([1100, 500], jnp.int32)
    bounds = segments.bounds(own, lengths, 128, own, lengths, 64)
    shifts = None if shift is None else jnp.full((2,), shift, jnp.int32)
    order = np.asarray(segments.order(bounds, 128, shifts, before, after))
    np.testing.assert_array_equal(np.sort(order), np.arange(18))
    start, stop = np.asarray(bounds[:, 0]), np.asarray(bounds[:, 1])
    first = np.arange(9) * 128 + (shift or 0)
    stop = stop if after is None else np.minimum(stop, first + 128 + after)
    start = start if before is None else np.maximum(start, first - before)
    counts = np.maximum(stop - start, 0).ravel()[order]
    assert (np.diff(counts) <= 0).all()


@pytest.mark.parametrize("is_image", [True, False])
@pytest.mark.parametrize("of_keys", [False, True])
def test_tiles_of_bounds(of_keys, is_image):
    """All that is visible, no tile more than needed in a row of images, and full tiles are full."""
    tokens, size, rows, columns = 700, 700, 128, 64
    rng = np.random.default_rng(4)
    if is_image:
        types = np.zeros((3, tokens), np.int32)
        types[0, 70:400] = types[1, 600:] = 1
        x = image_blocks(jnp.asarray(types))
    else:
        x = tuple(jnp.asarray(rng.integers(0, size + 1, (2, 3, tokens)), jnp.int32))
    lengths = np.array([tokens, 300, 0])
    given = (x, jnp.asarray(lengths, jnp.int32), rows, size, columns)
    found = np.asarray((segments.of_bound_keys if of_keys else segments.of_key_bounds)(*given))
    start, end = (np.asarray(a)[:, :, None] for a in x)
    seen = (start <= np.arange(size)) & (np.arange(size) < end)
    seen &= (np.arange(tokens) < lengths[:, None])[:, :, None]
    real = np.broadcast_to((np.arange(tokens) < lengths[:, None])[:, :, None], seen.shape)
    if of_keys:
        seen, real, rows, columns = (*(np.swapaxes(a, 1, 2) for a in (seen, real)), columns, rows)
    assert found.shape == (3, 4, -(-seen.shape[1] // rows))
    for b in range(3):
        for tile, (first, stop, full_first, full_stop) in enumerate(found[b].T):
            mine = slice(tile * rows, (tile + 1) * rows)
            some = np.flatnonzero(seen[b, mine].any(0))
            if len(some):
                assert first <= some[0]
                assert stop > some[-1]
                if is_image:
                    assert some[0] - first < columns
                    assert stop - some[-1] <= columns
            else:
                assert stop <= first
            inside = slice(full_first, full_stop)
            assert (seen | ~real)[b, mine, inside].all()
    if is_image and not of_keys:  # the second tile of queries is within the first image
        np.testing.assert_array_equal(found[0, :, 1], [0, 448, 0, 384])
