"""What is static in a call of `matmul`."""

from typing import Literal

import jax

Activation = Literal["silu", "gelu", "swiglu"]
ACTIVATIONS = ("silu", "gelu", "swiglu")
Precision = Literal["default", "high", "highest"] | jax.lax.Precision
Gradient = Literal["exact", "e4m3"]
GRADIENTS = ("exact", "e4m3")
