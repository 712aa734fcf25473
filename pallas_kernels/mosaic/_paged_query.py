"""The queries of a program of paged attention, as its warps load them."""

from typing import Any

from pallas_kernels.mosaic import _lane
from pallas_kernels.mosaic._decode_query import numbers
from pallas_kernels.mosaic._lane import Float
from pallas_kernels.mosaic._paged_types import LOG2_E, TILE, Arrays, Lane, Program, Query, Settings

_DOWN, _SMALLEST = 2.0**-16, 2.0**-100


def load_query(a: Arrays, at: Program, lane: Lane, pages: Any, s: Settings) -> Query:
    """Loads the program's queries, row ``head * T + token`` of their KV head.

    Args:
      a: arrays.
      at: the program.
      lane: the lane.
      pages: what pages hold: gives operands for a query's numbers.
      s: settings.
    """
    operands, starts, offsets, factors, positions = [], [], [], [], []
    width = 4 if a.dtype == "float32" else 2
    unit = s.scale * (LOG2_E if s.soft_cap is None else 1.0)
    for tile in range(s.tiles):
        base = at.tile * s.rows + TILE * tile
        row = (base + (lane.g >> 1)).minimum(a.rows - 1)
        token, head = row % a.tokens, at.head * a.group + row // a.tokens
        index = (at.batch * a.tokens + token) * a.heads + head
        source = a.query.times(index, a.head_dim * width).at(lane.t * (a.head_dim // 4 * width))
        words = source.words(a.head_dim // 16 * width)
        x = [number for word in words for number in numbers(word, a.dtype)]
        words, start, offset, scale = pages.query_operands(x, lane)
        operands.append(words)
        starts.append(start)
        offsets.append(offset)
        # What lane 8 t holds is of query t.
        factor = _lane.from_lane(scale, lane.t << 3) * unit
        if a.pages.key_scale is not None:
            factor = factor * a.pages.key_scale.float()
        factors.append(factor)
        own = base + lane.t
        token = own % a.tokens
        is_real = (own < a.rows) & (token < at.query_length)
        positions.append(is_real.where(at.begin + token, -1))
    return Query(operands, starts, offsets, factors, positions)


def scaled(x: list[Float]) -> tuple[list[Float], Float]:
    """A query's numbers over the largest magnitude among them, and that; NaN unless all are finite.

    Numbers below ``2**-84`` become 0, which changes no score.
    """
    top, bad = _lane.number(0.0), _lane.number(0.0)
    for v in x:
        top = _lane.maximum(top, _lane.maximum(v, -v))
        # Zero, or NaN for what is not finite.
        bad = _lane.fma(v, 0.0, bad)
    top = _lane.reduce_lanes(top, _lane.maximum, (1, 2))
    bad = _lane.reduce_lanes(bad, lambda u, v: u + v, (1, 2))
    # Far from where a reciprocal overflows, or is flushed to 0.
    top = _lane.maximum(top * _DOWN, _lane.number(_SMALLEST))
    inverse = _lane.reciprocal(top)
    return [v * _DOWN * inverse for v in x], (top + bad) * (1 / _DOWN)
