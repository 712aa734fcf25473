"""turbo4 pages, 16 queries of a program: rows of the products are queries, columns tokens.

The numbers are those of `turbo4`, whose columns are queries, to the bit: products are of the same
integers, and what is added in floating point is added in the same order. With queries as rows a
lane's weights are its part of the second product's operand, and it has 16 tokens of two queries,
not 8 of each of four: of maxima and sums two steps are between lanes, not three, for half of the
queries. With a loop without masks that is 1,940 instructions for a block of 64 tokens and warp,
where columns take 2,310: `docs/kernels/paged.md`.

Lane ``4 g + t`` has of a block of ``8 n`` tokens the scores of queries ``g`` and ``g + 8`` with
tokens ``n (2 t + j) + (i ^ odd)``, `j` 0 or 1, `i` below `n`; `odd` is that of row ``2 t + j``.
"""

import dataclasses
import operator
from typing import Any

from pallas_kernels.layouts import LOG2_E
from pallas_kernels.mosaic import lane, warp
from pallas_kernels.mosaic.hopper.paged import integers, turbo4
from pallas_kernels.mosaic.hopper.paged.inputs import (
    TILE,
    Place,
    Query,
    Settings,
    State,
    key_rows,
    parity,
)
from pallas_kernels.mosaic.lane import Float, Int, Pointer

ROWS = 16
_HALVES, _PLANES = (0, 1), (0, 1)


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """A lane's part of the queries; pairs are of its rows ``g`` and ``g + 8``."""

    operands: list[list[list[Int]]]  # of the low and the high plane, words of every 32 channels
    # Of each plane what the rows' sums start from, as a product's result: four registers, where
    # two would be copied before every product.
    start: list[list[Int]]
    offset: list[Float]
    factor: list[Float]
    position: list[Int]


def of_tiles(query: Query, here: Place) -> Rows:
    """The same queries, from tiles of four."""

    def moved(tiles: list[Any], source: Int) -> list[Any]:
        # Tile ``g // 4`` has row `g`, the one two further on row ``g + 8``.
        found = [lane.from_lane(x, source) for x in tiles]
        return [(here.g < TILE).where(found[i], found[i + 1]) for i in (0, 2)]

    number, operands = here.g & (TILE - 1), []
    for plane in _PLANES:
        source = ((number << 1) + plane << 2) + here.t
        words = [moved(list(x), source) for x in zip(*query.operands, strict=True)]
        operands.append([[*words[k], *words[k + 1]] for k in range(0, len(words), 2)])
    start = []
    for plane in _PLANES:
        (a, b), (c, d) = (moved([x[plane] for x in query.start], number) for _ in range(2))
        start.append([a, c, b, d])
    others = [moved(x, number) for x in (query.offset, query.factor, query.position)]
    return Rows(operands, start, *others)


def attend(
    slot: Pointer,
    begin: Int,
    rows: Rows,
    here: Place,
    products: turbo4.Turbo4,
    is_masked: bool,
    s: Settings,
) -> State:
    """The state of one block in shared memory at `slot`, whose first token is `begin`.

    `is_masked` says whether some query may not see all of it; see `existing`.
    """
    row = s.row_bytes(products.head_dim)
    norms = slot.at(2 * s.block * row)
    factors, units = (_norms(x, here, s) for x in (norms, norms.at(2 * s.block)))
    found = _scores(slot, rows, here, products, s)
    operands, maxima, totals = [], [], []
    for half in _HALVES:
        x = [
            [v * (norm * rows.factor[half]) for v, norm in zip(*pair, strict=True)]
            for pair in zip(found[half], factors, strict=True)
        ]
        if s.soft_cap is not None:
            one = lane.number(1.0)
            x = [[warp.soft_cap(v, one, s.soft_cap) * LOG2_E for v in of_j] for of_j in x]
        seen = _visible(rows.position[half] - begin, here, s) if is_masked else None
        if seen is not None:
            x = _where(seen, x, float("-inf"))
        top = lane.reduce_lanes(lane.tree(x[0] + x[1], lane.maximum), lane.maximum, (1, 2))
        shift = (top > float("-inf")).where(top, 0.0)
        p = [[lane.exp2(v - shift) for v in of_j] for of_j in x]
        # In the order of `kernel`'s sum.
        total = lane.tree(p[0], operator.add) + lane.tree(p[1], operator.add)
        maxima.append(top)
        totals.append(lane.reduce_lanes(total, operator.add, (1, 2)))
        weights = [
            [v * unit for v, unit in zip(*of_j, strict=True)] for of_j in zip(p, units, strict=True)
        ]
        operands.append(_weight_planes(weights if seen is None else _where(seen, weights, 0.0)))
    return State(_weighted(slot.at(s.block * row), operands, here, products, s), maxima, totals)


def existing(state: State, rows: Rows) -> State:
    """The state without what queries found that do not exist: they see all of some blocks."""
    real = [position >= 0 for position in rows.position]
    return State(
        [
            [is_real.where(x, 0.0) for x in outputs]
            for is_real, outputs in zip(real, state.outputs, strict=True)
        ],
        [is_real.where(x, float("-inf")) for is_real, x in zip(real, state.maxima, strict=True)],
        [is_real.where(x, 0.0) for is_real, x in zip(real, state.totals, strict=True)],
    )


def _where(seen: list[list[lane.Bool]], x: list[list[Float]], other: float) -> list[list[Float]]:
    return [
        [mask.where(v, other) for mask, v in zip(*of_j, strict=True)]
        for of_j in zip(seen, x, strict=True)
    ]


def _norms(pointer: Pointer, here: Place, s: Settings) -> list[list[Float]]:
    """Norms of the lane's tokens, of each `j`."""
    words = pointer.at(here.t * (4 * s.held)).words(s.held)
    size, out = len(words) // 2, []
    for j in _HALVES:
        odd = parity((here.t << 1) + j)
        out.append(integers.norms(words[j * size : (j + 1) * size], (odd * 0x2222) ^ 0x3210))
    return out


def _scores(
    slot: Pointer, rows: Rows, here: Place, products: turbo4.Turbo4, s: Settings
) -> list[list[list[Float]]]:
    """Of both queries, for each `j` and `i`, without norms and factors."""
    found: list[list[list[Float]]] = [[[], []], [[], []]]
    row = s.row_bytes(products.head_dim)
    for pair in key_rows(slot, row, s.held, here, products.look_up):
        for words in pair:
            sums = _of_planes(rows.operands, rows.start, words)
            for half in _HALVES:
                for j in _HALVES:
                    low, high = (x[2 * half + j] for x in sums)
                    found[half][j].append(integers.joined(low, high, rows.offset[half]))
    return found


def _of_planes(operands: Any, start: list[list[Int]], words: list[Int]) -> list[list[Int]]:
    """Sums of both planes of the left operand times the columns in `words`."""
    out = []
    for plane, c in zip(operands, start, strict=True):
        for k, left in enumerate(plane):
            c = lane.matmul(left, words[2 * k : 2 * k + 2], c)
        out.append(c)
    return out


def _visible(distance: Int, here: Place, s: Settings) -> list[list[lane.Bool]]:
    """Which of the lane's tokens a query sees that is `distance` tokens after the block's first."""
    out = []
    for j in _HALVES:
        g = (here.t << 1) + j
        out.append(visible(distance - g * s.held, parity(g), s))
    return out


def visible(distance: Int, odd: Int, s: Settings) -> list[lane.Bool]:
    """Which tokens ``i ^ odd`` a query sees that is `distance` tokens after the first of them."""
    out = []
    for i in range(s.held):
        token = odd ^ i
        mask = token <= distance
        if s.window is not None:
            mask = mask & (token >= distance - s.window[0]) & (token <= distance + s.window[1])
        out.append(mask)
    return out


def _weight_planes(w: list[list[Float]]) -> tuple[list[list[list[Int]]], Float]:
    """Words of the two planes for each four tokens of each `j`, and their unit."""
    inverse, unit = integers.weight_unit(w[0] + w[1], (1, 2))
    rounded = [[integers.rounded(v, inverse) for v in of_j] for of_j in w]
    planes = [
        [
            [integers.plane(of_j[k : k + 4], lane.integer(i)) for of_j in rounded]
            for k in range(0, len(w[0]), 4)
        ]
        for i in _PLANES
    ]
    return planes, unit


def _weighted(
    values: Pointer, weights: Any, here: Place, products: turbo4.Turbo4, s: Settings
) -> list[list[Float]]:
    """Outputs of both queries, in the order of `channel`."""
    (first, unit), (second, other) = weights
    units = unit, other
    operands = [
        [[a[0], b[0], a[1], b[1]] for a, b in zip(first[i], second[i], strict=True)]
        for i in _PLANES
    ]
    zero = [[lane.integer(0)] * 4] * 2
    ones = [lane.integer(0x01010101)] * (2 * len(operands[0]))
    sums = _of_planes(operands, zero, ones)
    pairs = [integers.less_middle(low, high, s.middle) for low, high in zip(*sums, strict=True)]
    start = [list(x) for x in zip(*(own for own, _ in pairs), strict=True)]
    offsets = [pairs[2 * half][1] for half in _HALVES]
    out: list[list[Float]] = [[], []]
    for words in products.value_rows(values, here):
        for which in (0, 1):
            c = _of_planes(operands, start, words[which::2])
            for half in _HALVES:
                for j in _HALVES:
                    low, high = (x[2 * half + j] for x in c)
                    out[half].append(integers.joined(low, high, offsets[half]) * units[half])
    return out


def channel(number: int, here: Place, head_dim: int) -> Int:
    """Which channel the lane's output `number` is of."""
    number, j = divmod(number, 2)
    of_column = dataclasses.replace(here, g=(here.t << 1) + j)
    return turbo4.channel(number, of_column, head_dim)
