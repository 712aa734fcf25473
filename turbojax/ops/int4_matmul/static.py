"""What is static in a call of `matmul`."""

from typing import Literal

Activation = Literal["silu", "gelu", "swiglu"]
ACTIVATIONS = ("silu", "gelu", "swiglu")
