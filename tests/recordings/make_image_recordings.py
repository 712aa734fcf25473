"""Records what transformers makes of a tiny Gemma 3 that reads images.

    python -m tests.recordings.make_image_recordings

Needs what `make test-all` installs. `image_recordings.py` says what is recorded.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from tests.models import image_helpers as tiny
from tests.recordings import image_recordings as recordings


def model(folder: Path) -> Any:
    """What transformers reads of the files: float32, eager attention."""
    found, report = transformers.Gemma3ForConditionalGeneration.from_pretrained(
        tiny.write(folder), attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    return found.eval()


def record() -> dict[str, np.ndarray]:
    with tempfile.TemporaryDirectory() as folder:
        reference = model(Path(folder))
    size = {"height": 24, "width": 24}
    processor = Gemma3ImageProcessorPil(size=size)
    pixels = processor(tiny.images(), return_tensors="np")["pixel_values"]
    found = {"pixels": np.stack(pixels).transpose(0, 2, 3, 1)}
    with torch.no_grad():
        seen = reference.model.get_image_features(torch.tensor(np.stack(pixels)))
    found |= {"tower": seen.last_hidden_state.numpy(), "soft": seen.pooler_output.numpy()}
    for i, (prompt, chosen) in enumerate(zip(tiny.PROMPTS, tiny.OF_PROMPTS, strict=True)):
        inputs = arguments(prompt, np.stack(pixels)[chosen])
        with torch.no_grad():
            found[f"logits{i}"] = reference(**inputs).logits[0].numpy()
            new = reference.generate(
                **inputs, do_sample=False, max_new_tokens=tiny.NEW, eos_token_id=None
            )
            found[f"greedy{i}"] = new[0, len(prompt) :].numpy().astype(np.int32)
            check_choices(reference, inputs, new)
    return found | gradients(reference, np.stack(pixels))


def arguments(prompt: list[int], pixels: np.ndarray) -> dict[str, Any]:
    ids = torch.tensor([prompt])
    found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if len(pixels):
        types = (ids == tiny.IMAGE).long()
        found |= {"pixel_values": torch.tensor(pixels), "token_type_ids": types}
    return found


def check_choices(reference: Any, inputs: dict[str, Any], new: torch.Tensor) -> None:
    """None of the greedy tokens is so close a choice that rounding could make it another."""
    whole = {**inputs, "input_ids": new, "attention_mask": torch.ones_like(new)}
    if "token_type_ids" in inputs:
        whole["token_type_ids"] = (new == tiny.IMAGE).long()
    logits = reference(**whole).logits[0, -tiny.NEW - 1 : -1].numpy()
    best = np.sort(logits, -1)
    assert (best[:, -1] - best[:, -2]).min() > 1e-3


def gradients(reference: Any, pixels: np.ndarray) -> dict[str, np.ndarray]:
    """Of the mean loss of the first prompt's text tokens, by some tensors of every part."""
    inputs = arguments(tiny.PROMPTS[0], pixels[tiny.OF_PROMPTS[0]])
    logits = reference(**inputs).logits[0, :-1]
    targets = inputs["input_ids"][0, 1:]
    text = targets != tiny.IMAGE
    losses = torch.nn.functional.cross_entropy(logits[text], targets[text], reduction="mean")
    named = dict(reference.named_parameters())
    chosen = {name: named[name] for name in recordings.DIFFERENTIATED}
    found = torch.autograd.grad(losses, list(chosen.values()))
    pairs = zip(chosen, found, strict=True)
    return {"loss": np.float32(losses.item())} | {f"d {name}": x.numpy() for name, x in pairs}


if __name__ == "__main__":
    made = record()
    print(json.dumps({name: list(np.shape(x)) for name, x in made.items()}, indent=1))
    np.savez_compressed(recordings.FILE, **made)
