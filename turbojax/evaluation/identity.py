"""What the results of an evaluation depend on, in plain JSON values."""

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from turbojax._environment import environment
from turbojax._sums import checksums
from turbojax.evaluation.decoding import AnyDecoder


def of_model(decoder: AnyDecoder) -> dict[str, Any]:
    """Shape, dtype and a checksum of all weights, wherever they came from."""
    config = decoder.config
    leaves, _ = jax.tree_util.tree_flatten_with_path(decoder)
    arrays = {f"{i:05d}{jax.tree_util.keystr(path)}": x for i, (path, x) in enumerate(leaves)}
    digest = hashlib.sha256(np.asarray(checksums(arrays)).tobytes())
    # The numbers alone do not say how they are read.
    for name, x in arrays.items():
        digest.update(f"{name} {x.dtype} {x.shape}".encode())
    digest.update(repr(config).encode())
    return {
        "kind": type(decoder).__name__,
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_length": config.max_length,
        "dtype": str(decoder.dtype),
        "weight_bytes": decoder.nbytes,
        "checksum": digest.hexdigest()[:16],
    }


def of_texts(texts: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """How many windows there are of every text, and a checksum of their tokens."""
    return {
        name: {
            "windows": len(rows),
            "checksum": hashlib.sha256(rows.astype("<i4").tobytes()).hexdigest()[:16],
        }
        for name, rows in texts.items()
    }


def of_settings(settings: Any, but: tuple[str, ...]) -> dict[str, Any]:
    """The fields of a dataclass, without some."""
    found: dict[str, Any] = dataclasses.asdict(settings)
    return {key: value for key, value in found.items() if key not in but}


def of_machine() -> tuple[dict[str, str], dict[str, str]]:
    """What bits depend on, and what only dates the results."""
    found = environment()
    dates = {key: found.pop(key) for key in ("date", "python")}
    return found, dates
