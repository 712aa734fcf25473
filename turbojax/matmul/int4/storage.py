"""INT4 weights as named tensors, and as safetensors files.

A weight named `name` is stored as the tensors ``name.codes`` (uint8), ``name.scales``,
``name.output_scale`` (float32) and, if it has them, ``name.zeros`` (int8), with its sizes as JSON
in the file's metadata under `name`. Scales in e4m3 are stored as their bits, uint8, since
safetensors cannot hand them to numpy.

Since version 2 arrays are stored as they lie in memory, in tiles (`int4_layout`). Before, codes
were ``[N, K / 2]`` and scales ``[K / group_size, N]``, and the metadata named no version; such
weights are converted when they are read.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _json, _writing
from turbojax.matmul.int4.layout import BLOCK, OUT_MULTIPLE, code_tiles, scale_tiles
from turbojax.matmul.int4.weight import Int4Weight

VERSION = 2
"""Of the metadata and of how arrays are stored."""
_ARRAYS = ("codes", "scales", "output_scale")
_SIZES = {"out_size": int, "in_size": int, "group_size": int, "gated": bool, "scale_dtype": str}


def to_tensors(weight: Int4Weight, name: str) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """A weight as what a safetensors file holds.

    Args:
      weight: the weight.
      name: what its tensors are called.

    Returns:
      tensors: the arrays by name, on the host, each contiguous.
      metadata: the weight's sizes, one entry.
    """
    tensors = {}
    for part in (*_ARRAYS, *(["zeros"] if weight.zeros is not None else [])):
        array = np.ascontiguousarray(jax.device_get(getattr(weight, part)))
        is_e4m3 = array.dtype == jnp.float8_e4m3fn
        tensors[f"{name}.{part}"] = array.view(np.uint8) if is_e4m3 else array
    sizes = {size: getattr(weight, size) for size in _SIZES}
    return tensors, {name: json.dumps({**sizes, "version": VERSION})}


def from_tensors(
    tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str], name: str
) -> Int4Weight:
    """The weight that `to_tensors` was given, bit for bit; also of an older version's tensors.

    Args:
      tensors: its tensors, among others.
      metadata: its sizes, among others.
      name: what its tensors are called.

    Raises:
      TypeError: if a tensor has another dtype.
      ValueError: if something is missing, cannot be read, or does not fit.
    """
    missing = [f"{name}.{part}" for part in _ARRAYS if f"{name}.{part}" not in tensors]
    if missing or name not in metadata:
        raise ValueError(f"{_json.shown(name)} lacks {missing or 'its entry in the metadata'}")
    sizes = _read_sizes(name, metadata[name])
    arrays = {part: tensors[f"{name}.{part}"] for part in _ARRAYS}
    if f"{name}.zeros" in tensors:
        arrays["zeros"] = tensors[f"{name}.zeros"]
    scale_dtype = sizes.pop("scale_dtype")
    if sizes.pop("version") == 1:
        arrays |= {part: tiles_of_version_1(part, arrays[part], name) for part in _ARRAYS}
    if scale_dtype == "e4m3":
        if arrays["scales"].dtype != np.uint8:
            raise TypeError(
                f"{name}.scales.dtype={arrays['scales'].dtype} must be uint8, bits of e4m3"
            )
        arrays["scales"] = arrays["scales"].view(jnp.float8_e4m3fn)
    leaves: dict[str, Any] = {part: jnp.asarray(array) for part, array in arrays.items()}
    weight = Int4Weight(**leaves, **sizes)
    weight.validate()
    if weight.scale_dtype != scale_dtype:
        raise TypeError(f"{name}.scales.dtype={weight.scales.dtype} must be that of {scale_dtype=}")
    return weight


def tiles_of_version_1(part: str, array: np.ndarray, name: str) -> np.ndarray:
    """Codes or scales of version 1 as they lie in memory today; other parts do not change."""
    if part not in ("codes", "scales"):
        return array
    rows, multiple = (0, BLOCK // 2) if part == "codes" else (1, 1)
    if array.ndim != 2 or array.shape[rows] % OUT_MULTIPLE or array.shape[1 - rows] % multiple:
        wanted = ("[64 i, 64 j]", "[j, 64 i]")[rows]
        raise ValueError(f"{name}.{part}.shape={array.shape} of version 1 must be {wanted}")
    return code_tiles(array) if part == "codes" else scale_tiles(array.T)


def save_weights(weights: Mapping[str, Int4Weight], path: str | os.PathLike[str]) -> None:
    """Writes weights by name to one safetensors file; `load_weights` reads them bit for bit.

    A reader sees the old file or the complete new one.

    Raises:
      FileNotFoundError: if there is no such folder.
      OSError: if the file cannot be written.
    """
    from safetensors.numpy import save_file

    tensors: dict[str, np.ndarray] = {}
    metadata: dict[str, str] = {}
    for name, weight in weights.items():
        arrays, sizes = to_tensors(weight, name)
        tensors |= arrays
        metadata |= sizes
    with _writing.replacing(path) as draft:
        save_file(tensors, draft, metadata=metadata)


def load_weights(path: str | os.PathLike[str]) -> dict[str, Int4Weight]:
    """Reads what `save_weights` wrote.

    Args:
      path: the file.

    Returns:
      The weights by name, on JAX's default device.

    Raises:
      FileNotFoundError: if there is no such file.
      TypeError: naming the file, if a tensor has another dtype.
      ValueError: naming the file, if it cannot be read, or a weight is not whole.
    """
    from safetensors import SafetensorError, safe_open

    if os.path.lexists(path):
        _json.check_file(Path(path), most=sys.maxsize)
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from error
    # The customary "format" is about the file.
    names = [name for name in metadata if name != "format"]
    try:
        return {name: from_tensors(tensors, metadata, name) for name in names}
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{path}: {error}") from error


def _read_sizes(name: str, text: str) -> dict[str, Any]:
    try:
        sizes = _json.parse(text)
    except ValueError as error:
        raise ValueError(f"metadata of {_json.shown(name)} is no JSON: {error}") from error
    if isinstance(sizes, dict):
        sizes.setdefault("version", 1)
        if sizes["version"] not in (1, VERSION):
            raise ValueError(
                f"metadata of {_json.shown(name)}: version={_json.shown(sizes['version'])} must be "
                f"{VERSION} or less"
            )
    found = {key: type(value) for key, value in sizes.items()} if isinstance(sizes, dict) else sizes
    if found != {**_SIZES, "version": int}:
        wanted = {key: kind.__name__ for key, kind in _SIZES.items()}
        raise ValueError(
            f"metadata of {_json.shown(name)} is {_json.shown(text)}, must hold {wanted}"
        )
    return sizes
