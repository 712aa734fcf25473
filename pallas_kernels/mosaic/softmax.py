"""One key block's softmax in registers: scores in, the second product's operand out."""

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any, Literal

import jax.experimental.mosaic.gpu as mgpu

from pallas_kernels.layouts import E4M3_MAX, INT8_RANGE, LOG2_E
from pallas_kernels.mosaic import bias, lane
from pallas_kernels.mosaic.lane import Bool, Float, Int, fragments

_TINY = 2.0**-126


@dataclasses.dataclass(frozen=True)
class Exponential:
    """How the exponential of non-positive scores is computed."""

    # ``"exact"``: the hardware's power of two. ``"polynomial"``: SAS as it is defined, a power of
    # the base times a cubic. ``"hardware"``: the hardware's power of two, and 0 below SAS's
    # threshold: within 1.2e-3 of SAS, and faster.
    kind: Literal["exact", "hardware", "polynomial"] = "exact"
    threshold: float = -6.0  # natural units, negative; below it SAS is 0. Not for ``"exact"``.
    # SAS's cubic on [0, 1), constant term first. Only for ``"polynomial"``.
    coefficients: tuple[float, ...] = ()
    is_base_2: bool = False  # whether SAS counts powers of two. Only for ``"polynomial"``.

    @property
    def unit(self) -> float:
        return 1.0 if self.kind == "polynomial" and not self.is_base_2 else LOG2_E


@dataclasses.dataclass(frozen=True)
class Policy:
    exponential: Exponential
    is_int8: bool  # weights become int8 with a scale per row and block; else e4m3 with a static one
    left: int | None  # how far back a query sees, or None
    right: int | None  # how far ahead a query sees, or None
    soft_cap: float | None

    @property
    def shift(self) -> float:
        """Added to exponents of two, and divided out in the end.

        The hardware's powers of two below -126 are 0: SAS's threshold is moved there, and costs
        nothing. With the exact exponential of e4m3 weights it is their scale.
        """
        if self.exponential.kind == "hardware":
            return -126.0 - self.exponential.threshold * LOG2_E
        if self.exponential.kind == "exact" and not self.is_int8:
            return math.log2(E4M3_MAX)
        return 0.0

    @property
    def sum_unit(self) -> float:
        """The number that stands for 1 in row sums."""
        if self.exponential.kind == "polynomial" and not self.is_int8:
            return E4M3_MAX
        return float(2.0**self.shift)

    @property
    def output_unit(self) -> float:
        """The number that stands for 1 in unnormalized outputs, apart from the values' scales."""
        return 1.0 if self.is_int8 else E4M3_MAX


def exponentials(x: Sequence[Float], shift: Float, factor: Float, policy: Policy) -> list[Float]:
    """``exp(x * factor - shift)`` in the policy's units."""
    return _exponentials(_arguments(x, shift, factor, policy), policy)


def _arguments(x: Sequence[Float], shift: Float, factor: Float, policy: Policy) -> list[Float]:
    """``x * factor - shift``, as `_exponentials` takes it: one instruction each."""
    if policy.exponential.kind == "polynomial":
        return [v.fma(-factor, shift) for v in x]
    low = lane.number(policy.shift) + -shift if policy.shift else -shift
    return [v.fma(factor, low) for v in x]


def _exponentials(x: Sequence[Float], policy: Policy) -> list[Float]:
    e = policy.exponential
    if e.kind != "polynomial":
        return [lane.exp2(v) for v in x]
    gain = 1.0 if policy.is_int8 else E4M3_MAX
    return [_sas(v, e, gain) for v in x]


def _sas(y: Float, e: Exponential, gain: float) -> Float:
    """`gain` times SAS of ``-y`` as it is defined."""
    # Rounding may leave the row's maximum slightly below 0; NaN survives, with the sum.
    y = (y < 0.0).where(0.0, y)
    whole = lane.add_rounder(y) + -lane.ROUNDER
    fraction = y + -whole
    *lower, highest = (c * gain for c in e.coefficients)
    value = fraction.fma(lane.number(highest), lane.number(lower[-1]))
    for c in reversed(lower[:-1]):
        value = value.fma(fraction, lane.number(c))
    power = lane.exp2(whole * (-LOG2_E / e.unit))
    below = lane.number(-e.threshold * e.unit) < y
    return below.where(lane.number(0.0), value * power)


def tanh(x: Float) -> Float:
    """Within a few units in the last place of 1. The power is at most 1, so nothing overflows."""
    t = lane.exp2(lane.absolute(x) * (-2 * LOG2_E))
    one = lane.number(1.0)
    return lane.with_sign_of(x, (one + -t) * lane.reciprocal(one + t))


def _tanh(x: Float, policy: Policy) -> Float:
    """`tanh`; for e4m3 weights, which have 4 bits, one instruction, within 2**-11."""
    return tanh(x) if policy.is_int8 else lane.tanh(x)


def _capped(x: Float, factor: Float, policy: Policy) -> Float:
    if policy.soft_cap is None:
        return x * factor
    inside = factor * (1 / policy.soft_cap)
    return _tanh(x * inside, policy) * (policy.soft_cap * policy.exponential.unit)


def _visible(
    limits: tuple[Int, Int],
    half: int,
    columns: int,
    policy: Policy,
    own: tuple[Sequence[Int], Sequence[Int], Int] | None = None,
) -> list[Bool]:
    """For each of a row's columns, whether the query sees the token that it stands for.

    Keys are permuted within groups of 16: see `attention.attention`. `limits` are the block's first
    query and the end of the keys, both relative to its first key; `half` is which of the thread's
    rows. `own` are each row's own first key and the one after its last, and the block's first.
    """
    query, length = limits
    row, t = fragments.row_and_place()
    four_t = t * 4
    position = query + row + (8 * half)
    stop = length
    if policy.right is not None:
        stop = stop.minimum(position + (policy.right + 1))
    first = None if policy.left is None else position - policy.left
    if own is not None:
        starts, ends, key = own
        start = starts[half] - key
        first = start if first is None else first.maximum(start)
        stop = stop.minimum(ends[half] - key)
    stop = stop - four_t
    first = None if first is None else first - four_t
    masks = []
    for c in range(columns):
        token = lane.integer(16 * (c // 4) + c % 4)
        mask = token < stop
        if first is not None:
            mask = mask & (token >= first)
        masks.append(mask)
    return masks


def seen(
    scores: Any,
    factors: Sequence[Any],
    limits: tuple[Any, Any] | None,
    policy: Policy,
    ids: tuple[Any, Any] | None = None,
    linear: tuple[Any, Any] | None = None,
    of_rows: tuple[Any, Any, Any] | None = None,
    of_pairs: tuple[Any, bias.Bias] | None = None,
) -> Any:
    """Scores of a tile of keys, float32 ``[64, n]``, capped, ``-inf`` where keys are hidden.

    They are in the exponential's units, so their factor is 1. For tiles in which there is something
    to cap or to hide; in others, `step` or `maxima` and `arguments` take the code products `scores`
    and scale them on the way. `factors` are scalars, of the scores of equal parts of the tile, in
    the exponential's units, with a cap in those of the scores. `limits` are those of `_visible`, or
    None if every row sees every key. With `ids`, int32 ``[64]`` of rows and ``[n]`` of columns, a
    row sees only its own. `linear` are scalars: the slope by which scores fall with the distance,
    in the exponential's units, and the first query's position relative to the tile's first key.
    With `of_rows`, beside `limits`, rows see keys from the first number to before the second alone,
    int32 ``[64]`` each; the third is the number of the tile's first key, a scalar. `of_pairs` are a
    bias' words, as `bias.of_scores` loads them.
    """
    scores = mgpu.optimization_barrier(scores)  # not before the product is done
    bounds = None
    if limits is not None:
        [query], [length] = (fragments.scalars(x) for x in limits)
        bounds = (query, length)
    if of_rows is not None:
        starts, ends, [key] = (fragments.scalars(x) for x in of_rows)
        of_rows = starts, ends, key
    biases = None if of_pairs is None else bias.numbers(*of_pairs)
    rows = []
    for half, x in enumerate(fragments.by_row(scores)):
        size, row = len(x) // len(factors), []
        for i, factor in enumerate(factors):
            [c] = fragments.scalars(factor)
            row += [_capped(v, c, policy) for v in _floats(x[i * size : (i + 1) * size])]
        if linear is not None:
            row = _fallen(row, linear, half)
        if biases is not None:
            row = bias.added(row, biases[half], policy.exponential.unit)
        if ids is not None:
            own, others = (fragments.scalars(x) for x in ids)
            row = [
                own[half].equals(k).where(v, -math.inf) for k, v in zip(others, row, strict=True)
            ]
        if bounds is not None:
            masks = _visible(bounds, half, len(x), policy, of_rows)
            row = [k.where(v, -math.inf) for k, v in zip(masks, row, strict=True)]
        rows.append(row)
    # Computed now, because they replace the products in registers.
    return mgpu.optimization_barrier(fragments.of_rows(rows))


def _fallen(x: Sequence[Float], linear: tuple[Any, Any], half: int) -> list[Float]:
    """Scores of a row less the slope times the distance of each of its keys."""
    [slope], [query] = (fragments.scalars(a) for a in linear)
    row, t = fragments.row_and_place()
    distance = (query + row + 8 * half - t * 4).to_float()
    tokens = [16 * (c // 4) + c % 4 for c in range(len(x))]
    return [
        lane.absolute(distance + lane.number(-float(token))).fma(-slope, v)
        for token, v in zip(tokens, x, strict=True)
    ]


def _floats(x: Sequence[Any]) -> list[Float]:
    return [v.to_float() if isinstance(v, Int) else v for v in x]


def step(scores: Any, m: Any, l: Any, factors: Sequence[Any], policy: Policy) -> tuple[Any, ...]:
    """One tile of Algorithm 1, up to the second product.

    `scores` ``[64, n]`` are code products or what `seen` returns, `m` the running maxima in the
    exponential's units, `l` the running sums of each thread's own columns, both ``[64]``, and
    `factors` scalars, of the scores of equal parts of the tile, in the exponential's units. Returns
    weights float32 ``[64, n]`` for `pack`; the new `m` and `l`; the factor of the sums before; and
    the unit of an int8 row's weights, 0 in a row that sees nothing.
    """
    scores = mgpu.optimization_barrier(scores)  # not before the product is done
    rows, state = [], []
    for x, old, total in zip(
        fragments.by_row(scores), fragments.scalars(m), fragments.scalars(l), strict=True
    ):
        top, new, alpha = _row_maxima(x, old, factors, policy)
        y = _row_arguments(x, new, factors, policy)
        p, total, unit = _row_weights(y, top, new, alpha, total, policy)
        rows.append(p)
        state.append((new, total, alpha, unit))
    # Computed before the next products are started.
    weights = mgpu.optimization_barrier(fragments.of_rows(rows))
    return weights, *(fragments.row_array(pair) for pair in zip(*state, strict=True))


def maxima(scores: Any, m: Any, factors: Sequence[Any], policy: Policy) -> tuple[Any, ...]:
    """The first part of `step`: a tile's maxima, the new running ones, factors of sums before."""
    scores = mgpu.optimization_barrier(scores)  # not before the product is done
    state = [
        _row_maxima(x, old, factors, policy)
        for x, old in zip(fragments.by_row(scores), fragments.scalars(m), strict=True)
    ]
    return tuple(fragments.row_array(pair) for pair in zip(*state, strict=True))


def _row_maxima(
    x: Sequence[Any], old: Float, factors: Sequence[Any], policy: Policy
) -> tuple[Float, Float, Float]:
    size, tops = len(x) // len(factors), []
    for i, factor in enumerate(factors):
        [c] = fragments.scalars(factor)
        top = lane.chain(x[i * size : (i + 1) * size], type(x[0]).maximum)
        tops += [v * c for v in _floats([top])]
    top = lane.among_four(lane.tree(tops, Float.maximum), Float.maximum)
    new = old.maximum(top)
    scale = lane.number(LOG2_E / policy.exponential.unit)
    return top, new, lane.exp2((old + -_finite(new)) * scale)


def to_floats(scores: Any) -> Any:
    """Int32 products of codes as float32, in the same registers."""
    rows = [_floats(x) for x in fragments.by_row(scores)]
    return mgpu.optimization_barrier(fragments.of_rows(rows))  # computed here


def arguments(scores: Any, m: Any, factors: Sequence[Any], policy: Policy) -> Any:
    """Scores minus the new running maxima `m`, float32 ``[64, n]``, as `weigh` takes them."""
    rows = [
        _row_arguments(x, new, factors, policy)
        for x, new in zip(fragments.by_row(scores), fragments.scalars(m), strict=True)
    ]
    # Computed here, not where they are used.
    return mgpu.optimization_barrier(fragments.of_rows(rows))


def _row_arguments(
    x: Sequence[Any], new: Float, factors: Sequence[Any], policy: Policy
) -> list[Float]:
    size, row = len(x) // len(factors), []
    for i, factor in enumerate(factors):
        [c] = fragments.scalars(factor)
        row += _arguments(_floats(x[i * size : (i + 1) * size]), _finite(new), c, policy)
    return row


def _finite(m: Float) -> Float:
    """A running maximum that can be subtracted: 0 in rows where nothing was visible yet."""
    return m.equals(-math.inf).where(0.0, m)


def weigh(x: Any, top: Any, m: Any, alpha: Any, l: Any, policy: Policy) -> tuple[Any, ...]:
    """The rest of `step`, with `maxima`'s results: weights, new sums, the unit of int8 weights."""
    rows, state = [], []
    for y, largest, new, factor, total in zip(
        fragments.by_row(x), *(fragments.scalars(a) for a in (top, m, alpha, l)), strict=True
    ):
        p, *rest = _row_weights(y, largest, new, factor, total, policy)
        rows.append(p)
        state.append(rest)
    # Computed before the next products are started.
    weights = mgpu.optimization_barrier(fragments.of_rows(rows))
    return weights, *(fragments.row_array(pair) for pair in zip(*state, strict=True))


def _row_weights(
    y: list[Float], top: Float, new: Float, alpha: Float, total: Float, policy: Policy
) -> tuple[list[Float], Float, Float]:
    p = _exponentials(y, policy)
    total = total.fma(alpha, lane.chain(p, operator.add))
    p, unit = _scale(p, top, _finite(new), policy)
    if policy.is_int8:
        unit = top.equals(-math.inf).where(0.0, unit)
    return p, total, unit


def pack(weights: Any, policy: Policy) -> Any:
    """Rounds weights of `step` or `weigh` to the second product's 8-bit register operand.

    A separate step, because the compiler overlaps no product with instructions that write the
    registers that another product reads: not before the product that uses them now is done.
    """
    pack_four = lane.pack_bytes if policy.is_int8 else lane.pack_e4m3
    rows = []
    for row in fragments.by_row(weights):
        x = [v.as_int() for v in row] if policy.is_int8 else row
        rows.append([pack_four(x[i : i + 4]) for i in range(0, len(x), 4)])
    return fragments.operand(rows, policy.is_int8)


def _scale(p: list[Float], top: Float, shift: Float, policy: Policy) -> tuple[list[Float], Float]:
    """Weights as `pack` takes them, and the value of an int8 code."""
    if not policy.is_int8:
        if policy.exponential.kind == "hardware":
            gain = lane.number(E4M3_MAX * 2.0 ** (-policy.shift))
            p = [v * gain for v in p]
        return p, lane.number(1.0)
    [largest] = exponentials([top], shift, lane.number(1.0), policy)
    nothing = largest < lane.number(_TINY * INT8_RANGE if not policy.shift else _TINY)
    # Powers of two in between keep everything in range: weights may be as small as 2**-126.
    inverse = lane.reciprocal(largest) * (INT8_RANGE / 128)
    inverse = nothing.where(0.0, inverse)
    unit = largest * (2.0 ** (-policy.shift) / INT8_RANGE)
    unit = nothing.where(1.0, unit)
    # The sum's last bit counts 1/128: what is in its low byte is the code, rounded half to even.
    rounder = lane.number(lane.ROUNDER / 128)
    return [v.fma(inverse, rounder) for v in p], unit


def accumulate(output: Any, product: Any, alpha: Any, unit: Any, policy: Policy) -> Any:
    """The sums before, rescaled by `alpha`, plus the second product of one block, both ``[64, H]``.

    `unit` ``[64]`` is that of int8 weights; None in the e4m3 modes, whose unit is left to the end.
    """
    product = mgpu.optimization_barrier(product)
    units = [None, None] if unit is None else fragments.scalars(unit)
    rows = []
    for old, new, a, u in zip(
        fragments.by_row(output),
        fragments.by_row(product),
        fragments.scalars(alpha),
        units,
        strict=True,
    ):
        if u is not None:
            new = [v.to_float() * u for v in new]
        rows.append([x.fma(a, y) for x, y in zip(old, new, strict=True)])
    # Computed now: the next product needs this one's registers.
    return mgpu.optimization_barrier(fragments.of_rows(rows))


def finish(
    output: Any,
    m: Any,
    l: Any,
    last: Any,
    scale: Any,
    policy: Policy,
    channels: int,
    width: int,
    sink: Any = None,
) -> tuple[Any, ...]:
    """Normalized outputs and log-sum-exps ``[64]``; 0 and ``-inf`` in rows that saw nothing.

    The float32 `sink` is a score with a weight and no value, which all real rows see: the results
    are 0 and the sink in those that saw nothing else. `output` is float32 ``[64, H]``, `l` holds
    sums of each thread's own columns, rows from `last` on are padding, and `scale` is that of the
    values. Outputs are ``channels / width`` arrays ``[64, width]`` of the first channels.
    """
    [stop], [v_scale] = fragments.scalars(last), fragments.scalars(scale)
    row, _ = fragments.row_and_place()
    zero, infinite = lane.number(0.0), lane.number(-math.inf)
    # Scaled by a power of two in between: sums may be as small as 2**-118.
    power = 2.0 ** -math.floor(math.log2(policy.sum_unit))
    gain = lane.number(policy.sum_unit * power / policy.output_unit)
    rows, lse = [], []
    for half, (x, maximum, part) in enumerate(
        zip(fragments.by_row(output), fragments.scalars(m), fragments.scalars(l), strict=True)
    ):
        total = lane.among_four(part, operator.add)
        is_padding = row + (8 * half) >= stop
        nothing = is_padding | total.equals(zero)
        weight = lane.reciprocal(total * power) * (gain * v_scale)
        row_of_outputs = [nothing.where(zero, v * weight) for v in x]
        natural = maximum * (1 / policy.exponential.unit)
        logarithm = lane.log2_of_any(total) + (-math.log2(policy.sum_unit))
        value = logarithm.fma(lane.number(1 / LOG2_E), natural)
        value = nothing.where(infinite, value)
        if sink is not None:
            [weightless] = fragments.scalars(sink)
            share, with_sink = _with_sink(value, weightless)
            share = is_padding.where(1.0, share)
            row_of_outputs = [v * share for v in row_of_outputs]
            value = is_padding.where(infinite, with_sink)
        rows.append(row_of_outputs)
        lse.append(value)
    columns = width // 4
    parts = [
        fragments.of_rows([x[i : i + columns] for x in rows])
        for i in range(0, channels // 4, columns)
    ]
    return *parts, fragments.row_array(lse)


def _with_sink(value: Float, sink: Float) -> tuple[Float, Float]:
    """The share of the weights that a row keeps beside a sink, and the log-sum-exp of both."""
    distance = (sink + -value) * LOG2_E
    share = lane.reciprocal(lane.exp2(distance) + lane.number(1.0))
    rest = lane.log2_of_any(lane.exp2(-lane.absolute(distance)) + lane.number(1.0))
    total = (value < sink).where(sink, value) + rest * (1 / LOG2_E)
    # Where neither has weight, the distance is NaN.
    nothing = value.equals(-math.inf)
    is_same = sink.equals(-math.inf)
    return (nothing & is_same).where(1.0, share), nothing.where(sink, total)
