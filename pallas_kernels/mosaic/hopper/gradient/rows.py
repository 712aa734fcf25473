"""What the backward pass needs of its rows, in one launch: codes of Q and dO, log-sum-exps, D.

A program takes one block of one head of one sequence. Half of the programs load the block of
`d_out` and of `out` once, round `d_out` with one scale, sum its rounded numbers times `out` for
every row, and store; the others do with the block of queries what `quantize` does.

Roofline, 2 sequences of 8192 tokens, 32 heads of 128, bfloat16, with codes of both:

  read        queries, d_out, out: 134 MB each; residuals 2 MB, their cotangents 2
  written     codes 67 MB each; log-sum-exps and D 2 MB each
  bytes       0.545 GB; without codes of d_out 0.478 GB
  operations  about 6 a value of the queries (see `quantize`), 11 of d_out: 1.2 G, 40 us of all
              float32 lanes, under the bytes
  floor       H200, whose copies reach 4.3 TB/s: 127 us, without codes of d_out 111 us
  target      90 %: 140 us and 123 us

Versions, us of that case, H200, jax 0.11.2:     e4m3, blocks of 64   128   int8, no codes of d_out
  for Triton, in the same run                                   152   162                       143
  v1  `d_out` first, then queries                               159   168                       120
  v2  in turns                                                  155   163                       114
    for Triton, in the same run                                 151   160                       142
  With int8 codes of both 176, where Triton takes 165.
  Rows: `benchmarks/results/bytes_versions_2026-11-24.json`.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.layouts import LOG2_E, GradientRows
from pallas_kernels.mosaic import block as blocks
from pallas_kernels.mosaic import eight_bits, lane
from pallas_kernels.mosaic.block import TOKENS, Block, Share, Words
from pallas_kernels.mosaic.hopper import quantize
from pallas_kernels.mosaic.hopper.quantize import Codes, Program
from pallas_kernels.mosaic.lane import Bool, Float, Int, Pointer


def unsupported(query: jax.Array, out: jax.Array, block: int) -> str | None:
    """Why rows in such blocks cannot be prepared by this kernel, or None."""
    return quantize.unsupported(query, block) or quantize.unsupported(out, block)


@dataclasses.dataclass(frozen=True)
class _Rows(quantize.Work):
    """Blocks of `d_out`.

    Attributes:
      codes: of `d_out`; None without them.
      out_shape: of `out`, ``[B, T', N, H']``.
      out_block: as a program holds one of `out`, of its own channels and dtype.
      rows: of `lse` and `delta`.
    """

    codes: Codes | None
    out_shape: tuple[int, ...]
    out_block: Block
    rows: int

    @property
    def outputs(self) -> list[jax.ShapeDtypeStruct]:
        """Log-sum-exps and D; codes and their scales."""
        batch, _, heads, _ = self.shape
        row = jax.ShapeDtypeStruct((batch, heads, self.rows), jnp.float32)
        return [row, row, *(self.codes.outputs if self.codes else [])]

    def run(
        self, index: Int, lengths: Pointer, x: list[Pointer], y: list[Pointer], memory: Pointer
    ) -> None:
        """Program `index`."""
        d_out, out, residual, d_residual = x
        p = self.program(index, d_out, lengths, memory)
        heads = self.shape[2]
        batch, head = p.pair // heads, p.pair % heads
        first = p.number * self.block.tokens
        residuals = self._rows(p, residual, batch, head, first)
        loaded = self.load(p, first)
        outs = self._load_out(p, out, batch, head, first)
        sees = [[~r.equals(-math.inf) for r in group] for group in residuals]
        values = [
            [[seen.where(w, 0) for w in words] for seen, words in zip(s, group, strict=True)]
            for s, group in zip(sees, loaded, strict=True)
        ]
        lse = [
            [seen.where(r * LOG2_E, math.inf) for seen, r in zip(s, group, strict=True)]
            for s, group in zip(sees, residuals, strict=True)
        ]
        self._store(p, y[0], first, lse)
        numbers, scale = self._numbers(p, y[2:], first, values)
        cotangents = self._rows(p, d_residual, batch, head, first)
        delta = [
            [self._delta(p.share, *of_token, scale) for of_token in zip(*of_group, strict=True)]
            for of_group in zip(numbers, outs, sees, cotangents, strict=True)
        ]
        self._store(p, y[1], first, delta)

    def _load_out(self, p: Program, out: Pointer, batch: Int, head: Int, first: Int) -> Words:
        """The lane's part of `out`, 0 where nothing is."""
        _, size, heads, channels = self.out_shape
        of_head = channels * self.out_block.value_bytes
        out = out.times(batch * size, heads * of_head).at(head * of_head)
        share = Share(self.out_block, p.share.thread)
        return share.load(out, heads * of_head, first, size, p.length)

    def _rows(self, p: Program, x: Pointer, batch: Int, head: Int, first: Int) -> list[list[Float]]:
        """Of float32 ``[B, T', N]`` a number for each of the lane's tokens, ``-inf`` past `T'`."""
        _, size, heads, _ = self.out_shape
        x = x.times(batch * size, 4 * heads).at(head << 2)
        out = []
        for number in range(self.block.groups):
            tokens = [first + (p.share.group(number) * TOKENS + i) for i in range(TOKENS)]
            found = [x.times(t.minimum(size - 1), 4 * heads).float() for t in tokens]
            out.append([(t < size).where(f, -math.inf) for t, f in zip(tokens, found, strict=True)])
        return out

    def _numbers(
        self, p: Program, y: list[Pointer], first: Int, values: Words
    ) -> tuple[list[list[list[Float]]], Float | None]:
        """What multiplies `out`, and what scales it; codes are stored."""
        share = p.share
        if self.codes is None:
            return [[share.floats(words) for words in group] for group in values], None
        share.tell(p.memory, share.largest(values))
        lane.block_barrier()
        scale = eight_bits.scale_of(share.told(p.memory).as_float(), self.codes.is_int8)
        codes = share.codes(values, scale, self.codes.is_int8)
        with lane.when(p.number < self.codes.count):
            with lane.when(share.thread.equals(0)):
                y[1].times(p.pair, 4 * self.codes.count).at(p.number << 2).store(scale)
            self.codes.store(p, y[0], first, codes)
        of = eight_bits.int8_numbers if self.codes.is_int8 else eight_bits.e4m3_numbers
        return [[[x for w in words for x in of(w)] for words in group] for group in codes], scale

    def _delta(
        self,
        share: Share,
        numbers: list[Float],
        out: list[Int],
        sees: Bool,
        cotangent: Float,
        scale: Float | None,
    ) -> Float:
        """Of one token, in all lanes that have some of its channels."""
        total = lane.number(0.0)
        of_out = Share(self.out_block, share.thread).floats(out)
        for x, y in zip(numbers, of_out, strict=True):
            total = lane.fma(x, y, total)
        distances = [1 << i for i in range(share.block.columns.bit_length() - 1)]
        total = lane.reduce_lanes(total, lambda a, b: a + b, distances)
        total = total if scale is None else total * scale
        return sees.where(total - cotangent, 0.0)

    def _store(self, p: Program, y: Pointer, first: Int, rows: list[list[Float]]) -> None:
        """Stores a number for each of the lane's tokens, by the lanes of the first channels."""
        y = y.times(p.pair, 4 * self.rows)
        for number, group in enumerate(rows):
            for i, x in enumerate(group):
                inside = p.share.group(number) * TOKENS + i
                token = first + inside
                is_there = (token < self.rows) & (inside < self.block.tokens)
                with lane.when(is_there & p.share.column.equals(0)):
                    y.times(token, 4).store(x)


def prepare_rows(
    query: jax.Array,
    d_out: jax.Array,
    out: jax.Array,
    residual: jax.Array,
    d_residual: jax.Array,
    lengths: jax.Array,
    *,
    block: int,
    query_dtype: jax.typing.DTypeLike,
    gradient_dtype: jax.typing.DTypeLike | None,
    tokens: int,
) -> GradientRows:
    """Codes of queries and of their outputs' gradients, log-sum-exps and sums of rows.

    Codes have the bits of `quantize`, of `d_out` with zeros for rows whose residual is ``-inf``:
    a NaN there spreads to nothing. A value that is not finite makes the scale NaN, and `delta` of
    all rows of its block that see something.

    Args:
      query: bfloat16, float16 or float32 ``[B, T, N, H]``, `H` a multiple of 8.
      d_out: ``[B, T, N, H]``, the cotangent of `out`, in any of these dtypes.
      out: ``[B, T', N, H']`` in any of them, `T'` and `H'` at most `T` and `H`: what it has not
        counts as 0.
      residual: float32 ``[B, T', N]``, natural log-sum-exps, ``-inf`` for rows that see nothing.
      d_residual: its cotangent.
      lengths: int32 ``[B]``, at most `T'`: queries and `d_out` past it count as zero.
      block: tokens that share a scale, a power of two from 16 to 256.
      query_dtype: int8 (scale of a maximum over 119) or float8_e4m3fn (over 448).
      gradient_dtype: the same of `d_out`; None for no codes of it.
      tokens: rows of `lse` and `delta`, at least `T'`.
    """
    values = blocks.VALUES_PER_LANE
    queries = quantize.codes_of(query, block, query_dtype, values=values)
    codes = None
    if gradient_dtype is not None:
        codes = quantize.codes_of(d_out, block, gradient_dtype, values=values)
    held = dataclasses.replace(queries.block, dtype=d_out.dtype.name)
    count = pl.cdiv(max(queries.count * block, tokens), block)
    of_out = dataclasses.replace(held, head_dim=out.shape[3], dtype=out.dtype.name)
    work = _Rows(d_out.shape, held, count, codes, out.shape, of_out, tokens)
    results: Any = quantize.launch(
        "turbojax_gradient_rows_hopper",
        lengths,
        [(work, [d_out, out, residual, d_residual]), (queries, [query])],
        in_turns=True,
    )
    [lse, delta, *of_codes], [q8, q_scale] = results
    d8, d_scale = of_codes or (None, None)
    return GradientRows(q8, q_scale, d8, d_scale, lse, delta)
