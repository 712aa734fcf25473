"""Plain-JAX baselines to compare with."""

from turbojax.baselines import kivi as kivi
from turbojax.baselines import tokens as tokens
from turbojax.baselines.kivi import Kivi as Kivi
