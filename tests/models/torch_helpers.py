"""What transformers computes of the checkpoints of `hf_helpers`. Tests import this when they run:
torch and transformers are not installed for `make test`.
"""

import functools
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
import transformers

from tests.models import hf_helpers as hf

# The matrices are too small to share.
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@functools.cache
def reference(name: str) -> Any:
    """The model of a variant, as transformers makes and computes it: float32, eager attention."""
    variant = hf.VARIANTS[name]
    # Configs keep and change what they are given.
    keys = json.loads(json.dumps({**hf.SMALL, **variant.keys}))
    kind = getattr(transformers, f"{variant.family}ForCausalLM")
    model = kind(kind.config_class(**keys, attn_implementation="eager"))
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(parameter_of(name, path, parameter.shape)))
        for path, buffer in model.named_buffers():
            if path in model.state_dict():
                buffer.copy_(torch.from_numpy(hf.weight(name, path, buffer.shape)))
    return model.eval()


def parameter_of(name: str, path: str, shape: Sequence[int]) -> np.ndarray:
    """What a variant's parameter holds: a tensor of its files, or those of all experts."""
    old = hf.VARIANTS[name].family == "Mixtral"
    if old:
        path = path.replace(".mlp.", ".block_sparse_moe.")
    found = re.fullmatch(r"(.*\.experts)\.(gate_up|down)_proj", path)
    if found is None or hf.VARIANTS[name].family == "GptOss":
        return hf.weight(name, path, shape)
    parts = {
        "gate_up": ("w1", "w3") if old else ("gate_proj", "up_proj"),
        "down": ("w2",) if old else ("down_proj",),
    }[found[2]]
    count, outputs, inputs = shape
    one = outputs // len(parts), inputs

    def rows(expert: int, part: str) -> np.ndarray:
        return hf.weight(name, f"{found[1]}.{expert}.{part}.weight", one)

    return np.stack([np.concatenate([rows(e, x) for x in parts]) for e in range(count)])


def load(folder: Path, dtype: Any = torch.float32) -> Any:
    """What transformers makes of a folder."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", local_files_only=True
    )
    return model.eval()


def config(file: dict[str, Any]) -> transformers.PretrainedConfig:
    """What transformers reads of a `config.json`."""
    # It keeps and changes what it is given.
    return transformers.AutoConfig.for_model(**json.loads(json.dumps(file)))


def amplitude(file: dict[str, Any]) -> float:
    """What a Llama of such a file multiplies queries and keys with."""
    return transformers.LlamaForCausalLM(config(file)).model.rotary_emb.attention_scaling


def whole_state(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder, which must be just those that transformers asks for."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    return model.state_dict()


@torch.no_grad()
def logits(
    model: Any, ids: np.ndarray, mask: np.ndarray | None = None, *, dtype: Any = torch.float32
) -> np.ndarray:
    """What transformers computes, positions counted from each row's first token."""
    arguments: dict[str, Any] = {}
    mask = None if mask is None else np.asarray(mask)
    if mask is not None:
        arguments["attention_mask"] = torch.tensor(mask, dtype=torch.long)
        arguments["position_ids"] = torch.tensor(np.maximum(mask.cumsum(1) - 1, 0))
    out = model(torch.tensor(ids), use_cache=False, **arguments).logits
    assert out.dtype == dtype
    return out.float().numpy()


@torch.no_grad()
def steps(model: Any, prompts: np.ndarray, mask: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Logits after left-padded prompts and after each new token but the last, by its own cache."""
    found = []
    lengths = mask.sum(1)
    given = {"input_ids": torch.tensor(prompts), "past_key_values": None}
    position = torch.tensor(np.maximum(mask.cumsum(1) - 1, 0))
    for i in range(new.shape[1]):
        out = model(
            **given, attention_mask=torch.tensor(mask), position_ids=position, use_cache=True
        )
        found.append(out.logits[:, -1].numpy())
        given = {
            "input_ids": torch.tensor(new[:, i : i + 1]),
            "past_key_values": out.past_key_values,
        }
        mask = np.concatenate([mask, np.ones((len(mask), 1), mask.dtype)], 1)
        position = torch.tensor(lengths[:, None] + i)
    return np.stack(found, 1)


@torch.no_grad()
def greedy(model: Any, ids: np.ndarray, mask: np.ndarray, new: int) -> np.ndarray:
    """The tokens that `generate` appends to left-padded prompts."""
    out = model.generate(
        torch.tensor(ids),
        attention_mask=torch.tensor(mask),
        do_sample=False,
        max_new_tokens=new,
        eos_token_id=None,
    )
    return out[:, ids.shape[1] :].numpy()
