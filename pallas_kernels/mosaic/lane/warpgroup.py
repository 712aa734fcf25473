"""Products of a warpgroup's matrix unit, as a lane sees them: words in, numbers out."""

from collections.abc import Sequence

from pallas_kernels.mosaic.lane.instructions import asm
from pallas_kernels.mosaic.lane.memory import Pointer
from pallas_kernels.mosaic.lane.numbers import Float, Int, f32, llvm

# A descriptor's stride of eight rows of 128 bytes, and rows interleaved over 128 bytes.
_HIGH = 0x40000000 | 1024 >> 4
_LOW = 1 << 16
_DEPTH = 32


def start_product(
    words: Sequence[Int],
    tokens: Pointer,
    columns: int,
    kind: str = "e4m3",
    minus: Sequence[Int] = (),
) -> list[Float]:
    """Starts a warpgroup's product of 8-bit floats of `kind`: ``[64, k] x [k, columns]``.

    Lane ``4 g + t`` of warp `w` has rows ``16 w + g`` and ``16 w + g + 8``. For 32 columns of the
    left operand it holds four `words` of four bytes: of its first row from column ``4 t`` on, of
    its second, then both from ``16 + 4 t`` on. `minus` are words of another left operand, whose
    product is subtracted; none or as many. `tokens` is the right operand in shared memory,
    ``[columns, 128]`` bytes at a multiple of 1,024, whose 16-byte chunks are permuted: chunk `c` of
    row `n` is where ``c ^ n % 8`` would be. `columns` is a multiple of 8.

    Returns for every eight columns ``8 j`` the lane's four numbers: columns ``8 j + 2 t`` and
    ``8 j + 2 t + 1`` of its first row, then of its second. They must not be touched before
    `finish`.
    """
    count = columns // 2
    accumulator = "{" + ",".join(f"${i}" for i in range(count)) + "}"
    lines = [
        "{.reg .pred no, yes; setp.ne.b32 no, 0, 0; setp.ne.b32 yes, 1, 0;",
        ".reg .b32 low, next; .reg .b64 tile;",
        f"shr.u32 low, ${count}, 4; and.b32 low, low, 0x3FFF; or.b32 low, low, {_LOW};",
        "wgmma.fence.sync.aligned;",
    ]
    every = [*words, *minus]
    for i in range(0, len(every), 4):
        names = ",".join(f"${count + 1 + i + j}" for j in range(4))
        lines.append(f"add.u32 next, low, {i % len(words) // 4 * (_DEPTH >> 4)};")
        lines.append(f"mov.b64 tile, {{next, {_HIGH}}};")
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{columns}k{_DEPTH}.f32.{kind}.{kind} {accumulator},"
            f" {{{names}}}, tile, {'yes' if i else 'no'}, {1 if i < len(words) else -1}, 1;"
        )
    lines.append("wgmma.commit_group.sync.aligned;}")
    result = asm(
        llvm.StructType.get_literal([f32()] * count),
        [tokens.address(), *(x.value for x in every)],
        "\n".join(lines),
        ",".join(["=f"] * count + ["r"] * (1 + len(every))),
        effects=True,
    )
    return [Float(llvm.extractvalue(f32(), result, [i])) for i in range(count)]


def finish(values: Sequence[Float]) -> list[Float]:
    """Waits for all products that were started, and returns the numbers of the last."""
    count = len(values)
    result = asm(
        llvm.StructType.get_literal([f32()] * count),
        [x.value for x in values],
        "wgmma.wait_group.sync.aligned 0;",
        ",".join(["=f"] * count + [str(i) for i in range(count)]),
        effects=True,
    )
    return [Float(llvm.extractvalue(f32(), result, [i])) for i in range(count)]
