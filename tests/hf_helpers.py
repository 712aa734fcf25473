"""Tiny random checkpoints of every family, written by transformers, and what it computes of them.

Their weights are large: attention is peaked, soft caps bite, norms and biases differ from what they
do to nothing. The windows are shorter than the texts, and so are the lengths that scaled rotary
embeddings were made for.
"""

import dataclasses
import functools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
import transformers

# The matrices are too small to share.
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

VOCAB = 128
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def rope(kind: str, **keys: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **keys}}


LONG = {
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 7.0, 12.0],
}


@dataclasses.dataclass(frozen=True)
class Variant:
    """A checkpoint's class of config, and what differs from `SMALL`."""

    family: str
    keys: dict[str, Any]


VARIANTS = {
    "llama2": Variant("Llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-5}),
    "llama-biased": Variant("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "llama-linear": Variant("Llama", rope("linear", factor=4.0)),
    "llama3.1": Variant(
        "Llama",
        rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        )
        | {"tie_word_embeddings": True, "num_key_value_heads": 1},
    ),
    "mistral": Variant("Mistral", {"sliding_window": 7, "head_dim": 24}),
    "mistral-no-window": Variant("Mistral", {"sliding_window": None}),
    "qwen2": Variant("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": Variant(
        "Qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
    ),
    "qwen2.5-yarn": Variant("Qwen2", rope("yarn", factor=4.0, original_max_position_embeddings=24)),
    "qwen3": Variant("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-window": Variant(
        "Qwen3",
        {
            "head_dim": 16,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "phi3": Variant("Phi3", {"sliding_window": 9}),
    "phi3-longrope": Variant(
        "Phi3",
        rope("longrope", partial_rotary_factor=0.75, **LONG)
        | {"original_max_position_embeddings": 32, "tie_word_embeddings": True},
    ),
    "gemma2": Variant(
        "Gemma2",
        {
            "num_hidden_layers": 4,
            "head_dim": 24,
            "query_pre_attn_scalar": 20,
            "sliding_window": 8,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 4.0,
        },
    ),
    "gemma2-odd": Variant(
        "Gemma2",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 5,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
}


@functools.cache
def reference(name: str) -> Any:
    """The model of a variant, as transformers makes and computes it: float32, eager attention."""
    variant = VARIANTS[name]
    # Configs keep and change what they are given.
    keys = json.loads(json.dumps({**SMALL, **variant.keys}))
    config = getattr(transformers, f"{variant.family}Config")(**keys, attn_implementation="eager")
    model = getattr(transformers, f"{variant.family}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(sum(name.encode()))

    def normal(parameter: torch.Tensor, std: float, mean: float = 0.0) -> None:
        parameter.copy_(mean + std * torch.randn(parameter.shape, generator=generator))

    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "norm" in path:
                normal(parameter, 0.3, 0.0 if variant.family == "Gemma2" else 1.0)
            elif path.endswith("bias"):
                normal(parameter, 0.5)
            elif "embed_tokens" in path:
                normal(parameter, 0.2)
            else:
                normal(parameter, 1.5 * parameter.shape[1] ** -0.5)
    return model.eval()


def write(name: str, folder: Path, **options: Any) -> Path:
    """Has transformers write the checkpoint of a variant."""
    reference(name).save_pretrained(folder, **options)
    return folder


def load(folder: Path, dtype: Any = torch.float32) -> Any:
    """What transformers makes of a folder."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", local_files_only=True
    )
    return model.eval()


def padding_mask(lengths: Sequence[int], size: int, side: str) -> np.ndarray:
    """int ``[B, size]``, 1 at real tokens."""
    place = np.arange(size)[None]
    if side == "left":
        place = place[:, ::-1]
    return (place < np.asarray(lengths)[:, None]).astype(np.int64)


def tokens(batch: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, batch, length]).integers(1, VOCAB, (batch, length))


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
