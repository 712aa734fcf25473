"""The queries of a program: each warp quantizes eight of its rows, for all warps."""

from pallas_kernels.mosaic import lane, warp
from pallas_kernels.mosaic.hopper.decode.block import channel_words
from pallas_kernels.mosaic.hopper.decode.query import row_code, row_scale
from pallas_kernels.mosaic.hopper.decode.types import Place, Shape
from pallas_kernels.mosaic.hopper.decode_rows.block import Queries
from pallas_kernels.mosaic.hopper.decode_rows.operands import UNIT
from pallas_kernels.mosaic.lane import Float, Int, Pointer


def query_bytes(rows: int, head_dim: int) -> int:
    """Shared memory of a program's queries: float16 codes and a scale for each."""
    return rows * (2 * head_dim + 4)


def store_queries(
    a: warp.Arrays,
    at: warp.Program,
    shape: Shape,
    here: Place,
    memory: Pointer,
    number: Int,
    factor: float,
) -> None:
    """Quantizes eight of the program's queries; row ``head * T + token`` of its KV head.

    Args:
      a: the arrays.
      at: the program.
      shape: sizes of the program.
      here: the lane's place.
      memory: of `query_bytes`.
      number: of the warp; several may do the same.
      factor: of the scores.
    """
    eight = number & (shape.rows // 8 - 1)
    tile, half = eight >> 1, eight & 1
    own = (eight << 3) + here.g
    row = (at.tile * shape.rows + own).minimum(a.rows - 1)
    index = (at.batch * a.tokens + row % a.tokens) * a.heads + at.head * a.group + row // a.tokens
    width = 4 if a.dtype == "float32" else 2
    words = channel_words(
        a.query.times(index, a.head_dim * width), here, a.head_dim, shape.key_bits, width
    )
    x = [v for word in words for v in warp.numbers(word, a.dtype)]
    # The factor of the scores stays positive, so that it does not move the maximum.
    x = x if factor >= 0 else [-v for v in x]
    scale = row_scale(x)
    codes = [row_code(v, scale).to_float() for v in x]
    place = memory.at(
        (tile * (shape.head_dim // 16 * 512)) + (((here.g << 2) + here.t) << 4) + (half << 2)
    )
    for i in range(0, len(codes), 4):
        for odd in (0, 1):
            pair = lane.half.pack(codes[i + odd], codes[i + odd + 2])
            place.at(128 * i + 8 * odd).store(pair)
    with lane.when(here.t.equals(0)):
        memory.at(own << 2, shape.rows * shape.head_dim * 2).store(scale)


def load_queries(
    a: warp.Arrays,
    at: warp.Program,
    shape: Shape,
    here: Place,
    memory: Pointer,
    factor: float,
) -> Queries:
    """What `store_queries` left.

    Args:
      a: the arrays.
      at: the program.
      shape: sizes of the program.
      here: the lane's place.
      memory: of `query_bytes`.
      factor: of the scores, times the unit of the exponential.
    """
    scales: list[Float] = []
    positions: list[Int] = []
    for eight in range(shape.rows // 8):
        own = here.g + 8 * eight
        scale = memory.at(own << 2, shape.rows * shape.head_dim * 2).float()
        scales.append(scale * (abs(factor) / UNIT))
        row = at.tile * shape.rows + own
        token = row % a.tokens
        is_real = (row < a.rows) & (token < at.query_length)
        positions.append(is_real.where(at.begin + token, -1))
    return Queries(memory, scales, positions)
