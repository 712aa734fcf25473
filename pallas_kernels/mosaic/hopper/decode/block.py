"""What one warp computes of one cache block: scores, softmax and weighted values.

Matrix products are of 16 rows, 8 columns and 32 in between, with 8-bit operands. Rows are tokens in
the first and channels in the second, columns are queries. Lane ``4 g + t`` holds rows ``g`` and
``g + 8``, columns ``2 t`` and ``2 t + 1``. Which token or channel a row stands for is free to
choose. It is chosen so that

  - packed codes are loaded as wide words and unpacked by a shift and a mask, four codes at once,
  - the weights that a lane computes are, packed, a word of the second product's operand, which four
    shuffles bring to the lanes that need it.

A query's code times its channel's scale takes 15 bits: two columns of the first product hold its
high and its low byte. Zeros of channels are one more row of "codes", those of values a factor of
the sum of weights, which is one more product.
"""

import dataclasses
import functools
import operator
from typing import Any

from pallas_kernels.layouts import float32
from pallas_kernels.mosaic import lane, warp
from pallas_kernels.mosaic.hopper.decode.types import (
    INT8_RANGE,
    Numerics,
    Place,
    Query,
    Shape,
    State,
    runs_of,
)
from pallas_kernels.mosaic.lane import Float, Int, Pointer

_EVERY_BYTE, _TOP_BITS = 0x01010101, 0x04040404


def unpack(words: list[Int], bits: int) -> list[Int]:
    """Operand words of four codes; those of one packed word follow each other."""
    mask = (2**bits - 1) * _EVERY_BYTE
    return [
        (word >> shift if shift else word) & mask for word in words for shift in range(0, 8, bits)
    ]


def load_words(pointer: Pointer, count: int) -> list[Int]:
    """Loads `count` words from a place aligned to `count` words, with the widest possible loads."""
    width = count & -count
    if width == count:
        return pointer.words(count)
    return [w for i in range(0, count, width) for w in pointer.at(4 * i).words(width)]


def code_words(area: Pointer, row: Int, here: Place, size: int, bits: int) -> list[Int]:
    """Operand words of a lane's quarter of the `size` packed codes at byte `row` of `area`.

    `row` is an offset and not a pointer, which saves an addition. 3-bit codes are a plane of their
    lower two bits, in the order of 2-bit ones, and then one of their highest bits, eight to a byte
    (see `turbojax.numerics.packing`): those of a lane's quarter are every second bit of half of
    that plane.
    """
    low = 2 if bits == 3 else bits
    plane = size * low // 8
    quarter, count = plane // 4, plane // 16
    out = unpack(load_words(area.at(row + here.t * quarter), count), low)
    if bits == 3:
        runs, parity = runs_of(bits), here.t >> 1
        place = area.at(row + ((here.t & 1) * quarter + plane))
        tops = [w >> parity for w in load_words(place, count)]
        for i, code in enumerate(out):
            word, run = divmod(i, runs)
            # From bit `2 run` to bit 2 of each byte.
            top = tops[word] << 2 if run == 0 else tops[word] >> (2 * run - 2)
            out[i] = (top & _TOP_BITS) | code
    return out


def channel_words(pointer: Pointer, here: Place, size: int, bits: int, scale: int = 1) -> list[Int]:
    """One number of `scale` bytes per channel, in the order of a key operand's words.

    With several bytes a number, each word is replaced by that many words.
    """
    runs = runs_of(bits)
    span = size // runs
    loaded = []
    for run in range(runs):
        at = pointer.at(here.t * (span // 4 * scale), run * span * scale)
        words = load_words(at, span // 16 * scale)
        loaded.append([words[i : i + scale] for i in range(0, len(words), scale)])
    return [word for group in zip(*loaded, strict=True) for words in group for word in words]


def scaled_queries(query: Query, scale: list[Int], here: Place) -> list[list[Int]]:
    """Operand words of each score tile: a plane of the query codes times their channels' scales."""
    is_high = here.g & 1
    # With 128 added, byte 1 is the rounded high part, and byte 0 the low part plus 128.
    bias = lane.integer(128)
    pick = is_high * 0x11 + 0x40
    flip = is_high.equals(0).where(0x80808080 - 2**32, 0)
    out = []
    for tile in query.codes:
        words = []
        for codes, word in zip(tile, scale, strict=True):
            x = [lane.dot4(word, code, bias) for code in codes]
            first = lane.permute_bytes(x[0], x[1], pick)
            second = lane.permute_bytes(x[2], x[3], pick)
            words.append(lane.permute_bytes(first, second, 0x5410) ^ flip)
        out.append(words)
    return out


def plain_queries(query: Query, here: Place) -> list[list[Int]]:
    """Operand words of each score tile if scales are 1: the low plane is the codes."""
    is_low = (here.g & 1).equals(0)
    return [[is_low.where(a | b | c | d, 0) for a, b, c, d in tile] for tile in query.codes]


def scores(
    shape: Shape, rows: Any, queries: list[list[Int]], zero: list[Int] | None
) -> list[list[Int]]:
    """Integer scores of each tile's query `t` with this lane's tokens.

    ``rows(i)`` gives the operand words of the lane's token number `i`; `zero` has those of the
    channels' zeros.
    """
    steps = range(0, len(queries[0]), 2)
    nothing = [lane.integer(0)] * 4
    starts = [nothing for _ in queries]
    if zero is not None:
        for tile, words in enumerate(queries):
            for k in steps:
                operand = [zero[k], zero[k], zero[k + 1], zero[k + 1]]
                starts[tile] = lane.matmul(operand, words[k : k + 2], starts[tile])
    out: list[list[Int]] = [[] for _ in queries]
    for i in range(0, shape.block // 8, 2):
        first, second = rows(i), rows(i + 1)
        for tile, words in enumerate(queries):
            c = starts[tile]
            for k in steps:
                operand = [first[k], second[k], first[k + 1], second[k + 1]]
                c = lane.matmul(operand, words[k : k + 2], c)
            out[tile] += [(c[1] << 8) + c[0], (c[3] << 8) + c[2]]
    return out


def token_words(shape: Shape, here: Place) -> list[Int]:
    """The first token of each of the lane's words of four."""
    runs = runs_of(shape.value_bits)
    span, parity, pair = shape.block // runs, here.g & 1, here.g >> 1
    out = []
    for e in range(shape.words):
        (even_word, even_run), (odd_word, odd_run) = (
            divmod(shape.words * half + e, runs) for half in (0, 1)
        )
        even, odd = (
            4 * word + span * run for word, run in ((even_word, even_run), (odd_word, odd_run))
        )
        out.append(pair * (span // 4) + (parity * (odd - even) + even))
    return out


@dataclasses.dataclass(frozen=True, eq=False)
class Weights:
    """A block's softmax."""

    words: list[list[Int]]  # packed weights of each score tile's query `t`
    maxima: list[Float]  # of these queries
    totals: list[Float]  # this lane's part of the sums of weights
    # Whether a tile's query sees any token of the block; None if all see all.
    seen: list[lane.Bool] | None
    nan_terms: list[Float]  # NaN where the scale of the scores is, 0 elsewhere


def softmax(
    products: list[list[Int]],
    query: Query,
    key_scale: Float,
    first_token: Int,
    tokens: list[Int],
    here: Place,
    n: Numerics,
    is_masked: bool,
) -> Weights:
    """A block's softmax relative to its own maximum, weights rounded (see `decode_reference`)."""
    words, maxima, totals, seen, nan_terms = [], [], [], [], []
    for tile, integers in enumerate(products):
        factor = query.scale[tile] * key_scale
        x, slope = [s.to_float() for s in integers], factor
        visible = None
        # Maxima of integers: of a NaN and a number, the float instruction gives the number.
        highest = x
        if is_masked:
            visible = _visible(query.position[tile], first_token, tokens, here, n)
            highest = [v.where(s, float("-inf")) for v, s in zip(visible, x, strict=True)]
        top = lane.tree(highest, lane.maximum)
        top = lane.reduce_lanes(top, lane.maximum, (4, 8, 16))
        is_seen = top > float("-inf")
        if n.soft_cap is not None:
            cap = functools.partial(warp.soft_cap, factor=factor * (1 / n.unit), cap=n.soft_cap)
            x, top = [cap(s) * n.unit for s in x], cap(top) * n.unit
            slope = lane.number(1.0)
        top = top * slope
        shift, nan = top, factor * 0.0
        if is_masked:
            top = is_seen.where(top, float("-inf"))
            shift, nan = is_seen.where(top, 0.0), is_seen.where(nan, 0.0)
            seen.append(is_seen)
        p = [n.exp(lane.fma(s, slope, -shift)) for s in x]
        if visible is not None:
            p = [v.where(w, 0.0) for v, w in zip(visible, p, strict=True)]
        maxima.append(top)
        totals.append(lane.tree(p, operator.add))
        nan_terms.append(nan)
        words.append([_pack(p[i : i + 4], here, n) for i in range(0, len(p), 4)])
    return Weights(words, maxima, totals, seen or None, nan_terms)


def _visible(
    position: Int, first: Int, tokens: list[Int], here: Place, n: Numerics
) -> list[lane.Bool]:
    out = []
    for start in tokens:
        for b in range(4):
            token = first + start + (here.rotation ^ b)
            mask = token <= position
            if n.window is not None:
                left, right = n.window
                mask = mask & (token >= position - left) & (token <= position + right)
            out.append(mask)
    return out


def _pack(p: list[Float], here: Place, n: Numerics) -> Int:
    # The sum's low byte is the rounded weight.
    a, b, c, d = (lane.fma(x, INT8_RANGE / n.largest, lane.ROUNDER).as_int() for x in p)
    low, high = lane.permute_bytes(a, b, 0x0040), lane.permute_bytes(c, d, 0x0040)
    return lane.permute_bytes(lane.permute_bytes(low, high, 0x5410), 0, here.selector)


def _for_outputs(values: list[Any], tile: int, here: Place) -> tuple[Any, Any]:
    """From numbers of score tiles' queries, those of queries ``2 t, 2 t + 1`` of an output tile."""
    column = (here.t & 1) * 2
    own = here.g << 2
    pair = []
    for i in (0, 1):
        source = own + column + i
        x = lane.from_lane(values[2 * tile], source)
        if len(values) > 1:
            x = (here.t < 2).where(x, lane.from_lane(values[2 * tile + 1], source))
        pair.append(x)
    return pair[0], pair[1]


def weight_operands(shape: Shape, words: list[list[Int]], tile: int, here: Place) -> list[Int]:
    """Operand words of an output tile's weights, for tokens as `token_words` orders them."""
    out = []
    for a in range(2 * shape.words):
        half, e = divmod(a, shape.words)
        source = (((here.t << 1) + half) << 2) + (here.g & 3)
        word = lane.from_lane(words[2 * tile][e], source)
        if len(words) > 1:
            other = lane.from_lane(words[2 * tile + 1][e], source)
            word = (here.g < 4).where(word, other)
        out.append(word)
    return out


def add_block(
    shape: Shape,
    state: State,
    weights: Weights,
    rows: Any,
    channels: tuple[list[Int], list[Int]] | None,
    value_scale: Float,
    here: Place,
    n: Numerics,
) -> State:
    """Adds a block's weighted values to the running softmax.

    ``rows(i)`` gives the operand words of the lane's channel number `i`; `channels` are the scales
    and zeros of the lane's channels, four to a word, or None if they are 1 and 0.
    """
    alphas, factors, maxima, totals = [], [], [], []
    for tile, top in enumerate(weights.maxima):
        new = lane.maximum(state.maxima[tile], top)
        shift = new
        if weights.seen is not None:
            shift = (new > float("-inf")).where(new, 0.0)
        alpha, factor = n.exact_exp(state.maxima[tile] - shift), n.exact_exp(top - shift)
        total = lane.fma(weights.totals[tile], factor, weights.nan_terms[tile])
        totals.append(lane.fma(state.totals[tile], alpha, total))
        factor = factor * value_scale * (n.largest / INT8_RANGE)
        if weights.seen is not None:
            factor = weights.seen[tile].where(factor, 0.0)
        alphas.append(alpha)
        factors.append(factor)
        maxima.append(new)
    outputs: list[Float] = []
    per_tile = shape.outputs // shape.output_tiles
    for tile in range(shape.output_tiles):
        operands = weight_operands(shape, weights.words, tile, here)
        outputs += _tile_outputs(
            shape,
            state.outputs[tile * per_tile : (tile + 1) * per_tile],
            operands,
            rows,
            channels,
            _for_outputs(alphas, tile, here),
            _for_outputs(factors, tile, here),
        )
    return State(outputs, maxima, totals)


def _tile_outputs(
    shape: Shape,
    outputs: list[Float],
    operands: list[Int],
    rows: Any,
    channels: tuple[list[Int], list[Int]] | None,
    alphas: tuple[Float, Float],
    factors: tuple[Float, Float],
) -> list[Float]:
    """One output tile: ``o * alpha + (values x weights) * scale * factor``."""
    ones = [lane.integer(_EVERY_BYTE)] * 4
    nothing = [lane.integer(0)] * 4
    sums = nothing
    for k in range(0, len(operands), 2):
        sums = lane.matmul(ones, operands[k : k + 2], sums)
    out = []
    for i in range(0, shape.head_dim // 8, 2):
        first, second = rows(i), rows(i + 1)
        c = nothing
        for k in range(0, len(operands), 2):
            operand = [first[k], second[k], first[k + 1], second[k + 1]]
            c = lane.matmul(operand, operands[k : k + 2], c)
        for half in (0, 1):
            scales = list(factors)
            pair = c[2 * half : 2 * half + 2]
            if channels is not None:
                word, byte = divmod(i + half, 4)
                scale, zero = (lane.signed_byte(x[word], byte) for x in channels)
                # Integers below 2**24, exact as float32.
                pair = [x + zero * s for x, s in zip(pair, sums[:2], strict=True)]
                scales = [scale.to_float() * f for f in factors]
            for j in (0, 1):
                o = outputs[2 * (i + half) + j]
                out.append(lane.fma(pair[j].to_float(), scales[j], o * alphas[j]))
    return out


# Queries: every warp quantizes them for itself, with the bits of `turbojax.quantizers` ------------

_TINY = 1.1754943508222875e-38


def load_query(
    a: warp.Arrays, at: warp.Program, shape: Shape, here: Place, factor: float, unit: float
) -> Query:
    """Loads and quantizes a program's queries; row ``head * T + token`` of its KV head."""
    width = 4 if a.dtype == "float32" else 2
    codes, scales, positions = [], [], []
    for number in range(shape.score_tiles):
        base = at.tile * shape.rows + 4 * number
        row = (base + (here.g >> 1)).minimum(a.rows - 1)
        index = (
            (at.batch * a.tokens + row % a.tokens) * a.heads + at.head * a.group + row // a.tokens
        )
        words = channel_words(
            a.query.times(index, a.head_dim * width), here, a.head_dim, shape.key_bits, width
        )
        x = [v for word in words for v in warp.numbers(word, a.dtype)]
        # The factor of the scores stays positive, so that it does not move the maximum.
        x = x if factor >= 0 else [-v for v in x]
        scale = row_scale(x)
        quantized = [row_code(v, scale) for v in x]
        codes.append(
            [
                [(c & 255) << (8 * i) for i, c in enumerate(quantized[k : k + 4])]
                for k in range(0, len(quantized), 4)
            ]
        )
        scales.append(lane.from_lane(scale, here.t << 3) * (abs(factor) * unit))
        positions.append(warp.position(base, here, a, at))
    return Query(codes, scales, positions)


def row_scale(x: list[Float]) -> Float:
    """Stage 1's scale (`scale_from_maximum`) of the row that four lanes share."""
    magnitudes = [lane.maximum(v, -v) for v in x]
    top: Any = magnitudes[0]
    bad: Any = lane.number(0.0)
    for v, m in zip(x, magnitudes, strict=True):
        top = lane.maximum(top, m)
        # Zero, or NaN for what is not finite.
        bad = lane.fma(v, 0.0, bad)
    top = lane.reduce_lanes(top, lane.maximum, (1, 2))
    bad = lane.reduce_lanes(bad, lambda a, b: a + b, (1, 2))
    scale = ((top * float32(1 / INT8_RANGE)).as_int() + 255) & -256
    value = scale.as_float()
    return (value < _TINY).where(1.0, value) + bad


def row_code(x: Float, scale: Float) -> Int:
    """``rint(x / scale)``, made exact by comparisons (`turbojax.numerics.int8`)."""
    limit = int(INT8_RANGE)
    return warp.settled_code(x, x / scale, scale, -limit, limit)
