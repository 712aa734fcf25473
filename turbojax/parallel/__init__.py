"""Attention, caches and models over many devices."""

from turbojax.sharding.axes import Axes as Axes
from turbojax.sharding.meshes import mesh_of as mesh_of
