"""The queries of a program: each warp quantizes eight of its rows, for all warps."""

from pallas_kernels.mosaic import lane, warp
from pallas_kernels.mosaic.hopper.decode.block import channel_words
from pallas_kernels.mosaic.hopper.decode.query import row_code, row_scale
from pallas_kernels.mosaic.hopper.decode.types import Place, Shape, Width
from pallas_kernels.mosaic.hopper.decode_rows.block import Queries
from pallas_kernels.mosaic.hopper.decode_rows.operands import UNIT
from pallas_kernels.mosaic.lane import Float, Int


def store_queries(
    a: warp.Arrays,
    at: warp.Program,
    shape: Shape,
    here: Place,
    queries: Queries,
    key: Width,
    number: Int,
    factor: float,
    unit: float,
) -> None:
    """Quantizes eight of the program's queries; row ``head * T + token`` of its KV head.

    `key` is the width of the head's keys, which determines the order of channels. `number` is the
    warp's; several warps may store the same. `factor` is the scores', `unit` the exponential's.
    """
    eight = number & (shape.rows // 8 - 1)
    tile, half = eight >> 1, eight & 1
    own = (eight << 3) + here.g
    row = (at.tile * shape.rows + own).minimum(a.rows - 1)
    index = (at.batch * a.tokens + row % a.tokens) * a.heads + at.head * a.group + row // a.tokens
    width = 4 if a.dtype == "float32" else 2
    pointer = a.query.times(index, a.head_dim * width)

    def load(bits: int) -> list[Float]:
        words = channel_words(pointer, here, a.head_dim, bits, width)
        return [v for word in words for v in warp.numbers(word, a.dtype)]

    x = key.either([Float] * (a.head_dim // 4), load)
    # The factor of the scores stays positive, so that it does not move the maximum.
    x = x if factor >= 0 else [-v for v in x]
    scale = row_scale(x)
    codes = [row_code(v, scale).to_float() for v in x]
    place = queries.operands.at(
        (tile * (shape.head_dim // 16 * 512)) + (((here.g << 2) + here.t) << 4) + (half << 2)
    )
    for i in range(0, len(codes), 4):
        for odd in (0, 1):
            pair = lane.half.pack(codes[i + odd], codes[i + odd + 2])
            place.at(128 * i + 8 * odd).store(pair)
    token = row % a.tokens
    is_real = (at.tile * shape.rows + own < a.rows) & (token < at.query_length)
    with lane.when(here.t.equals(0)):
        queries.scales.at(own << 2).store(scale * (abs(factor) * unit / UNIT))
        queries.positions.at(own << 2).store(is_real.where(at.begin + token, -1))
