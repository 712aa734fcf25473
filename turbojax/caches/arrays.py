"""The base class of caches: the bytes they hold, beside those of bfloat16."""

import math
from typing import Any

import jax

from turbojax.sharding.specs import Split


def nbytes(tree: Any) -> int:
    """Bytes of all arrays of a tree; they may be abstract."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


class CacheArrays(Split):
    """A dataclass of arrays with the attributes of `turbojax.caches.LayerCache`."""

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays held, bookkeeping included."""
        return nbytes(self)

    @property
    def compression_ratio(self) -> float:
        """Bytes of a bfloat16 cache of `max_length` tokens over `nbytes`."""
        return self._bfloat16_bytes / self.nbytes

    @property
    def _bfloat16_bytes(self) -> int:
        sizes: Any = self
        # `lengths` has all leading axes, those of stacked layers too.
        values: int = sizes.lengths.size * sizes.max_length * sizes.num_kv_heads * sizes.head_dim
        return 4 * values
