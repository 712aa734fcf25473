"""Python's garbage collector kept short, where a device waits for the program."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def only_of_new_objects() -> Iterator[None]:
    """Inside, the collector leaves alone what is there at the beginning.

    Modules and traced programs are hundreds of thousands of objects: to look at all of them takes
    longer than several steps of an engine.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
