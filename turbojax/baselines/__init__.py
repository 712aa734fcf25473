"""Plain-JAX baselines to compare with."""

from turbojax.baselines import kivi as kivi
