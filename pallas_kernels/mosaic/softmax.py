"""One key block's softmax in registers: scores in, the second product's operand out."""

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any, Literal

import jax.experimental.mosaic.gpu as mgpu

from pallas_kernels.layouts import E4M3_MAX, INT8_RANGE, LOG2_E
from pallas_kernels.mosaic import lane
from pallas_kernels.mosaic.lane import Bool, Float, Int, fragments

_TINY = 2.0**-126


@dataclasses.dataclass(frozen=True)
class Exponential:
    """How the exponential of non-positive scores is computed.

    Attributes:
      kind: ``"exact"``: the hardware's power of two. ``"polynomial"``: SAS as it is defined, a
        power of the base times a cubic. ``"hardware"``: the hardware's power of two, and 0 below
        SAS's threshold: within 1.2e-3 of SAS, and faster.
      threshold: natural units, negative; below it SAS is 0. Not for ``"exact"``.
      coefficients: SAS's cubic on [0, 1), constant term first. Only for ``"polynomial"``.
      is_base_2: whether SAS counts powers of two. Only for ``"polynomial"``.
    """

    kind: Literal["exact", "hardware", "polynomial"] = "exact"
    threshold: float = -6.0
    coefficients: tuple[float, ...] = ()
    is_base_2: bool = False

    @property
    def unit(self) -> float:
        """Units of the arguments in one nat."""
        return 1.0 if self.kind == "polynomial" and not self.is_base_2 else LOG2_E


@dataclasses.dataclass(frozen=True)
class Policy:
    """What is static in a softmax.

    Attributes:
      exponential: see there.
      is_int8: weights become int8 with a scale per row and block; else e4m3 with a static one.
      scores_are_integers: whether scores come as int32.
      left: how far back a query sees, or None.
      right: how far ahead a query sees, or None.
      soft_cap: the scores' cap, or None.
    """

    exponential: Exponential
    is_int8: bool
    scores_are_integers: bool
    left: int | None
    right: int | None
    soft_cap: float | None

    @property
    def shift(self) -> float:
        """Added to exponents of two, to be divided out in the end.

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


def _tanh(x: Float, policy: Policy) -> Float:
    """In one instruction, within 2**-11, where weights have 4 bits; else as a quotient."""
    if not policy.is_int8:
        return lane.tanh(x)
    # The power is at most 1, so that nothing overflows.
    t = lane.exp2(lane.absolute(x) * (-2 * LOG2_E))
    one = lane.number(1.0)
    return lane.with_sign_of(x, (one + -t) * lane.reciprocal(one + t))


def _cap(x: Sequence[Float], factor: Float, policy: Policy) -> tuple[list[Float], Float]:
    """``x * factor`` capped if there is a cap, as numbers and what they are to be multiplied by."""
    if policy.soft_cap is None:
        return list(x), factor
    inside = factor * (1 / policy.soft_cap)
    gain = lane.number(policy.soft_cap * policy.exponential.unit)
    return [_tanh(v * inside, policy) for v in x], gain


def _visible(limits: tuple[Int, Int], half: int, columns: int, policy: Policy) -> list[Bool]:
    """For each of a row's columns whether the query sees the token it stands for.

    Keys are permuted within groups of 16: see `attention.attention`.

    Args:
      limits: the block's first query and the end of the keys, both relative to its first key.
      half: which of the thread's rows.
      columns: how many the thread holds of it.
      policy: what hides keys.
    """
    query, length = limits
    row, t = fragments.row_and_place()
    four_t = t * 4
    position = query + row + (8 * half)
    stop = length
    if policy.right is not None:
        stop = stop.minimum(position + (policy.right + 1))
    stop = stop - four_t
    masks = []
    for c in range(columns):
        token = lane.integer(16 * (c // 4) + c % 4)
        mask = token < stop
        if policy.left is not None:
            first = position - policy.left - four_t
            mask = mask & (token >= first)
        masks.append(mask)
    return masks


def maxima(
    scores: Any,
    m: Any,
    factors: Sequence[Any],
    limits: tuple[Any, Any] | None,
    policy: Policy,
) -> tuple[Any, ...]:
    """Row maxima of a tile of keys.

    Args:
      scores: ``[64, n]``, code products.
      m: ``[64]``, running maxima in the exponential's units.
      factors: scalars, of the scores of equal parts of the tile, in the exponential's units.
      limits: see `_visible`; None if every row sees every key.
      policy: what is static.

    Returns:
      ``[64]`` each: the tile's maxima, the new running ones, and the factor of what was summed
      before.
    """
    scores = mgpu.optimization_barrier(scores)  # not before the product is there
    bounds = _bounds(limits)
    state = []
    for half, (x, old) in enumerate(
        zip(fragments.by_row(scores), fragments.scalars(m), strict=True)
    ):
        top = lane.among_four(_largest(x, factors, bounds, half, policy), Float.maximum)
        [capped], gain = _cap([top], lane.number(1.0), policy)
        if policy.soft_cap is not None:
            # What is hidden stays below the cap.
            top = top.equals(-math.inf).where(top, capped * gain)
        new = old.maximum(top)
        scale = lane.number(LOG2_E / policy.exponential.unit)
        state.append((top, new, lane.exp2((old + -_finite(new)) * scale)))
    return tuple(fragments.row_array(pair) for pair in zip(*state, strict=True))


def _bounds(limits: tuple[Any, Any] | None) -> tuple[Int, Int] | None:
    if limits is None:
        return None
    [query], [length] = (fragments.scalars(x) for x in limits)
    return query, length


def _largest(
    x: list[Any],
    factors: Sequence[Any],
    limits: tuple[Int, Int] | None,
    half: int,
    policy: Policy,
) -> Float:
    """The maximum of what a thread holds of a row, scaled; ``-inf`` if all is hidden."""
    is_int, size = policy.scores_are_integers, len(x) // len(factors)
    lowest: Any = -(2**31) if is_int else -math.inf
    if limits is not None:
        masks = _visible(limits, half, len(x), policy)
        x = [k.where(v, lowest) for k, v in zip(masks, x, strict=True)]
    tops = []
    for i, factor in enumerate(factors):
        [c] = fragments.scalars(factor)
        top = lane.chain(x[i * size : (i + 1) * size], Int.maximum if is_int else Float.maximum)
        top = top.to_float() if is_int else top
        scaled = top * c
        if limits is not None:
            # Not times a factor that may be 0 or NaN.
            scaled = top.equals(float(lowest)).where(-math.inf, scaled)
        tops.append(scaled)
    return lane.tree(tops, Float.maximum)


def arguments(
    scores: Any,
    m: Any,
    factors: Sequence[Any],
    limits: tuple[Any, Any] | None,
    policy: Policy,
) -> Any:
    """Scores minus the running maxima, float32 ``[64, n]``, as `weigh` takes them.

    Args:
      scores: see `maxima`.
      m: `maxima`'s second result.
      factors: see `maxima`.
      limits: see `maxima`.
      policy: what is static.
    """
    bounds = _bounds(limits)
    hidden = math.inf if policy.exponential.kind == "polynomial" else -math.inf
    rows = []
    for half, (x, maximum) in enumerate(
        zip(fragments.by_row(scores), fragments.scalars(m), strict=True)
    ):
        if policy.scores_are_integers:
            x = [v.to_float() for v in x]
        size, row = len(x) // len(factors), []
        for i, factor in enumerate(factors):
            [c] = fragments.scalars(factor)
            part, c = _cap(x[i * size : (i + 1) * size], c, policy)
            row += _arguments(part, _finite(maximum), c, policy)
        if bounds is not None:
            masks = _visible(bounds, half, len(x), policy)
            row = [k.where(v, hidden) for k, v in zip(masks, row, strict=True)]
        rows.append(row)
    # Here, not where they are used.
    return mgpu.optimization_barrier(fragments.of_rows(rows))


def _finite(m: Float) -> Float:
    """A running maximum that can be subtracted: 0 in rows where nothing was visible yet."""
    return m.equals(-math.inf).where(0.0, m)


def weigh(scores: Any, top: Any, m: Any, alpha: Any, l: Any, policy: Policy) -> tuple[Any, ...]:
    """Weights of `arguments`, with `maxima`'s results and the sums of each thread's own columns.

    Returns:
      weights float32 ``[64, n]`` for `pack`; the new sums; and the unit of an int8 row's weights,
      0 in a row that sees nothing.
    """
    rows, state = [], []
    for x, *row in zip(
        fragments.by_row(scores), *(fragments.scalars(a) for a in (top, m, alpha, l)), strict=True
    ):
        largest, new, a, total = row
        p = _exponentials(x, policy)
        total = total.fma(a, lane.chain(p, operator.add))
        p, unit = _scale(p, largest, _finite(new), policy)
        if policy.is_int8:
            unseen = largest.equals(-math.inf)
            unit = unseen.where(0.0, unit)
        rows.append(p)
        state.append((total, unit))
    # Not after the next products are started.
    weights = mgpu.optimization_barrier(fragments.of_rows(rows))
    return weights, *(fragments.row_array(pair) for pair in zip(*state, strict=True))


def pack(weights: Any, policy: Policy) -> Any:
    """What `weigh` returns, rounded: the second product's 8-bit register operand.

    By itself, because the compiler overlaps no product with instructions that write the registers
    which another one reads: not before the product that uses them now is done.
    """
    pack_four = lane.pack_bytes if policy.is_int8 else lane.pack_e4m3
    rows = []
    for row in fragments.by_row(weights):
        x = [v.as_int() for v in row] if policy.is_int8 else row
        rows.append([pack_four(x[i : i + 4]) for i in range(0, len(x), 4)])
    return fragments.operand(rows, policy.is_int8)


def _scale(p: list[Float], top: Float, shift: Float, policy: Policy) -> tuple[list[Float], Float]:
    """Weights as `pack` takes them, and what an int8 code stands for."""
    if not policy.is_int8:
        if policy.exponential.kind == "hardware":
            gain = lane.number(E4M3_MAX * 2.0 ** (-policy.shift))
            p = [v * gain for v in p]
        return p, lane.number(1.0)
    [largest] = exponentials([top], shift, lane.number(1.0), policy)
    nothing = largest < lane.number(_TINY * INT8_RANGE if not policy.shift else _TINY)
    # Powers of two on the way keep everything in range: weights may be as small as 2**-126.
    inverse = lane.reciprocal(largest) * (INT8_RANGE / 128)
    inverse = nothing.where(0.0, inverse)
    unit = largest * (2.0 ** (-policy.shift) / INT8_RANGE)
    unit = nothing.where(1.0, unit)
    # The sum's last bit counts 1/128: what is in its low byte is the code, rounded half to even.
    rounder = lane.number(lane.ROUNDER / 128)
    return [v.fma(inverse, rounder) for v in p], unit


def accumulate(output: Any, product: Any, alpha: Any, unit: Any, policy: Policy) -> Any:
    """What was summed before, rescaled, and the second product of one block.

    Args:
      output: float32 ``[64, H]``.
      product: ``[64, H]``.
      alpha: ``[64]``.
      unit: ``[64]``; None in the e4m3 modes, whose unit is left to the end.
      policy: what is static.
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
    # Not later: the product's registers are needed for the next one.
    return mgpu.optimization_barrier(fragments.of_rows(rows))


def finish(m: Any, l: Any, last: Any, scale: Any, *output: Any, policy: Policy) -> tuple[Any, ...]:
    """Normalized outputs and log-sum-exps; 0 and ``-inf`` in rows that saw nothing.

    Args:
      m: ``[64]``.
      l: ``[64]``, sums of each thread's own columns.
      last: int32 scalar: rows from there on are padding.
      scale: float32 scalar, of the values.
      output: float32 ``[64, n]``, pieces of the rows.
      policy: what is static.

    Returns:
      the outputs, and the log-sum-exps ``[64]``.
    """
    [stop], [v_scale] = fragments.scalars(last), fragments.scalars(scale)
    row, _ = fragments.row_and_place()
    zero, infinite = lane.number(0.0), lane.number(-math.inf)
    # A power of two on the way: sums may be as small as 2**-118.
    power = 2.0 ** -math.floor(math.log2(policy.sum_unit))
    gain = lane.number(policy.sum_unit * power / policy.output_unit)
    weights, lse = [], []
    for half, (maximum, part) in enumerate(
        zip(fragments.scalars(m), fragments.scalars(l), strict=True)
    ):
        total = lane.among_four(part, operator.add)
        is_padding = row + (8 * half) >= stop
        nothing = is_padding | total.equals(zero)
        weights.append((nothing, lane.reciprocal(total * power) * (gain * v_scale)))
        natural = maximum * (1 / policy.exponential.unit)
        logarithm = lane.log2_of_any(total) + (-math.log2(policy.sum_unit))
        value = logarithm.fma(lane.number(1 / LOG2_E), natural)
        lse.append(nothing.where(infinite, value))
    pieces = []
    for piece in output:
        rows = zip(fragments.by_row(piece), weights, strict=True)
        pieces.append(
            fragments.of_rows([[no.where(zero, v * w) for v in x] for x, (no, w) in rows])
        )
    return *pieces, fragments.row_array(lse)
