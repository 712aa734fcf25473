"""What is static in a call of `matmul`."""

from typing import Literal

import jax

Activation = Literal["silu", "gelu", "swiglu", "geglu"]
ACTIVATIONS = ("silu", "gelu", "swiglu", "geglu")
GATED = ("swiglu", "geglu")
"""Those of gated weights: SiLU or GELU of the gate, times its partner."""
Precision = Literal["default", "high", "highest"] | jax.lax.Precision
Gradient = Literal["exact", "e4m3"]
GRADIENTS = ("exact", "e4m3")
