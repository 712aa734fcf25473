"""A warp's share of a decode program: blocks as their copies arrive, then perhaps the buffer."""

from typing import Any

from pallas_kernels.mosaic import lane
from pallas_kernels.mosaic.hopper.decode.block import (
    add_block,
    channel_words,
    plain_queries,
    scaled_queries,
    scores,
    softmax,
    token_words,
    unpack,
)
from pallas_kernels.mosaic.hopper.decode.inputs import (
    BARRIER_BYTES,
    Arrays,
    Program,
    Settings,
    copies_of,
)
from pallas_kernels.mosaic.hopper.decode.query import load_query
from pallas_kernels.mosaic.hopper.decode.result import keep
from pallas_kernels.mosaic.hopper.decode.types import Numerics, Place, Query, Shape, State
from pallas_kernels.mosaic.lane import Float, Int, Pointer


def _attend_block(
    shape: Shape,
    state: State,
    slot: Pointer,
    scales: tuple[Float, Float],
    first_token: Int,
    query: Query,
    here: Place,
    n: Numerics,
) -> State:
    """Adds the block in shared memory at `slot`."""
    tokens = token_words(shape, here)
    size, quarter = shape.key_row, here.t * (shape.key_row // 4)

    def key_words(i: int) -> list[Int]:
        token = tokens[i // 4] + (here.rotation ^ (i % 4))
        return unpack(slot.at(token * size + quarter).words(size // 16), shape.key_bits)

    per_lane = shape.head_dim // 8
    value_slot = slot.at(shape.offset("value"))

    def value_words(i: int) -> list[Int]:
        channel = here.g * per_lane + ((here.rotation ^ (i % 4)) + i // 4 * 4)
        row = shape.value_row
        at = value_slot.at(channel * row + here.t * (row // 4))
        return unpack(at.words(row // 16), shape.value_bits)

    key_scale, key_zero = (
        channel_words(slot.at(shape.offset(name)), here, shape.head_dim, shape.key_bits)
        for name in ("key_scale", "key_zero")
    )
    products = scores(shape, key_words, scaled_queries(query, key_scale, here), key_zero)
    weights = softmax(products, query, scales[0], first_token, tokens, here, n, n.is_masked)
    value_scale, value_zero = (
        [
            lane.permute_bytes(x, 0, here.selector)
            for x in slot.at(here.g * per_lane, shape.offset(name)).words(per_lane // 4)
        ]
        for name in ("value_scale", "value_zero")
    )
    channels = (value_scale, value_zero)
    return add_block(shape, state, weights, value_words, channels, scales[1], here, n)


def _attend_buffer(
    a: Arrays,
    shape: Shape,
    state: State,
    at: Program,
    query: Query,
    here: Place,
    n: Numerics,
) -> State:
    """Adds the int8 buffer."""
    key, value = (x.buffer.times(at.pair, a.buffer_size * a.head_dim) for x in (a.key, a.value))
    scales = [x.buffer_scale.at(at.pair << 2).float() for x in (a.key, a.value)]
    tokens = token_words(shape, here)

    def row_of(token: Int) -> Int:
        return token.minimum(a.buffer_size - 1) * a.head_dim

    def key_words(i: int) -> list[Int]:
        row = key.at(row_of(tokens[i // 4] + (here.rotation ^ (i % 4))))
        return channel_words(row, here, a.head_dim, shape.key_bits)

    groups: dict[int, list[list[Int]]] = {}

    def value_words(i: int) -> list[Int]:
        if i // 4 not in groups:
            groups.clear()
            groups[i // 4] = _transposed(a, shape, value, i // 4, here, row_of)
        return [words[i % 4] for words in groups[i // 4]]

    products = scores(shape, key_words, plain_queries(query, here), None)
    weights = softmax(products, query, scales[0], at.compressed, tokens, here, n, True)
    return add_block(shape, state, weights, value_words, None, scales[1], here, n)


def _transposed(
    a: Arrays, shape: Shape, value: Pointer, group: int, here: Place, row_of: Any
) -> list[list[Int]]:
    """Four channels of the buffer's values, for each operand word, from rows of tokens."""
    runs = 8 // shape.value_bits
    out = []
    for number in range(2 * shape.words):
        word, run = divmod(number, runs)
        first = here.t * (shape.value_row // 4) + (4 * word + run * (shape.block // runs))
        column = here.g * (a.head_dim // 8)
        rows = [
            lane.permute_bytes(
                value.at(row_of(first + b), column, 4 * group).word(), 0, here.selector
            )
            for b in range(4)
        ]
        low = [lane.permute_bytes(rows[i], rows[i + 1], 0x5140) for i in (0, 2)]
        high = [lane.permute_bytes(rows[i], rows[i + 1], 0x7362) for i in (0, 2)]
        out.append(
            [
                lane.permute_bytes(pair[0], pair[1], select)
                for pair in (low, high)
                for select in (0x5410, 0x7632)
            ]
        )
    return out


def walk(
    a: Arrays,
    at: Program,
    groups: tuple[int, int],
    smem: tuple[Pointer, Pointer],
    s: Settings,
) -> None:
    """A warp's share of the program's units, for one pair of widths, and its result."""
    shape = Shape(a.head_dim, s.block, s.key_bits[groups[0]], s.value_bits[groups[1]], s.rows)
    is_masked = a.tokens > 1 or s.window is not None
    n = Numerics(s.exponential, s.window, s.soft_cap, is_masked)
    here, warps = Place.here(), s.warps
    warp = lane.uniform(lane.thread() >> 5)
    stage = s.warp_bytes(a.head_dim) // s.stages
    slots = smem[0].at(warp * (stage * s.stages))
    barriers = smem[1].at(warp * (BARRIER_BYTES * s.stages))
    leader = (here.g | here.t).equals(0)
    start_copy = copies_of(a, at, shape, groups)
    first, stop = at.start + warp, at.stop.minimum(at.blocks)
    with lane.when(leader):
        for i in range(s.stages):
            lane.init_barrier(barriers.at(BARRIER_BYTES * i))
        lane.publish_barriers()
        for i in range(s.stages):
            unit = first + i * warps
            with lane.when(unit < stop):
                start_copy(unit, slots.at(i * stage), barriers.at(BARRIER_BYTES * i))
    lane.warp_barrier()
    query = load_query(
        a.query,
        (at.batch, at.head, at.tile),
        (a.tokens, a.heads, a.group, a.head_dim, a.dtype),
        (at.begin, at.query_length),
        shape,
        here,
        s.scale,
        n.unit,
    )

    def block_scales(unit: Int) -> list[Float]:
        inside = unit.minimum(a.blocks - 1).maximum(0)
        index = (at.pair * a.blocks + inside) << 2
        return [side.block_scale.at(index).float() for side in (a.key, a.value)]

    def step(unit: Int, carry: list[Any]) -> list[Any]:
        *flat, key_scale, value_scale, number, parity = carry
        following = block_scales(unit + warps)
        barrier, slot = barriers.at(number * BARRIER_BYTES), slots.at(number * stage)
        lane.wait(barrier, parity)
        state = _attend_block(
            shape,
            State.of(flat, shape),
            slot,
            (key_scale, value_scale),
            unit * s.block,
            query,
            here,
            n,
        )
        lane.warp_barrier()
        later = unit + warps * s.stages
        with lane.when(leader & (later < stop)):
            start_copy(later, slot, barrier)
        is_last = number.equals(s.stages - 1)
        number = is_last.where(0, number + 1)
        return [*state.flat(), *following, number, is_last.where(parity ^ 1, parity)]

    carry = [
        *State.empty(shape).flat(),
        *block_scales(first),
        lane.integer(0),
        lane.integer(0),
    ]
    *flat, _, _, _, _ = lane.loop(first, stop, warps, carry, step)
    owner = (at.blocks - at.start) % warps
    has_buffer = (
        (at.buffered > 0) & (at.blocks < at.stop) & (at.blocks >= at.start) & owner.equals(warp)
    )
    flat = lane.loop(
        lane.integer(0),
        has_buffer.where(lane.integer(1), 0),
        1,
        flat,
        lambda _, x: _attend_buffer(a, shape, State.of(x, shape), at, query, here, n).flat(),
    )
    keep(shape, State.of(flat, shape), slots, here, n)
