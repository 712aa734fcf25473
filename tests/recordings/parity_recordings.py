"""What transformers computed of the checkpoints of `hf_helpers`, as recorded in `recordings/`.

`models.json` holds of each variant its `config.json` and the tensors of its files, the seed of its
weights, angles of its rotary embedding, greedy texts; what the versions were; `logits.npz` the
texts and logits; `text.json` tokens and rendered chats. `make_recordings.py` makes them, and the
tests named `test_parity_live_*` make them anew and compare.
"""

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

FOLDER = Path(__file__).parent
# Logits are linear in the last hidden state, so a few columns show an error in any of it.
COLUMNS = slice(None, None, 8)


class Logits(NamedTuple):
    """Of some places in texts: float32 `[..., vocab / 8]`, and the largest one's token `[...]`."""

    columns: np.ndarray
    top: np.ndarray


def shorten(logits: np.ndarray) -> Logits:
    """What is recorded of logits, `[..., vocab]`."""
    return Logits(logits[..., COLUMNS], logits.argmax(-1).astype(np.uint8))


@functools.cache
def read(name: str) -> dict[str, Any]:
    """One of the JSON files."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def facts(variant: str) -> dict[str, Any]:
    """What `models.json` says of a variant."""
    return read("models")["variants"][variant]


@functools.cache
def arrays() -> dict[str, np.ndarray]:
    with np.load(FOLDER / "logits.npz") as file:
        return dict(file)


def logits(variant: str, kind: str) -> Logits:
    """Recorded logits: of `forward`, `short` or `cache`."""
    return Logits(*(arrays()[f"{variant}/{kind}/{part}"] for part in Logits._fields))


def error(logits: np.ndarray, recorded: Logits) -> float:
    """The largest difference in the recorded columns; all columns are asked for the largest logit.

    That one may be another token's than in the recording, where the two differ by no more.
    """
    assert np.isfinite(logits).all()
    top = np.take_along_axis(logits, recorded.top[..., None].astype(int), -1)[..., 0]
    behind = (logits.max(-1) - top).max()
    return max(float(np.abs(logits[..., COLUMNS] - recorded.columns).max()), float(behind) / 2)
