"""Attention to keys and values pooled at a level of each block's own."""

from turbojax.ops.pooled_attention.api import pooled_attention as pooled_attention
