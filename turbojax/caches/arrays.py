"""The base class of caches: the bytes they hold, beside those of bfloat16."""

from typing import Any

from turbojax._pytrees import nbytes
from turbojax.sharding.specs import Split


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
