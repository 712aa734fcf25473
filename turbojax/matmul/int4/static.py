"""What is static in a call of `matmul`."""

from typing import Literal

import jax

Activation = Literal["silu", "gelu", "swiglu", "geglu"]
ACTIVATIONS = ("silu", "gelu", "swiglu", "geglu")
GATED = ("swiglu", "geglu")
"""Those of gated weights: SiLU or GELU of the gate, times its partner."""
TokenKind = Literal["e4m3", "bf16"]
TOKEN_KINDS = ("e4m3", "bf16")
"""What tokens are multiplied as: rounded to e4m3, or unrounded in their own dtype."""
Precision = Literal["default", "high", "highest"] | jax.lax.Precision
Gradient = Literal["exact", "e4m3"]
GRADIENTS = ("exact", "e4m3")
