"""Products of e4m3 activations and INT4 weights."""

from turbojax.matmul.int4.api import matmul as matmul
