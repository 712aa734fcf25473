"""What the backward pass needs of its rows, in one launch: codes of Q and dO, log-sum-exps, D.

Roofline, for 2 sequences of 8,192 tokens, 32 heads of 128, bfloat16, with codes of both: 0.545 GB,
127 us at the 4.3 TB/s of a copy on an H200, without codes of d_out 111; operations 35 us. Target:
90 %. Seen: 128 and 113 us. Memory bounds it.

A program takes one block of one head of one sequence. Half of the programs load the block of
`d_out` and of `out` once, round `d_out` with one scale, sum its rounded numbers times `out` for
every row, and store; the others do with the block of queries what `quantize` does.

Roofline in full and versions: `docs/kernels/gradient.md`.
"""

import dataclasses
import functools
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

_WARP = 32


def unsupported(query: jax.Array, out: jax.Array, block: int) -> str | None:
    """Why rows in such blocks cannot be prepared by this kernel, or None."""
    return quantize.unsupported(query, block) or quantize.unsupported(out, block)


@dataclasses.dataclass(frozen=True)
class _Rows(quantize.Work):
    """Blocks of `d_out`."""

    codes: Codes | None  # of `d_out`, or None
    out_shape: tuple[int, ...]  # of `out`, ``[B, T', N, H']``
    out_block: Block  # `out` as a program holds it, with its own channels and dtype
    rows: int  # of `lse` and `delta`

    @property
    def outputs(self) -> list[jax.ShapeDtypeStruct]:
        """Types of log-sum-exps, D, codes and their scales."""
        batch, _, heads, _ = self.shape
        row = jax.ShapeDtypeStruct((batch, heads, self.rows), jnp.float32)
        return [row, row, *(self.codes.outputs if self.codes else [])]

    @property
    def lane_tokens(self) -> int:
        """How many tokens a lane has channels of."""
        return TOKENS * self.block.groups

    def run(
        self, index: Int, lengths: Pointer, x: list[Pointer], y: list[Pointer], memory: Pointer
    ) -> None:
        d_out, out, residual, d_residual = x
        p = self.program(index, d_out, lengths, memory)
        heads = self.shape[2]
        batch, head = p.pair // heads, p.pair % heads
        first = p.number * self.block.tokens
        own = self._own_tokens(p.share)
        outs = self._load_out(p, out, batch, head, first)
        residuals = self._rows(residual, batch, head, first, own)
        cotangents = self._rows(d_residual, batch, head, first, own)
        loaded = self.load(p, first)
        sees = [~r.equals(-math.inf) for r in residuals]
        values = self._seen(p.share, sees, loaded)
        both = list(zip(sees, residuals, strict=True))
        self._store(p, y[0], first, own, [s.where(r * LOG2_E, math.inf) for s, r in both])
        sums, scale = self._sums(p, y[2:], first, values, outs)
        delta = [
            saw.where((total if scale is None else total * scale) - cotangent, 0.0)
            for saw, total, cotangent in zip(sees, sums, cotangents, strict=True)
        ]
        self._store(p, y[1], first, own, delta)

    def _load_out(
        self, p: Program, out: Pointer, batch: Int, head: Int, first: Int
    ) -> list[list[Float]]:
        _, size, heads, channels = self.out_shape
        of_head = channels * self.out_block.value_bytes
        out = out.times(batch * size, heads * of_head).at(head * of_head)
        share = Share(self.out_block, p.share.thread)
        loaded = share.load(out, heads * of_head, first, size, p.length)
        return [share.floats(words) for group in loaded for words in group]

    # Rows are numbers of a token. All lanes with some of its channels would hold the same, so
    # each of them takes the rows of some of their tokens.

    def _own_tokens(self, share: Share) -> list[Int]:
        """The tokens whose sums the lane takes, from its `column`-th own token on."""
        columns = self.block.columns
        tokens = []
        for begin in range(0, self.lane_tokens, columns):
            number = share.column % min(columns, self.lane_tokens) + begin
            step = self.block.threads // columns
            group = share.group(0) + (number // TOKENS) * step
            tokens.append(group * TOKENS + number % TOKENS)
        return tokens

    def _rows(self, x: Pointer, batch: Int, head: Int, first: Int, own: list[Int]) -> list[Float]:
        _, size, heads, _ = self.out_shape
        x = x.times(batch * size, 4 * heads).at(head << 2)
        tokens = [first + token for token in own]
        found = [x.times(t.minimum(size - 1), 4 * heads).float() for t in tokens]
        return [(t < size).where(f, -math.inf) for t, f in zip(tokens, found, strict=True)]

    def _seen(self, share: Share, sees: list[Bool], values: Words) -> Words:
        """Values, with zeros for tokens that see nothing."""
        columns = self.block.columns
        begin = share.thread & (_WARP - columns)
        bits = [lane.ballot(s) >> begin for s in sees]
        seen = [
            ~(bits[token // columns] & (1 << token % columns)).equals(0)
            for token in range(self.lane_tokens)
        ]
        return [
            [
                [seen[number * TOKENS + i].where(w, 0) for w in words]
                for i, words in enumerate(group)
            ]
            for number, group in enumerate(values)
        ]

    def _store(self, p: Program, y: Pointer, first: Int, own: list[Int], rows: list[Float]) -> None:
        y = y.times(p.pair, 4 * self.rows)
        for token, x in zip(own, rows, strict=True):
            is_there = (first + token < self.rows) & (token < self.block.tokens)
            if self.lane_tokens < self.block.columns:
                is_there = is_there & (p.share.column < self.lane_tokens)
            with lane.when(is_there):
                y.times(first + token, 4).store(x)

    def _sums(
        self, p: Program, y: list[Pointer], first: Int, values: Words, outs: list[list[Float]]
    ) -> tuple[list[Float], Float | None]:
        """Sums of rounded numbers times `out`, and their scale; stores the codes."""
        share = p.share
        scale: Float | None = None
        tokens = [share.floats(words) for group in values for words in group]
        if self.codes is None:
            sums = [_product(x, out) for x, out in zip(tokens, outs, strict=True)]
        else:
            share.tell(p.memory, share.largest(values))
            lane.block_barrier()
            scale = eight_bits.scale_of(share.told(p.memory).as_float(), self.codes.is_int8)
            codes, sums = self._rounded(tokens, scale, outs)
            with lane.when(p.number < self.codes.count):
                with lane.when(share.thread.equals(0)):
                    y[1].times(p.pair, 4 * self.codes.count).at(p.number << 2).store(scale)
                self.codes.store(p, y[0], first, codes)
        for bit in range(self.block.columns.bit_length() - 1):
            sums = _halved(share.thread, 1 << bit, sums)
        return sums, scale

    def _rounded(
        self, tokens: list[list[Float]], scale: Float, outs: list[list[Float]]
    ) -> tuple[Words, list[Float]]:
        """Codes of the lane's values, and for each token the products with `out`."""
        assert self.codes is not None
        is_int8 = self.codes.is_int8
        rounded = eight_bits.rounding_of(scale, is_int8, self.block.dtype)
        nothing = [lane.integer(0 if is_int8 else 0x7F7F7F7F)] * 2 + [lane.number(math.nan)]

        def of(x: list[Float], out: list[Float]) -> list[Any]:
            halves = [rounded(x[:4]), rounded(x[4:])]
            numbers = [y for _, half in halves for y in half]
            return [*(word for word, _ in halves), _product(numbers, out)]

        codes, sums = [], []
        for token in zip(tokens, outs, strict=True):
            known = functools.partial(of, *token)
            *words, total = eight_bits.if_known(scale, [Int, Int, Float], known, nothing)
            codes.append(words)
            sums.append(total)
        return [codes[i : i + TOKENS] for i in range(0, len(codes), TOKENS)], sums


def _product(a: list[Float], b: list[Float]) -> Float:
    total = lane.number(0.0)
    for x, y in zip(a, b, strict=True):
        total = lane.fma(x, y, total)
    return total


def _halved(thread: Int, distance: int, sums: list[Float]) -> list[Float]:
    """Adds a partner's sums; each of the two keeps every other sum, if there are at least two."""
    if len(sums) == 1:
        return [sums[0] + lane.partner(sums[0], distance)]
    is_second = ~(thread & distance).equals(0)
    return [
        is_second.where(b, a) + lane.partner(is_second.where(a, b), distance)
        for a, b in zip(sums[::2], sums[1::2], strict=True)
    ]


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

    Codes have the bits of `quantize`, those of `d_out` with zeros for rows whose residual is
    ``-inf``: a NaN there spreads to nothing. A value that is not finite makes the scale NaN, and
    `delta` of all rows of its block that see something.

    `query` and `d_out`, the cotangent of `out`, are ``[B, T, N, H]``, `H` a multiple of 8; `out` is
    ``[B, T', N, H']``, `T'` and `H'` at most `T` and `H`, and missing values count as 0; each
    bfloat16, float16 or float32. `residual`, natural log-sum-exps, ``-inf`` for rows that see
    nothing, and its cotangent are float32 ``[B, T', N]``. `lengths`, int32 ``[B]``, are at most
    `T'`: queries and `d_out` past them count as zero. `block` tokens share a scale, a power of two
    from 16 to 256. Dtypes are int8 (scale of a maximum over 119) or float8_e4m3fn (over 448), that
    of `d_out` None for no codes. `tokens`, at least `T'`, are the rows of `lse` and `delta`.
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
        alternate=True,
    )
    [lse, delta, *of_codes], [q8, q_scale] = results
    d8, d_scale = of_codes or (None, None)
    return GradientRows(q8, q_scale, d8, d_scale, lse, delta)
