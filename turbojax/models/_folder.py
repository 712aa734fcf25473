"""The files of a checkpoint's folder: `config.json`, and tensors in safetensors files.

A safetensors file is the length of a header (8 bytes, little endian), the header (a JSON object
that gives dtype, shape and place of each tensor), and the tensors' bytes. Tensors are read and
written one at a time, so that a large file never lies in memory as a whole.
"""

import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from turbojax import _json, _writing

T = TypeVar("T")

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = f"{WEIGHTS_NAME}.index.json"
"""The index of weights that are split into several files: which tensor is in which file."""

MAX_SHARD_BYTES = 5_000_000_000

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
# Of readers, where somebody replaces the checkpoint.
_TRIES, _PAUSE_SECONDS = 20, 0.005
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file.

    Attributes:
      file: where it lies.
      dtype: its dtype's name there, such as ``"BF16"``.
      shape: its shape.
      begin: its first byte in the file.
      nbytes: how many there are.
      version: of the file, when its header was read.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int
    version: tuple[int, int, int]

    @property
    def numpy_dtype(self) -> np.dtype:
        """The dtype of what is read.

        Raises:
          NotImplementedError: if numpy has none like it.
        """
        dtype = _DTYPES.get(self.dtype)
        if dtype is None:
            name = _json.shown_name(self.dtype)
            raise NotImplementedError(f"{self.file}: dtype {name} is not supported")
        return dtype

    def read(self, first: int = 0, count: int | None = None) -> np.ndarray:
        """Reads some rows, by default all.

        Args:
          first: of the rows.
          count: how many; None for all from the first.

        Raises:
          NotImplementedError: see `numpy_dtype`.
          ValueError: if the file is not the one whose header was read.
        """
        shape, dtype = self.shape, self.numpy_dtype
        if count is not None:
            shape = (min(count, shape[0] - first), *shape[1:])
        row = dtype.itemsize * int(np.prod(self.shape[1:], dtype=np.int64))
        offset = self.begin + first * row
        size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        try:
            with self.file.open("rb") as opened:
                content = np.fromfile(opened, np.uint8, count=size, offset=offset)
                # Checked last, so that no change goes unnoticed.
                same = _version(os.fstat(opened.fileno())) == self.version
        except FileNotFoundError as error:
            raise _changed(self.file) from error
        if not same or content.size != size:
            raise _changed(self.file)
        return content.view(dtype).reshape(shape)


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor to be written, made when its turn comes.

    Attributes:
      name: in the file.
      dtype: one that `Stored.read` knows.
      shape: its shape.
      make: returns it.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        """Its size in a file."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def cast(tensor: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """The tensor in another dtype.

    Raises:
      ValueError: if a finite number becomes infinite.
    """
    if tensor.dtype == dtype:
        return tensor
    with np.errstate(over="ignore"):
        result = tensor.astype(dtype)
    if np.count_nonzero(np.isinf(result)) != np.count_nonzero(np.isinf(tensor)):
        raise ValueError(f"dtype={dtype.name} cannot hold {name}, whose numbers are larger")
    return result


def require_folder(folder: Path) -> None:
    """Raises an OSError unless the folder exists.

    Raises:
      FileNotFoundError: if nothing is there.
      NotADirectoryError: if something else is.
    """
    wanted = f"must be 'embedded' or a folder with {CONFIG_NAME} and {WEIGHTS_NAME}"
    if not folder.exists():
        raise FileNotFoundError(f"{str(folder)!r} {wanted}: there is no such folder")
    if not folder.is_dir():
        raise NotADirectoryError(f"{str(folder)!r} {wanted}, not a file")


def read_config(folder: Path) -> dict[str, Any]:
    """What a folder's `config.json` says.

    Raises:
      OSError: if there is no such folder, or no such file in it.
      ValueError: if the file cannot be parsed, or holds no object.
    """
    require_folder(folder)
    if not (folder / CONFIG_NAME).is_file():
        raise FileNotFoundError(f"{str(folder)!r} is no checkpoint: it must hold {CONFIG_NAME}")
    return read_json(folder / CONFIG_NAME)


def require_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Raises ValueError unless a folder's `config.json` still says this.

    To be called after `stored_tensors`: `write` takes the old `config.json` away before it touches
    the weights, so that those belong to what was read before.
    """
    try:
        found = read_config(folder)
    except FileNotFoundError as error:
        raise _changed(folder / CONFIG_NAME) from error
    if _json.differ(found, config):
        raise _changed(folder / CONFIG_NAME)


def read_json(path: Path) -> dict[str, Any]:
    """The object of a JSON file.

    Raises:
      OSError: if there is none.
      ValueError: see `turbojax._json.read_object`.
    """
    return _json.read_object(path)


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a checkpoint, one or many.

    `model.safetensors` goes before an index of several files, as it does for transformers.

    Raises:
      FileNotFoundError: if there are none, or one that the index names is missing.
      ValueError: if the index cannot be read.
    """
    if (folder / WEIGHTS_NAME).is_file():
        return (folder / WEIGHTS_NAME,)
    if (folder / INDEX_NAME).is_file():
        return tuple(dict.fromkeys(_read_index(folder).values()))
    pickles = [name for name in _PICKLES if (folder / name).exists()]
    if pickles:
        raise FileNotFoundError(
            f"{str(folder)!r} must hold {WEIGHTS_NAME}; {pickles[0]} is not read, because a pickle "
            f"can run any code: AutoModelForCausalLM.from_pretrained({str(folder)!r})"
            ".save_pretrained(...) of the package transformers writes safetensors"
        )
    raise FileNotFoundError(
        f"{str(folder)!r} is no checkpoint: it must hold {WEIGHTS_NAME} or {INDEX_NAME}"
    )


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """All tensors of a checkpoint's files, in the order in which they lie there; none is read.

    Raises:
      FileNotFoundError: see `weight_files`.
      ValueError: if a file cannot be parsed or is cut short, two files hold tensors of one name,
        or the index places a tensor in a file that lacks it.
    """
    tensors: dict[str, Stored] = {}
    for file in weight_files(folder):
        for name, stored in _read_header(file):
            if name in tensors:
                raise ValueError(f"{tensors[name].file} and {file} both hold {some([name])}")
            tensors[name] = stored
    if not (folder / WEIGHTS_NAME).is_file():
        lost: dict[Path, list[str]] = {}
        for name, file in _read_index(folder).items():
            if name not in tensors or tensors[name].file != file:
                lost.setdefault(file, []).append(name)
        for file, names in lost.items():
            raise ValueError(f"{file} lacks {some(names)}, which {INDEX_NAME} places there")
    return tensors


def require_tensors(
    tensors: Mapping[str, Stored], expected: Mapping[str, tuple[int, ...]], folder: Path
) -> None:
    """Raises ValueError unless the tensors have exactly these names and shapes."""
    missing = sorted(expected.keys() - tensors.keys())
    if missing:
        raise ValueError(
            f"{_source(tensors, folder)} lacks {some(missing)}, which {CONFIG_NAME} asks for"
        )
    unexpected = sorted(tensors.keys() - expected.keys())
    if unexpected:
        file = tensors[unexpected[0]].file
        raise ValueError(f"{file} holds unexpected tensors: {some(unexpected)}")
    for name, shape in expected.items():
        stored = tensors[name]
        if stored.shape != shape:
            raise ValueError(
                f"{stored.file}: {name} has shape {_json.shown(stored.shape)}, must be {shape}, "
                f"as {CONFIG_NAME} has it"
            )


def require_layers(tensors: Mapping[str, Stored], count: int, prefix: str, folder: Path) -> None:
    """Raises ValueError unless the tensors are those of so many layers.

    To be called before anything is made for every layer that `config.json` claims.

    Args:
      tensors: of the checkpoint.
      count: the number of layers that is claimed.
      prefix: of their names, before the layer's number.
      folder: of the checkpoint.
    """
    inside = [name.removeprefix(prefix) for name in tensors if name.startswith(prefix)]
    layers = {name.partition(".")[0] for name in inside}
    if len(layers) < count:
        raise ValueError(
            f"{_source(tensors, folder)} lacks {prefix}{count - 1}: it holds {len(layers)} layers, "
            f"{CONFIG_NAME} says num_hidden_layers={count}"
        )


def _source(tensors: Mapping[str, Stored], folder: Path) -> Path:
    """The file to blame for what is missing: the only one, or the index of several."""
    files = {x.file for x in tensors.values()}
    return files.pop() if len(files) == 1 else folder / INDEX_NAME


def write(
    path: str | os.PathLike[str],
    config: Mapping[str, Any],
    tensors: Sequence[Tensor],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    companions: Mapping[str, Path] | None = None,
) -> None:
    """Writes a checkpoint into a folder, which is created if it does not exist.

    `steady` readers see the old checkpoint or the new one, at every moment and after every kind of
    interruption, see `_writing.replacing_files`.

    Args:
      path: the folder; the checkpoint it held is replaced, other files stay.
      config: content of `config.json`.
      tensors: what to write.
      max_shard_bytes: of the tensors in one file; a larger tensor gets a file of its own.
      companions: further files by name, to be copied from elsewhere.

    Raises:
      BlockingIOError: if another program is writing there.
      TypeError: if JSON cannot say what the config holds.
    """
    shards = _split(tensors, max_shard_bytes)
    count = len(shards)
    names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    if count == 1:
        names = [WEIGHTS_NAME]
    texts = {CONFIG_NAME: _encode(config)}
    if count > 1:
        places = {x.name: n for n, shard in zip(names, shards, strict=True) for x in shard}
        total = {"total_size": sum(x.nbytes for x in tensors)}
        texts[INDEX_NAME] = _encode({"metadata": total, "weight_map": places})
    with _writing.replacing_files(path, owned=_is_checkpoint, last=CONFIG_NAME) as draft:
        for name, shard in zip(names, shards, strict=True):
            _write_tensors(draft / name, shard)
        for name, text in texts.items():
            (draft / name).write_bytes(text)
        for name, source in (companions or {}).items():
            (draft / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source, draft / name)


def steady(folder: Path, read: Callable[[Path], T]) -> T:
    """What `read` makes of a checkpoint: of one, also where somebody replaces it meanwhile.

    Args:
      folder: of the checkpoint.
      read: is given the folder where its files lie; called again if it was replaced.

    Raises:
      Whatever `read` raises; ValueError if the checkpoint is replaced again and again.
    """
    require_folder(folder)
    settle(folder)
    for _ in range(_TRIES):
        place = _writing.current(folder)
        before = _state(place)
        try:
            result = read(place)
        except (OSError, ValueError, NotImplementedError):
            if _writing.current(folder) == place and _state(place) == before:
                raise
        else:
            if _writing.current(folder) == place and _state(place) == before:
                return result
        time.sleep(_PAUSE_SECONDS)
    raise _changed(folder)


def settle(folder: Path) -> None:
    """Ends what an interrupted `write` had not ended, so that every file has its place."""
    _writing.finish(folder, owned=_is_checkpoint, last=CONFIG_NAME)


def _state(folder: Path) -> tuple[int, int, int] | None:
    """A value that changes if `write` replaces the checkpoint: every one has a new file."""
    try:
        return _version((folder / CONFIG_NAME).stat())
    except FileNotFoundError:
        return None


def some(names: Sequence[str]) -> str:
    """The first few of these names."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(_json.shown_name, names[:3])) + more


_SHARD_PATTERN = "model-[0-9]*-of-[0-9]*.safetensors"


def _is_checkpoint(name: str) -> bool:
    return name in (CONFIG_NAME, WEIGHTS_NAME, INDEX_NAME) or fnmatch(name, _SHARD_PATTERN)


def _read_index(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor."""
    index = folder / INDEX_NAME
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ValueError(f"{index} must hold a weight_map, from tensors to files")
    for name, file in places.items():
        if not isinstance(file, str) or file in ("", "..") or Path(file).name != file:
            raise ValueError(
                f"{index} places {some([name])} in {_json.shown(file)}, must be a file beside it"
            )
    missing = sorted({file for file in places.values() if not (folder / file).is_file()})
    if missing:
        raise FileNotFoundError(f"{str(folder)!r} lacks {some(missing)}, which {INDEX_NAME} names")
    return {name: folder / file for name, file in places.items()}


def _read_header(file: Path) -> Iterator[tuple[str, Stored]]:
    """Name and place of each tensor of a file, in their order."""
    # The library checks the header, and that the file is as long as it says. It does not say where
    # tensors lie, and reads bfloat16 for numpy only in its newest versions.
    with file.open("rb") as opened:
        version = _version(os.fstat(opened.fileno()))
        _check_header_length(file, opened)
        try:
            with safe_open(file, framework="numpy"):
                pass
        except SafetensorError as error:
            raise ValueError(
                f"{file} is not a readable safetensors file, or was cut short: {error}"
            ) from error
        if _version(file.stat()) != version:
            raise _changed(file)
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


def _version(stat: os.stat_result) -> tuple[int, int, int]:
    """A value that changes if the file is replaced or written to."""
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _changed(file: Path) -> ValueError:
    return ValueError(f"{file} changed while it was read: load it again when it is complete")


def _split(tensors: Sequence[Tensor], max_bytes: int) -> list[list[Tensor]]:
    """Groups of neighbours, each of at most this many bytes or a single tensor."""
    shards: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def _write_tensors(path: Path, tensors: Sequence[Tensor]) -> None:
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


def _encode(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
