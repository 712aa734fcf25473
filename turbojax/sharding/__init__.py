"""How arrays are split over the devices of a mesh; `turbojax.parallel` is built on it."""

from turbojax.sharding.axes import Axes as Axes
from turbojax.sharding.varying import as_carried as as_carried
from turbojax.sharding.varying import together as together
from turbojax.sharding.varying import varying_like as varying_like
