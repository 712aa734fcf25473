"""A linear layer of a packed checkpoint, unpacked; and what a format says about its tensors."""

import dataclasses
from collections.abc import Mapping
from typing import Literal, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from turbojax.matmul.int4.codes import from_codes
from turbojax.matmul.int4.weight import Int4Weight

PER_WORD = 8
"""Codes of four bits in an int32."""
MIDDLE = 8
"""What is added to a signed code, -8 to 7, to store it as 0 to 15."""

Places = tuple[tuple[Literal["outputs", "inputs", "groups"], int], ...]
"""What each axis of a tensor counts, and how many of them are one step along it."""

_SHIFTS = np.arange(0, 32, 4, dtype=np.int32)
_Array = TypeVar("_Array", jax.Array, np.ndarray)


@dataclasses.dataclass(frozen=True)
class Part:
    """A stored part of a linear layer; `shapes` has its shape for each of safetensors' dtypes."""

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
      inputs: int32 ``[K]``, the layer's input that each column of `codes` belongs to, or None where
        they are in order.
    """

    codes: jax.Array
    scales: np.ndarray
    zeros: np.ndarray | None
    group_size: int | None
    inputs: np.ndarray | None = None

    def rows(self, first: int, last: int) -> "Codes":
        """The outputs from `first` to the one before `last`."""
        zeros = None if self.zeros is None else self.zeros[first:last]
        codes, scales = self.codes[first:last], self.scales[first:last]
        return Codes(codes, scales, zeros, self.group_size, self.inputs)


class PackedFormat(Protocol):
    """How the linear layers of a checkpoint are stored, as its `quantization_config` says."""

    @property
    def name(self) -> str:
        """The format's name, for errors."""

    @property
    def codes(self) -> str:
        """The name of the part that holds a layer's codes, which every layer has."""

    @property
    def group_size(self) -> int | None:
        """Inputs of a group, or None for all."""

    @property
    def places(self) -> Mapping[str, Places]:
        """What the axes of codes and scales count, by the names of the parts that hold them."""

    def parts(self, outputs: int, inputs: int) -> Mapping[str, Part]:
        """The tensors of a layer, by the end of their names; ValueError if the size is wrong."""

    def unpack(self, parts: Mapping[str, np.ndarray], outputs: int, inputs: int) -> Codes:
        """The layer of these checked tensors; ValueError if they contradict each other."""


def weights(parts: Mapping[str, Codes]) -> dict[str, Int4Weight]:
    """The weights of some layers; if one has zero points, all get them."""
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


def require_words(count: int, what: str) -> None:
    """Raises ValueError unless so many codes fill whole words."""
    if count % PER_WORD:
        raise ValueError(f"{count} {what} must be a multiple of {PER_WORD}")


def nibbles(words: _Array) -> _Array:
    """Codes 0 to 15 ``[..., 8]`` of int32 words ``[...]``, those of the lowest bits first."""
    shifts = np.expand_dims(_SHIFTS, tuple(range(words.ndim)))
    return (words[..., None] >> shifts) & 15


def signed(codes: _Array) -> _Array:
    """Codes or zero points 0 to 15 as int8 -8 to 7."""
    return (codes - MIDDLE).astype(np.int8)


@jax.jit
def along_inputs(words: jax.Array) -> jax.Array:
    """int8 codes ``[N, 8 W]`` of words ``[N, W]`` of eight inputs each."""
    return signed(nibbles(words)).reshape(words.shape[0], -1)


def by_groups(zeros: np.ndarray, symmetric: bool) -> np.ndarray | None:
    """The zero points, or None if the format says that there are none and all are 0."""
    return None if symmetric and not zeros.any() else zeros


def grouped(
    codes: jax.Array,
    scales: np.ndarray,
    zeros: np.ndarray | None,
    group_size: int | None,
    groups: np.ndarray | None,
) -> Codes:
    """A layer whose inputs may be in any groups, reordered so that those of a group are neighbours.

    `codes` are int8 ``[N, K]``, `scales` ``[N, G]``, and `groups` int ``[K]`` the group of each
    input, None where each run of `group_size` is one.
    """
    if groups is None:
        return Codes(codes, scales, zeros, group_size)
    size, count = group_size or groups.size, scales.shape[1]
    if groups.min() < 0 or groups.max() >= count:
        raise ValueError(f"groups from {groups.min()} to {groups.max()} must be 0 to {count - 1}")
    order = None
    if not _are_runs(groups, size):
        order = np.argsort(groups, kind="stable").astype(np.int32)
        groups = groups[order]
        if not _are_runs(groups, size):
            raise ValueError(f"the group index must give every group {size} inputs")
        codes = codes[:, order]
    runs = groups[::size]
    return Codes(
        codes, scales[:, runs], None if zeros is None else zeros[:, runs], group_size, order
    )


def _are_runs(groups: np.ndarray, size: int) -> bool:
    return np.array_equal(np.repeat(groups[::size], size)[: groups.size], groups)
