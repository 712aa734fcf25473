"""Tensors of a GGUF file under Hugging Face's names, with Hugging Face's numbers.

llama.cpp's converter changes some numbers: for architecture "llama" it reorders the rows of queries
and keys, because it rotates channels in neighbouring pairs; and it adds 1 to the scales of Gemma's
norms. Both are undone when a tensor is read. The order of rows is also restored where blocks are
read as they are stored, codes beside their scales (`GgufBlocks`): a row of blocks is a row of
numbers.
"""

import dataclasses
import importlib.util
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from turbojax import _extras
from turbojax._json import shown_name
from turbojax.models.checkpoint.gguf import config as _config
from turbojax.models.checkpoint.gguf import header as _header
from turbojax.models.checkpoint.gguf.header import Header, Place
from turbojax.models.checkpoint.safetensors import Box, Stored

_FLOATS = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": jnp.dtype(jnp.bfloat16),
}
# Numbers that are dequantized at once; the temporary arrays are several times as large.
_CHUNK = 1 << 24

_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    _config.HEAD: "lm_head.weight",
}
_COMMON = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA = {
    **_COMMON,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_INSIDE: dict[str, Mapping[str, str]] = {
    "llama": _COMMON,
    "qwen2": _COMMON,
    "qwen3": {**_COMMON, **_HEAD_NORMS},
    "gemma2": _GEMMA,
    "gemma3": {**_GEMMA, **_HEAD_NORMS},
    "phi3": {
        **{name: _COMMON[name] for name in ("attn_norm", "attn_output", "ffn_norm", "ffn_down")},
        "attn_qkv": "self_attn.qkv_proj",
        "ffn_up": "mlp.gate_up_proj",
    },
}
"""Names within a layer, by architecture."""
_PERMUTED = {
    "attn_q": "attention.head_count",
    "attn_k": "attention.head_count_kv",
}
_FACTORS = (_config.ROPE_FACTORS, _config.SHORT_FACTORS, _config.LONG_FACTORS)
_IN_LAYER = re.compile(r"blk\.([0-9]{1,6})\.([a-z_]+)\.(weight|bias)")


@dataclasses.dataclass(frozen=True)
class GgufTensor(Stored):
    """A tensor of a GGUF file, as Hugging Face has it.

    `dtype` is that of what is read: for codes float32, which holds their products with the scales
    as `gguf.quants.dequantize` gives them.

    Attributes:
      name: in the file.
      raw: its bytes there, ``[rows, bytes]``; a tensor of one axis is one row.
      heads: how many heads there are whose rows are put back in order; None to leave all rows.
      offset: added to every number.
    """

    name: str
    place: Place
    raw: Stored
    heads: int | None = None
    offset: float = 0.0

    def read_box(self, box: Box) -> np.ndarray:
        """See `Stored`. Only the blocks that the box meets are read."""
        if len(self.shape) == 1:
            whole = self._rows(0, 1, 0, self.shape[0])[0]
            if self.heads is not None:
                whole = whole[_order(self.shape[0], self.heads)]
            [(first, last)] = box
            return self._shifted(whole[first:last])
        rows, (start, stop) = box

        def read(first: int, last: int) -> np.ndarray:
            return self._rows(first, last, start, stop)

        return self._shifted(_in_order(read, rows, self.shape[0], self.heads))

    def blocks(self) -> "GgufBlocks":
        """The same rows, of two axes, as the bytes of their blocks."""
        rows, size = self.shape[0], self.place.block_bytes
        return GgufBlocks(
            file=self.file,
            dtype="U8",
            shape=(rows, self.raw.shape[1] // size, size),
            begin=self.begin,
            nbytes=self.nbytes,
            version=self.version,
            raw=self.raw,
            heads=self.heads,
        )

    def _rows(self, first: int, last: int, start: int, stop: int) -> np.ndarray:
        """The numbers `start` to `stop` of rows `first` to `last`, in the file's order."""
        block, size = self.place.block, self.place.block_bytes
        begin, end = start // block, -(-stop // block)
        cut = slice(start - begin * block, stop - begin * block)
        if self.place.type in _FLOATS:
            raw = self.raw.read_box(((first, last), (begin * size, end * size)))
            return raw.view(self.numpy_dtype)[:, cut]
        found = np.empty((last - first, stop - start), np.float32)
        count = max(1, _CHUNK // max(1, (end - begin) * block))
        for row in range(first, last, count):
            until = min(row + count, last)
            raw = self.raw.read_box(((row, until), (begin * size, end * size)))
            found[row - first : until - first] = _dequantize(raw, self.place.type)[:, cut]
        return found

    def _shifted(self, numbers: np.ndarray) -> np.ndarray:
        return numbers + numbers.dtype.type(self.offset) if self.offset else numbers


@dataclasses.dataclass(frozen=True)
class GgufBlocks(Stored):
    """A tensor's blocks, rows in Hugging Face's order: uint8 ``[N, blocks, bytes of a block]``."""

    raw: Stored
    heads: int | None

    def read_box(self, box: Box) -> np.ndarray:
        """See `Stored`. Blocks are read whole."""
        rows, (start, stop), cut = box
        size = self.shape[2]

        def read(first: int, last: int) -> np.ndarray:
            return self.raw.read_box(((first, last), (start * size, stop * size)))

        found = _in_order(read, rows, self.shape[0], self.heads)
        return found.reshape(len(found), stop - start, size)[:, :, slice(*cut)]


def _in_order(
    read: Callable[[int, int], np.ndarray], rows: tuple[int, int], count: int, heads: int | None
) -> np.ndarray:
    """Some of Hugging Face's `count` rows; ``read(first, last)`` reads rows in the file's order."""
    first, last = rows
    if heads is None:
        return read(first, last)
    # Whole heads, whose rows lie together.
    size = count // heads
    begin, end = first // size * size, -(-last // size) * size
    order = _order(end - begin, (end - begin) // size)[first - begin : last - begin]
    return read(begin, end)[order]


def _dequantize(raw: np.ndarray, name: str) -> np.ndarray:
    import gguf

    with np.errstate(all="ignore"):
        found: np.ndarray = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    return found


def _order(rows: int, heads: int) -> np.ndarray:
    """For each row of Hugging Face's tensor, the row in the file."""
    numbers = np.arange(rows).reshape(heads, rows // heads // 2, 2)
    return numbers.swapaxes(1, 2).reshape(-1)


def read_config(file: Path) -> dict[str, Any]:
    """The `config.json` that the metadata of a file describes."""
    header = _header.read(file)
    factors = {}
    for name in _FACTORS:
        if name in header.tensors:
            found = _stored(header, name, header.tensors[name]).read().astype(np.float32)
            if found.ndim != 1 or not np.isfinite(found).all() or (found <= 0).any():
                raise ValueError(f"{file}: {name} must hold positive numbers along one axis")
            factors[name] = found
    return _config.config(header, factors)


def stored(file: Path) -> dict[str, Stored]:
    """The tensors of a file by Hugging Face's names, in the order in which they lie there."""
    header = _header.read(file)
    architecture = header.metadata.get(_config.ARCHITECTURE)
    inside = _INSIDE.get(architecture) if isinstance(architecture, str) else None
    if inside is None:
        read_config(file)  # raises an error that says what is wrong
        raise AssertionError(architecture)
    assert isinstance(architecture, str)
    if importlib.util.find_spec("gguf") is None:
        raise ImportError(f"{file} needs the package gguf: {_extras.install('gguf')}")
    found: dict[str, Stored] = {}
    for name, place in sorted(header.tensors.items(), key=lambda item: item[1].begin):
        if name in _FACTORS:
            continue
        if name in _OUTSIDE:
            target, kind = _OUTSIDE[name], name.partition(".")[0]
        else:
            match = _IN_LAYER.fullmatch(name)
            if match is None or match[2] not in inside:
                raise ValueError(
                    f"{file} holds an unexpected tensor for {architecture!r}: {shown_name(name)}"
                )
            kind = match[2]
            target = f"model.layers.{int(match[1])}.{inside[kind]}.{match[3]}"
        if len(place.shape) > 2:
            raise ValueError(f"{file}: {name} has shape {place.shape}, must have at most two axes")
        heads = None
        if architecture == "llama" and kind in _PERMUTED:
            heads = _heads(header, _PERMUTED[kind], place, name)
        is_shifted = architecture.startswith("gemma") and kind.endswith("norm")
        tensor = _stored(header, name, place, heads, -1.0 if is_shifted else 0.0)
        if target in found:
            raise ValueError(f"{file} holds {shown_name(name)} twice")
        found[target] = tensor
    return found


def _heads(header: Header, key: str, place: Place, name: str) -> int:
    """How many heads have rows that are out of order."""
    found = header.metadata.get(f"llama.{key}", header.metadata.get("llama.attention.head_count"))
    if isinstance(found, np.ndarray) and len(found):
        found = found[0].item()
    if type(found) is not int or found < 1 or place.shape[0] % (2 * found):
        raise ValueError(
            f"{header.file}: {name} has {place.shape[0]} rows, must have an even number for each "
            f"of llama.{key}={found} heads"
        )
    return found


def _stored(
    header: Header, name: str, place: Place, heads: int | None = None, offset: float = 0.0
) -> GgufTensor:
    rows = place.shape[0] if len(place.shape) == 2 else 1
    raw = Stored(
        header.file, "U8", (rows, place.nbytes // rows), place.begin, place.nbytes, header.version
    )
    dtype = place.type if place.type in _FLOATS else "F32"
    return GgufTensor(
        file=header.file,
        dtype=dtype,
        shape=place.shape,
        begin=place.begin,
        nbytes=place.nbytes,
        version=header.version,
        name=name,
        place=place,
        raw=raw,
        heads=heads,
        offset=offset,
    )
