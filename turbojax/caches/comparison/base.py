"""What the caches for comparison share: their bytes, and that tokens stay on one device."""

from typing import Any

import jax

from turbojax.sharding.axes import Axes
from turbojax.sharding.specs import Split


class BaselineCache(Split):
    """Base class of `KiviCache` and `TokenCache`: sequences and heads are split, tokens are not."""

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays held."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    @property
    def compression_ratio(self) -> float:
        """Bytes of bfloat16 keys and values of `max_length` tokens over `nbytes`."""
        sizes: Any = self
        values = sizes.lengths.size * sizes.max_length * sizes.num_kv_heads * sizes.head_dim
        ratio: float = 4 * values / self.nbytes
        return ratio

    def check_split(self, axes: Axes) -> None:
        """See `Split.check_split`; ValueError if tokens are to be split over several devices."""
        if axes.size("sequence") > 1:
            raise ValueError(
                f"{axes.sequence=} must be () for a {type(self).__name__}, whose tokens stay on "
                "one device: it is for comparison"
            )
