"""What is static in a call of `pooled_attention`."""

import dataclasses

from turbojax import _checks
from turbojax.attention.options import Options

LEVELS = (1, 2, 4, 8)
"""Tokens that a pooled key stands for; 0 skips a block."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PooledOptions(Options):
    """The options of a call, and its blocks; `is_causal` is about the last token of a pooled key.

    `block_q` queries share a row of levels, `block_kv` keys, a multiple of 8, a level. Raises as
    `Options`, also for sizes, and NotImplementedError if there is a window or a cap.
    """

    block_q: int
    block_kv: int

    def __post_init__(self) -> None:
        _checks.check_sizes(block_q=self.block_q, block_kv=self.block_kv)
        if self.block_kv % LEVELS[-1]:
            raise ValueError(f"block_kv={self.block_kv} must be a multiple of {LEVELS[-1]}")
        super().__post_init__()
        if self.window is not None or self.logits_soft_cap is not None:
            raise NotImplementedError(
                f"pooled attention has no window and no cap of scores: {self}"
            )
        object.__setattr__(self, "block_q", int(self.block_q))
        object.__setattr__(self, "block_kv", int(self.block_kv))
