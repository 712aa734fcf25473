"""Decode over latents compiled on Hopper: against the oracle, and equal bits."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from tests.gpu.gpu_helpers import on_hopper
from tests.models import latent_helpers as helpers

pytestmark = [pytest.mark.gpu, on_hopper]


CASES = {
    "decode": ((1500, 0, 1, 64, 63), {}, {}),
    "heads of V3, small pages": ((3000, 200), {"heads": 128, "page_size": 16}, {}),
    "tokens": (
        (700, 65, 3),
        {"heads": 20, "tokens": 4, "page_size": 32, "query_lengths": np.array([4, 3, 1], np.int32)},
        {},
    ),
    "window": ((1500, 300), {"heads": 64, "tokens": 2, "page_size": 128}, {"window": 200}),
    "broken": ((900, -1, 77), {"extra": 0}, {}),
    "one part, broken": ((900, -1, 77), {"extra": 0, "heads": 128}, {"parts": 1}),
    "long parts": ((9000, 100, 0), {"heads": 128}, {"parts": 1}),
}


@pytest.mark.quick(6)
@pytest.mark.parametrize("name", helpers.FORMATS)
@pytest.mark.parametrize("case", list(CASES))
def test_equals_the_oracle(case, name):
    lengths, given, options = CASES[case]
    made = helpers.make(name, lengths, **given)
    found = helpers.run(made, name, **options)
    helpers.assert_close(found, helpers.oracle(made, window=options.get("window")))
    for a, b in zip(found, helpers.run(made, name, **options), strict=True):
        # Not as bfloat16, whose NaN are not equal.
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def changed(case, **arrays):
    """A case with other arrays, by name."""
    names = ("q", "q_rope", "data", "scale", "rope", "tables", "lengths", "real")
    given = dict(zip(names, case.arrays, strict=True)) | arrays
    return dataclasses.replace(case, arrays=tuple(given.values()))


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", helpers.FORMATS)
@pytest.mark.parametrize("heads", [16, 128])
def test_bits_do_not_depend_on_others(name, heads):
    """Neither on what they hold nor on their order."""
    case = helpers.make(name, (5000, 700), heads=heads)
    both = helpers.run(case, name)
    of_sequences = ((0, "q"), (1, "q_rope"), (5, "tables"), (6, "lengths"))
    turned = changed(case, **{key: case.arrays[i][::-1] for i, key in of_sequences})
    alone = changed(case, lengths=jnp.asarray([5000, 0], jnp.int32))
    turned, alone = helpers.run(turned, name), helpers.run(alone, name)
    for x, y, z in zip(both, turned, alone, strict=True):
        np.testing.assert_array_equal(x, y[::-1])
        np.testing.assert_array_equal(x[0], z[0])


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", helpers.FORMATS)
@pytest.mark.parametrize("window", [None, 1500])
def test_bits_do_not_depend_on_where_a_prompt_was_cut(name, window):
    case = helpers.make(name, (3074,), heads=20, tokens=4)
    q, q_rope = case.arrays[:2]
    # Positions 3070 to 3073, then 3068 to 3071.
    shifted = {"q": jnp.roll(q, 2, 1), "q_rope": jnp.roll(q_rope, 2, 1)}
    before = changed(case, lengths=jnp.asarray([3072], jnp.int32), **shifted)
    later = helpers.run(case, name, window=window)
    sooner = helpers.run(before, name, window=window)
    for x, y in zip(later, sooner, strict=True):
        np.testing.assert_array_equal(x[:, :2], y[:, 2:])


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", helpers.FORMATS)
def test_nan_reaches_those_who_see_it(name):
    """In the newest token but one: queries before it are as they were."""
    case = helpers.make(name, (700,), heads=20, tokens=4)
    before = np.asarray(helpers.run(case, name)[0], np.float32)
    arrays = list(case.arrays)
    page, at = int(arrays[5][0, 698 // 64]), 698 % 64
    which = 2 if arrays[3] is None else 3
    place = (page, at, 3) if which == 2 else (page, at)
    arrays[which] = arrays[which].at[place].set(jnp.nan)
    out, lse = helpers.run(dataclasses.replace(case, arrays=tuple(arrays)), name)
    out = np.asarray(out, np.float32)
    np.testing.assert_array_equal(out[0, :2], before[0, :2])
    assert np.isnan(out[0, 2:]).all()
    assert np.isnan(np.asarray(lse)[0, 2:]).all()
