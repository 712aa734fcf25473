"""Flax modules and attention functions: for nnx, and in `turbojax.flax.linen` for linen."""

from turbojax.attention.options import AttentionOptions as AttentionOptions
from turbojax.flax import linen as linen
from turbojax.flax._masks import MaskWarning as MaskWarning
from turbojax.flax.attention import TurboAttention as TurboAttention
from turbojax.flax.attention_fn import PooledAttentionFn as PooledAttentionFn
from turbojax.flax.attention_fn import TurboAttentionFn as TurboAttentionFn
from turbojax.flax.attention_fn import attention_fn as attention_fn
from turbojax.flax.experts import Int4Experts as Int4Experts
from turbojax.flax.linear import FrozenParam as FrozenParam
from turbojax.flax.linear import Int4Linear as Int4Linear
from turbojax.rotary import Rope as Rope

__all__ = [
    "AttentionOptions",
    "FrozenParam",
    "Int4Experts",
    "Int4Linear",
    "MaskWarning",
    "PooledAttentionFn",
    "Rope",
    "TurboAttention",
    "TurboAttentionFn",
    "attention_fn",
    "linen",
]
