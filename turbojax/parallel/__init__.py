"""Attention, caches and models over many devices."""

from turbojax.parallel.processes import Processes as Processes
from turbojax.parallel.processes import start as start
from turbojax.sharding.axes import Axes as Axes
