"""One safetensors file: where its tensors lie, and how they are read and written.

A file is the length of a header (8 bytes, little endian), the header (a JSON object with dtype,
shape and place of each tensor), and the tensors' bytes. Tensors are read and written one at a time,
so that a large file is never in memory as a whole. If a model is split over processes, each reads
the parts of tensors that it needs.
"""

import contextlib
import contextvars
import dataclasses
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from turbojax import _json, _writing

# Names of dtypes in safetensors files.
_DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": jnp.dtype(jnp.bfloat16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_HEADER_LENGTH_BYTES = 8

Box = tuple[tuple[int, int], ...]
"""Part of an array: for each axis the first index and the one after the last."""


@dataclasses.dataclass
class BytesRead:
    """What was read from checkpoints' files, headers aside; see `count_bytes_read`.

    Attributes:
      by_tensor: bytes by the place of a tensor, its file's name and its first byte.
    """

    by_tensor: Counter[tuple[str, int]] = dataclasses.field(default_factory=Counter)

    @property
    def total(self) -> int:
        """Bytes of all tensors."""
        return self.by_tensor.total()


_COUNTS: contextvars.ContextVar[tuple[BytesRead, ...]] = contextvars.ContextVar(
    "turbojax_bytes_read", default=()
)


@contextlib.contextmanager
def count_bytes_read() -> Iterator[BytesRead]:
    """Counts the bytes of tensors that this process reads within, in this thread."""
    counted = BytesRead()
    token = _COUNTS.set((*_COUNTS.get(), counted))
    try:
        yield counted
    finally:
        _COUNTS.reset(token)


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file.

    `dtype` is safetensors' name, `begin` the first byte in the file, `version` the file's when its
    header was read.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int
    version: _writing.Version

    @property
    def numpy_dtype(self) -> np.dtype:
        """The dtype of what is read; NotImplementedError if numpy has none like it."""
        dtype = _DTYPES.get(self.dtype)
        if dtype is None:
            name = _json.shown_name(self.dtype)
            raise NotImplementedError(f"{self.file}: dtype {name} is not supported")
        return dtype

    def read(self, first: int = 0, count: int | None = None) -> np.ndarray:
        """Reads `count` rows from `first` on, or all; ValueError if the file has changed."""
        box = whole_box(self.shape)
        if first or count is not None:
            last = self.shape[0] if count is None else min(first + count, self.shape[0])
            box = ((first, last), *box[1:])
        return self.read_box(box)

    def read_box(self, box: Box) -> np.ndarray:
        """Reads a part of the tensor and nothing between; ValueError if the file has changed."""
        dtype = self.numpy_dtype
        offsets, run = _runs(self.shape, box)
        size = dtype.itemsize * run
        content = np.empty(size * offsets.size, np.uint8)
        try:
            with self.file.open("rb", buffering=0) as opened:
                read = 0
                for i, offset in enumerate(offsets.tolist() if size else ()):
                    opened.seek(self.begin + dtype.itemsize * offset)
                    read += _read_into(opened, content.data[i * size : (i + 1) * size])
                # Checked last, so that no change goes unnoticed.
                same = _writing.version(os.fstat(opened.fileno())) == self.version
        except FileNotFoundError as error:
            raise changed(self.file) from error
        if not same or content.size != read:
            raise changed(self.file)
        for counted in _COUNTS.get():
            counted.by_tensor[self.file.name, self.begin] += read
        return content.view(dtype).reshape([last - first for first, last in box])


def whole_box(shape: Sequence[int]) -> Box:
    """The box of a whole array."""
    return tuple((0, size) for size in shape)


def _runs(shape: Sequence[int], box: Box) -> tuple[np.ndarray, int]:
    """Where the contiguous runs of a box begin, and how many numbers each has."""
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    # Axes from here on are whole, so a run extends along the axis before them.
    inner = len(shape)
    while inner and box[inner - 1] == (0, shape[inner - 1]):
        inner -= 1
    if not inner:
        return np.zeros(1, np.int64), math.prod(shape)
    first, last = box[inner - 1]
    offsets = np.array([first * strides[inner - 1]], np.int64)
    for (first_row, last_row), stride in zip(
        reversed(box[: inner - 1]), reversed(strides[: inner - 1]), strict=True
    ):
        rows = np.arange(first_row, last_row, dtype=np.int64) * stride
        offsets = np.add.outer(rows, offsets).reshape(-1)
    return offsets, (last - first) * strides[inner - 1]


def _read_into(opened: Any, target: memoryview) -> int:
    """Fills the target as far as the file goes; returns the bytes read."""
    read = 0
    # One call reads 2 GB at most on Linux.
    while read < len(target):
        count = opened.readinto(target[read:])
        if not count:
            break
        read += count
    return read


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor to be written, whose array `make` returns when its turn comes."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        """Its size in a file."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def read_header(file: Path) -> Iterator[tuple[str, Stored]]:
    """Name and place of each tensor of a file, in the order of their bytes."""
    # The library checks the header, and that the file is as long as it says. It does not say where
    # tensors lie, and reads bfloat16 for numpy only in its newest versions.
    with file.open("rb") as opened:
        version = _writing.version(os.fstat(opened.fileno()))
        _check_header_length(file, opened)
        try:
            with safe_open(file, framework="numpy"):
                pass
        except SafetensorError as error:
            raise ValueError(
                f"{file} is not a readable safetensors file, or was cut short: {error}"
            ) from error
        if _writing.version(file.stat()) != version:
            raise changed(file)
        length = int.from_bytes(opened.read(_HEADER_LENGTH_BYTES), "little")
        try:
            header = _json.parse(opened.read(length))
        except ValueError as error:
            raise ValueError(f"{file} has a header that is no JSON: {error}") from error
    header.pop("__metadata__", None)
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        start = _HEADER_LENGTH_BYTES + length + begin
        shape = tuple(entry["shape"])
        yield name, Stored(file, entry["dtype"], shape, start, end - begin, version)


def _check_header_length(file: Path, opened: BinaryIO) -> None:
    """Raises ValueError if a header has more bytes than its JSON may have."""
    length = int.from_bytes(opened.read(_HEADER_LENGTH_BYTES), "little")
    if length > _json.MOST_BYTES:
        raise ValueError(
            f"{file} is not a readable safetensors file, or was cut short: its header has {length} "
            f"bytes, must have {_json.MOST_BYTES} at most"
        )
    opened.seek(0)


def write_tensors(path: Path, tensors: Sequence[Tensor]) -> None:
    """Writes a file of these tensors, one at a time in memory."""
    # Tensors begin at multiples of their items' sizes if wide items come first.
    ordered = sorted(tensors, key=lambda x: -x.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for x in ordered:
        begin, end = end, end + x.nbytes
        header[x.name] = {
            "dtype": _DTYPE_NAMES[x.dtype],
            "shape": list(x.shape),
            "data_offsets": [begin, end],
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _HEADER_LENGTH_BYTES)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(_HEADER_LENGTH_BYTES, "little"))
        file.write(encoded)
        for x in ordered:
            array = np.ascontiguousarray(x.make())
            file.write(array.reshape(-1).view(np.uint8).data)


def changed(file: Path) -> ValueError:
    """The error for a file that changed after its header was read."""
    return ValueError(f"{file} changed while it was read: load it again when it is complete")
