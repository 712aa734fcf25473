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
    "one part, broken": ((900, -1, 77), {"extra": 0}, {}),
}


@pytest.mark.quick(6)
@pytest.mark.parametrize("name", helpers.FORMATS)
@pytest.mark.parametrize("case", list(CASES))
def test_equals_the_oracle(case, name):
    lengths, given, options = CASES[case]
    made = helpers.make(name, lengths, **given)
    found = helpers.run(made, name, **options)
    helpers.assert_close(found, helpers.oracle(made, **options))
    for a, b in zip(found, helpers.run(made, name, **options), strict=True):
        # Not as bfloat16, whose NaN are not equal.
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", helpers.FORMATS)
def test_bits_do_not_depend_on_others(name):
    case = helpers.make(name, (1500, 700), heads=128)
    both = helpers.run(case, name)
    cut = [x[:1] if i in (0, 1, 5, 6, 7) else x for i, x in enumerate(case.arrays)]
    alone = helpers.run(dataclasses.replace(case, arrays=tuple(cut)), name)
    for a, b in zip(alone, both, strict=True):
        np.testing.assert_array_equal(a[0], b[0])


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
