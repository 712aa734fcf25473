"""The suite of several devices, on devices that one CPU pretends to be: everything runs."""

import pytest

from benchmarks.suites.parallel import ops

pytestmark = pytest.mark.mesh


@pytest.mark.fuzz
def test_one_sequence_and_a_prompt():
    row = ops.decode_sequence("turbo4", 256, 1, 2)
    assert row["exchanges"] == {"all-gather": 1}
    assert row["difference"] < 0.01
    row = ops.prefill(512, 2)
    assert set(row["exchanges"]) == {"collective-permute"}
    assert ops.collective("all-gather", 1024, 1, 2)["us"] > 0
