"""The two files of a checkpoint's folder: `config.json` and `model.safetensors`."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
SHARDS_NAME = f"{WEIGHTS_NAME}.index.json"
"""What stands beside weights that are split into several files."""


def require_file(folder: Path, name: str) -> Path:
    """The file of this name in a folder.

    Raises:
      FileNotFoundError: if the folder or the file does not exist.
    """
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{str(folder)!r} must be 'embedded' or a folder with {CONFIG_NAME} and {WEIGHTS_NAME}"
        )
    if not (folder / name).is_file():
        if name == WEIGHTS_NAME and (folder / SHARDS_NAME).is_file():
            raise FileNotFoundError(
                f"{str(folder)!r} holds {SHARDS_NAME}: weights in several files are not supported, "
                f"they must be one file, {WEIGHTS_NAME}"
            )
        raise FileNotFoundError(f"{str(folder)!r} is no checkpoint: it must hold {name}")
    return folder / name


def read_json(path: Path) -> dict[str, Any]:
    """The object of a JSON file.

    Raises:
      ValueError: if the file cannot be parsed, or holds no object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """All tensors of a safetensors file.

    Raises:
      ValueError: if the file cannot be parsed.
    """
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from error


def require_tensors(
    tensors: Mapping[str, np.ndarray], expected: Mapping[str, tuple[int, ...]], source: Path
) -> None:
    """Raises ValueError unless the tensors have exactly these names and shapes."""
    missing = sorted(expected.keys() - tensors.keys())
    if missing:
        raise ValueError(f"{source} lacks {_some(missing)}")
    unexpected = sorted(tensors.keys() - expected.keys())
    if unexpected:
        raise ValueError(f"{source} holds unexpected tensors: {_some(unexpected)}")
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise ValueError(f"{source}: {name} has shape {tensors[name].shape}, must be {shape}")


def write(
    path: str | os.PathLike[str], config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]
) -> None:
    """Writes both files into a folder, which is created if it does not exist."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / WEIGHTS_NAME, metadata={"format": "pt"})
    # safetensors creates the file readable for its owner alone; a package must be readable to all.
    (folder / WEIGHTS_NAME).chmod(0o644)
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
