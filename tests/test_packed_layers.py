"""Layers of GPTQ, AWQ and compressed-tensors, unpacked: recorded ones and an oracle's."""

import numpy as np
import packed_helpers as packed
import packed_recordings
import pytest

from turbojax import fireq
from turbojax.models.checkpoint.packed import formats
from turbojax.models.checkpoint.packed.codes import weights

RECORDED = packed_recordings.read()


def loaded(config, parts, shape):
    """The `Int4Weight` of stored arrays, whose shapes and dtypes are checked as a folder's are."""
    layout = formats.parse(config)
    wanted = layout.parts(*shape)
    assert {name for name, part in wanted.items() if part.required} <= set(parts) <= set(wanted)
    for name, array in parts.items():
        assert array.shape == wanted[name].shapes[packed.DTYPE_NAMES[array.dtype]], name
    return weights({"": layout.unpack(parts, *shape)})[""]


@pytest.mark.parametrize("name", RECORDED)
def test_values_are_those_that_the_packages_compute(name):
    case = RECORDED[name]
    weight = loaded(case.config, case.parts, case.weight.shape)
    values = np.asarray(fireq.dequantize(weight))
    assert case.weight.dtype == weight.scales.dtype
    assert values.astype(case.weight.dtype).tobytes() == case.weight.tobytes()
    assert (weight.zeros is None) == name.endswith("-sym")
    # Subnormal scales and all, and nothing is rounded before.
    assert np.abs(case.weight.astype(np.float64) - values).max() <= np.abs(values).max() / 2**8
