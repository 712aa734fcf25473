"""Attention, caches and models over many devices."""

from turbojax.sharding.axes import Axes as Axes
