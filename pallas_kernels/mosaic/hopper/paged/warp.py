"""A warp's share of a program of paged attention: blocks as their copies arrive."""

import operator
from typing import Any

from pallas_kernels.mosaic import lane
from pallas_kernels.mosaic.hopper.decode.block import soft_cap
from pallas_kernels.mosaic.hopper.decode.result import write_partial
from pallas_kernels.mosaic.hopper.paged.fp8 import Fp8
from pallas_kernels.mosaic.hopper.paged.query import load_query
from pallas_kernels.mosaic.hopper.paged.turbo4 import Turbo4
from pallas_kernels.mosaic.hopper.paged.types import (
    BARRIER_BYTES,
    LOG2_E,
    Arrays,
    Place,
    Program,
    Query,
    Settings,
    State,
)
from pallas_kernels.mosaic.lane import Float, Int, Pointer

Products = Turbo4 | Fp8


def walk(
    a: Arrays,
    at: Program,
    here: Place,
    products: Products,
    smem: tuple[Pointer, Pointer],
    s: Settings,
) -> State:
    """Attends to every block of the program that is this warp's.

    Args:
      a: arrays.
      at: the program.
      here: the lane's place.
      products: how to multiply with what pages hold.
      smem: the warp's slots and barriers.
      s: settings.
    """
    slots, barriers = smem
    stage = s.block * s.token_bytes(a.head_dim)
    warp = lane.uniform(lane.thread() >> 5)
    first = at.start + warp
    pages = [_page_of(a, at, here, first + i * s.warps, s) for i in range(s.stages)]
    with lane.when(here.is_first):
        for i in range(s.stages):
            lane.init_barrier(barriers.at(BARRIER_BYTES * i))
        lane.publish_barriers()
    lane.warp_barrier()
    for i, page in enumerate(pages):
        slot, barrier = slots.at(i * stage), barriers.at(BARRIER_BYTES * i)
        _start_copies(a, at, here, first + i * s.warps, page, (slot, barrier), s)
    query = load_query(a, at, here, products, s)

    def step(block: Int, carry: list[Any]) -> list[Any]:
        *flat, number, parity = carry
        later = block + s.warps * s.stages
        page = _page_of(a, at, here, later, s)
        barrier, slot = barriers.at(number * BARRIER_BYTES), slots.at(number * stage)
        lane.wait(barrier, parity)
        place = slot, block * s.block
        state = _attend(State.of(flat, s.tiles), place, at, query, here, products, s)
        lane.warp_barrier()
        _start_copies(a, at, here, later, page, (slot, barrier), s)
        is_last = number.equals(s.stages - 1)
        return [
            *state.flat(),
            is_last.where(0, number + 1),
            is_last.where(parity ^ 1, parity),
        ]

    state = State.empty(s.tiles, a.head_dim // 8)
    carry = [*state.flat(), lane.integer(0), lane.integer(0)]
    *flat, _, _ = lane.loop(first, at.stop, s.warps, carry, step)
    return State.of(flat, s.tiles)


def _pages_per_block(a: Arrays, s: Settings) -> int:
    return max(1, s.block // a.page_size)


def _page_of(a: Arrays, at: Program, here: Place, block: Int, s: Settings) -> Int:
    """The number of the page from which this lane copies; any, where it copies nothing."""
    number = block * s.block // a.page_size
    if _pages_per_block(a, s) > 1:
        number = number + here.number
    return a.tables.times(at.batch, 4 * a.max_pages).at(number.minimum(a.max_pages - 1) << 2).word()


def _start_copies(
    a: Arrays,
    at: Program,
    here: Place,
    block: Int,
    page: Int,
    target: tuple[Pointer, Pointer],
    s: Settings,
) -> None:
    """Starts to copy a block of the program: its pages that hold tokens, and no others."""
    slot, barrier = target
    count, size = _pages_per_block(a, s), min(a.page_size, s.block)
    row, begin = s.row_bytes(a.head_dim), block * s.block
    with lane.when(block < at.stop):
        held = (at.length - begin + (size - 1)) // size
        with lane.when(here.is_first):
            lane.expect_bytes(barrier, held.minimum(count) * (size * s.token_bytes(a.head_dim)))
        lane.warp_barrier()
        with lane.when(here.number < held.minimum(count)):
            first = (page * a.kv_heads + at.head) * a.page_size
            if a.page_size > s.block:
                first = first + begin % a.page_size
            offset = 0
            sources = [(a.pages.key, row), (a.pages.value, row)]
            if s.has_norms:
                sources += [(a.pages.key_norm, 2), (a.pages.value_norm, 2)]
            for source, width in sources:
                to = slot.at(here.number * (size * width), offset)
                lane.copy(source.times(first, width), to, size * width, barrier)
                offset += s.block * width


def _attend(
    state: State,
    place: tuple[Pointer, Int],
    at: Program,
    query: Query,
    here: Place,
    products: Products,
    s: Settings,
) -> State:
    """Adds the block in shared memory, given its place there, and its first token."""
    slot, begin = place
    lost = products.unseen(slot, begin, at, here)
    alphas, weights, masks, maxima, totals = [], [], [], [], []
    first = begin + here.g * s.held
    for tile, x in enumerate(products.scores(slot, query, here)):
        if s.soft_cap is not None:
            one = lane.number(1.0)
            x = [soft_cap(v, factor=one, cap=s.soft_cap) * LOG2_E for v in x]
        seen = _visible(query.position[tile] - first, here, s)
        x = [mask.where(v, float("-inf")) for mask, v in zip(seen, x, strict=True)]
        # Of NaN and a number the number; the sum of weights is NaN then.
        top = lane.reduce_lanes(lane.tree(x, lane.maximum), lane.maximum, (4, 8, 16))
        new = lane.maximum(state.maxima[tile], top)
        shift = (new > float("-inf")).where(new, 0.0)
        alpha = lane.exp2(state.maxima[tile] - shift)
        p = [lane.exp2(v - shift) for v in x]
        alphas.append(alpha)
        weights.append(p)
        masks.append(seen)
        maxima.append(new)
        total = lane.tree(p, operator.add)
        totals.append(lane.fma(state.totals[tile], alpha, total))
    outputs = products.add_values(state.outputs, slot, weights, masks, alphas, lost, here)
    return State(outputs, maxima, totals)


def _visible(distance: Int, here: Place, s: Settings) -> list[lane.Bool]:
    """Which of the lane's tokens are seen by a query `distance` tokens after the first of them."""
    out = []
    for i in range(s.held):
        token = here.odd ^ i
        mask = token <= distance
        if s.window is not None:
            mask = mask & (token >= distance - s.window[0]) & (token <= distance + s.window[1])
        out.append(mask)
    return out


def keep(
    state: State, area: Pointer, here: Place, head_dim: int, channel: Any, s: Settings
) -> None:
    """Writes a warp's result to shared memory: outputs, maxima in powers of two, sums."""
    lane.warp_barrier()
    size = s.rows * head_dim * 4
    for tile in range(s.tiles):
        row = here.t + 4 * tile
        for i, x in enumerate(state.outputs[tile]):
            area.at((row * head_dim + channel(i, here, head_dim)) << 2).store(x)
        total = lane.reduce_lanes(state.totals[tile], lambda x, y: x + y, (4, 8, 16))
        with lane.when(here.g.equals(0)):
            at = area.at(row << 2, size)
            at.store(state.maxima[tile])
            at.at(4 * s.rows).store(total)


def _combined(results: list[Pointer], element: Int, q: Int, size: int, s: Settings) -> Any:
    maxima = [x.at(q << 2, 4 * size).float() for x in results]
    sums = [x.at(q << 2, 4 * (size + s.rows)).float() for x in results]
    outputs = [x.at(element << 2).float() for x in results]
    top = lane.tree(maxima, lane.maximum)
    shift = (top > float("-inf")).where(top, 0.0)
    weights = [lane.exp2(m - shift) for m in maxima]
    o, l = (
        lane.total([x * w for x, w in zip(values, weights, strict=True)])
        for values in (outputs, sums)
    )
    return o, top, l


def combine(a: Arrays, at: Program, area: Pointer, s: Settings) -> None:
    """Merges the results of the program's warps and writes them."""
    lane.block_barrier()
    threads, size = 32 * s.warps, s.rows * a.head_dim
    results = [area.at(warp * s.warp_bytes(a.head_dim)) for warp in range(s.warps)]
    for start in range(0, size, threads):
        element = lane.thread() + start
        q, channel = element // a.head_dim, element % a.head_dim
        row = at.tile * s.rows + q
        inside = row < a.rows
        if size % threads:
            inside = inside & (element < size)
        with lane.when(inside):
            result = _combined(results, element, q, size, s)
            if a.is_final:
                _write_final(a, at, row, channel, result)
            else:
                index = (at.pair * a.parts(s.part) + at.part) * a.rows + row
                write_partial(a, index, channel, result)


def _write_final(
    a: Arrays, at: Program, row: Int, channel: Int, result: tuple[Float, Float, Float]
) -> None:
    o, top, l = result
    out, lse = a.outputs
    head, token = at.head * a.group + row // a.tokens, row % a.tokens
    index = (at.batch * a.tokens + token) * a.heads + head
    is_empty = l.equals(0.0)
    total = is_empty.where(1.0, l)
    # What sees nothing may have been multiplied with 0 times NaN.
    normalized = is_empty.where(lane.number(0.0), lane.divide(o, total))
    out.times(index, 4 * a.head_dim).at(channel << 2).store(normalized)
    with lane.when(channel.equals(0)):
        value = top * (1 / LOG2_E) + lane.log2(total) * (1 / LOG2_E)
        lse.times(index, 4).store(is_empty.where(float("-inf"), value))
