"""Attention, caches and models over many devices."""

from turbojax.parallel.context import ring_attention as ring_attention
from turbojax.parallel.context import ring_pooled_attention as ring_pooled_attention
from turbojax.parallel.heads import heads_attention as heads_attention
from turbojax.parallel.layers import ContextAttention as ContextAttention
from turbojax.parallel.processes import Processes as Processes
from turbojax.parallel.processes import start as start
from turbojax.parallel.zigzag import from_zigzag as from_zigzag
from turbojax.parallel.zigzag import permutation as permutation
from turbojax.parallel.zigzag import positions as positions
from turbojax.parallel.zigzag import to_zigzag as to_zigzag
from turbojax.sharding.axes import Axes as Axes
from turbojax.sharding.meshes import mesh_of as mesh_of
