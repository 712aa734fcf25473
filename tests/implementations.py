"""Running a test on each implementation of an op that a CPU can run."""

import contextlib

from turbojax._device import interpret_kernels

ON_CPU = ("xla", "triton")


def interpreted(implementation):
    """A context in which the implementation runs on a CPU: interpreted, if it is a kernel."""
    return contextlib.nullcontext() if implementation == "xla" else interpret_kernels()
