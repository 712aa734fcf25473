# mypy: disable-error-code="call-arg, arg-type"
"""Products on a warpgroup's matrix unit.

Pallas's own start from an accumulator of zeros, which takes as many instructions as it has
registers, and are waited for where their result is read. These ignore what the accumulator held,
and run until a wait.
"""

from typing import Any

import jax.experimental.mosaic.gpu as mgpu
from jax.experimental.mosaic.gpu import mma_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels.mosaic.lane import fragments

Value = Any  # A value of the compiler

_ROWS = 64
# Bytes of the contracted axis that one instruction takes.
_DEPTH = 32


def _steps(
    ref: Value, swizzle: int, group: tuple[int, int], *, is_left: bool
) -> tuple[Value, list[int]]:
    """An operand's descriptor, and what is added to it for each instruction.

    `ref` is tiled shared memory: ``[m / 8, k / w, 8, w]``, on the right ``[k / w, n / 8, w, 8]`` or
    ``[k / 8, n / w, 8, w]``, where `w` are the numbers in `swizzle` bytes, a tile's row. `group`
    are rows and depth, on the right depth and columns, of the parts that one descriptor's strides
    reach.
    """
    depth = group[1 if is_left else 0]
    large = (_ROWS, depth) if is_left else (depth, depth)
    (base, strides), (_, group_stride), _ = mma_utils.create_descriptor(
        ref, swizzle=swizzle, large_tile=large, group_size=group, logical_k_major=not is_left
    )
    shape = ir.MemRefType(ref.type).shape
    size = shape[1] * shape[3] if is_left else shape[0] * shape[2]
    return base, [
        mma_utils.encode_addr(i * group_stride + j * strides[1][0])
        for i in range(size // depth)
        for j in range(swizzle // _DEPTH)
    ]


_NAMES = {
    "i8": ("s32.s8.s8", 32),
    "f8E4M3FN": ("f32.e4m3.e4m3", 32),
    "bf16": ("f32.bf16.bf16", 16),
    "f16": ("f32.f16.f16", 16),
}


def start(
    a: Any,
    b: Value,
    *,
    swizzle: int,
    a_swizzle: int | None = None,
    total: Any | None = None,
    rows_are_depth: bool = False,
) -> Any:
    """Starts ``a @ b`` as one group of asynchronous products.

    `a` ``[64, k]`` is in registers (layout `WGMMA_8BIT`, or its words, see `int4.load` and
    `fragments.half_words`) or in tiled shared memory, rows of its tiles then `a_swizzle` bytes; `b`
    is tiled shared memory of ``[n, k]``, of ``[k, n]`` if `rows_are_depth`, for 16-bit numbers
    only. `total`, what such a call returned, is added to. Returns int32 or float32 ``[64, n]``, not
    to be touched before a wait for the group.
    """
    if not rows_are_depth:
        b = mgpu.memref_transpose(b, (1, 0, 3, 2))
    kind = ir.MemRefType(b.type)
    _, tiles, _, wide = kind.shape
    n = tiles * wide
    element = str(kind.element_type)
    name, depth = _NAMES[element]
    is_int, is_half = element == "i8", depth == 16
    assert is_half or not rows_are_depth, "8-bit operands cannot be transposed"
    part = swizzle * depth // _DEPTH
    base, offsets = _steps(b, swizzle, (part, n), is_left=False)
    count, sums = n // 2, [] if total is None else total.registers.flat
    inputs, constraints = [base], ["l"]
    if a_swizzle is None:
        words = fragments.operand_words(a)
        inputs, constraints = inputs + words, constraints + ["r"] * len(words)
        names = [f"${count + 1 + i}" for i in range(len(words))]
        left = ["{" + ",".join(names[i : i + 4]) + "}" for i in range(0, len(words), 4)]
        left_offsets = [0] * len(left)
    else:
        part = a_swizzle * depth // _DEPTH
        a_base, left_offsets = _steps(a, a_swizzle, (_ROWS, part), is_left=True)
        inputs, constraints = [*inputs, a_base], [*constraints, "l"]
        left = ["a"] * len(left_offsets)
    inputs += [x for register in sums for x in fragments.elements(register)]
    accumulator = "{" + ",".join(f"${i}" for i in range(count)) + "}"
    flags = "" if is_int else ", 1, 1"
    if is_half:
        flags += f", {int(rows_are_depth)}" if a_swizzle is None else f", 0, {int(rows_are_depth)}"
    lines = ["{.reg .pred no, yes; setp.ne.b32 no, 0, 0; setp.ne.b32 yes, 1, 0; .reg .b64 a, b;"]
    lines.append("wgmma.fence.sync.aligned;")
    # Descriptors are added up here: outside each would take two registers all the time.
    for i, source in enumerate(left):
        if a_swizzle is not None:
            lines.append(f"add.s64 a, ${count + 1}, {left_offsets[i]};")
        lines.append(f"add.s64 b, ${count}, {offsets[i]};")
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{n}k{depth}.{name} {accumulator}, {source}, b,"
            f" {'no' if i == 0 and total is None else 'yes'}{flags};"
        )
    lines.append("wgmma.commit_group.sync.aligned;}")
    scalar = ir.IntegerType.get_signless(32) if is_int else ir.F32Type.get()
    letter = "=r" if is_int else "=f"
    constraints = [letter] * count + constraints
    constraints += [] if total is None else [str(i) for i in range(count)]
    result: Value = llvm.inline_asm(
        llvm.StructType.get_literal([scalar] * count),
        inputs,
        "\n".join(lines),
        ",".join(constraints),
        has_side_effects=True,
        asm_dialect=0,
    )
    values = [llvm.extractvalue(scalar, result, [i]) for i in range(count)]
    return fragments.of_registers(values, is_int)
