"""Flax nnx modules."""

from turbojax.flax.linear import FrozenParam as FrozenParam
from turbojax.flax.linear import Int4Linear as Int4Linear

__all__ = ["FrozenParam", "Int4Linear"]
