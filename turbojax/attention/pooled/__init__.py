"""Attention to keys and values that are pooled, each block at a level of its own."""

from turbojax.attention.pooled.api import attend as attend
from turbojax.attention.pooled.api import pooled_attention as pooled_attention
