"""MXFP4 in checkpoints (gpt-oss): 4-bit floating-point codes, 32 of which share a power of two.

A tensor ``NAME`` of numbers ``[E, in, out]`` is stored as ``NAME_blocks``, uint8
``[E, out, in / 32, 16]``, two codes in a byte, the low bits first, and ``NAME_scales``, uint8
``[E, out, in / 32]``, exponents plus 127. A code is the format E2M1 of the Open Compute Project's
"Microscaling Formats" (2023): its sign above one of 8 numbers. An exponent of 255 means NaN.

All these numbers are bfloat16 numbers, and so are the products, so what is read is exact in a model
of bfloat16 or float32.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from turbojax.models.checkpoint import folder as _folder

QUANT_METHOD = "mxfp4"
_BLOCKS, _SCALES = "_blocks", "_scales"
_GROUP = 32
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_CODES = np.array([*_POSITIVE, *(-x for x in _POSITIVE)], np.float32)
# The two numbers of each byte.
_PAIRS = np.stack([np.tile(_CODES, 16), np.repeat(_CODES, 16)], axis=-1)
_BFLOAT16 = jnp.dtype(jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class PackedTensor(_folder.Stored):
    """A tensor stored in MXFP4, codes and exponents, and read as bfloat16 ``[E, in, out]``."""

    blocks: _folder.Stored
    scales: _folder.Stored

    def read_box(self, box: _folder.Box) -> np.ndarray:
        """See `Stored`. Numbers lie in groups of 32 inputs, which are read whole."""
        (first, last), (first_input, last_input), outputs = box
        groups = (first_input // _GROUP, -(-last_input // _GROUP))
        cut = slice(first_input - groups[0] * _GROUP, last_input - groups[0] * _GROUP)
        found = np.empty([end - begin for begin, end in box], _BFLOAT16)
        # One expert after the other: all in float32 would be eight times what is stored.
        for i, expert in enumerate(range(first, last)):
            one = ((expert, expert + 1), outputs, groups)
            blocks = self.blocks.read_box((*one, (0, _GROUP // 2)))[0]
            found[i] = dequantize(blocks, self.scales.read_box(one)[0])[:, cut].T
        return found


def dequantize(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The bfloat16 ``[..., 32 G]`` of uint8 codes ``[..., G, 16]`` and exponents ``[..., G]``."""
    exponents = scales.astype(np.int32) - 127
    with np.errstate(over="ignore"):
        powers = np.where(scales == 255, np.nan, np.ldexp(np.float64(1), exponents))
        values = _PAIRS[blocks].reshape(*scales.shape, _GROUP) * powers[..., None]
        return values.reshape(*scales.shape[:-1], -1).astype(np.float32).astype(_BFLOAT16)


def is_packed(hf: Mapping[str, Any]) -> bool:
    """Whether a `config.json` belongs to a checkpoint whose experts may be in MXFP4."""
    block = hf.get("quantization_config")
    return isinstance(block, Mapping) and block.get("quant_method") == QUANT_METHOD


def unpacked(tensors: Mapping[str, _folder.Stored]) -> dict[str, _folder.Stored]:
    """A checkpoint's tensors, each pair of blocks and scales as one; ValueError unless they fit."""
    found = dict(tensors)
    names = [x.removesuffix(_BLOCKS) for x in tensors if x.endswith(_BLOCKS)]
    names += [x.removesuffix(_SCALES) for x in tensors if x.endswith(_SCALES)]
    for name in dict.fromkeys(names):
        parts = {suffix: found.pop(name + suffix, None) for suffix in (_BLOCKS, _SCALES)}
        for suffix, part in parts.items():
            if part is None:
                other = next(x for x in parts.values() if x is not None)
                raise ValueError(f"{other.file} lacks {name}{suffix}, of a tensor in MXFP4")
            if part.dtype != "U8":
                raise NotImplementedError(
                    f"{part.file}: {name}{suffix} has dtype {part.dtype}, which is not supported: "
                    "must be U8"
                )
        blocks, scales = parts[_BLOCKS], parts[_SCALES]
        assert blocks is not None
        assert scales is not None
        if len(blocks.shape) != 4 or blocks.shape != (*scales.shape, _GROUP // 2):
            raise ValueError(
                f"{blocks.file}: {name}{_BLOCKS} has shape {blocks.shape}, must be [E, out, in / "
                f"{_GROUP}, {_GROUP // 2}], and {name}{_SCALES} of shape {scales.shape} its first "
                "three axes"
            )
        experts, outputs, groups, _ = blocks.shape
        found[name] = PackedTensor(
            blocks.file,
            "BF16",
            (experts, groups * _GROUP, outputs),
            blocks.begin,
            blocks.nbytes + scales.nbytes,
            blocks.version,
            blocks,
            scales,
        )
    return found
