"""Numbers of one lane: 32 bits each, whose operators emit the compiler's operations.

Operators and methods are operations that the compiler may fold, combine and move; the functions of
`instructions` stay the instructions that they name.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir as _ir
from jaxlib.mlir.dialects import arith as _arith
from jaxlib.mlir.dialects import llvm as _llvm
from jaxlib.mlir.dialects import math as _math
from jaxlib.mlir.dialects import scf as _scf

# These bindings are only partly typed, and in places wrongly.
ir, arith, llvm, scf, math = cast(tuple[Any, ...], (_ir, _arith, _llvm, _scf, _math))


def i32() -> Any:
    return ir.IntegerType.get_signless(32)


def f32() -> Any:
    return ir.F32Type.get()


def int_value(x: "Int | int") -> Any:
    """The compiler's value of an integer or a constant."""
    if isinstance(x, Int):
        return x.value
    return arith.constant(i32(), ir.IntegerAttr.get(i32(), (x + 2**31) % 2**32 - 2**31))


def float_value(x: "Float | float") -> Any:
    return x.value if isinstance(x, Float) else arith.constant(f32(), float(x))


def _compare(name: str) -> Callable[["Int", "Int | int"], "Bool"]:
    return lambda a, b: Bool(arith.cmpi(getattr(arith.CmpIPredicate, name), a.value, int_value(b)))


def _compare_float(name: str) -> Callable[["Float", "Float | float"], "Bool"]:
    return lambda a, b: Bool(
        arith.cmpf(getattr(arith.CmpFPredicate, name), a.value, float_value(b))
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Bool:
    value: Any

    def __and__(self, other: "Bool") -> "Bool":
        return Bool(arith.andi(self.value, other.value))

    def __or__(self, other: "Bool") -> "Bool":
        return Bool(arith.ori(self.value, other.value))

    def __invert__(self) -> "Bool":
        return Bool(arith.xori(self.value, arith.constant(self.value.type, True)))

    def where(self, a: Any, b: Any) -> Any:
        """`a` where this is true, `b` elsewhere: both integers or both floats."""
        if isinstance(a, Float) or isinstance(b, Float):
            return Float(arith.select(self.value, float_value(a), float_value(b)))
        return Int(arith.select(self.value, int_value(a), int_value(b)))


@dataclasses.dataclass(frozen=True, eq=False)
class Int:
    """A 32-bit integer, signed where that matters."""

    value: Any

    def __add__(self, other: "Int | int") -> "Int":
        return Int(arith.addi(self.value, int_value(other)))

    def __sub__(self, other: "Int | int") -> "Int":
        return Int(arith.subi(self.value, int_value(other)))

    def __mul__(self, other: "Int | int") -> "Int":
        return Int(arith.muli(self.value, int_value(other)))

    def __and__(self, other: "Int | int") -> "Int":
        return Int(arith.andi(self.value, int_value(other)))

    def __or__(self, other: "Int | int") -> "Int":
        return Int(arith.ori(self.value, int_value(other)))

    def __xor__(self, other: "Int | int") -> "Int":
        return Int(arith.xori(self.value, int_value(other)))

    def __lshift__(self, other: "Int | int") -> "Int":
        return Int(arith.shli(self.value, int_value(other)))

    def __rshift__(self, other: "Int | int") -> "Int":
        """A logical shift."""
        return Int(arith.shrui(self.value, int_value(other)))

    def __floordiv__(self, other: "Int | int") -> "Int":
        """Only for non-negative numbers."""
        return Int(arith.divui(self.value, int_value(other)))

    def __mod__(self, other: "Int | int") -> "Int":
        """Only for non-negative numbers."""
        return Int(arith.remui(self.value, int_value(other)))

    __lt__ = _compare("slt")
    __le__ = _compare("sle")
    __gt__ = _compare("sgt")
    __ge__ = _compare("sge")
    equals = _compare("eq")

    def maximum(self, other: "Int | int") -> "Int":
        return Int(arith.maxsi(self.value, int_value(other)))

    def minimum(self, other: "Int | int") -> "Int":
        return Int(arith.minsi(self.value, int_value(other)))

    def to_float(self) -> "Float":
        return Float(arith.sitofp(f32(), self.value))

    def as_float(self) -> "Float":
        """Reinterprets the bits."""
        return Float(arith.bitcast(f32(), self.value))


@dataclasses.dataclass(frozen=True, eq=False)
class Float:
    value: Any

    def __add__(self, other: "Float | float") -> "Float":
        return Float(arith.addf(self.value, float_value(other)))

    def __sub__(self, other: "Float | float") -> "Float":
        return Float(arith.subf(self.value, float_value(other)))

    def __mul__(self, other: "Float | float") -> "Float":
        return Float(arith.mulf(self.value, float_value(other)))

    def __truediv__(self, other: "Float | float") -> "Float":
        return Float(arith.divf(self.value, float_value(other)))

    def __neg__(self) -> "Float":
        return Float(arith.negf(self.value))

    __lt__ = _compare_float("OLT")
    __gt__ = _compare_float("OGT")
    __ge__ = _compare_float("OGE")
    equals = _compare_float("OEQ")

    def maximum(self, other: "Float | float") -> "Float":
        """The larger of two; of NaN and a number, the number."""
        return Float(arith.maxnumf(self.value, float_value(other)))

    def fma(self, b: "Float", c: "Float") -> "Float":
        return Float(math.fma(self.value, b.value, c.value))

    def as_int(self) -> Int:
        """Reinterprets the bits."""
        return Int(arith.bitcast(i32(), self.value))


def integer(x: int) -> Int:
    return Int(int_value(x))


def number(x: float) -> Float:
    return Float(float_value(x))


def scalar(x: Any) -> Int:
    """An int32 scalar of Pallas as `Int`."""
    [value] = x.registers.flat
    return Int(value)


def number_of(x: Float | float) -> Float:
    return x if isinstance(x, Float) else number(x)


def when(condition: Bool) -> Any:
    return mgpu.utils.when(condition.value)


def loop(
    start: Int, stop: Int, step: int, state: list[Any], body: Callable[[Int, list[Any]], list[Any]]
) -> list[Any]:
    """``for i in range(start, stop, step): state = body(i, state)``."""
    kinds = [type(x) for x in state]
    op = scf.ForOp(start.value, stop.value, int_value(step), [x.value for x in state])
    with ir.InsertionPoint(op.body):
        inside = [kind(x) for kind, x in zip(kinds, op.inner_iter_args, strict=True)]
        out = body(Int(op.induction_variable), inside)
        scf.YieldOp([x.value for x in out])
    return [kind(x) for kind, x in zip(kinds, op.results, strict=True)]


def either(
    condition: Bool,
    kinds: Sequence[type],
    a: Callable[[], list[Any]],
    b: Callable[[], list[Any]],
) -> list[Any]:
    """What `a` computes if `condition` holds, otherwise what `b` does; only one of them runs.

    The lanes of a warp must agree on `condition`. Both functions return a list of as many numbers,
    whose types `kinds` are.
    """
    types = [i32() if kind is Int else f32() for kind in kinds]
    op = scf.IfOp(condition.value, types, has_else=True)
    for block, f in ((op.then_block, a), (op.else_block, b)):
        with ir.InsertionPoint(block):
            scf.YieldOp([x.value for x in f()])
    return [kind(x) for kind, x in zip(kinds, op.results, strict=True)]


def total(values: Sequence[Any]) -> Any:
    return functools.reduce(lambda a, b: a + b, values)


def tree(values: Sequence[Any], op: Callable[[Any, Any], Any]) -> Any:
    """Combines numbers pairwise, which keeps dependency chains short."""
    values = list(values)
    while len(values) > 1:
        pairs = [op(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + values[len(pairs) * 2 :]
    return values[0]


def chain(values: Sequence[Any], op: Callable[[Any, Any], Any]) -> Any:
    """Combines numbers two at a time into two alternating results: fewer at once than in a `tree`.

    Two integer maxima in a row are one instruction.
    """
    totals = list(values[:2])
    for i in range(2, len(values), 2):
        k = i // 2 % 2
        for x in values[i : i + 2]:
            totals[k] = op(totals[k], x)
    return op(*totals)
