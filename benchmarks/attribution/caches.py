"""What whole caches cost the model, as they are used: prefilled, then decoded step by step."""

from typing import Any

import numpy as np

from turbojax import evaluation, models
from turbojax.evaluation.recall import RecallMeasure

CACHES = (
    *("4bit", "kivi4", "4bit:buffer_size=64", "4bit:mode=fp8", "int8", "paged_int8"),
    *("paged_int8_v4", "k8v4", "fp8_e4m3", "turbo4", "k4v2", "2/4bit", "3bit", "kv4", "paged_k8v4"),
)
"""What ``--caches all`` measures, in this order."""

DECODED = 448
"""Tokens of a window that are decoded: of 24 windows the exact logits fit what is kept of them."""

RECALLED = (
    *("exact", "paged_int8", "paged_int8_v4", "kivi4", "4bit", "4bit:buffer_size=64", "k4v2"),
    *("2/4bit", "fp8_e4m3", "turbo4", "kv4"),
)
"""What ``--recall all`` asks."""

LENGTHS = (2048, 8192)
"""Tokens of what is asked for in `Recall`."""


class Recall:
    """Copies, values by key, sentences in long texts and in chats, asked of caches.

    Args:
      decoder: the model, in the dtype that it is used in.
      tokenizer: its own.
      windows: int32 ``[n, T + 1]`` by the text's name; joined they are the texts that items are in.
      count: items of each kind, length and depth.
    """

    def __init__(
        self,
        decoder: models.Decoder,
        tokenizer: models.Tokenizer,
        windows: dict[str, np.ndarray],
        count: int = 4,
    ) -> None:
        self.decoder = decoder
        self.measure = RecallMeasure(
            {name: x.reshape(-1).tolist() for name, x in windows.items()},
            tokenizer,
            lengths=LENGTHS,
            depths=(0.0, 0.25, 0.5, 0.75, 1.0),
            count=count,
            seed=0,
            max_length=decoder.config.max_length,
            batch_size=10,
        )

    def row(self, name: str) -> dict[str, Any]:
        """What `RecallMeasure` says of the cache of this name."""
        method = evaluation.method(name, self.decoder.config)
        return self.measure(self.decoder, method, lambda done, total: None)


class Caches:
    """A model's exact runs over windows by the text's name, shared by all caches.

    Args:
      decoder: the model, in the dtype that it is used in.
      windows: int32 ``[n, T + 1]`` by the text's name.
      decoded: tokens of each that are decoded.
      batch: windows that run at once.
    """

    def __init__(
        self,
        decoder: models.Decoder,
        windows: dict[str, np.ndarray],
        decoded: int = DECODED,
        batch: int = 24,
    ) -> None:
        self.decoder = decoder
        self.runs = {
            name: evaluation.ExactRun(
                decoder, tokens, prompt=tokens.shape[1] - 1 - decoded, batch_size=batch
            )
            for name, tokens in windows.items()
        }

    def row(self, name: str) -> dict[str, Any]:
        """What the cache of this name costs in bits per token, and its size.

        Raises:
          OSError, ValueError, NotImplementedError: see `evaluation.method` and `evaluation.score`.
        """
        method = evaluation.method(name, self.decoder.config)
        scores = {
            text: evaluation.score(self.decoder, run.tokens, method, prompt=run.prompt, exact=run)
            for text, run in self.runs.items()
        }
        costs = {text: (s.bits - s.exact_bits).mean(axis=1) for text, s in scores.items()}
        every, found = np.concatenate(list(costs.values())), list(scores.values())
        # A file may say something else later.
        of_file = {}
        if isinstance(method.cache, tuple):
            of_file = {"layers": [str(kind) for kind in method.cache]}
        return {
            **of_file,
            "cost": float(every.mean()),
            "interval": evaluation.bootstrap(every).ends,
            "cost_by_text": {text: float(x.mean()) for text, x in costs.items()},
            "exact_bits": float(np.mean([s.exact_bits.mean() for s in found])),
            "divergence": float(np.mean([s.divergence.mean() for s in found])),
            "same_choice": float(np.mean([(s.choices == s.exact_choices).mean() for s in found])),
            "compression": found[0].exact_cache_bytes / found[0].cache_bytes,
            "decoded": found[0].bits.shape[1],
        }
