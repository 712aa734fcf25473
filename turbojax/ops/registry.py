"""Which implementation runs an op; it lives in `turbojax._registry`, which the cache uses too."""

from turbojax._registry import IMPLEMENTATION_NAMES as IMPLEMENTATION_NAMES
from turbojax._registry import Implementation as Implementation
from turbojax._registry import ImplementationName as ImplementationName
from turbojax._registry import Registry as Registry
