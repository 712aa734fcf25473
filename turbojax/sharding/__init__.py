"""How arrays are split over the devices of a mesh; `turbojax.parallel` is built on it."""

from turbojax.sharding.axes import Axes as Axes
