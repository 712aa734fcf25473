"""Latent attention (MLA) in a `config.json`: keys and values made from one latent per token."""

import dataclasses
import math
from typing import Any

from turbojax import _checks
from turbojax._json import shown
from turbojax._pytrees import static
from turbojax.models.families.keys import LARGEST_SIZE
from turbojax.rotary import RopeScaling, YarnScaling


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

    Raises:
      ValueError: if a value is out of the range stated here.
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
