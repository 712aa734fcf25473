"""Half precision in a lane: conversions between formats, and a warp's product of 16-bit floats."""

import struct
from collections.abc import Sequence

from pallas_kernels.mosaic.lane.instructions import asm, assembly, half_to_float
from pallas_kernels.mosaic.lane.numbers import Float, Int, f32, i32, integer, llvm

_PAIRS = {"bfloat16": "bf16x2", "float16": "f16x2"}
_NAMES = {"bfloat16": "bf16", "float16": "f16"}


def pack(low: Float, high: Float, dtype: str = "float16") -> Int:
    """Two numbers, rounded to ``"float16"`` or ``"bfloat16"``, as a word."""
    text = f"cvt.rn.{_PAIRS[dtype]}.f32 $0, $2, $1;"
    return Int(asm(i32(), [low.value, high.value], text, "=r,f,f", effects=False))


def unpack(word: Int, dtype: str = "float16") -> tuple[Float, Float]:
    if dtype == "bfloat16":
        return (word << 16).as_float(), (word & 0xFFFF0000).as_float()
    return half_to_float(word), half_to_float(word >> 16)


def constant(x: float, dtype: str = "float16") -> Int:
    """A number that `dtype` has, in both halves of a word."""
    is_float16 = dtype == "float16"
    bits = struct.pack("<e", x) if is_float16 else struct.pack("<f", x)[2:]
    return integer(int.from_bytes(bits, "little") * 0x10001)


def twice(word: Int, which: int) -> Int:
    """A word with the low (0) or the high (1) of a word's two numbers in both halves."""
    half = ("low", "high")[which]
    text = f"{{ .reg .b16 low, high; mov.b32 {{low, high}}, $1; mov.b32 $0, {{{half}, {half}}}; }}"
    return Int(asm(i32(), [word.value], text, "=r,r", effects=False))


def fma(a: Int, b: Int, c: Int) -> Int:
    return Int(assembly("fma.rn.f16x2 $0, $1, $2, $3;", a, b, c).value)


def subtract(a: Int, b: Int, dtype: str = "float16") -> Int:
    return Int(assembly(f"sub.rn.{_PAIRS[dtype]} $0, $1, $2;", a, b).value)


def multiply(a: Int, b: Int, dtype: str = "float16") -> Int:
    return Int(assembly(f"mul.rn.{_PAIRS[dtype]} $0, $1, $2;", a, b).value)


def clip(a: Int, most: Int, dtype: str = "float16") -> Int:
    """The two numbers of `a`, clipped to the magnitudes in `most`."""
    return Int(assembly(f"min.xorsign.abs.{_PAIRS[dtype]} $0, $1, $2;", a, most).value)


def from_e4m3(word: Int) -> tuple[Int, Int]:
    """Four e4m3 as two words of two float16."""
    text = "{{ .reg .b16 low, high; mov.b32 {{low, high}}, $1; cvt.rn.f16x2.e4m3x2 $0, {0}; }}"
    return _halves(word, text, ("low", "high"))


def from_e5m2(word: Int) -> tuple[Int, Int]:
    """Four e5m2, the upper bytes of float16, as two words of two float16."""
    return _halves(word, "prmt.b32 $0, $1, 0, {0};", ("0x1404", "0x3424"))


def _halves(word: Int, text: str, which: tuple[str, str]) -> tuple[Int, Int]:
    low, high = (
        Int(asm(i32(), [word.value], text.format(half), "=r,r", effects=False)) for half in which
    )
    return low, high


def matmul(
    a: Sequence[Int], b: Sequence[Int], c: Sequence[Float], dtype: str = "float16"
) -> list[Float]:
    """A warp's product in this dtype: ``[16, 16] x [16, 8] + [16, 8]``, summed in float32.

    Lane ``4 g + t`` holds two numbers a word of `a`, rows g and g + 8 from column ``2 t`` on, then
    both from ``8 + 2 t`` on; of `b` column g, from row ``2 t`` and from ``8 + 2 t`` on; of `c` row
    g at columns ``2 t`` and ``2 t + 1``, then row g + 8.
    """
    name = _NAMES[dtype]
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32 "
        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    )
    result = llvm.StructType.get_literal([f32()] * 4)
    args = [*(x.value for x in a), *(x.value for x in b), *(x.value for x in c)]
    constraints = ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4)
    out = asm(result, args, text, constraints, effects=False)
    return [Float(llvm.extractvalue(f32(), out, [i])) for i in range(4)]
