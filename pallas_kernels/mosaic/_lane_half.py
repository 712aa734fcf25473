"""Half precision in a lane: conversions between formats, and a warp's product of float16."""

from collections.abc import Sequence
from typing import Any

from pallas_kernels.mosaic._lane import Float, Int, half_to_float, ir, llvm


def _asm(text: str, kind: Any, constraints: str, *args: Any) -> Any:
    values = [x.value for x in args]
    return llvm.inline_asm(kind, values, text, constraints, has_side_effects=False)


def _i32() -> Any:
    return ir.IntegerType.get_signless(32)


def pack(low: Float, high: Float) -> Int:
    """Two numbers, rounded to float16, as a word."""
    return Int(_asm("cvt.rn.f16x2.f32 $0, $2, $1;", _i32(), "=r,f,f", low, high))


def unpack(word: Int) -> tuple[Float, Float]:
    """The two float16 of a word."""
    return half_to_float(word), half_to_float(word >> 16)


def from_e4m3(word: Int) -> tuple[Int, Int]:
    """Four e4m3 as two words of two float16."""
    text = "{{ .reg .b16 low, high; mov.b32 {{low, high}}, $1; cvt.rn.f16x2.e4m3x2 $0, {0}; }}"
    low, high = (Int(_asm(text.format(half), _i32(), "=r,r", word)) for half in ("low", "high"))
    return low, high


def from_e5m2(word: Int) -> tuple[Int, Int]:
    """Four e5m2, the upper bytes of float16, as two words of two float16."""
    zero = "prmt.b32 $0, $1, 0, {0};"
    low, high = (Int(_asm(zero.format(s), _i32(), "=r,r", word)) for s in ("0x1404", "0x3424"))
    return low, high


def matmul(a: Sequence[Int], b: Sequence[Int], c: Sequence[Float]) -> list[Float]:
    """A warp's product of float16: ``[16, 16] x [16, 8] + [16, 8]``, summed in float32.

    Lane ``4 g + t`` holds two numbers a word of `a`, rows g and g + 8 from column ``2 t`` on, then
    both from ``8 + 2 t`` on; of `b` column g, from row ``2 t`` and from ``8 + 2 t`` on; of `c` row
    g at columns ``2 t`` and ``2 t + 1``, then row g + 8.
    """
    text = (
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    )
    f32 = ir.F32Type.get()
    result = llvm.StructType.get_literal([f32] * 4)
    constraints = ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4)
    out = _asm(text, result, constraints, *a, *b, *c)
    return [Float(llvm.extractvalue(f32, out, [i])) for i in range(4)]
