"""Running a test on each implementation of an op that a CPU can run.

Interpreted kernels take long to compile. So the fast tier runs them in one mode and on what they
compute, and leaves more of the same, other modes and transforms, to the slow tier.
"""

import contextlib

import pytest

from turbojax._device import interpret_kernels

ON_CPU = ("xla", "triton")


def interpreted(implementation):
    """A context in which the implementation runs on a CPU: interpreted, if it is a kernel."""
    return contextlib.nullcontext() if implementation == "xla" else interpret_kernels()


kernel_is_slow = pytest.mark.parametrize(
    "implementation", ["xla", pytest.param("triton", marks=pytest.mark.slow)]
)
