"""A tiny byte-level model, its text and the command, for tests of fine-tuning."""

import numpy as np
from flax import nnx
from typer.testing import CliRunner

from turbojax import finetune, models
from turbojax.app.main import app
from turbojax.finetune import documents

TINY = models.TransformerConfig(
    vocab_size=256,
    hidden_size=16,
    intermediate_size=24,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    max_length=64,
    tie_embeddings=True,
)
SETTINGS = finetune.Settings(
    steps=5, context=256, batch_size=2, learning_rate=1e-2, warmup_steps=2, precision="float32"
)


def tiny_model() -> models.Transformer:
    return models.Transformer(TINY, rngs=nnx.Rngs(1))


def text(seed: int, size: int) -> bytes:
    """Words that repeat, so that there is something to learn."""
    rng = np.random.default_rng(seed)
    words = [bytes(rng.integers(97, 123, 5).tolist()) for _ in range(20)]
    return b" ".join(words[i] for i in rng.integers(20, size=size // 6 + 1))[:size]


def corpus() -> finetune.Corpus:
    stream = documents.join(text(0, 300) for _ in range(10))
    return finetune.Corpus(stream, text(1, 600), "words")


def command(*arguments: str):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
