"""What one lane of a warp computes: numbers, instructions and control flow inside `inline_mgpu`.

Pallas works on arrays of a whole warpgroup. Decode gives every warp its own blocks, so its body
is written for one lane, in values of 32 bits whose operators emit the instructions.
"""

import dataclasses
import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any, cast

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir as _ir
from jaxlib.mlir.dialects import arith as _arith
from jaxlib.mlir.dialects import gpu as _gpu
from jaxlib.mlir.dialects import llvm as _llvm
from jaxlib.mlir.dialects import scf as _scf

# These bindings are only partly typed, and in places wrongly.
ir, arith, gpu, llvm, scf = cast(tuple[Any, ...], (_ir, _arith, _gpu, _llvm, _scf))

# Added to float32 below 2**22 it leaves their integer, rounded half to even, in the low bits.
ROUNDER = 12582912.0


def _i32() -> Any:
    return ir.IntegerType.get_signless(32)


def _f32() -> Any:
    return ir.F32Type.get()


def _integer(x: "Int | int") -> Any:
    if isinstance(x, Int):
        return x.value
    return arith.constant(_i32(), ir.IntegerAttr.get(_i32(), (x + 2**31) % 2**32 - 2**31))


def _float(x: "Float | float") -> Any:
    return x.value if isinstance(x, Float) else arith.constant(_f32(), float(x))


def _compare(name: str) -> Callable[["Int", "Int | int"], "Bool"]:
    return lambda a, b: Bool(arith.cmpi(getattr(arith.CmpIPredicate, name), a.value, _integer(b)))


def _compare_float(name: str) -> Callable[["Float", "Float | float"], "Bool"]:
    return lambda a, b: Bool(arith.cmpf(getattr(arith.CmpFPredicate, name), a.value, _float(b)))


@dataclasses.dataclass(frozen=True, eq=False)
class Bool:
    """A predicate."""

    value: Any

    def __and__(self, other: "Bool") -> "Bool":
        return Bool(arith.andi(self.value, other.value))

    def __or__(self, other: "Bool") -> "Bool":
        return Bool(arith.ori(self.value, other.value))

    def where(self, a: Any, b: Any) -> Any:
        """`a` where this is true, `b` elsewhere: both integers or both floats."""
        if isinstance(a, Float) or isinstance(b, Float):
            return Float(arith.select(self.value, _float(a), _float(b)))
        return Int(arith.select(self.value, _integer(a), _integer(b)))


@dataclasses.dataclass(frozen=True, eq=False)
class Int:
    """A 32-bit integer, signed where that matters."""

    value: Any

    def __add__(self, other: "Int | int") -> "Int":
        return Int(arith.addi(self.value, _integer(other)))

    def __sub__(self, other: "Int | int") -> "Int":
        return Int(arith.subi(self.value, _integer(other)))

    def __mul__(self, other: "Int | int") -> "Int":
        return Int(arith.muli(self.value, _integer(other)))

    def __and__(self, other: "Int | int") -> "Int":
        return Int(arith.andi(self.value, _integer(other)))

    def __or__(self, other: "Int | int") -> "Int":
        return Int(arith.ori(self.value, _integer(other)))

    def __xor__(self, other: "Int | int") -> "Int":
        return Int(arith.xori(self.value, _integer(other)))

    def __lshift__(self, other: "Int | int") -> "Int":
        return Int(arith.shli(self.value, _integer(other)))

    def __rshift__(self, other: "Int | int") -> "Int":
        """A logical shift."""
        return Int(arith.shrui(self.value, _integer(other)))

    def __floordiv__(self, other: "Int | int") -> "Int":
        """Of non-negative numbers."""
        return Int(arith.divui(self.value, _integer(other)))

    def __mod__(self, other: "Int | int") -> "Int":
        """Of non-negative numbers."""
        return Int(arith.remui(self.value, _integer(other)))

    __lt__ = _compare("slt")
    __le__ = _compare("sle")
    __gt__ = _compare("sgt")
    __ge__ = _compare("sge")
    equals = _compare("eq")

    def maximum(self, other: "Int | int") -> "Int":
        """The larger of two."""
        return Int(arith.maxsi(self.value, _integer(other)))

    def minimum(self, other: "Int | int") -> "Int":
        """The smaller of two."""
        return Int(arith.minsi(self.value, _integer(other)))

    def to_float(self) -> "Float":
        """As a float32."""
        return Float(arith.sitofp(_f32(), self.value))

    def as_float(self) -> "Float":
        """The same bits."""
        return Float(arith.bitcast(_f32(), self.value))


@dataclasses.dataclass(frozen=True, eq=False)
class Float:
    """A float32."""

    value: Any

    def __add__(self, other: "Float | float") -> "Float":
        return Float(arith.addf(self.value, _float(other)))

    def __sub__(self, other: "Float | float") -> "Float":
        return Float(arith.subf(self.value, _float(other)))

    def __mul__(self, other: "Float | float") -> "Float":
        return Float(arith.mulf(self.value, _float(other)))

    def __truediv__(self, other: "Float | float") -> "Float":
        return Float(arith.divf(self.value, _float(other)))

    def __neg__(self) -> "Float":
        return Float(arith.negf(self.value))

    __lt__ = _compare_float("OLT")
    __gt__ = _compare_float("OGT")
    equals = _compare_float("OEQ")

    def as_int(self) -> Int:
        """The same bits."""
        return Int(arith.bitcast(_i32(), self.value))


def integer(x: int) -> Int:
    """A constant."""
    return Int(_integer(x))


def number(x: float) -> Float:
    """A constant."""
    return Float(_float(x))


def scalar(x: Any) -> Int:
    """An int32 scalar of Pallas."""
    [value] = x.registers.flat
    return Int(value)


def float_bits(x: float) -> str:
    """A float32 constant in assembly."""
    return f"0f{struct.unpack('<I', struct.pack('<f', x))[0]:08X}"


def _asm(result: Any, args: Sequence[Any], text: str, constraints: str, effects: bool) -> Any:
    return llvm.inline_asm(result, list(args), text, constraints, has_side_effects=effects)


def assembly(text: str, *args: Int | Float) -> Any:
    """One pure instruction; its result has the type of the first argument."""
    letters = ["f" if isinstance(a, Float) else "r" for a in args]
    kind = type(args[0])
    values = [a.value for a in args]
    constraints = ",".join([f"={letters[0]}", *letters])
    return kind(_asm(values[0].type, values, text, constraints, effects=False))


def fma(a: Float, b: Float | float, c: Float | float) -> Float:
    """``a * b + c``, rounded once."""
    return assembly("fma.rn.f32 $0, $1, $2, $3;", a, number_of(b), number_of(c))


def number_of(x: Float | float) -> Float:
    """A constant, or the number itself."""
    return x if isinstance(x, Float) else number(x)


def exp2(x: Float) -> Float:
    """``2 ** x`` in one instruction; tiny results are 0."""
    return assembly("ex2.approx.ftz.f32 $0, $1;", x)


def log2(x: Float) -> Float:
    """The logarithm of a normal number."""
    return assembly("lg2.approx.ftz.f32 $0, $1;", x)


def divide(a: Float, b: Float) -> Float:
    """A quotient within two units in the last place: the instruction that Triton emits."""
    return assembly("div.full.f32 $0, $1, $2;", a, b)


def reciprocal(x: Float) -> Float:
    """``1 / x`` within a unit in the last place."""
    return assembly("rcp.approx.ftz.f32 $0, $1;", x)


def half_to_float(x: Int) -> Float:
    """The float16 in the low half of a word."""
    text = "{ .reg .b16 low, high; mov.b32 {low, high}, $1; cvt.f32.f16 $0, low; }"
    return Float(_asm(_f32(), [x.value], text, "=f,r", effects=False))


def maximum(a: Float, b: Float) -> Float:
    """The larger of two; of NaN and a number, the number."""
    return assembly("max.f32 $0, $1, $2;", a, b)


def minimum(a: Float, b: Float) -> Float:
    """The smaller of two; of NaN and a number, the number."""
    return assembly("min.f32 $0, $1, $2;", a, b)


def floor(x: Float) -> Float:
    """Rounds numbers in [0, 2**22) down."""
    return assembly(f"add.rm.f32 $0, $1, {float_bits(ROUNDER)};", x) - ROUNDER


def permute_bytes(a: Int, b: Int | int, selector: Int | int) -> Int:
    """Four bytes of the eight of `a` (0 to 3) and `b` (4 to 7), one nibble of `selector` each."""
    return assembly("prmt.b32 $0, $1, $2, $3;", a, Int(_integer(b)), Int(_integer(selector)))


def signed_byte(x: Int, index: int) -> Int:
    """Byte `index`, as a number."""
    sign = 8 + index
    return permute_bytes(x, 0, index | (sign << 4) | (sign << 8) | (sign << 12))


def dot4(a: Int, b: Int, c: Int) -> Int:
    """The products of four signed bytes each, added to `c`."""
    return assembly("dp4a.s32.s32 $0, $1, $2, $3;", a, b, c)


def matmul(a: Sequence[Int], b: Sequence[Int], c: Sequence[Int]) -> list[Int]:
    """A warp's product of int8: ``[16, 32] x [32, 8] + [16, 8]``.

    Lane ``4 g + t`` holds four bytes a word of `a`, rows g and g + 8 from column ``4 t`` on, then
    both from ``16 + 4 t`` on; of `b` column g, from row ``4 t`` and from ``16 + 4 t`` on; of `c`
    row g at columns ``2 t`` and ``2 t + 1``, then row g + 8.
    """
    text = (
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    )
    result = llvm.StructType.get_literal([_i32()] * 4)
    args = [x.value for x in (*a, *b, *c)]
    out = _asm(result, args, text, ",".join(["=r"] * 4 + ["r"] * 10), effects=False)
    return [Int(llvm.extractvalue(_i32(), out, [i])) for i in range(4)]


def _shuffle(x: Any, lane: Any, kind: str) -> Any:
    bits = x.as_int() if isinstance(x, Float) else x
    text = f"shfl.sync.{kind}.b32 $0, $1, $2, 31, 0xffffffff;"
    moved = Int(_asm(_i32(), [bits.value, _integer(lane)], text, "=r,r,r", effects=True))
    return moved.as_float() if isinstance(x, Float) else moved


def from_lane(x: Any, lane: Int) -> Any:
    """What lane `lane` of the warp holds."""
    return _shuffle(x, lane, "idx")


def reduce_lanes(x: Any, op: Callable[[Any, Any], Any], distances: Sequence[int]) -> Any:
    """Combines lanes whose numbers differ in these bits."""
    for distance in distances:
        x = op(x, _shuffle(x, distance, "bfly"))
    return x


def ballot(condition: Bool) -> Int:
    """A bit for each lane: whether `condition` holds there."""
    bit = condition.where(integer(1), 0)
    text = "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }"
    return Int(_asm(_i32(), [bit.value], text, "=r,r", effects=True))


def thread() -> Int:
    """The thread's number in its block."""
    return Int(arith.index_cast(_i32(), gpu.thread_id(gpu.Dimension.x)))


def uniform(x: Int) -> Int:
    """Tells the compiler that a number is the same in all lanes of a warp."""
    return from_lane(x, integer(0))


def _act(text: str, *args: Any, constraints: str = "") -> None:
    _asm(ir.Type.parse("!llvm.void"), args, text, constraints, effects=True)


def block_barrier() -> None:
    """Waits for all threads of the block."""
    _act("bar.sync 0;")


def warp_barrier() -> None:
    """Waits for all lanes of the warp."""
    _act("bar.warp.sync 0xffffffff;")


@dataclasses.dataclass(frozen=True, eq=False)
class Pointer:
    """Memory, in bytes."""

    value: Any

    @classmethod
    def to(cls, ref: Any) -> "Pointer":
        """The beginning of a reference."""
        return cls(mgpu.utils.memref_ptr(ref))

    def at(self, *offsets: Int | int) -> "Pointer":
        """Some bytes on; offsets are added with 64 bits."""
        value = self.value
        byte = ir.IntegerType.get_signless(8)
        for offset in offsets:
            if isinstance(offset, int) and offset == 0:
                continue
            wide = arith.extsi(ir.IntegerType.get_signless(64), _integer(offset))
            value = llvm.getelementptr(
                value.type, value, [wide], [-(2**31)], byte, llvm.GEPNoWrapFlags.none
            )
        return Pointer(value)

    def times(self, index: Int, size: int) -> "Pointer":
        """``index * size`` bytes on, multiplied with 64 bits."""
        i64 = ir.IntegerType.get_signless(64)
        wide = arith.muli(
            arith.extsi(i64, index.value), arith.constant(i64, ir.IntegerAttr.get(i64, size))
        )
        byte = ir.IntegerType.get_signless(8)
        value = llvm.getelementptr(
            self.value.type, self.value, [wide], [-(2**31)], byte, llvm.GEPNoWrapFlags.none
        )
        return Pointer(value)

    def words(self, count: int) -> list[Int]:
        """Loads 32-bit words, aligned to the whole load, at most 16 bytes at a time."""
        out: list[Int] = []
        while count > len(out):
            width = min(4, count - len(out))
            kind = ir.VectorType.get((width,), _i32())
            loaded = llvm.load(kind, self.at(4 * len(out)).value, alignment=4 * width)
            out += [Int(llvm.extractelement(loaded, _integer(i))) for i in range(width)]
        return out

    def word(self) -> Int:
        """Loads 32 bits."""
        return self.words(1)[0]

    def float(self) -> Float:
        """Loads a float32."""
        return Float(llvm.load(_f32(), self.value, alignment=4))

    def store(self, x: Int | Float) -> None:
        """Stores 32 bits."""
        llvm.store(x.value, self.value, alignment=4)

    def store_as(self, x: Float, dtype: str) -> None:
        """Stores a float32, rounded to ``"float32"``, ``"bfloat16"`` or ``"float16"``."""
        kinds = {"bfloat16": ir.BF16Type, "float16": ir.F16Type}
        if dtype == "float32":
            self.store(x)
            return
        rounded = arith.truncf(kinds[dtype].get(), x.value)
        llvm.store(rounded, self.value, alignment=2)

    def address(self) -> Any:
        """As an integer: 32 bits in shared memory, 64 in global memory."""
        is_shared = "3" in str(self.value.type)
        kind = ir.IntegerType.get_signless(32 if is_shared else 64)
        return llvm.ptrtoint(kind, self.value)


def when(condition: Bool) -> Any:
    """A context whose body runs where `condition` holds."""
    return mgpu.utils.when(condition.value)


def loop(
    start: Int, stop: Int, step: int, state: list[Any], body: Callable[[Int, list[Any]], list[Any]]
) -> list[Any]:
    """``for i in range(start, stop, step): state = body(i, state)``."""
    kinds = [type(x) for x in state]
    op = scf.ForOp(start.value, stop.value, _integer(step), [x.value for x in state])
    with ir.InsertionPoint(op.body):
        inside = [kind(x) for kind, x in zip(kinds, op.inner_iter_args, strict=True)]
        out = body(Int(op.induction_variable), inside)
        scf.YieldOp([x.value for x in out])
    return [kind(x) for kind, x in zip(kinds, op.results, strict=True)]


def total(values: Sequence[Any]) -> Any:
    """The sum of several numbers."""
    return functools.reduce(lambda a, b: a + b, values)


@dataclasses.dataclass(frozen=True, eq=False)
class ClusterPointer:
    """Shared memory of some program of the cluster, in bytes."""

    value: Any

    @classmethod
    def of(cls, pointer: Pointer, rank: int) -> "ClusterPointer":
        """Where program `rank` has what `pointer` points to here."""
        text = f"mapa.shared::cluster.u32 $0, $1, {rank};"
        return cls(_asm(_i32(), [pointer.address()], text, "=r,r", effects=False))

    def at(self, *offsets: Int | int) -> "ClusterPointer":
        """Some bytes on."""
        return ClusterPointer(total([Int(self.value), *offsets]).value)

    def float(self) -> Float:
        """Loads a float32."""
        return Float(_asm(_f32(), [self.value], "ld.shared::cluster.f32 $0, [$1];", "=f,r", True))


def cluster_barrier() -> None:
    """Waits for all threads of the cluster, and for what they wrote to shared memory."""
    _act("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;")


def init_barrier(barrier: Pointer) -> None:
    """Prepares eight bytes of shared memory as a barrier on which one lane arrives."""
    _act("mbarrier.init.shared.b64 [$0], 1;", barrier.address(), constraints="r")


def publish_barriers() -> None:
    """Lets the copy engine see new barriers."""
    _act("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;")


def publish_stores() -> None:
    """Orders this lane's stores to shared memory before later copies to the same place."""
    _act("fence.proxy.async.shared::cta;")


def expect_bytes(barrier: Pointer, size: Int | int) -> None:
    """Arrives, and lets `barrier` wait for copies of this many bytes."""
    text = "mbarrier.arrive.expect_tx.shared.b64 _, [$0], $1;"
    _act(text, barrier.address(), _integer(size), constraints="r,r")


def copy(source: Pointer, target: Pointer, size: int, barrier: Pointer) -> None:
    """Copies into shared memory by the copy engine; all multiples of 16 bytes."""
    _act(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        f"[$0], [$1], {size}, [$2];",
        target.address(),
        source.address(),
        barrier.address(),
        constraints="r,l,r",
    )


def wait(barrier: Pointer, parity: Int) -> None:
    """Waits until the barrier's phase of this parity is over."""
    # Labels are local to the braces.
    text = (
        "{ .reg .pred done; again: mbarrier.try_wait.parity.shared.b64 done, [$0], $1; "
        "@done bra over; bra again; over: }"
    )
    _act(text, barrier.address(), parity.value, constraints="r,r")
