"""Small 4-bit layers as GPTQModel, AutoAWQ and compressed-tensors store them, and their weights.

`make_packed_recordings.py` writes them. Arrays of floats are recorded as their bits.
"""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

FILE = Path(__file__).parent / "packed.npz"
_DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A layer: its `quantization_config`, its tensors, and the weight ``[N, K]`` they stand for."""

    config: dict[str, Any]
    parts: dict[str, np.ndarray]
    weight: np.ndarray


def write(cases: dict[str, Any], versions: dict[str, str]) -> None:
    facts = {name: {key: case[key] for key in ("config", "dtypes")} for name, case in cases.items()}
    arrays = {
        f"{name}/{key}": array
        for name, case in cases.items()
        for key, array in case["arrays"].items()
    }
    described = json.dumps({"cases": facts, "versions": versions}, sort_keys=True)
    np.savez_compressed(FILE, description=np.array(described), **arrays)


@functools.cache
def read() -> dict[str, Recorded]:
    with np.load(FILE) as file:
        cases = json.loads(str(file["description"]))["cases"]
        return {name: _layer(file, name, case) for name, case in cases.items()}


def _layer(file: Any, name: str, case: dict[str, Any]) -> Recorded:
    arrays = {}
    for key, dtype in case["dtypes"].items():
        array = file[f"{name}/{key}"]
        arrays[key] = array.view(_DTYPES[dtype]) if dtype in _DTYPES else array
    weight = arrays.pop("weight")
    return Recorded(case["config"], arrays, weight)
