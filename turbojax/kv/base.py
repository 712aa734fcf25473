"""How a layer attends, and what it does with its cache."""

from typing import Any, Protocol

import jax

from turbojax.ops.options import PLAIN, AttentionOptions

Cache = Any


class Attend(Protocol):
    """How a layer attends, and what it does with its cache."""

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        cache: Cache,
        options: AttentionOptions = PLAIN,
    ) -> tuple[jax.Array, Cache]:
        """Attends for one layer.

        Args:
          query: ``[B, T, N, H]``, rotated.
          key: ``[B, T, K, H]``, rotated.
          value: ``[B, T, K, H]``.
          cache: this layer's cache, or None.
          options: of this layer.

        Returns:
          The output ``[B, T, N, H]`` and the layer's new cache, of the same structure.

        Raises:
          NotImplementedError: if it cannot attend with these options.
        """
        ...
