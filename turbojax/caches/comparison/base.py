"""What the caches for comparison share: tokens stay on one device."""

from turbojax.caches.arrays import CacheArrays
from turbojax.sharding.axes import Axes


class BaselineCache(CacheArrays):
    """Base class of `KiviCache` and `TokenCache`: sequences and heads are split, tokens are not."""

    def check_split(self, axes: Axes) -> None:
        """See `Split.check_split`; ValueError if tokens are to be split over several devices."""
        if axes.size("sequence") > 1:
            raise ValueError(
                f"{axes.sequence=} must be () for a {type(self).__name__}, whose tokens stay on "
                "one device: it is for comparison"
            )
