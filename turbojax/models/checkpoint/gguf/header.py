"""What stands before the tensors of a GGUF file: metadata, and where each tensor lies.

The package `gguf` has a reader, too. It makes several objects of every token of a vocabulary, which
takes seconds, and believes the lengths that a file claims; so the header is parsed here, and the
package is asked only for the numbers of quantized tensors (`tensors.py`).

All integers are little endian: ``"GGUF"``, a version, the number of tensors and of pairs; for each
pair a key, the kind of its value, and the value; for each tensor its name, sizes (the fastest
first), type, and its place counted from after the padding that follows the header.
"""

import dataclasses
import functools
import math
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from turbojax import _json, _writing
from turbojax.models.checkpoint.safetensors import changed

SUFFIX = ".gguf"

TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
"""Types of tensors that are read: name, numbers of a block, its bytes."""

_OTHER_TYPES = {
    **{9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS"},
    **{18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS"},
    **{24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M"},
    **{34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"},
}
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {
    **{0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4"},
    **{7: "?", 10: "<u8", 11: "<i8", 12: "<f8"},
}
_STRING, _ARRAY = 8, 9
_ALIGNMENT = "general.alignment"
_DEFAULT_ALIGNMENT = 32
_MOST_AXES = 4
# Most bytes of the metadata and the tensors' places; the largest vocabularies take 20 MB.
_MOST_BYTES = 1 << 28


@dataclasses.dataclass(frozen=True)
class Place:
    """A tensor in a GGUF file, whose first byte there is `begin`.

    `type` is a name of `TYPES`; `shape` has the fastest axis last, along which each `block` numbers
    are stored together in `block_bytes` bytes.
    """

    type: str
    shape: tuple[int, ...]
    block: int
    block_bytes: int
    begin: int

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor has in the file."""
        return math.prod(self.shape) // self.block * self.block_bytes


@dataclasses.dataclass(frozen=True, eq=False)
class Header:
    """The beginning of a GGUF file; `version` is that of the file when it was read."""

    file: Path
    version: _writing.Version
    metadata: dict[str, Any]
    tensors: dict[str, Place]


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Whether a path is that of a GGUF file, by its ending; a folder never is."""
    return Path(path).suffix.lower() == SUFFIX and not Path(path).is_dir()


def read(file: Path) -> Header:
    """The header of a file, which is cached until the file changes."""
    if not file.exists():
        raise FileNotFoundError(f"there is no file {str(file)!r}")
    return _read(file, _writing.version(file.stat()))


@functools.lru_cache(maxsize=2)
def _read(file: Path, version: _writing.Version) -> Header:
    with file.open("rb") as opened:
        if _writing.version(os.fstat(opened.fileno())) != version:
            raise changed(file)
        size = os.fstat(opened.fileno()).st_size
        try:
            return _parse(file, version, _Reader(opened, size), size)
        except (_Broken, UnicodeDecodeError, OverflowError) as error:
            raise ValueError(
                f"{file} is not a readable GGUF file, or was cut short: {error}"
            ) from error


class _Broken(Exception):
    """The file does not hold what a GGUF file holds."""


class _Reader:
    """Reads values one after the other, none beyond the end of the file."""

    def __init__(self, opened: BinaryIO, size: int) -> None:
        self._content = opened.read(min(size, _MOST_BYTES))
        self.at = 0

    def take(self, count: int, what: str) -> bytes:
        end = self.at + count
        if end > len(self._content):
            raise _Broken(
                f"{what} at byte {self.at} has {count} bytes, the header has "
                f"{len(self._content) - self.at} more at most"
            )
        found = self._content[self.at : end]
        self.at = end
        return found

    def number(self, kind: str, what: str) -> int:
        [found] = struct.unpack(kind, self.take(struct.calcsize(kind), what))
        return int(found)

    def string(self, what: str) -> str:
        return self.take(self.number("<Q", what), what).decode("utf-8")

    def value(self, kind: int, what: str) -> Any:
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self.array(what)
        if kind not in _SCALARS:
            raise _Broken(f"{what} has a value of kind {kind}, must be one of 0 to 12")
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self.take(dtype.itemsize, what), dtype)[0].item()

    def array(self, what: str) -> Any:
        kind, count = self.number("<I", what), self.number("<Q", what)
        if kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind])
            return np.frombuffer(self.take(dtype.itemsize * count, what), dtype)
        if kind != _STRING:
            raise _Broken(f"{what} is an array of kind {kind}, must be one of numbers or strings")
        if 8 * count > len(self._content) - self.at:
            raise _Broken(f"{what} has {count} strings, which the file is too short for")
        return [self.string(what) for _ in range(count)]


def _parse(file: Path, version: _writing.Version, reader: _Reader, size: int) -> Header:
    if reader.take(len(_MAGIC), "the beginning") != _MAGIC:
        raise _Broken(f"it must begin with {_MAGIC.decode()}")
    number = reader.number("<I", "the version")
    if number not in _VERSIONS:
        raise NotImplementedError(
            f"{file}: version {number} of GGUF is not supported: must be 2 or 3, little endian"
        )
    tensor_count = reader.number("<Q", "the number of tensors")
    pair_count = reader.number("<Q", "the number of keys")
    metadata: dict[str, Any] = {}
    for _ in range(pair_count):
        key = reader.string("a key")
        if key in metadata:
            raise _Broken(f"key {_json.shown(key)} is there twice")
        kind = reader.number("<I", key)
        metadata[key] = reader.value(kind, _json.shown_name(key))
    if metadata.get("split.count", 1) not in (0, 1):
        raise NotImplementedError(
            f"{file}: split.count={_json.shown(metadata['split.count'])} is not supported: must be "
            "one file; llama-gguf-split --merge of llama.cpp makes one of several"
        )
    tensors = _places(file, reader, tensor_count, metadata, size)
    return Header(file, version, metadata, tensors)


def _places(
    file: Path, reader: _Reader, count: int, metadata: dict[str, Any], size: int
) -> dict[str, Place]:
    """Where the tensors lie, all within the file."""
    found: dict[str, Place] = {}
    for _ in range(count):
        name = reader.string("a tensor's name")
        shown = _json.shown_name(name)
        if name in found:
            raise _Broken(f"two tensors are called {shown}")
        axes = reader.number("<I", shown)
        if not 1 <= axes <= _MOST_AXES:
            raise _Broken(f"{shown} has {axes} axes, must have 1 to {_MOST_AXES}")
        sizes = tuple(reader.number("<Q", shown) for _ in range(axes))
        kind, offset = reader.number("<I", shown), reader.number("<Q", shown)
        if kind not in TYPES:
            raise NotImplementedError(
                f"{file}: {shown} has type {_OTHER_TYPES.get(kind, kind)}, which is not supported: "
                f"must be one of {', '.join(name for name, *_ in TYPES.values())}"
            )
        type_name, block, block_bytes = TYPES[kind]
        if 0 in sizes or sizes[0] % block:
            raise _Broken(
                f"{shown} has shape {sizes[::-1]}, of type {type_name} the last axis must be a "
                f"positive multiple of {block}"
            )
        found[name] = Place(type_name, sizes[::-1], block, block_bytes, offset)
    alignment = metadata.get(_ALIGNMENT, _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20:
        raise _Broken(f"{_ALIGNMENT}={_json.shown(alignment)} must be 1 to {1 << 20}")
    start = -(-reader.at // alignment) * alignment
    for name, place in found.items():
        found[name] = moved = dataclasses.replace(place, begin=start + place.begin)
        if moved.begin + moved.nbytes > size:
            raise _Broken(
                f"{_json.shown_name(name)} ends at byte {moved.begin + moved.nbytes}, the file has "
                f"{size}"
            )
    return found
