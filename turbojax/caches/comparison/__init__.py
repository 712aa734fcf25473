"""Plain-JAX baselines to compare with."""

from turbojax.caches.comparison import kivi as kivi
from turbojax.caches.comparison import tokens as tokens
from turbojax.caches.comparison.kivi import Kivi as Kivi
