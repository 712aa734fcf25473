"""The queries of a program of paged attention, as its warps load them."""

from typing import Any

from pallas_kernels.mosaic import lane
from pallas_kernels.mosaic.hopper.decode.query import numbers
from pallas_kernels.mosaic.hopper.paged.types import (
    LOG2_E,
    TILE,
    Arrays,
    Place,
    Program,
    Query,
    Settings,
)
from pallas_kernels.mosaic.lane import Float

_DOWN, _SMALLEST = 2.0**-16, 2.0**-100


def load_query(a: Arrays, at: Program, here: Place, pages: Any, s: Settings) -> Query:
    """Loads the program's queries, row ``head * T + token`` of their KV head.

    Args:
      a: arrays.
      at: the program.
      here: the lane's place.
      pages: what pages hold: gives operands for a query's numbers.
      s: settings.
    """
    operands, starts, offsets, factors, positions = [], [], [], [], []
    width = 4 if a.dtype == "float32" else 2
    unit = s.scale * (LOG2_E if s.soft_cap is None else 1.0)
    for tile in range(s.tiles):
        base = at.tile * s.rows + TILE * tile
        row = (base + (here.g >> 1)).minimum(a.rows - 1)
        token, head = row % a.tokens, at.head * a.group + row // a.tokens
        index = (at.batch * a.tokens + token) * a.heads + head
        source = a.query.times(index, a.head_dim * width).at(here.t * (a.head_dim // 4 * width))
        words = source.words(a.head_dim // 16 * width)
        x = [number for word in words for number in numbers(word, a.dtype)]
        words, start, offset, scale = pages.query_operands(x, here)
        operands.append(words)
        starts.append(start)
        offsets.append(offset)
        # What lane 8 t holds is of query t.
        factor = lane.from_lane(scale, here.t << 3) * unit
        if a.pages.key_scale is not None:
            factor = factor * a.pages.key_scale.float()
        factors.append(factor)
        own = base + here.t
        token = own % a.tokens
        is_real = (own < a.rows) & (token < at.query_length)
        positions.append(is_real.where(at.begin + token, -1))
    return Query(operands, starts, offsets, factors, positions)


def scaled(x: list[Float]) -> tuple[list[Float], Float]:
    """A query's numbers over the largest magnitude among them, and that; NaN unless all are finite.

    Numbers below ``2**-84`` become 0, which changes no score.
    """
    top, bad = lane.number(0.0), lane.number(0.0)
    for v in x:
        top = lane.maximum(top, lane.maximum(v, -v))
        # Zero, or NaN for what is not finite.
        bad = lane.fma(v, 0.0, bad)
    top = lane.reduce_lanes(top, lane.maximum, (1, 2))
    bad = lane.reduce_lanes(bad, lambda u, v: u + v, (1, 2))
    # Far from where a reciprocal overflows, or is flushed to 0.
    top = lane.maximum(top * _DOWN, lane.number(_SMALLEST))
    inverse = lane.reciprocal(top)
    return [v * _DOWN * inverse for v in x], (top + bad) * (1 / _DOWN)
