"""What an engine's calls leave to Python's garbage collector: nothing."""

import gc

from tests.serving.engine_device import make, on
from turbojax import _garbage
from turbojax.models import Request


def test_a_step_leaves_no_garbage():
    made, device = make(8, 2, 16, prefixes=True)
    for token in range(3):
        made.add(Request([token] * 20, 12))
    gc.collect()
    gc.disable()
    try:
        with on(device):
            made.step()
            made.run()
        made.statistics()
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_old_objects_are_left_alone_inside():
    before = gc.get_freeze_count()
    with _garbage.only_of_new_objects():
        assert gc.get_freeze_count() > before
    assert gc.get_freeze_count() == 0
