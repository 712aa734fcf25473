"""Records what transformers makes of tiny checkpoints.

    python -m tests.recordings.make_recordings

Needs what `make test-all` installs. `parity_recordings.py` says what is recorded. With names of
variants these are recorded, and all that is no variant's; other variants stay as they are, which is
for new ones and the same versions.
"""

import importlib.metadata
import json
import re
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from transformers import AutoTokenizer

from tests.models import chat_cases, tokenizer_helpers
from tests.models import family_helpers as families
from tests.models import hf_helpers as hf
from tests.models import torch_helpers as theirs
from tests.recordings import parity_recordings as recordings
from tests.recordings import parity_texts as texts

PACKAGES = ("transformers", "torch", "tokenizers", "jinja2")
# Written at every release, and nothing of the model's.
_NOT_RECORDED = ("transformers_version",)


def versions() -> dict[str, str]:
    """Without what a build adds, such as `+cpu`."""
    return {x: importlib.metadata.version(x).partition("+")[0] for x in PACKAGES}


def facts(name: str) -> dict[str, Any]:
    """Of a variant: files, seed, rotary embedding, greedy texts."""
    model = theirs.reference(name)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        with safe_open(Path(folder) / "model.safetensors", "np") as file:
            shapes = {key: file.get_slice(key).get_shape() for key in sorted(file.keys())}
    found = {
        "seed": hf.seed(name),
        "config": {key: x for key, x in config.items() if key not in _NOT_RECORDED},
        "tensors": shapes,
        **angles(model.model.rotary_emb),
    }
    if name in texts.CONTINUED:
        found["greedy"] = greedy(model).tolist()
    if name in texts.FAMILIES:
        exact = theirs.logits(model, texts.short())
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            low = theirs.load(Path(folder), torch.bfloat16)
        rounded = theirs.logits(low, texts.short(), dtype=torch.bfloat16)
        error = (rounded - exact)[..., recordings.COLUMNS]
        found["bfloat16_error"] = float(error.std())
    return found


def angles(rotary: Any) -> dict[str, Any]:
    """Frequencies and amplitude of a rotary embedding, and of layers with one of their own."""
    if not hasattr(rotary, "layer_types"):
        return {
            "frequencies": rotary.original_inv_freq.tolist(),
            "amplitude": rotary.attention_scaling,
        }
    assert rotary.sliding_attention_attention_scaling == 1
    return {
        "frequencies": rotary.full_attention_original_inv_freq.tolist(),
        "amplitude": rotary.full_attention_attention_scaling,
        "local_frequencies": rotary.sliding_attention_original_inv_freq.tolist(),
    }


def greedy(model: Any) -> np.ndarray:
    """New tokens, none of them so close a choice that rounding could make it another."""
    ids, mask = texts.greedy("left")
    new = theirs.greedy(model, ids, mask, texts.NEW)
    whole = np.concatenate([ids, new], 1), np.concatenate([mask, np.ones_like(new)], 1)
    best = np.sort(theirs.logits(model, *whole)[:, -texts.NEW - 1 : -1], -1)
    assert (best[..., -1] - best[..., -2]).min() > 5 * texts.TOLERANCE
    return new


def logits(name: str) -> dict[str, recordings.Logits]:
    """Of a variant."""
    model = theirs.reference(name)
    ids, mask = texts.forward()
    # What stands at padding means nothing.
    found = {"forward": theirs.logits(model, ids, mask)[mask.astype(bool)]}
    if name in texts.FAMILIES:
        found["short"] = theirs.logits(model, texts.short())
    if name in texts.CONTINUED:
        found["cache"] = texts.after_prompts(theirs.logits(model, texts.cached()))
    return {kind: recordings.shorten(x) for kind, x in found.items()}


def defaults(family: str) -> list[dict[str, Any]]:
    """What transformers fills into the two least files of a family."""
    filled = [theirs.config(file).to_dict() for file in families.least_files(family)]
    kept = [{k: v for k, v in x.items() if k not in _NOT_RECORDED} for x in filled]
    # Keys that are numbers become texts, as in a file.
    return json.loads(json.dumps(kept))


def tokens(kind: str) -> dict[str, Any]:
    """Of a tokenizer: its size and ends, and the tokens of every text with and without a begin."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_helpers.folder(kind, Path(folder)))
    return {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "special": [tokenizer.encode(text) for text in tokenizer_helpers.TEXTS],
        "plain": [
            tokenizer.encode(text, add_special_tokens=False) for text in tokenizer_helpers.TEXTS
        ],
    }


def chats() -> dict[str, Any]:
    """What each conversation is rendered as, and the tokens of some."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = AutoTokenizer.from_pretrained(chat_cases.folder(Path(folder)))
    texts = {
        name: tokenizer.apply_chat_template(
            case.messages,
            chat_template=chat_cases.TEMPLATES[case.template],
            tokenize=False,
            **case.options,
            **case.variables,
        )
        for name, case in chat_cases.CASES.items()
    }
    numbers = {
        name: tokenizer.apply_chat_template(
            [chat_cases.USER],
            chat_template=chat_cases.TEMPLATES[name],
            add_generation_prompt=True,
            return_dict=False,
        )
        for name in chat_cases.ENCODED
    }
    return {"texts": texts, "tokens": numbers}


def models(names: Collection[str]) -> dict[str, Any]:
    return {
        "versions": versions(),
        "variants": {
            name: facts(name) if name in names else recordings.facts(name) for name in hf.VARIANTS
        },
        "defaults": {family: defaults(family) for family in families.ARCHITECTURES},
    }


def text() -> dict[str, Any]:
    return {
        "versions": versions(),
        "tokens": {kind: tokens(kind) for kind in tokenizer_helpers.KINDS},
        "chats": chats(),
    }


def arrays(names: Collection[str]) -> dict[str, np.ndarray]:
    """Texts, and logits of all variants."""
    ids, mask = texts.forward()
    prompts, _ = texts.greedy("left")
    found = {
        "forward/tokens": ids.astype(np.uint8),
        "forward/mask": mask.astype(bool),
        "short/tokens": texts.short().astype(np.uint8),
        "cache/tokens": texts.cached().astype(np.uint8),
        "greedy/tokens": prompts.astype(np.uint8),
    }
    for name in hf.VARIANTS:
        if name not in names:
            before = recordings.arrays().items()
            found |= {key: x for key, x in before if key.startswith(f"{name}/")}
            continue
        for kind, part in logits(name).items():
            found |= {f"{name}/{kind}/{key}": x for key, x in part._asdict().items()}
    return found


def write(name: str, content: dict[str, Any]) -> None:
    """A line for each value and for each list of numbers, so that a change is easy to see."""
    text = json.dumps(content, indent=1, ensure_ascii=False, sort_keys=True)
    text = re.sub(r"\[[\d\s.,eE+-]+\]", lambda found: " ".join(found[0].split()), text)
    (recordings.FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    recordings.FOLDER.mkdir(exist_ok=True)
    chosen = sys.argv[1:] or tuple(hf.VARIANTS)
    assert set(chosen) <= set(hf.VARIANTS), chosen
    made = arrays(chosen)
    write("models", models(chosen))
    write("text", text())
    np.savez_compressed(recordings.FOLDER / "logits.npz", **made)
