"""The files of a checkpoint's folder: `config.json`, tensors in safetensors files, companions.

Functions that take a folder's path also take a GGUF file's and read it like a folder; it has no
companions, and none is ever written.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from turbojax import _json, _writing
from turbojax.models.checkpoint import safetensors as _safetensors
from turbojax.models.checkpoint.gguf import tensors as _gguf
from turbojax.models.checkpoint.gguf.header import is_gguf as is_gguf
from turbojax.models.checkpoint.safetensors import Box as Box
from turbojax.models.checkpoint.safetensors import Stored as Stored
from turbojax.models.checkpoint.safetensors import Tensor as Tensor
from turbojax.models.checkpoint.safetensors import changed as _changed
from turbojax.models.checkpoint.safetensors import whole_box as whole_box

T = TypeVar("T")

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = f"{WEIGHTS_NAME}.index.json"
"""The index of weights that are split into several files: which tensor is in which file."""

MAX_SHARD_BYTES = 5_000_000_000

_SHARD_PATTERN = "model-[0-9]*-of-[0-9]*.safetensors"
# Names that `write` owns: those that it does not write are removed.
_CHECKPOINT = (CONFIG_NAME, WEIGHTS_NAME, INDEX_NAME, _SHARD_PATTERN)
_COMPANIONS = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "additional_chat_templates/*.jinja", "generation_config.json"),
)
# How often, and after which pauses, readers try again if the checkpoint is replaced.
_TRIES, _PAUSE_SECONDS = 20, 0.005
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def cast(tensor: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """The tensor in another dtype; raises ValueError if a finite number becomes infinite."""
    if tensor.dtype == dtype:
        return tensor
    with np.errstate(over="ignore"):
        result = tensor.astype(dtype)
    if np.count_nonzero(np.isinf(result)) != np.count_nonzero(np.isinf(tensor)):
        raise ValueError(f"dtype={dtype.name} cannot hold {name}, whose numbers are larger")
    return result


def require_folder(folder: Path) -> None:
    """Raises FileNotFoundError if nothing is there, NotADirectoryError if it is no folder."""
    wanted = (
        f"must be 'embedded' or a folder with {CONFIG_NAME} and {WEIGHTS_NAME}, a .gguf file, or "
        "'smollm2'"
    )
    if not folder.exists():
        kind = "file" if is_gguf(folder) else "folder"
        raise FileNotFoundError(f"{str(folder)!r} {wanted}: there is no such {kind}")
    if not folder.is_dir():
        raise NotADirectoryError(f"{str(folder)!r} {wanted}, not a file")


def read_config(folder: Path) -> dict[str, Any]:
    """A folder's `config.json`, or a GGUF file's metadata in its form; OSError if it is missing."""
    if is_gguf(folder):
        return _gguf.read_config(folder)
    require_folder(folder)
    if not (folder / CONFIG_NAME).is_file():
        raise FileNotFoundError(f"{str(folder)!r} is no checkpoint: it must hold {CONFIG_NAME}")
    return _json.read_object(folder / CONFIG_NAME)


def require_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Raises ValueError unless a folder's `config.json` still says this.

    To be called after `stored_tensors`: `write` removes the old `config.json` before it touches the
    weights, so an unchanged one means that the weights belong to it.
    """
    if is_gguf(folder):
        return
    try:
        found = read_config(folder)
    except FileNotFoundError as error:
        raise _changed(folder / CONFIG_NAME) from error
    if _json.differ(found, config):
        raise _changed(folder / CONFIG_NAME)


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a checkpoint; OSError if one is missing.

    `model.safetensors` goes before an index of several files, as it does for transformers.
    """
    if is_gguf(folder):
        return (folder,)
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
    """All tensors of a checkpoint, in the order of their files; none is read yet."""
    if is_gguf(folder):
        return _gguf.stored(folder)
    tensors: dict[str, Stored] = {}
    for file in weight_files(folder):
        for name, stored in _safetensors.read_header(file):
            if name in tensors:
                raise ValueError(f"{tensors[name].file} and {file} both hold {some([name])}")
            tensors[name] = stored
    if not (folder / WEIGHTS_NAME).is_file():
        missing: dict[Path, list[str]] = {}
        for name, file in _read_index(folder).items():
            if name not in tensors or tensors[name].file != file:
                missing.setdefault(file, []).append(name)
        for file, names in missing.items():
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
    """Raises ValueError unless the tensors' names, after `prefix`, have at least `count` layers.

    To be called before anything is made for every layer that `config.json` claims.
    """
    inside = [name.removeprefix(prefix) for name in tensors if name.startswith(prefix)]
    layers = {name.partition(".")[0] for name in inside}
    if len(layers) < count:
        raise ValueError(
            f"{_source(tensors, folder)} lacks {prefix}{count - 1}: it holds {len(layers)} layers, "
            f"{CONFIG_NAME} says num_hidden_layers={count}"
        )


def require_count(tensors: Mapping[str, Stored], least: int, folder: Path) -> None:
    """Raises ValueError unless there are at least so many tensors of experts, whatever their names.

    To be called before anything is made for every expert that `config.json` claims.
    """
    if len(tensors) < least:
        raise ValueError(
            f"{_source(tensors, folder)} holds {len(tensors)} tensors, {CONFIG_NAME} asks for "
            f"{least} of experts alone"
        )


def _source(tensors: Mapping[str, Stored], folder: Path) -> Path:
    """The file to name in errors about missing tensors: the only one, or the index."""
    files = {x.file for x in tensors.values()}
    return files.pop() if len(files) == 1 else folder / INDEX_NAME


def write(
    path: str | os.PathLike[str],
    config: Mapping[str, Any],
    tensors: Sequence[Tensor],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    companions: Mapping[str, Path | bytes] | None = None,
) -> None:
    """Writes a checkpoint into a folder, which is created if it does not exist.

    `steady` readers see the old checkpoint or the new one, at every moment and after every kind of
    interruption, see `_writing.replacing_files`. Other files in the folder stay. `companions` are
    further files by name, to be copied from elsewhere, or their contents; those of an older
    checkpoint are removed, see `find_companions`, unless it is None.
    """
    shards = _split(tensors, max_shard_bytes)
    count = len(shards)
    names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    if count == 1:
        names = [WEIGHTS_NAME]
    texts = {CONFIG_NAME: encode(config)}
    if count > 1:
        places = {x.name: n for n, shard in zip(names, shards, strict=True) for x in shard}
        total = {"total_size": sum(x.nbytes for x in tensors)}
        texts[INDEX_NAME] = encode({"metadata": total, "weight_map": places})
    files = (*names, *texts, *(companions or ()))
    owned = (*_CHECKPOINT, *(() if companions is None else _COMPANIONS))
    with _writing.replacing_files(path, files=files, owned=owned, last=CONFIG_NAME) as draft:
        for name, shard in zip(names, shards, strict=True):
            _safetensors.write_tensors(draft / name, shard)
        for name, text in texts.items():
            (draft / name).write_bytes(text)
        for name, source in (companions or {}).items():
            (draft / name).parent.mkdir(exist_ok=True)
            if isinstance(source, bytes):
                (draft / name).write_bytes(source)
            else:
                shutil.copyfile(source, draft / name)


def find(folder: Path, name: str) -> Path:
    """Where to read a file of a checkpoint right now, within `steady`; it need not exist."""
    return _writing.find(folder, name, CONFIG_NAME)


def find_all(folder: Path, pattern: str) -> dict[str, Path]:
    """Files of a checkpoint by name, sorted by name; see `find`."""
    names = {
        path.relative_to(place).as_posix()
        for place in (folder, _writing.current(folder, CONFIG_NAME))
        for path in place.glob(pattern)
    }
    found = {name: find(folder, name) for name in sorted(names)}
    return {name: path for name, path in found.items() if os.path.lexists(path)}


def find_companions(folder: Path) -> dict[str, Path]:
    """The files that go with a checkpoint's weights, by name: its tokenizer, chat templates, ..."""
    if is_gguf(folder):
        return {}

    def read(_: Path) -> dict[str, Path]:
        found = [item for pattern in _COMPANIONS for item in find_all(folder, pattern).items()]
        return {name: path for name, path in found if path.is_file()}

    return steady(folder, read)


def steady(folder: Path, read: Callable[[Path], T]) -> T:
    """What `read` returns for the folder where the files lie, also if they are replaced meanwhile.

    Then it is called again; ValueError if that happens again and again.
    """
    if is_gguf(folder) and folder.exists():
        return read(folder)
    require_folder(folder)
    # What an interrupted `write` left comes to its end, so that every file is in its place.
    _writing.finish(folder, last=CONFIG_NAME)
    for attempt in range(_TRIES):
        place = _writing.current(folder, CONFIG_NAME)
        before = _state(place)
        try:
            result = read(place)
        except (OSError, ValueError, NotImplementedError):
            if _writing.current(folder, CONFIG_NAME) == place and _state(place) == before:
                raise
        else:
            if _writing.current(folder, CONFIG_NAME) == place and _state(place) == before:
                return result
        time.sleep(attempt * _PAUSE_SECONDS)
    raise _changed(folder)


def _state(folder: Path) -> _writing.Version | None:
    """A value that changes when `write` replaces the checkpoint: each has a new `config.json`."""
    return _writing.version_of(folder / CONFIG_NAME)


def some(names: Sequence[str]) -> str:
    """The first few of these names, for error messages."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(_json.shown_name, names[:3])) + more


def _read_index(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor."""
    index = folder / INDEX_NAME
    places = _json.read_object(index).get("weight_map")
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


def encode(content: Mapping[str, Any]) -> bytes:
    """A JSON file's content; TypeError if JSON cannot express it."""
    return (json.dumps(content, indent=2) + "\n").encode()
