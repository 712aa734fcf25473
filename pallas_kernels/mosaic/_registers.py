# mypy: disable-error-code="call-arg, arg-type"
"""Arithmetic on the registers of a warpgroup's arrays, below what Pallas can express.

Arrays of ``[64, n]`` in the layout of a matrix unit's accumulator: thread ``4 g + t`` of a warp
holds rows ``g`` and ``g + 8`` of the warp's 16, and of each the columns ``8 j + 2 t`` and
``8 j + 2 t + 1``. Row arrays ``[64]`` hold the same two rows.
"""

from collections.abc import Sequence
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxlib.mlir.dialects import math as mlir_math

Value = Any
"""An `ir.Value`: one register of every thread."""


def f32() -> ir.Type:
    return ir.F32Type.get()


def i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def constant(x: float) -> Value:
    return arith.ConstantOp(f32(), ir.FloatAttr.get(f32(), x)).result


def integer(x: int) -> Value:
    return arith.ConstantOp(i32(), ir.IntegerAttr.get(i32(), x)).result


def asm(result: ir.Type, ptx: str, constraints: str, *args: Value) -> Value:
    """One or more instructions without side effects."""
    return llvm.inline_asm(
        result, list(args), ptx, constraints, has_side_effects=False, asm_dialect=0
    )


def exp2(x: Value) -> Value:
    """``2 ** x`` within two units in the last place; below ``2 ** -126`` it is 0."""
    return asm(f32(), "ex2.approx.ftz.f32 $0, $1;", "=f,f", x)


def log2(x: Value) -> Value:
    return asm(f32(), "lg2.approx.f32 $0, $1;", "=f,f", x)


def reciprocal(x: Value) -> Value:
    return asm(f32(), "rcp.approx.ftz.f32 $0, $1;", "=f,f", x)


def fma(a: Value, b: Value, c: Value) -> Value:
    return mlir_math.fma(a, b, c)


def add(a: Value, b: Value) -> Value:
    return arith.addf(a, b)


def mul(a: Value, b: Value) -> Value:
    return arith.mulf(a, b)


def neg(a: Value) -> Value:
    return arith.negf(a)


def maximum(a: Value, b: Value) -> Value:
    """The larger of two float32, or the one that is not NaN."""
    return arith.maxnumf(a, b)


def select(mask: Value, a: Value, b: Value) -> Value:
    return arith.select(mask, a, b)


def less(a: Value, b: Value) -> Value:
    """Of float32; False if one is NaN."""
    return arith.cmpf(arith.CmpFPredicate.OLT, a, b)


def equal(a: Value, b: Value) -> Value:
    """Of float32; False if one is NaN."""
    return arith.cmpf(arith.CmpFPredicate.OEQ, a, b)


def int_less(a: Value, b: Value) -> Value:
    return arith.cmpi(arith.CmpIPredicate.slt, a, b)


def int_at_least(a: Value, b: Value) -> Value:
    return arith.cmpi(arith.CmpIPredicate.sge, a, b)


def to_float(a: Value) -> Value:
    return arith.sitofp(f32(), a)


def bits(a: Value) -> Value:
    return arith.bitcast(i32(), a)


def thread() -> tuple[Value, Value]:
    """The first row of the thread's two within its warpgroup's 64, and its place `t` of four."""
    tid = asm(i32(), "mov.u32 $0, %tid.x;", "=r")
    row = arith.addi(
        arith.muli(arith.andi(arith.shrui(tid, integer(5)), integer(3)), integer(16)),
        arith.andi(arith.shrui(tid, integer(2)), integer(7)),
    )
    return row, arith.andi(tid, integer(3))


def among_four(x: Value, combine: Any) -> Value:
    """Combines what the four threads of a row hold."""
    for distance in (1, 2):
        other = asm(f32(), f"shfl.sync.bfly.b32 $0, $1, {distance}, 0x1f, 0xffffffff;", "=f,f", x)
        x = combine(x, other)
    return x


def tree(xs: Sequence[Value], combine: Any) -> Value:
    """Combines values pairwise."""
    xs = list(xs)
    while len(xs) > 1:
        pairs = [combine(a, b) for a, b in zip(xs[::2], xs[1::2], strict=False)]
        xs = pairs + xs[len(pairs) * 2 :]
    return xs[0]


def chain(xs: Sequence[Value], combine: Any) -> Value:
    """Combines values two at a time, alternately into two: fewer at once than in a `tree`.

    Two maxima of integers in a row are one instruction.
    """
    totals = list(xs[:2])
    for i in range(2, len(xs), 2):
        k = i // 2 % 2
        for x in xs[i : i + 2]:
            totals[k] = combine(totals[k], x)
    return combine(*totals)


def elements(register: Value) -> list[Value]:
    """What a register array's one register holds."""
    if not isinstance(register.type, ir.VectorType):
        return [register]
    [size] = ir.VectorType(register.type).shape
    place = ir.DenseI64ArrayAttr.get
    return [
        vector.extract(register, dynamic_position=[], static_position=place([i]))
        for i in range(size)
    ]


def by_row(a: Any) -> list[list[Value]]:
    """Of an accumulator ``[64, n]``: for each of the two rows its ``n / 4`` columns."""
    registers = a.registers.reshape(-1, 2)
    return [[x for r in registers[:, half] for x in elements(r)] for half in range(2)]


def of_rows(rows: Sequence[Sequence[Value]]) -> Any:
    """The reverse of `by_row`, float32."""
    kind = ir.VectorType.get((2,), f32())
    shape = mgpu.WGMMA_LAYOUT.registers_shape((64, 4 * len(rows[0])))
    registers = np.empty((len(rows[0]) // 2, 2), dtype=object)
    for half, columns in enumerate(rows):
        for j in range(len(columns) // 2):
            registers[j, half] = vector.from_elements(kind, columns[2 * j : 2 * j + 2])
    return mgpu.FragmentedArray(
        _registers=registers.reshape(shape), _layout=mgpu.WGMMA_LAYOUT, _is_signed=None
    )


def scalars(a: Any) -> list[Value]:
    """A row array's two registers, or the one of a scalar."""
    return [x for r in a.registers.flat for x in elements(r)]


def row_array(pair: Sequence[Value]) -> Any:
    kind = ir.VectorType.get((1,), f32())
    registers = np.empty((2,), dtype=object)
    for i, x in enumerate(pair):
        registers[i] = vector.from_elements(kind, [x])
    shape = mgpu.WGMMA_ROW_LAYOUT.registers_shape((64,))
    return mgpu.FragmentedArray(
        _registers=registers.reshape(shape), _layout=mgpu.WGMMA_ROW_LAYOUT, _is_signed=None
    )


def operand(words: Sequence[Sequence[Value]], element: ir.Type, is_signed: bool | None) -> Any:
    """The 8-bit register operand ``[64, k]`` from words of four codes, for each row ``k / 16``."""
    kind, word = ir.VectorType.get((4,), element), ir.VectorType.get((1,), i32())
    registers = np.empty((len(words[0]), 2), dtype=object)
    for half, row in enumerate(words):
        for i, x in enumerate(row):
            registers[i, half] = vector.bitcast(kind, vector.broadcast(word, x))
    shape = mgpu.WGMMA_LAYOUT_8BIT.registers_shape((64, 16 * len(words[0])))
    return mgpu.FragmentedArray(
        _registers=registers.reshape(shape), _layout=mgpu.WGMMA_LAYOUT_8BIT, _is_signed=is_signed
    )


def pack_e4m3(x: Sequence[Value]) -> Value:
    """Four float32 to the bytes of one word, rounded to e4m3."""
    return asm(
        i32(),
        "{.reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1;"
        " cvt.rn.satfinite.e4m3x2.f32 b, $4, $3; mov.b32 $0, {a, b};}",
        "=r,f,f,f,f",
        *x,
    )


def pack_bytes(x: Sequence[Value]) -> Value:
    """The low bytes of four words."""
    return asm(
        i32(),
        "{.reg .b32 a, b; prmt.b32 a, $1, $2, 0x0040; prmt.b32 b, $3, $4, 0x0040;"
        " prmt.b32 $0, a, b, 0x5410;}",
        "=r,r,r,r,r",
        *x,
    )
