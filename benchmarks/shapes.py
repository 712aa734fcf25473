"""Named attention shapes of real models: one table for tests, benchmarks and tuning."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Heads:
    """The heads of one attention layer."""

    query: int
    kv: int
    dim: int


MODELS = {
    "llama3-8b": Heads(32, 8, 128),
    "llama3.2-1b": Heads(32, 8, 64),
    "qwen2.5-7b": Heads(28, 4, 128),
    # Figure 6 of the TurboAttention paper.
    "phi3-medium": Heads(40, 10, 128),
    "gemma2-9b": Heads(16, 8, 256),
    "phi3-mini": Heads(32, 32, 96),
    # Awkward ones: heads that are not a power of two, one KV head, odd groups, small head dims.
    "falcon-7b": Heads(71, 1, 64),
    "smollm-135m": Heads(9, 3, 64),
    "stablelm-3b": Heads(32, 32, 80),
    "tiny": Heads(4, 2, 64),
}

# Plain shapes of no model, for benchmarks.
PLAIN = {
    "mha-16": Heads(16, 16, 128),
    "mha-16-narrow": Heads(16, 16, 64),
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """One attention call."""

    model: str
    batch: int
    tokens: int
    is_causal: bool = False
    window: int | None = None

    @property
    def local_window(self) -> tuple[int, int] | None:
        """The window as attention functions take it."""
        return None if self.window is None else (self.window, 0)

    @property
    def heads(self) -> Heads:
        return (MODELS | PLAIN)[self.model]

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "batch": self.batch,
            "tokens": self.tokens,
            "heads": self.heads.query,
            "kv_heads": self.heads.kv,
            "head_dim": self.heads.dim,
            "is_causal": self.is_causal,
            **({} if self.window is None else {"window": self.window}),
        }

    @property
    def label(self) -> str:
        """A part of a row's name: ``llama3-8b/b16-s32768``."""
        causal = "-causal" if self.is_causal else ""
        window = "" if self.window is None else f"-w{self.window}"
        return f"{self.model}/b{self.batch}-s{self.tokens}{causal}{window}"
