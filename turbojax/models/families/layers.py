"""Layers of experts, and latent attention (MLA), in a `config.json`."""

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any, Literal

from turbojax import _checks
from turbojax._json import shown
from turbojax._pytrees import static
from turbojax.matmul.routing import check_groups
from turbojax.models.families.keys import LARGEST_SIZE, integer
from turbojax.rotary import RopeScaling, YarnScaling

MOST_EXPERTS = 10_000
"""No known layer has a tenth of it; a limit because each expert has tensors of its own."""


def told_fields(config: Any, added: Collection[str]) -> dict[str, Any]:
    """The fields of a dataclass by name, those `added` only where they differ from their default.

    Fields were added after files were written that hold the others, or digests of them.
    """
    return {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name not in added or getattr(config, field.name) != field.default
    }


@static
@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """Feed-forward layers of experts, in place of one: a router chooses some for each token.

    Attributes:
      count: experts `E` of a layer, at most `MOST_EXPERTS`.
      per_token: how many of them a token goes to.
      intermediate_size: width of each expert's gated layer.
      softmax: ``"before"`` if weights are probabilities among all experts, ``"after"`` if among the
        chosen ones; see `turbojax.fireq.route`.
      normalize: whether a token's weights are divided by their sum.
      dense_layers: numbers of the layers that have one feed-forward layer, of the config's
        `intermediate_size`, and no experts; ascending.
      scores: what experts are chosen by; with ``"sigmoid"`` the model has a correction of the
        scores.
      groups: of experts, see `turbojax.fireq.route`.
      top_groups: how many groups a token's experts are chosen from.
      scaling: factor of a token's weights.
      shared_size: width of a further gated layer that every token goes to, or None.
      has_biases: whether the router and the experts' linear layers have biases.
      swiglu_limit: optional `c`: experts compute ``silu(alpha min(gate, c)) / alpha`` times
        ``clip(up, -c, c) + 1`` in place of the config's activation times `up`.
      swiglu_alpha: the `alpha` of that.
    """

    count: int
    per_token: int
    intermediate_size: int
    softmax: Literal["before", "after"] = "before"
    normalize: bool = False
    dense_layers: tuple[int, ...] = ()
    scores: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    top_groups: int = 1
    scaling: float = 1.0
    shared_size: int | None = None
    has_biases: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.702

    def __repr__(self) -> str:
        """Without later fields that have their default, because files hold digests of this text."""
        return f"ExpertsConfig({', '.join(f'{key}={x!r}' for key, x in self.told().items())})"

    def told(self) -> dict[str, Any]:
        """The fields by name, those of `_ADDED` only where they differ from their default."""
        return told_fields(self, _ADDED)

    def __post_init__(self) -> None:
        sizes = ["count", "per_token", "intermediate_size"]
        for name in (*sizes, *([] if self.shared_size is None else ["shared_size"])):
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
        for name in ("normalize", "has_biases"):
            if type(getattr(self, name)) is not bool:
                raise ValueError(
                    f"experts.{name}={shown(getattr(self, name))} must be true or false"
                )
        self._check_choice()
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

    def _check_choice(self) -> None:
        """Raises ValueError unless experts can be chosen and computed like this."""
        if self.scores not in ("softmax", "sigmoid"):
            raise ValueError(f"experts.scores={self.scores!r} must be 'softmax' or 'sigmoid'")
        if self.scores == "sigmoid" and self.softmax != "before":
            raise ValueError(f"experts.softmax={self.softmax!r} must be 'before' with sigmoids")
        for name in ("groups", "top_groups"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= self.count:
                raise ValueError(
                    f"experts.{name}={shown(value)} must be an integer of 1 to {self.count}"
                )
        try:
            check_groups(self.count, self.per_token, self.groups, self.top_groups, self.scores)
        except ValueError as error:
            raise ValueError(f"experts: {error}") from error
        for name in ("scaling", "swiglu_alpha", "swiglu_limit"):
            value = getattr(self, name)
            if value is None and name == "swiglu_limit":
                continue
            if not _checks.is_finite_number(value) or value <= 0:
                raise ValueError(f"experts.{name}={shown(value)} must be a positive, finite number")


# Fields that were added to `ExpertsConfig` after files were written that hold digests of it.
_ADDED = (
    *("scores", "groups", "top_groups", "scaling", "shared_size", "has_biases"),
    *("swiglu_limit", "swiglu_alpha"),
)


def read_count(keys: Mapping[str, Any], *names: str, default: int) -> int:
    """The experts of a layer under any of `names`, 0 for none; ValueError if these disagree."""
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
    """How many experts a token goes to; ValueError unless it is 1 to `count`."""
    chosen = integer(keys, "num_experts_per_tok")
    if chosen > count:
        raise ValueError(
            f"config.json: num_experts_per_tok={chosen} must be at most the {count} experts"
        )
    return chosen


def experts_of_all_layers(
    keys: Mapping[str, Any], default: int, **options: Any
) -> dict[str, ExpertsConfig]:
    """The field of experts that all layers have, weighted among themselves."""
    count = read_count(keys, "num_local_experts", "num_experts", default=default)
    if count < 1:
        raise ValueError(f"config.json: num_local_experts={count} must be at least 1")
    chosen, width = read_per_token(keys, count), keys["intermediate_size"]
    return {"experts": ExpertsConfig(count, chosen, width, softmax="after", **options)}


@static
@dataclasses.dataclass(frozen=True)
class LatentConfig:
    """Attention whose heads share a latent and a rotary key of each token (DeepSeek-V2, 2024).

    A head's key is `nope_dim` channels made from the latent, beside the rotary key; its value is
    made from the latent, too. Queries have the same two parts, of which the second is rotated.

    Attributes:
      rank: channels `C` of the latent.
      nope_dim: channels of a head's query and key that are not rotated.
      rope_dim: channels `R` of the rotary key, even.
      value_dim: channels of a head's value, at most ``nope_dim + rope_dim``.
      query_rank: channels that queries are made from, or None where they are made from the residual
        stream.
      interleaved: whether channels ``2 i`` and ``2 i + 1`` rotate together, and not i and i + R/2.
      yarn_mscale: with YaRN, scores are multiplied by ``(0.1 yarn_mscale ln(factor) + 1) ** 2``.
    """

    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    query_rank: int | None = None
    interleaved: bool = True
    yarn_mscale: float = 0.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self)[:5]:
            value: Any = getattr(self, field.name)
            if value is None and field.name == "query_rank":
                continue
            if type(value) is not int or not 1 <= value <= LARGEST_SIZE:
                raise ValueError(
                    f"latent.{field.name}={shown(value)} must be an integer of 1 to {LARGEST_SIZE}"
                )
        if self.rope_dim % 2:
            raise ValueError(f"latent.rope_dim={self.rope_dim} must be even: RoPE rotates pairs")
        if self.value_dim > self.key_dim:
            raise ValueError(
                f"latent.value_dim={self.value_dim} must be at most nope_dim + rope_dim="
                f"{self.key_dim}"
            )
        if type(self.interleaved) is not bool:
            raise ValueError(f"latent.interleaved={shown(self.interleaved)} must be true or false")
        if not _checks.is_finite_number(self.yarn_mscale) or self.yarn_mscale < 0:
            raise ValueError(
                f"latent.yarn_mscale={shown(self.yarn_mscale)} must be finite and at least 0"
            )

    @property
    def key_dim(self) -> int:
        """Channels of a head's query and key."""
        return self.nope_dim + self.rope_dim

    def scale(self, scaling: RopeScaling | None) -> float:
        """Factor of the scores."""
        scale = self.key_dim**-0.5
        if not isinstance(scaling, YarnScaling) or scaling.factor <= 1:
            return scale
        return scale * (0.1 * self.yarn_mscale * math.log(scaling.factor) + 1) ** 2
