"""Plain-JAX baselines to compare with."""

from turbojax.baselines import exact as exact
from turbojax.baselines import kivi as kivi
