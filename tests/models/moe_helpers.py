"""Tiny models with experts: their folders, and what a layer of experts computes, in float64."""

import json
import zlib
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.models.tiny import logits as logits
from tests.models.tiny import relative as relative
from turbojax import models
from turbojax.models import TransformerConfig
from turbojax.models.checkpoint.huggingface import expected_shapes
from turbojax.models.families import ExpertsConfig

VOCAB, LAYERS = 128, 3
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_layers": LAYERS,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "max_length": 256,
}
CONFIGS = {
    "mixtral": TransformerConfig(
        **SIZES, family="mixtral", experts=ExpertsConfig(4, 2, 96, softmax="after")
    ),
    "mixtral-window": TransformerConfig(
        **SIZES,
        family="mixtral",
        local_windows=(7,) * LAYERS,
        experts=ExpertsConfig(5, 1, 96, softmax="after"),
    ),
    "qwen3-moe": TransformerConfig(
        **SIZES, family="qwen3_moe", qk_norm=True, experts=ExpertsConfig(6, 3, 40, normalize=True)
    ),
    # Layers of both kinds.
    "qwen3-moe-mixed": TransformerConfig(
        **SIZES,
        family="qwen3_moe",
        qk_norm=True,
        tie_embeddings=True,
        local_windows=(9,) * LAYERS,
        experts=ExpertsConfig(6, 2, 40, dense_layers=(0, 2)),
    ),
}


def tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Large weights, as those of `hf_helpers`: attention is peaked, and so are routers."""
    noise = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    if "norm" in name:
        return (1 + 0.3 * noise).astype(np.float32)
    std = 0.2 if "embed_tokens" in name else 1.5 * shape[1] ** -0.5
    return (std * noise).astype(np.float32)


def write(config: TransformerConfig, folder: Path) -> Path:
    """The folder of a model of this shape."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_hf()), encoding="utf-8")
    tensors = {name: tensor(name, shape) for name, shape in expected_shapes(config).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def tokens(batch: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, VOCAB, (batch, length))


def oracle(x, router, gate, up, down, experts: ExpertsConfig) -> np.ndarray:
    """Token by token, in float64; weights ``[E, in, out]``, router ``[D, E]``."""
    x, router, gate, up, down = (np.asarray(a, np.float64) for a in (x, router, gate, up, down))
    out = np.zeros_like(x)
    for t, token in enumerate(x):
        scores = token @ router
        chosen = np.argsort(-scores, kind="stable")[: experts.per_token]
        exponentials = np.exp(scores - scores.max())
        among = exponentials if experts.softmax == "before" else exponentials[chosen]
        weights = exponentials[chosen] / among.sum()
        if experts.normalize:
            weights /= weights.sum()
        for e, weight in zip(chosen, weights, strict=True):
            z = token @ gate[e]
            out[t] += weight * ((z / (1 + np.exp(-z)) * (token @ up[e])) @ down[e])
    return out


def load(name: str, folder: Path) -> models.Decoder:
    return models.load_decoder(write(CONFIGS[name], folder))
