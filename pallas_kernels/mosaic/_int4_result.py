"""What becomes of the sums of an INT4 x FP8 product: scales, bias, activation, residual, output."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels.layouts import LOG2_E
from pallas_kernels.mosaic import _lane
from pallas_kernels.mosaic import _registers as r
from pallas_kernels.mosaic._lane import Float, Int, Pointer

ROWS = 64
_GELU = (math.sqrt(2 / math.pi), 0.044715)


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """What is static in it.

    Attributes:
      activation: None, ``"silu"``, ``"gelu"`` or ``"swiglu"``.
      has_bias: whether there is a bias.
      has_residual: whether something is added at the end.
      dtype: ``"bfloat16"`` or ``"float16"``.
      swizzle: bytes over which rows of the output in shared memory are interleaved; 0 for none.
    """

    activation: str | None
    has_bias: bool
    has_residual: bool
    dtype: str
    swizzle: int

    @property
    def outputs(self) -> int:
        """Of a warpgroup's 64 rows."""
        return ROWS // 2 if self.activation == "swiglu" else ROWS


def _sigmoid_times(x: Float) -> Float:
    """``x * sigmoid(x)``; of values so negative that ``exp`` overflows, -0."""
    e = _lane.exp2(x * -LOG2_E)
    return x * _lane.assembly("rcp.approx.ftz.f32 $0, $1;", e + 1.0)


def _activate(x: Float, kind: str | None) -> Float:
    if kind == "silu":
        return _sigmoid_times(x)
    if kind == "gelu":
        # x / 2 * (1 + tanh(y)) is x * sigmoid(2 y).
        y = x * (_lane.fma(x * x, _GELU[1], 1.0) * (2 * _GELU[0] * LOG2_E))
        return x * _lane.assembly("rcp.approx.ftz.f32 $0, $1;", _lane.exp2(-y) + 1.0)
    return x


def _pack(low: Float, high: Float, dtype: str) -> Int:
    """Two float32 as a word of two 16-bit floats."""
    name = {"bfloat16": "bf16x2", "float16": "f16x2"}[dtype]
    value = r.asm(r.i32(), f"cvt.rn.{name}.f32 $0, $2, $1;", "=r,f,f", low.value, high.value)
    return Int(value)


def _unpack(word: Int, dtype: str) -> tuple[Float, Float]:
    if dtype == "bfloat16":
        return (word << 16).as_float(), (word & 0xFFFF0000).as_float()
    return _lane.half_to_float(word), _lane.half_to_float(word >> 16)


def _address(out: Any, token: Int, byte: Int, e: Epilogue) -> Int:
    """Where in shared memory ``[tokens, outputs]`` a token's 16 bytes from `byte` on are."""
    base = Int(Pointer.to(out).address())
    size = 2 * e.outputs
    if e.swizzle == 0:
        return base + token * size + byte
    # Swizzled: chunks of 16 bytes are permuted by the number of their row of 128 bytes.
    line = token * size + byte
    mask = e.swizzle // 16 - 1
    return base + (line ^ (((line >> 7) & mask) << 4))


def _store(address: Int, words: Sequence[Int]) -> None:
    """Stores 8 x 8 blocks of 16-bit numbers, columns as rows."""
    names = ", ".join(f"${i + 1}" for i in range(len(words)))
    _lane._act(
        f"stmatrix.sync.aligned.m8n8.x{len(words)}.trans.shared.b16 [$0], {{{names}}};",
        address.value,
        *[w.value for w in words],
        constraints=",".join(["r"] * (len(words) + 1)),
    )


def _load(address: Int, count: int) -> list[Int]:
    """The reverse of `_store`."""
    names = ", ".join(f"${i}" for i in range(count))
    # A single result is not a structure.
    result = llvm.StructType.get_literal([r.i32()] * count) if count > 1 else r.i32()
    text = f"ldmatrix.sync.aligned.m8n8.x{count}.trans.shared.b16 {{{names}}}, [${count}];"
    out = llvm.inline_asm(
        result,
        [address.value],
        text,
        ",".join(["=r"] * count + ["r"]),
        has_side_effects=True,
        asm_dialect=0,
    )
    if count == 1:
        return [Int(out)]
    return [Int(_lane.llvm.extractvalue(r.i32(), out, [i])) for i in range(count)]


def _row_factors(ref: Any, row: Int) -> list[Float]:
    """Factors of the lane's two rows; for rows that do not exist, those of some other row."""
    last = ir.MemRefType(ref.type).shape[0] - 1
    rows = [(row + 8 * half).minimum(last) for half in range(2)]
    return [Pointer.to(ref).at(x << 2).float() for x in rows]


def finish(
    sums: Any,
    span: tuple[int, int],
    token_scales: Any,
    output_scales: Any,
    bias: Any | None,
    out: Any,
    first_row: Any,
    e: Epilogue,
) -> None:
    """Writes a warpgroup's outputs to shared memory.

    Args:
      sums: float32 ``[64, tokens]`` of weight rows and tokens.
      span: the first of these tokens, and how many to write, a multiple of 8.
      token_scales: shared memory, bfloat16 ``[tokens]``.
      output_scales: global memory, float32, of all rows.
      bias: the same, or None.
      out: shared memory ``[span[1], outputs]`` in the output's dtype; holds the residual, if there
        is one.
      first_row: int32 scalar, of these rows among all.
      e: what to do.
    """
    row, t = (Int(x) for x in r.thread())
    at = row + _lane.scalar(first_row)
    factors = _row_factors(output_scales, at)
    biases = [_lane.number(0.0)] * 2 if bias is None else _row_factors(bias, at)
    lane = Int(r.asm(r.i32(), "mov.u32 $0, %laneid;", "=r"))
    is_gated = e.activation == "swiglu"
    warp_byte = (Int(row.value) >> 4) * (16 if is_gated else 32)
    blocks = []
    for pair in _scaled(sums, span, token_scales, t):
        values = [
            [_lane.fma(v, factors[half], biases[half]) for v in pair[half]] for half in range(2)
        ]
        if is_gated:
            blocks.append([_sigmoid_times(g) * u for g, u in zip(*values, strict=True)])
        else:
            blocks += [[_activate(v, e.activation) for v in pair] for pair in values]
    # A block is eight outputs of eight tokens; lanes 8 i .. 8 i + 7 point to the tokens of block i.
    per_token = 1 if is_gated else 2
    at_once = min(4, len(blocks))
    number = lane >> 3
    if at_once < 4:
        number = number & (at_once - 1)
    for begin in range(0, len(blocks), at_once):
        some = blocks[begin : begin + at_once]
        block = number + begin
        token = ((block >> (per_token - 1)) << 3) + (lane & 7)
        byte = warp_byte + ((block & (per_token - 1)) << 4)
        address = _address(out, token, byte, e)
        if e.has_residual:
            held = [_unpack(w, e.dtype) for w in _load(address, len(some))]
            some = [
                [v + h for v, h in zip(pair, old, strict=True)]
                for pair, old in zip(some, held, strict=True)
            ]
        _store(address, [_pack(pair[0], pair[1], e.dtype) for pair in some])


def partial_sums(sums: Any, span: tuple[int, int], out: Any) -> None:
    """Writes float32 sums of some tokens to shared memory ``[span[1], 64]``."""
    row, t = (Int(x) for x in r.thread())
    for half, values in enumerate(r.by_row(sums)):
        for j in range(span[0] // 4, sum(span) // 4):
            token = (t << 1) + (4 * j - span[0] if j % 2 == 0 else 4 * (j - 1) + 1 - span[0])
            place = (token * ROWS + row + 8 * half) << 2
            Pointer.to(out).at(place).store(Float(values[j]))


def _scaled(
    sums: Any, span: tuple[int, int], token_scales: Any, t: Int
) -> Iterator[list[list[Float]]]:
    """Sums times the tokens' scales, eight tokens at a time: of both rows the lane's two tokens."""
    rows = r.by_row(sums)
    for j in range(span[0] // 8, sum(span) // 8):
        word = Pointer.to(token_scales).at((t << 2) + (16 * j)).word()
        scales = _unpack(word, "bfloat16")
        yield [[Float(row[2 * j + i]) * scales[i] for i in range(2)] for row in rows]


def _places(sums: Any, memory: Any) -> Iterator[tuple[int, int, Pointer]]:
    """Of an accumulator's numbers: row, place in the row, and address, contiguous over lanes."""
    thread = Int(r.asm(r.i32(), "mov.u32 $0, %tid.x;", "=r")) & 127
    base = Pointer.to(memory).at(thread << 2)
    columns = len(r.by_row(sums)[0])
    for half in range(2):
        for j in range(columns):
            yield half, j, base.at((half * columns + j) * 512)


def put(sums: Any, memory: Any) -> None:
    """Writes a warpgroup's sums to shared memory, for `add`."""
    rows = r.by_row(sums)
    for half, j, place in _places(sums, memory):
        place.store(Float(rows[half][j]))


def add(sums: Any, memory: Any) -> Any:
    """Sums with those that another warpgroup put there."""
    rows = r.by_row(sums)
    for half, j, place in _places(sums, memory):
        rows[half][j] = (Float(rows[half][j]) + place.float()).value
    return r.of_rows(rows)
