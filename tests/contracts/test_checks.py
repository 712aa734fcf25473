"""Checks of numbers that are static under `jit`."""

import numpy as np
import pytest

from turbojax import _checks

KINDS = (float, np.float16, np.float32, np.float64, np.longdouble)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_every_kind(kind):
    """Warnings are errors here: numpy warns where a comparison would round to infinity."""
    for check in (_checks.check_number, _checks.check_positive):
        check("scale", kind(0.125))
        for bad in ("inf", "-inf", "nan"):
            with pytest.raises(ValueError, match="scale=.*must be"):
                check("scale", kind(bad))


@pytest.mark.parametrize("number", [3, np.int8(3), np.uint64(3), None])
def test_integers_are_numbers(number):
    _checks.check_number("scale", number)
    _checks.check_positive("scale", number)


def test_what_no_float_holds():
    for bad in (10**400, -(10**400)):
        with pytest.raises(ValueError, match="scale=.*must be finite"):
            _checks.check_number("scale", bad)
        assert not _checks.is_finite_number(bad)
    for bad in (1j, np.complex64(1), "1", [1]):
        with pytest.raises(TypeError, match="must be a Python number"):
            _checks.check_number("scale", bad)
