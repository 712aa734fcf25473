"""Tiny random checkpoints of every family, as transformers writes them, made without it.

Their weights are large: attention is peaked, soft caps have an effect, and so have norms and
biases. The windows are shorter than the texts, and so are the lengths that scaled rotary embeddings
were made for.

What `config.json` says and which tensors there are is recorded from transformers; the weights
follow from a tensor's name and a seed. `test_parity_live_checkpoint.py` holds both to what
transformers writes.
"""

import copy
import dataclasses
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.recordings import parity_recordings

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


LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "moe_intermediate_size": 40,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 0,
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
    "gemma3": Variant(
        "Gemma3",
        {
            "num_hidden_layers": 4,
            "head_dim": 24,
            "query_pre_attn_scalar": 20,
            "sliding_window": 8,
            "sliding_window_pattern": 3,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "rope_theta": 5000.0,
            "rope_local_base_freq": 100.0,
        },
    ),
    "gemma3-odd": Variant(
        "Gemma3",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 5,
            "final_logit_softcapping": 4.0,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 10000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 24,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "mixtral": Variant("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": Variant(
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "use_sliding_window": True,
            "sliding_window": 9,
        },
    ),
    "gpt-oss": Variant(
        "GptOss",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            # So that some gates are clamped.
            "swiglu_limit": 2.0,
        }
        | rope("yarn", factor=8.0, truncate=False, original_max_position_embeddings=24),
    ),
    "deepseek-v2-lite": Variant(
        "DeepseekV2",
        LATENT
        | rope(
            "yarn",
            factor=8.0,
            mscale=0.707,
            mscale_all_dim=0.707,
            original_max_position_embeddings=24,
        )
        | {"q_lora_rank": None, "n_routed_experts": 5, "n_shared_experts": 2},
    ),
    "deepseek-v2": Variant(
        "DeepseekV2",
        LATENT
        | {
            "topk_method": "group_limited_greedy",
            "n_routed_experts": 6,
            "n_shared_experts": 1,
            "n_group": 3,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "routed_scaling_factor": 3.0,
        },
    ),
    "deepseek-v3": Variant(
        "DeepseekV3",
        LATENT
        | rope(
            "yarn",
            factor=4.0,
            mscale=1.0,
            mscale_all_dim=1.0,
            original_max_position_embeddings=24,
        )
        | {
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "attention_bias": True,
        },
    ),
}
VARIANTS |= {
    "olmo2": Variant("Olmo2", {}),
    "olmo2-biased": Variant(
        "Olmo2", {"attention_bias": True, "num_key_value_heads": 4, "tie_word_embeddings": True}
    ),
    "smollm3": Variant("SmolLM3", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "smollm3-window": Variant(
        "SmolLM3",
        {
            "no_rope_layers": [0, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 7,
            "tie_word_embeddings": False,
        },
    ),
    "granite": Variant(
        "Granite",
        {
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.6,
            "logits_scaling": 1.5,
        },
    ),
    "cohere2": Variant(
        "Cohere2", {"num_hidden_layers": 4, "sliding_window": 8, "logit_scale": 0.8}
    ),
    "cohere2-odd": Variant(
        "Cohere2",
        {
            "sliding_window": 5,
            "logit_scale": 1.0,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "glm": Variant("Glm", {"head_dim": 24}),
    "glm4": Variant(
        "Glm4",
        {"head_dim": 40, "attention_bias": False}
        | rope("yarn", factor=4.0, original_max_position_embeddings=24, partial_rotary_factor=0.5),
    ),
}
WITH_EXPERTS = tuple(
    name
    for name, variant in VARIANTS.items()
    if variant.family in ("Mixtral", "Qwen3Moe", "GptOss", "DeepseekV2", "DeepseekV3")
)


def seed(name: str) -> int:
    """Of a variant's weights."""
    return sum(name.encode())


def weight(name: str, tensor: str, shape: Sequence[int]) -> np.ndarray:
    """A tensor of a variant, float32: nearly normal, from integers, so the same everywhere.

    It is the sum of four uniform 16-bit numbers, taken from the raw bits of a generator whose
    stream NumPy does not change.
    """
    generator = np.random.PCG64([seed(name), zlib.crc32(tensor.encode())])
    words = generator.random_raw(int(np.prod(shape))).astype("<u8").view("<u2")
    noise = words.reshape(*shape, 4).sum(-1, dtype=np.int64) - 2 * (2**16 - 1)
    normal = noise / np.sqrt(4 * (2**32 - 1) / 12)
    if "norm" in tensor:
        std, mean = 0.3, 0.0 if "Gemma" in VARIANTS[name].family else 1.0
    elif tensor.endswith("bias"):
        std, mean = 0.5, 0.0
    elif tensor.endswith("sinks"):
        std, mean = 1.0, 1.0
    elif "embed_tokens" in tensor:
        std, mean = 0.2, 0.0
    else:
        std, mean = 1.5 * shape[1] ** -0.5, 0.0
    return (mean + std * normal).astype(np.float32)


def config(name: str) -> dict[str, Any]:
    """What transformers writes into the `config.json` of a variant; the caller's own, to change."""
    return copy.deepcopy(parity_recordings.facts(name)["config"])


def tensors(name: str) -> dict[str, np.ndarray]:
    """What its files hold: a head that is the embedding is not among it."""
    shapes = parity_recordings.facts(name)["tensors"]
    return {tensor: weight(name, tensor, shape) for tensor, shape in shapes.items()}


def write(name: str, folder: Path, *, shard_bytes: int | None = None) -> Path:
    """Writes the checkpoint of a variant, in one file or in several of about so many bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(name)), encoding="utf-8")
    content, metadata = tensors(name), {"format": "pt"}
    if shard_bytes is None:
        save_file(content, folder / "model.safetensors", metadata)
        return folder
    shards: list[dict[str, np.ndarray]] = [{}]
    for tensor, array in content.items():
        held = sum(x.nbytes for x in shards[-1].values())
        if shards[-1] and held + array.nbytes > shard_bytes:
            shards.append({})
        shards[-1][tensor] = array
    places = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, metadata)
        places |= dict.fromkeys(shard, file)
    total = sum(x.nbytes for x in content.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def padding_mask(lengths: Sequence[int], size: int, side: str) -> np.ndarray:
    """int ``[B, size]``, 1 at real tokens."""
    place = np.arange(size)[None]
    if side == "left":
        place = place[:, ::-1]
    return (place < np.asarray(lengths)[:, None]).astype(np.int64)


def tokens(batch: int, length: int, seed: int = 0) -> np.ndarray:
    """Random tokens but the padding's, the same everywhere: from a generator's raw bits."""
    raw = np.random.PCG64([seed, batch, length]).random_raw(batch * length)
    return 1 + (raw % (VOCAB - 1)).astype(np.int64).reshape(batch, length)
