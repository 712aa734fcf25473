"""Attention with quantized products (TurboAttention), forward and backward."""

from turbojax.attention.turbo.api import attend as attend
from turbojax.attention.turbo.api import turbo_attention as turbo_attention
