"""What is static in a call of `pooled_attention`."""

import dataclasses

LEVELS = (1, 2, 4, 8)
"""Tokens that a pooled key stands for; 0 skips a block."""


@dataclasses.dataclass(frozen=True)
class Static:
    """The options of a call that are not arrays.

    Attributes:
      block_q: queries that share a row of levels.
      block_kv: keys that share a level, a multiple of 8.
      scale: factor of the scores.
      is_causal: a query sees a pooled key if it sees the last of its tokens.
    """

    block_q: int
    block_kv: int
    scale: float
    is_causal: bool
