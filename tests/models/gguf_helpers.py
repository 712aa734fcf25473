"""Tiny GGUF files, written by the package `gguf` as llama.cpp's converter writes large ones."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from turbojax.models import TransformerConfig
from turbojax.models.checkpoint.huggingface import expected_shapes

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")
SIZES = {
    "context_length": 64,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "block_count": 2,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 5000.0,
    "rope.dimension_count": 16,
}
MORE: Mapping[str, Mapping[str, Any]] = {
    "qwen3": {"attention.key_length": 16, "attention.value_length": 16},
    "gemma2": {
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.sliding_window": 8,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3": {
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.sliding_window": 8,
    },
    "phi3": {"attention.sliding_window": 8},
}
TIED = ("gemma2", "gemma3")
VOCAB = 300

# Written anew, and not taken from what is tested.
_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
}
_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def name_of(name: str, architecture: str) -> str:
    """llama.cpp's name of one of Hugging Face's tensors."""
    outside = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in outside:
        return outside[name]
    _, _, layer, rest = name.split(".", 3)
    stem, kind = rest.rsplit(".", 1)
    names = {**_NAMES, **(_GEMMA if architecture.startswith("gemma") else {})}
    return f"blk.{layer}.{names[stem]}.{kind}"


def converted(name: str, array: np.ndarray, architecture: str) -> np.ndarray:
    """What llama.cpp's converter makes of one of Hugging Face's tensors."""
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return array + 1
    heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2], 0)
    if architecture == "llama" and heads:
        # LlamaModel.permute of convert_hf_to_gguf.py.
        rows = array.shape[0]
        parts = array.reshape(heads, 2, rows // heads // 2, *array.shape[1:])
        return parts.swapaxes(1, 2).reshape(array.shape)
    return array


def hf_tensors(config: TransformerConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights under Hugging Face's names; norms and their sums with 1 are exact."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, shape in expected_shapes(config).items():
        array = rng.standard_normal(shape).astype(np.float32) * np.float32(0.1)
        found[name] = np.round(array * 1024) / np.float32(1024) if "norm" in name else array
    return found


def write(
    path: Path,
    architecture: str = "llama",
    tensors: Mapping[str, np.ndarray] | None = None,
    *,
    kinds: Mapping[str, Kind] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a file; tensors by llama.cpp's names, in their kinds or float32."""
    writer = gguf.GGUFWriter(path, architecture)
    sizes = {**SIZES, **MORE.get(architecture, {})}
    values = {f"{architecture}.{key}": value for key, value in sizes.items()}
    for key, value in {**values, **(metadata or {})}.items():
        _add(writer, key, value)
    for name, array in (tensors or {}).items():
        kind = (kinds or {}).get(name, Kind.F32)
        if kind == Kind.F32:
            writer.add_tensor(name, array.astype(np.float32))
        elif kind == Kind.F16:
            writer.add_tensor(name, array.astype(np.float16))
        else:
            codes = array if array.dtype == np.uint8 else gguf.quants.quantize(array, kind)
            writer.add_tensor(name, codes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def write_model(path: Path, architecture: str, config: TransformerConfig, **options: Any) -> Path:
    """Writes random weights of a model as the converter does."""
    tensors = {
        name_of(name, architecture): converted(name, array, architecture)
        for name, array in hf_tensors(config).items()
    }
    return write(path, architecture, {**tensors, **options.pop("more", {})}, **options)


def skeleton(path: Path, architecture: str, **options: Any) -> Path:
    """Writes a file whose only weights are the tables, for its metadata."""
    table = np.zeros((VOCAB, 64), np.float32)
    tensors = {"token_embd.weight": table}
    if architecture not in TIED:
        tensors["output.weight"] = table
    return write(path, architecture, {**tensors, **options.pop("more", {})}, **options)


def config_of(tmp_path: Path, architecture: str, **options: Any) -> TransformerConfig:
    """The config that a file of this metadata describes."""
    from turbojax import models

    path = skeleton(tmp_path / f"{architecture}-config.gguf", architecture, **options)
    return TransformerConfig.from_hf(models.read_config(path))


def byte_characters() -> list[str]:
    """GPT-2's character of each byte."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 600))
    return [chr(byte) if byte in kept else chr(next(others)) for byte in range(256)]


def byte_level_metadata(pre: str = "smollm", **more: Any) -> dict[str, Any]:
    """A byte-level tokenizer: bytes, some merges, and special tokens."""
    characters = byte_characters()
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2", "12 3", "Ġ Ġ"]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>", *characters]
    types = [3, 3, 3, 4, *[1] * 256]
    for merge in merges:
        tokens.append(merge.replace(" ", ""))
        types.append(1)
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    found = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": template,
    }
    return {**found, **{f"tokenizer.ggml.{key}": value for key, value in more.items()}}


def sentencepiece_metadata(**more: Any) -> dict[str, Any]:
    """A tokenizer of SentencePiece: bytes, pieces with scores, special tokens."""
    pieces = ["▁", "h", "e", "l", "o", "w", "r", "d", "he", "ll", "hell", "hello", "▁hello", "▁w"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
    scores = [0.0] * 259 + [-1000.0 if len(x) == 1 else -float(i) for i, x in enumerate(pieces)]
    found = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return {**found, **{f"tokenizer.ggml.{key}": value for key, value in more.items()}}
