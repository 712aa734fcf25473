"""Attention to keys and values that are pooled, each block at a level of its own."""

from turbojax.ops.pooled_attention.api import attend as attend
from turbojax.ops.pooled_attention.api import pooled_attention as pooled_attention
