"""Attention that is not the same in all layers of a model."""

import dataclasses
from typing import Any

import jax

from turbojax.attention.options import PLAIN, AttentionOptions
from turbojax.caches.base import Attend


@dataclasses.dataclass(frozen=True)
class FirstLayers:
    """An `Attend` that is one in the first layers of a model, and another in the others.

    Models get a layer's by `attend_of`; it cannot be called itself.

    Attributes:
      first: of the first `count` layers.
      others: of the layers after them.
      count: how many, at least 1. A model with no more layers attends by `first` alone.

    Raises:
      TypeError: if `count` is not an integer.
      ValueError: if it is less than 1.
    """

    first: Attend
    others: Attend
    count: int

    def __post_init__(self) -> None:
        if type(self.count) is not int:
            raise TypeError(f"count={self.count!r} must be an integer")
        if self.count < 1:
            raise ValueError(f"count={self.count} must be at least 1")

    def of_layer(self, layer: int) -> Attend:
        """What the layer with this number, from 0 on, attends by."""
        return self.first if layer < self.count else self.others

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        cache: Any = None,
        options: AttentionOptions = PLAIN,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Always raises NotImplementedError: a layer's number is not among the arguments."""
        raise NotImplementedError(
            f"attend={self} must be asked for its layers, by turbojax.caches.layered.attend_of"
        )


def attend_of(attend: Attend, layer: int) -> Attend:
    """The attention of one layer of a model, from that of all layers."""
    return attend.of_layer(layer) if isinstance(attend, FirstLayers) else attend
