"""What a decode kernel reads: the cache, the settings and a program's queries."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.triton._common import Exponential, Ref
from pallas_kernels.triton._packed import Span
from pallas_kernels.triton._rows import quantize_rows


@dataclasses.dataclass(frozen=True)
class Settings:
    """A decode call's static settings.

    Attributes:
      mode: ``"int8"``, or ``"float"``: queries and weights are not rounded.
      exp: the softmax's exponential.
      unit: how many units of its argument are one nat.
      largest: its value at 0.
      key_bits: widths of the keys' code arrays.
      value_bits: widths of the values' code arrays.
      block: tokens of a cache block.
      first_tokens: the first tokens that are in the buffer's first slots, before those of blocks.
      splits: programs that share a KV head's blocks.
      out_dtype: of the output, ``"float32"``; None for the queries'.
    """

    mode: str
    exp: Exponential
    unit: float
    largest: float
    key_bits: tuple[int, ...]
    value_bits: tuple[int, ...]
    block: int
    first_tokens: int
    scale: float
    window: tuple[int, int] | None
    soft_cap: float | None
    splits: int
    num_warps: int
    num_stages: int
    interpret: bool
    out_dtype: str | None = None


class Query(NamedTuple):
    """A program's queries, and which tokens they see."""

    parts: tuple[jax.Array, ...]  # codes [R, span], one per channel span
    scale: jax.Array  # float32 [R]
    position: jax.Array  # int32 [R]
    is_real: jax.Array  # bool [R]


def load_query(
    q_ref: Ref,
    at: tuple[jax.Array, jax.Array],
    channels: tuple[Span, ...],
    *,
    rows: int,
    group: int,
    begin: jax.Array,
    query_length: jax.Array,
    s: Settings,
) -> Query:
    """Loads a KV head's query rows, row ``g * T + t``, and quantizes each."""
    b, h = at
    tokens = q_ref.shape[1]
    r = jnp.arange(rows, dtype=jnp.int32)
    is_row = r < group * tokens
    t, head = r % tokens, h * group + jnp.minimum(r // tokens, group - 1)
    parts = []
    for span in channels:
        ref = q_ref.at[b, t[:, None], head[:, None], span.positions()[None, :]]
        x = plgpu.load(ref, mask=is_row[:, None] & span.inside()[None, :], other=0)
        # The factor of the scores stays positive, so that it does not move the maximum.
        parts.append(x if s.scale >= 0 else -x)
    codes, scale = quantize_rows(tuple(parts), s.mode)
    return Query(codes, scale * abs(s.scale), begin + t, is_row & (t < query_length))
