# mypy: disable-error-code="call-arg, arg-type"
"""A lane's part of a warpgroup's register arrays, as numbers.

Arrays of ``[64, n]`` in the layout of a matrix unit's accumulator: lane ``4 g + t`` of a warp
holds rows ``g`` and ``g + 8`` of the warp's 16, and of each the columns ``8 j + 2 t`` and
``8 j + 2 t + 1``. Row arrays ``[64]`` hold the same two rows.
"""

from collections.abc import Sequence
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import numpy as np
from jaxlib.mlir.dialects import vector

from pallas_kernels.mosaic.lane.half import pack
from pallas_kernels.mosaic.lane.instructions import special
from pallas_kernels.mosaic.lane.numbers import Float, Int, f32, i32, ir

ROWS = 64  # rows of a warpgroup: the height of a matrix instruction


def row_and_place() -> tuple[Int, Int]:
    """The first of the lane's two rows within its warpgroup's 64, and its place `t` of four."""
    thread = special("tid.x")
    row = ((thread >> 5) & 3) * 16 + ((thread >> 2) & 7)
    return row, thread & 3


def elements(register: Any) -> list[Any]:
    """The compiler's values in a register array's one register."""
    if not isinstance(register.type, ir.VectorType):
        return [register]
    [size] = ir.VectorType(register.type).shape
    place = ir.DenseI64ArrayAttr.get
    return [
        vector.extract(register, dynamic_position=[], static_position=place([i]))
        for i in range(size)
    ]


def _number(value: Any) -> Any:
    return Int(value) if isinstance(value.type, ir.IntegerType) else Float(value)


def by_row(a: Any) -> list[list[Any]]:
    """The ``n / 4`` columns of each of the lane's two rows of an accumulator ``[64, n]``."""
    registers = a.registers.reshape(-1, 2)
    return [[_number(x) for r in registers[:, half] for x in elements(r)] for half in range(2)]


def scalars(a: Any) -> list[Any]:
    """The two numbers of a row array, or the one of a scalar."""
    return [_number(x) for r in a.registers.flat for x in elements(r)]


def _pair(values: Sequence[Any], kind: Any) -> Any:
    return vector.from_elements(ir.VectorType.get((len(values),), kind), values)


def _accumulator(registers: Any, columns: int, is_signed: bool | None) -> Any:
    shape = mgpu.WGMMA_LAYOUT.registers_shape((ROWS, columns))
    return mgpu.FragmentedArray(
        _registers=registers.reshape(shape), _layout=mgpu.WGMMA_LAYOUT, _is_signed=is_signed
    )


def of_rows(rows: Sequence[Sequence[Float]]) -> Any:
    """The reverse of `by_row`, float32."""
    registers = np.empty((len(rows[0]) // 2, 2), dtype=object)
    for half, columns in enumerate(rows):
        for j in range(len(columns) // 2):
            registers[j, half] = _pair([x.value for x in columns[2 * j : 2 * j + 2]], f32())
    return _accumulator(registers, 4 * len(rows[0]), None)


def of_registers(values: Sequence[Any], is_int: bool) -> Any:
    """The compiler's values as an accumulator ``[64, 2 * n]``, in the order of its registers."""
    kind = i32() if is_int else f32()
    registers = np.empty((len(values) // 2,), dtype=object)
    for i in range(len(values) // 2):
        registers[i] = _pair(values[2 * i : 2 * i + 2], kind)
    return _accumulator(registers, 2 * len(values), True if is_int else None)


def carrier(words: Sequence[Int]) -> Any:
    """Words of a lane as an int32 array ``[64, 2 * n]``, which loops carry as they are."""
    return of_registers([x.value for x in words], is_int=True)


def half_words(rows: Sequence[Sequence[Float]], dtype: str) -> list[Int]:
    """Rows as `by_row` gives them, as the words of a 16-bit register operand; see `carrier`."""
    words = []
    for i in range(0, len(rows[0]), 4):
        for begin in (i, i + 2):
            words += [pack(*row[begin : begin + 2], dtype) for row in rows]
    return words


def row_array(pair: Sequence[Float]) -> Any:
    """A float32 ``[64]`` of the lane's two rows."""
    registers = np.empty((2,), dtype=object)
    for i, x in enumerate(pair):
        registers[i] = _pair([x.value], f32())
    shape = mgpu.WGMMA_ROW_LAYOUT.registers_shape((ROWS,))
    return mgpu.FragmentedArray(
        _registers=registers.reshape(shape), _layout=mgpu.WGMMA_ROW_LAYOUT, _is_signed=None
    )


def operand(words: Sequence[Sequence[Int]], is_int: bool) -> Any:
    """The 8-bit register operand ``[64, k]`` of ``k / 16`` words of each row, int8 or e4m3."""
    element = ir.IntegerType.get_signless(8) if is_int else ir.Float8E4M3FNType.get()
    kind, word = ir.VectorType.get((4,), element), ir.VectorType.get((1,), i32())
    registers = np.empty((len(words[0]), 2), dtype=object)
    for half, row in enumerate(words):
        for i, x in enumerate(row):
            registers[i, half] = vector.bitcast(kind, vector.broadcast(word, x.value))
    shape = mgpu.WGMMA_LAYOUT_8BIT.registers_shape((ROWS, 16 * len(words[0])))
    return mgpu.FragmentedArray(
        _registers=registers.reshape(shape),
        _layout=mgpu.WGMMA_LAYOUT_8BIT,
        _is_signed=True if is_int else None,
    )


def operand_words(a: Any) -> list[Any]:
    """The words of a register operand: of `operand`, `carrier` or 16-bit ``[64, k]``, in order."""
    if isinstance(a.mlir_dtype, ir.IntegerType) and ir.IntegerType(a.mlir_dtype).width == 32:
        return [x.value for x in scalars(a)]
    word = ir.VectorType.get((1,), i32())
    return [
        vector.extract(
            vector.bitcast(word, x),
            dynamic_position=[],
            static_position=ir.DenseI64ArrayAttr.get([0]),
        )
        for x in a.registers.flat
    ]
