"""Products of e4m3 activations and INT4 weights."""

from turbojax.ops.int4_matmul.api import matmul as matmul
