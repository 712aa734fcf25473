"""Q4_0 of GGUF files, as llama.cpp and the package `gguf` write it.

A row of `K` inputs is ``K / 32`` blocks of 18 bytes: a scale `d`, float16, little endian, then the
codes of 32 inputs, 0 to 15. Byte `i` of those holds the code of input `i` in its low bits, and that
of input ``16 + i`` in its high ones. A weight is ``(code - 8) * d``, in float32, which holds it
exactly; `d` may be negative. Groups have no zero points.

The other types of GGUF files are no INT4 weights: Q4_1 and Q4_K have a minimum for each group,
``code * d + m``, and ``-m / d`` is no integer zero point; the rest have other numbers of bits.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from turbojax.models.checkpoint.folder import Stored
from turbojax.models.checkpoint.gguf.tensors import GgufTensor
from turbojax.models.checkpoint.packed.codes import MIDDLE, Codes, Part, Places
from turbojax.models.families.tensors import LAYERS

TYPE = "Q4_0"
_BLOCK, _BYTES = 32, 18
_SCALE_BYTES = 2


@dataclasses.dataclass(frozen=True)
class Q40:
    """How the linear layers are stored; the part `codes` holds the scales, too."""

    name: str = TYPE
    codes: str = "blocks"
    group_size: int = _BLOCK

    @property
    def places(self) -> Mapping[str, Places]:
        """See `PackedFormat`. Scales lie beside the codes, so whole groups are read."""
        return {"blocks": (("outputs", 1), ("groups", 1))}

    def parts(self, outputs: int, inputs: int) -> Mapping[str, Part]:
        """See `PackedFormat`."""
        if inputs % _BLOCK:
            raise ValueError(f"{inputs} inputs must be a multiple of {_BLOCK}")
        return {"blocks": Part({"U8": (outputs, inputs // _BLOCK, _BYTES)})}

    def unpack(self, parts: Mapping[str, np.ndarray], outputs: int, inputs: int) -> Codes:
        """See `PackedFormat`."""
        blocks = parts["blocks"]
        scales = np.ascontiguousarray(blocks[..., :_SCALE_BYTES]).view("<f2")[..., 0]
        return Codes(_codes(blocks[..., _SCALE_BYTES:]), scales, None, _BLOCK)


def linear_layers_as_blocks(tensors: Mapping[str, Stored], file: Path) -> dict[str, Stored]:
    """A GGUF file's tensors, with matrices of layers as their blocks."""
    found: dict[str, Stored] = {}
    for name, tensor in tensors.items():
        assert isinstance(tensor, GgufTensor)
        if not name.startswith(LAYERS) or len(tensor.shape) != 2:
            found[name] = tensor
            continue
        if tensor.place.type != TYPE:
            raise NotImplementedError(
                f"{file}: {tensor.name} has type {tensor.place.type}, which is not supported as "
                f"INT4 weights: all linear layers must have type {TYPE}, as llama-quantize --pure "
                "of llama.cpp makes them"
            )
        found[f"{name.removesuffix('.weight')}.blocks"] = tensor.blocks()
    return found


@jax.jit
def _codes(nibbles: jax.Array) -> jax.Array:
    """int8 ``[N, 32 G]`` of bytes ``[N, G, 16]``."""
    halves = jnp.concatenate([nibbles & 15, nibbles >> 4], axis=-1)
    return (halves.astype(jnp.int8) - MIDDLE).reshape(nibbles.shape[0], -1)
