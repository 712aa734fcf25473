"""Layers of experts in a `config.json`: how many there are, and which of them a token goes to."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from turbojax._json import shown
from turbojax.models.families.keys import LARGEST_SIZE, integer

MOST_EXPERTS = 10_000
"""No layer has a tenth of it; each has tensors of its own."""


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """Feed-forward layers of experts, in place of one: a router chooses some for each token.

    Attributes:
      count: experts `E` of a layer, at most `MOST_EXPERTS`.
      per_token: how many of them a token goes to.
      intermediate_size: width of each expert's gated layer.
      softmax: whether weights are probabilities among all experts, ``"before"`` the choice, or
        among the chosen ones, ``"after"`` it; see `turbojax.fireq.route`.
      normalize: whether a token's weights are divided by their sum.
      dense_layers: numbers of the layers that have one feed-forward layer, of the config's
        `intermediate_size`, and no experts; ascending.

    Raises:
      ValueError: if a value is out of the range stated here.
    """

    count: int
    per_token: int
    intermediate_size: int
    softmax: Literal["before", "after"] = "before"
    normalize: bool = False
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("count", "per_token", "intermediate_size"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= LARGEST_SIZE:
                raise ValueError(
                    f"experts.{name}={shown(value)} must be an integer of 1 to {LARGEST_SIZE}"
                )
        if self.count > MOST_EXPERTS:
            raise ValueError(f"experts.count={self.count} must be at most {MOST_EXPERTS}")
        if self.per_token > self.count:
            raise ValueError(
                f"experts.per_token={self.per_token} must be at most experts.count={self.count}"
            )
        if self.softmax not in ("before", "after"):
            raise ValueError(f"experts.softmax={self.softmax!r} must be 'before' or 'after'")
        if type(self.normalize) is not bool:
            raise ValueError(f"experts.normalize={shown(self.normalize)} must be true or false")
        layers: Any = self.dense_layers
        if (
            not isinstance(layers, tuple)
            or any(type(x) is not int or x < 0 for x in layers)
            or list(layers) != sorted(set(layers))
        ):
            raise ValueError(
                f"experts.dense_layers={shown(layers)} must be a tuple of numbers of layers, each "
                "once and ascending"
            )


def read_count(keys: Mapping[str, Any], *names: str, default: int) -> int:
    """Experts of a layer, under whichever of its names the file has; 0 for none.

    Raises:
      ValueError: if it is no integer that there can be, or the names have unlike values.
    """
    given = {name: keys[name] for name in names if keys.get(name) is not None}
    for name in given:
        if integer(given, name, 0) > MOST_EXPERTS:
            raise ValueError(
                f"config.json: {name}={shown(given[name])} must be at most {MOST_EXPERTS}"
            )
    if len(set(given.values())) > 1:
        raise ValueError(f"config.json: {' and '.join(given)} must be equal, are {given}")
    return next(iter(given.values()), default)


def read_per_token(keys: Mapping[str, Any], count: int) -> int:
    """Experts that a token goes to.

    Raises:
      ValueError: if it is no integer from 1 to the number of experts.
    """
    chosen = integer(keys, "num_experts_per_tok")
    if chosen > count:
        raise ValueError(
            f"config.json: num_experts_per_tok={chosen} must be at most the {count} experts"
        )
    return chosen
