"""Instructions of a lane, and of its warp together, as they are in assembly."""

import struct
from collections.abc import Callable, Sequence
from typing import Any, cast

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir.dialects import gpu as _gpu
from jaxlib.mlir.dialects import nvvm as _nvvm

from pallas_kernels.mosaic.lane.numbers import (
    Bool,
    Float,
    Int,
    arith,
    f32,
    i32,
    int_value,
    integer,
    ir,
    llvm,
    number_of,
)

gpu, nvvm = cast(tuple[Any, ...], (_gpu, _nvvm))

# Added to float32 below 2**22 it leaves their integer, rounded half to even, in the low bits.
ROUNDER = 12582912.0


def float_bits(x: float) -> str:
    return f"0f{struct.unpack('<I', struct.pack('<f', x))[0]:08X}"


def asm(result: Any, args: Sequence[Any], text: str, constraints: str, effects: bool) -> Any:
    return llvm.inline_asm(result, list(args), text, constraints, has_side_effects=effects)


def assembly(text: str, *args: Int | Float) -> Any:
    """One pure instruction; its result has the type of the first argument."""
    letters = ["f" if isinstance(a, Float) else "r" for a in args]
    kind = type(args[0])
    values = [a.value for a in args]
    constraints = ",".join([f"={letters[0]}", *letters])
    return kind(asm(values[0].type, values, text, constraints, effects=False))


def fma(a: Float, b: Float | float, c: Float | float) -> Float:
    """``a * b + c``, rounded once."""
    return assembly("fma.rn.f32 $0, $1, $2, $3;", a, number_of(b), number_of(c))


def exp2(x: Float) -> Float:
    """``2 ** x`` in one instruction; tiny results are 0."""
    return assembly("ex2.approx.ftz.f32 $0, $1;", x)


def log2(x: Float) -> Float:
    """The logarithm of a normal number."""
    return assembly("lg2.approx.ftz.f32 $0, $1;", x)


def log2_of_any(x: Float) -> Float:
    """The logarithm of a number, subnormal or not; takes some more instructions."""
    return assembly("lg2.approx.f32 $0, $1;", x)


def absolute(x: Float) -> Float:
    return assembly("abs.f32 $0, $1;", x)


def with_sign_of(sign: Float, x: Float) -> Float:
    return assembly("copysign.f32 $0, $1, $2;", sign, x)


def tanh(x: Float) -> Float:
    """The hyperbolic tangent, within 2**-11 of its value."""
    return assembly("tanh.approx.f32 $0, $1;", x)


def divide(a: Float, b: Float) -> Float:
    """A quotient within two units in the last place, by the instruction that Triton emits."""
    return assembly("div.full.f32 $0, $1, $2;", a, b)


def rounded_quotient(a: Float, b: Float) -> Float:
    """A quotient rounded to nearest; takes tens of instructions."""
    return assembly("div.rn.f32 $0, $1, $2;", a, b)


def reciprocal(x: Float) -> Float:
    """``1 / x`` within a unit in the last place."""
    return assembly("rcp.approx.ftz.f32 $0, $1;", x)


def root(x: Float) -> Float:
    """The square root, rounded to nearest."""
    return assembly("sqrt.rn.f32 $0, $1;", x)


def reciprocal_root(x: Float) -> Float:
    """``1 / sqrt(x)`` within two units in the last place."""
    return assembly("rsqrt.approx.f32 $0, $1;", x)


def half_to_float(x: Int) -> Float:
    """The float16 in the low half of a word."""
    text = "{ .reg .b16 low, high; mov.b32 {low, high}, $1; cvt.f32.f16 $0, low; }"
    return Float(asm(f32(), [x.value], text, "=f,r", effects=False))


def maximum(a: Float, b: Float) -> Float:
    """The larger of two; of NaN and a number, the number."""
    return assembly("max.f32 $0, $1, $2;", a, b)


def minimum(a: Float, b: Float) -> Float:
    """The smaller of two; of NaN and a number, the number."""
    return assembly("min.f32 $0, $1, $2;", a, b)


def add_rounder(x: Float) -> Float:
    """``x + ROUNDER`` of numbers in [0, 2**22), rounded down."""
    return assembly(f"add.rm.f32 $0, $1, {float_bits(ROUNDER)};", x)


def floor(x: Float) -> Float:
    """Rounds numbers in [0, 2**22) down."""
    return add_rounder(x) - ROUNDER


def permute_bytes(a: Int, b: Int | int, selector: Int | int) -> Int:
    """Four bytes of the eight of `a` (0 to 3) and `b` (4 to 7), one nibble of `selector` each."""
    return assembly("prmt.b32 $0, $1, $2, $3;", a, Int(int_value(b)), Int(int_value(selector)))


def permute_bytes_here(a: Int, b: Int, selector: Int) -> Int:
    """`permute_bytes`, in its place among other instructions with side effects."""
    values = [a.value, b.value, selector.value]
    return Int(asm(i32(), values, "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", effects=True))


def flip_masked(a: Int, mask: int, bits: int) -> Int:
    """``(a & mask) ^ bits`` in one instruction; two operators with constants would be two."""
    return assembly("lop3.b32 $0, $1, $2, $3, 0x6a;", a, Int(int_value(mask)), Int(int_value(bits)))


def signed_byte(x: Int, index: int) -> Int:
    sign = 8 + index
    return permute_bytes(x, 0, index | (sign << 4) | (sign << 8) | (sign << 12))


def pack_bytes(x: Sequence[Int]) -> Int:
    text = (
        "{.reg .b32 a, b; prmt.b32 a, $1, $2, 0x0040; prmt.b32 b, $3, $4, 0x0040;"
        " prmt.b32 $0, a, b, 0x5410;}"
    )
    return Int(asm(i32(), [v.value for v in x], text, "=r,r,r,r,r", effects=False))


def pack_e4m3(x: Sequence[Float]) -> Int:
    """Four numbers as the bytes of a word, rounded to e4m3."""
    return _pack_float8(x, "e4m3")


def pack_e5m2(x: Sequence[Float]) -> Int:
    """Four numbers as the bytes of a word, rounded to e5m2."""
    return _pack_float8(x, "e5m2")


def _pack_float8(x: Sequence[Float], kind: str) -> Int:
    text = (
        f"{{.reg .b16 a, b; cvt.rn.satfinite.{kind}x2.f32 a, $2, $1;"
        f" cvt.rn.satfinite.{kind}x2.f32 b, $4, $3; mov.b32 $0, {{a, b}};}}"
    )
    return Int(asm(i32(), [v.value for v in x], text, "=r,f,f,f,f", effects=False))


def dot4(a: Int, b: Int, c: Int) -> Int:
    """The products of four signed bytes each, added to `c`."""
    return assembly("dp4a.s32.s32 $0, $1, $2, $3;", a, b, c)


def matmul(a: Sequence[Int], b: Sequence[Int], c: Sequence[Int], right: str = "s8") -> list[Int]:
    """A warp's product of int8: ``[16, 32] x [32, 8] + [16, 8]``; with `right` ``"u8"`` of uint8.

    Lane ``4 g + t`` holds four bytes a word of `a`, rows g and g + 8 from column ``4 t`` on, then
    both from ``16 + 4 t`` on; of `b` column g, from row ``4 t`` and from ``16 + 4 t`` on; of `c`
    row g at columns ``2 t`` and ``2 t + 1``, then row g + 8.
    """
    text = (
        f"mma.sync.aligned.m16n8k32.row.col.s32.s8.{right}.s32 "
        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    )
    result = llvm.StructType.get_literal([i32()] * 4)
    args = [x.value for x in (*a, *b, *c)]
    out = asm(result, args, text, ",".join(["=r"] * 4 + ["r"] * 10), effects=False)
    return [Int(llvm.extractvalue(i32(), out, [i])) for i in range(4)]


def _shuffle(x: Any, lane: Any, kind: str) -> Any:
    bits = x.as_int() if isinstance(x, Float) else x
    text = f"shfl.sync.{kind}.b32 $0, $1, $2, 31, 0xffffffff;"
    moved = Int(asm(i32(), [bits.value, int_value(lane)], text, "=r,r,r", effects=True))
    return moved.as_float() if isinstance(x, Float) else moved


def from_lane(x: Any, lane: Int) -> Any:
    return _shuffle(x, lane, "idx")


def partner(x: Any, distance: int) -> Any:
    """What the lane holds whose index differs in bit `distance`."""
    return _shuffle(x, distance, "bfly")


def reduce_lanes(x: Any, op: Callable[[Any, Any], Any], distances: Sequence[int]) -> Any:
    """Combines lanes whose indices differ in the bits `distances`."""
    for distance in distances:
        x = op(x, _shuffle(x, distance, "bfly"))
    return x


def among_four(x: Float, op: Callable[[Float, Float], Float]) -> Float:
    """Combines what the four lanes of a row hold, as instructions that the compiler may move."""
    for distance in (1, 2):
        text = f"shfl.sync.bfly.b32 $0, $1, {distance}, 0x1f, 0xffffffff;"
        x = op(x, assembly(text, x))
    return x


def maxima_of_halves(a: Int, b: Int) -> Int:
    """The larger of two signed numbers of 16 bits, in each half of a word."""
    return _of_halves("max", a, b)


def minima_of_halves(a: Int, b: Int) -> Int:
    """The smaller of two signed numbers of 16 bits, in each half of a word."""
    return _of_halves("min", a, b)


def _of_halves(kind: str, a: Int, b: Int) -> Int:
    """One instruction since Hopper; before, computed on both halves as 32-bit numbers."""
    if mgpu.utils.get_arch().major >= 9:
        return assembly(f"{kind}.s16x2 $0, $1, $2;", a, b)
    text = (
        "{ .reg .s32 a, b, c, d; shr.s32 a, $1, 16; shr.s32 b, $2, 16; bfe.s32 c, $1, 0, 16; "
        f"bfe.s32 d, $2, 0, 16; {kind}.s32 a, a, b; {kind}.s32 c, c, d; "
        "prmt.b32 $0, c, a, 0x5410; }"
    )
    return Int(asm(i32(), [a.value, b.value], text, "=r,r,r", effects=False))


def largest_of_warp(x: Int) -> Int:
    """The largest unsigned number of the warp's lanes."""
    text = "redux.sync.max.u32 $0, $1, 0xffffffff;"
    return Int(asm(i32(), [x.value], text, "=r,r", effects=True))


def ballot(condition: Bool) -> Int:
    """A bit for each lane: whether `condition` holds there."""
    bit = condition.where(integer(1), 0)
    text = "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }"
    return Int(asm(i32(), [bit.value], text, "=r,r", effects=True))


def elected() -> Bool:
    """Whether this lane is the one that its warp chose, all of whose lanes must ask.

    The compiler knows that there is one alone: a copy that it starts is a third of the instructions
    of one that a lane with some number starts.
    """
    return Bool(nvvm.elect_sync())


def thread() -> Int:
    return Int(arith.index_cast(i32(), gpu.thread_id(gpu.Dimension.x)))


def special(name: str) -> Int:
    """A register that the hardware sets, ``"tid.x"`` or ``"laneid"``; read anew at each use."""
    return Int(asm(i32(), [], f"mov.u32 $0, %{name};", "=r", effects=False))


def uniform(x: Int) -> Int:
    """Tells the compiler that a number is the same in all lanes of a warp."""
    return from_lane(x, integer(0))


def held(x: int) -> Int:
    """A constant that stays in a register, because it is hidden from the compiler."""
    own = special("laneid")
    return from_lane(own + x, own) - own


def act(text: str, *args: Any, constraints: str = "") -> None:
    """Assembly without a result; its side effects keep it in place."""
    asm(ir.Type.parse("!llvm.void"), args, text, constraints, effects=True)


def block_barrier() -> None:
    act("bar.sync 0;")


def named_barrier(number: Int, threads: int) -> None:
    """Waits for `threads` threads of the block at its barrier `number`, from 1 to 15."""
    act(f"bar.sync $0, {threads};", number.value, constraints="r")


def warpgroup_barrier() -> None:
    mgpu.utils.warpgroup_barrier()


def warp_barrier() -> None:
    act("bar.warp.sync 0xffffffff;")
