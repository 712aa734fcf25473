"""A tiny byte-level model and texts, which tests of evaluations share with their programs."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from turbojax import models

CONFIG = models.TransformerConfig(
    vocab_size=256,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_length=512,
)
CONTEXT, PROMPT, BATCH = 40, 17, 2


def decoder(**sizes) -> models.Decoder:
    """Its weights follow from a seed."""
    return models.random_decoder(dataclasses.replace(CONFIG, **sizes), dtype=jnp.float32)


def texts(count: int = 3, lines: int = 60) -> dict[str, bytes]:
    """Files of lines that are unlike each other."""
    rng = np.random.default_rng(0)
    return {
        f"file{i}.py": b"".join(
            b"value_%d = call(%d)\n" % (j, rng.integers(1 << 30)) for j in range(lines)
        )
        for i in range(count)
    }


def tokens() -> np.ndarray:
    """Windows ``[3, CONTEXT + 1]``."""
    return np.random.default_rng(1).integers(0, 256, (3, CONTEXT + 1))
