"""A linear layer of a packed checkpoint, unpacked; and what a format says of its tensors."""

import dataclasses
from collections.abc import Mapping
from typing import Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from turbojax.quantizers.int4 import Int4Weight
from turbojax.quantizers.int4_codes import from_codes

PER_WORD = 8
"""Codes of four bits in an int32."""
MIDDLE = 8
"""What a stored code is more than the signed one: codes are -8 to 7, stored as 0 to 15."""

_SHIFTS = np.arange(0, 32, 4, dtype=np.int32)
_Array = TypeVar("_Array", jax.Array, np.ndarray)


@dataclasses.dataclass(frozen=True)
class Part:
    """A tensor that a linear layer is stored as.

    Attributes:
      shapes: the shape it must have, by the dtypes it may have, in safetensors' names.
      required: whether it must be there.
    """

    shapes: Mapping[str, tuple[int, ...]]
    required: bool = True


@dataclasses.dataclass(frozen=True)
class Codes:
    """A linear layer's weight: ``(codes - zeros) * scales``.

    Attributes:
      codes: int8 ``[N, K]``, -8 to 7.
      scales: float16 or bfloat16 ``[N, ceil(K / group_size)]``.
      zeros: int8 as `scales`, -8 to 8, or None if all are 0.
      group_size: neighbouring inputs that share a scale, or None for all inputs.
    """

    codes: jax.Array
    scales: np.ndarray
    zeros: np.ndarray | None
    group_size: int | None

    def rows(self, first: int, last: int) -> "Codes":
        """Some outputs, from the first to the one before the last."""
        zeros = None if self.zeros is None else self.zeros[first:last]
        return Codes(self.codes[first:last], self.scales[first:last], zeros, self.group_size)


class PackedFormat(Protocol):
    """How the linear layers of a checkpoint are stored, which its `quantization_config` says."""

    @property
    def name(self) -> str:
        """Of the format, for errors."""

    @property
    def codes(self) -> str:
        """The part that holds a layer's codes, which every layer has."""

    def parts(self, outputs: int, inputs: int) -> Mapping[str, Part]:
        """The tensors of a linear layer, by what follows the layer's name and a dot.

        Raises:
          ValueError: if the format cannot hold a layer of this size.
        """

    def unpack(self, parts: Mapping[str, np.ndarray], outputs: int, inputs: int) -> Codes:
        """The layer of these tensors, whose shapes and dtypes are right.

        Raises:
          NotImplementedError: if it is one that groups of neighbouring inputs cannot express.
          ValueError: if the tensors contradict each other.
        """


def weights(parts: Mapping[str, Codes]) -> dict[str, Int4Weight]:
    """The weights of some layers, alike in that all have zeros if one has."""
    some = any(part.zeros is not None for part in parts.values())

    def weight(part: Codes) -> Int4Weight:
        zeros = part.zeros
        if some and zeros is None:
            zeros = np.zeros(part.scales.shape, np.int8)
        return from_codes(
            part.codes,
            jnp.asarray(part.scales),
            None if zeros is None else jnp.asarray(zeros),
            group_size=part.group_size,
        )

    return {name: weight(part) for name, part in parts.items()}


def nibbles(words: _Array) -> _Array:
    """Codes 0 to 15 of int32 words ``[...]``, ``[..., 8]``, those of the lowest bits first."""
    shifts = np.expand_dims(_SHIFTS, tuple(range(words.ndim)))
    return (words[..., None] >> shifts) & 15


def signed(codes: _Array) -> _Array:
    """Codes 0 to 15 as -8 to 7, and zero points likewise, int8."""
    return (codes - MIDDLE).astype(np.int8)


@jax.jit
def along_inputs(words: jax.Array) -> jax.Array:
    """int8 ``[N, 8 W]`` of words ``[N, W]`` of eight inputs each."""
    return signed(nibbles(words)).reshape(words.shape[0], -1)


def by_groups(zeros: np.ndarray, symmetric: bool) -> np.ndarray | None:
    """Zero points, or None where the format says that there are none and all are 0."""
    return None if symmetric and not zeros.any() else zeros


def in_order(groups: np.ndarray, size: int, name: str) -> np.ndarray:
    """The group of each run of `size` inputs.

    Args:
      groups: int ``[K]``, the group of each input.
      size: inputs of a group.
      name: of the tensor, for errors.

    Returns:
      int ``[ceil(K / size)]``.

    Raises:
      NotImplementedError: if a run has inputs of more than one group.
      ValueError: if there is no such group.
    """
    count = -(-groups.size // size)
    if groups.min() < 0 or groups.max() >= count:
        raise ValueError(f"{name} must hold groups from 0 to {count - 1}")
    first = groups[::size]
    if (np.repeat(first, size)[: groups.size] != groups).any():
        raise NotImplementedError(
            f"{name} says that inputs of a group are no neighbours, which is not supported: "
            f"quantize with desc_act=False or static groups, so that every {size} inputs in their "
            "order are a group"
        )
    return first
