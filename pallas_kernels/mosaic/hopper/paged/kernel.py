"""Attention of new queries to pages of integers of 2 to 8 bits or floats of 8 or 16, for Hopper.

Roofline, for 16 sequences, 8 KV heads with 4 queries each, 32,768 tokens, head dim 128:
  - bytes that must move: 16 * 8 * 32768 tokens * 132 = 554 MB for turbo4, 256 bytes a token and
    1,074 MB for 8-bit floats, 512 and 2,147 MB for 16 bits; at the 3.0 TB/s of a copy 185, 358 and
    716 us. One multiprocessor has 650 clocks for a block of 64 tokens of turbo4, 1,260 of 8-bit
    floats and 2,520 of 16 bits.
  - instructions, by count: some 1,000 for a block and warp of any; four schedulers issue 2,600,
    5,000 and 10,000 in those clocks.
Memory is the floor. Target: 80 % of it for 4 and 8 bits, 230 and 450 us; for 16 bits, where nothing
else is scarce, 97 % of cuDNN's speed.

As in `decode`, every warp takes its own blocks of tokens, brings them to shared memory by itself
with the copy engine, a page or a part of one with each copy, and works without a barrier that other
warps share. Contiguous caches ``[B, n, K, H]`` are pages of one token, whose rows lanes copy. Rows
of the products are tokens and channels, columns queries; each query has two, a high and a low part,
which makes eight of four queries, the fewest that a product takes.

Every block has a softmax of its own, and is then joined with those before it: of a part of the
sequence, `Settings.part` tokens at a fixed place, each warp takes every fourth block in order, then
the four warps' results are joined, then the parts' (`merge`). A program takes a part, or, where
those would be few, a few blocks (`Settings.is_split`), whose results the merge joins in that order.
So what is added up, and how, depends on a token's position alone: not on the length of its
sequence, on how a prompt is cut into chunks, on the rest of the batch, or on the programs.

Versions, H100, jax 0.11.2, device time of both kernels (cuDNN on dense bfloat16 in the same run):
  turbo4                   16 x 32k   64 x 4k   1 x 32k   1 x 4k
    cuDNN                    702 us    351 us     51 us    9.5 us
    parts of 1024, taken     209       112        20      12.6     3.35 times, 88 % of a copy's rate
    parts of 512             218       118        26      10.1
    parts of 2048            205       111        20      18.0
    1 block in flight        231       125
    blocks of 32 tokens      212       113
    two warpgroups           253       145        24               too few programs at a time
    32 parts merged at once  207       116        19      12.7     1 x 128k: 65, not 82 us
  pages of 16, 32, 128       225, 214, 208 us
  fp8, parts of 1024         373       195        32      12.4     1.88 times, 96 %
  16 queries of 4 x 8k, 4, 8, 16 in a program: 175, 142, 117 us of turbo4, 327, 200, 130 of fp8
  1 x 1k: 9.6 us, where cuDNN takes 6.4: one program of four blocks a warp for each KV head.
These and more rows are in `benchmarks/results/paged_versions_2026-11-21.json`.

H200 (reads 4.5 TB/s: turbo4 122 us, fp8 236), whole calls, us; fp8 in the last three columns:
                                 16 x 32k  64 x 4k  1 x 8k  1 x 4k   16 x 32k  64 x 4k  1 x 8k
    cuDNN                           472      243     14.6    11.0       472      243    14.6
    v1, as above                    184      111     19.5    15.0       267      146    15.9
      of which the kernel           169              10.4               257             10.5
    v2                              158       87     11.0     9.0       257      139    14.4
      of which the kernel           154       83      7.8     5.8       253      135     9.2
    v3 (cuDNN 473, 244, 14.8, 11.2) 149       81     10.6     8.4
      of which the kernel           146       78      7.5     5.6
  v2's steps, the kernel alone, turbo4, 16 x 32k:
    its table in registers that the compiler does not know to be constant, and
      not in copies before every permute (218 of 1,382 instructions)       168 -> 166
    halves of the table added and not or-ed: done by the multipliers, where
      permutes, shifts and logic keep one unit at 60 %                     166 -> 155
    parts of 2,048; of 4,096 146                                           155 -> 148
    each block's own softmax; queries rotated by the warps, a query each   148 -> 154
      (all queries by every warp: 153, and 0.6 us more for short calls)
    the merge normalizes, rotates back, checks tables: 3.6 us, and no other kernels
  What bounded v2: without look-ups it took 133, without the transposition of values 137. Slower or
  the same: shifts as high halves of products (160), blocks of 32 tokens with up to 5 in flight (159
  to 189), one in flight (157), masks only where some token is hidden (154).
  v3: the table's upper half is looked up with complements of codes, by multipliers, and not with
  codes whose highest bit logic flips, so every other shift goes too: of 664 instructions of the
  busiest unit 536 are left. Not taken, 16 x 32k and 64 x 4k: keys and values in slots of their own,
  so that four programs share a multiprocessor (148.6, 80.0; of v2 154.9, 84.0; with queries in
  shared memory, as 128 registers just suffice, 147.5, 79.9); parts of 4,096 (146.3, 81.7, other
  bits, too few programs in shorter calls); shifts by dp2a (149.4, 80.5); one in flight (161, 86);
  halves of look-ups multiplied, not added (2 more); merges that read signs first (1 x: v3's row).
  Programs that take a few blocks: 1 x 32k 29 and not 19, 4 x 8k 26 and not 21; 4 x 4k 18 for 19.
Rows: `benchmarks/results/paged_versions_2026-11-24.json`, of v3 `bytes_tuning_2026-11-25.json`.

16 bits, H200, bfloat16, whole calls, us; cuDNN on dense bfloat16 in the same run in brackets:
                                         16 x 32k   64 x 4k    4 x 8k     1 x 8k     1 x 4k
  in Triton, before                      609 (472)  313 (243)             22.9 (14.7)
  three programs a multiprocessor,
    1 block of 32 tokens in flight       500 (474)  269 (242)             15.3 (14.5) 11.7 (11.1)
    2 blocks of 16                       499        271
    parts of 4,096                       531        267
    parts of 1,024                       484 (463)  247 (238)
  two programs, 1 block of 32            477 (463)  243 (238)  36.6 (37.0)
  one program, 2 blocks                  482 (463)  244 (238)  37.0 (37.1)
  as it is: two programs, or one and 2 blocks where there is no second; merges that
    wait for no length                              247 (244)  35.2 (37.0) 14.3 (15.0) 10.2 (11.1)
      of which the merge                            2.5        1.7         3.3         3.2
  With three programs the last of some 5 rounds has a few, and they take as long as any.
  Copied by lanes, 16 bytes each, and not by the copy engine: the same for pages (478, 243, 15.8,
  11.2). For contiguous caches, 256 bytes a token and head, 475 (463) where one copy of the engine
  for each token takes 512 (474); with a window of 1,024 tokens 24.9 and 74.6, of 32k and of 4k.
  Outputs are off by 4.3e-4 of their length, mostly their rounding to bfloat16; cuDNN's by 5.5e-4.
  The same two programs for 8-bit floats (`_IN_PAIRS`): 132.3 and not 135.0 at 64 x 4k, 70.6 and not
  80.6 at 32 x 4k, 256.4 and not 254.8 at 16 x 32k; for turbo4 92 and not 86.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.layouts import LOG2_E
from pallas_kernels.mosaic import lane, warp
from pallas_kernels.mosaic.hopper.paged import codes, floats, merge, scaled, turbo4
from pallas_kernels.mosaic.hopper.paged.copies import page_of, start_copies
from pallas_kernels.mosaic.hopper.paged.fp8 import Fp8
from pallas_kernels.mosaic.hopper.paged.inputs import (
    TILE,
    Arrays,
    Place,
    Program,
    Query,
    State,
    table_width,
)
from pallas_kernels.mosaic.hopper.paged.inputs import Pages as Pages
from pallas_kernels.mosaic.hopper.paged.inputs import Settings as Settings
from pallas_kernels.mosaic.hopper.paged.inputs import Stored as Stored
from pallas_kernels.mosaic.hopper.paged.plain import Plain
from pallas_kernels.mosaic.hopper.paged.rotation import rotated
from pallas_kernels.mosaic.lane import Int, Pointer

Products = turbo4.Turbo4 | floats.Floats | scaled.Scaled | codes.Mixed


def products_of(head_dim: int, s: Settings) -> Products:
    if s.stored is not None:
        return codes.Mixed.of(head_dim, s)
    if s.kind in scaled.KINDS:
        return scaled.KINDS[s.kind].of(head_dim, s)
    if s.has_norms:
        return turbo4.Turbo4.of(head_dim, s)
    return (Plain if s.is_plain else Fp8)(head_dim, s)


def channel_of(s: Settings) -> Callable[[int, Place, int], Int]:
    """Which channels a lane's outputs are: ``channel(number, here, H)``."""
    if s.stored is not None:
        return functools.partial(codes.channel, bits=s.stored[1].bits)
    if s.kind in scaled.KINDS:
        return scaled.channel
    return turbo4.channel if s.has_norms else floats.channel


_GRID = ("tile", "run", "pair")


def _kernel(*refs: Any, s: Settings) -> None:
    def body(refs: Any, inputs: Any, ids: list[Int], memory: tuple[Any, Any]) -> None:
        a = Arrays.of(refs, inputs, s)
        at, here = Program.of(a, ids, s), Place.here()
        # Read before it is known whether there is anything to do, which takes a load too.
        own = at.start + lane.uniform(lane.thread() >> 5)
        pages = [page_of(a, at, here, own + i * s.warps, s) for i in range(s.stages)]
        with lane.when(at.start < at.stop):
            _run(a, at, here, pages, (Pointer.to(memory[0]), Pointer.to(memory[1])), s)

    warp.inline(_GRID, refs, body)


def _run(
    a: Arrays,
    at: Program,
    here: Place,
    pages: list[Int],
    smem: tuple[Pointer, Pointer],
    s: Settings,
) -> None:
    products, number = products_of(a.head_dim, s), lane.uniform(lane.thread() >> 5)
    size = s.block * s.token_bytes(a.head_dim)
    arrivals = 32 if s.is_contiguous or s.copies_words else 1
    slots = warp.Slots.of(smem, number, s.warp_bytes(a.head_dim), size, s.stages, arrivals)
    state = _walk(a, at, here, pages, products, slots, smem[0], s)
    if state is None:
        return
    _keep(state, slots.area, here, a.head_dim, channel_of(s), s)
    _combine(a, at, smem[0], s)


def _walk(
    a: Arrays,
    at: Program,
    here: Place,
    pages: list[Int],
    products: Products,
    slots: warp.Slots,
    area: Pointer,
    s: Settings,
) -> State | None:
    """Attends to this warp's blocks of the program; `pages` are those of the first blocks."""
    first = at.start + lane.uniform(lane.thread() >> 5)
    with lane.when(here.is_first):
        slots.init()
    lane.warp_barrier()
    for i, page in enumerate(pages):
        target = slots.slot(i), slots.barrier(i)
        start_copies(a, at, here, first + i * s.warps, page, target, s)
    query = _load_query(a, at, here, products, area, s)

    channel = channel_of(s)

    def ahead(block: Int) -> tuple[Int, Int]:
        later = block + s.warps * s.stages
        return later, page_of(a, at, here, later, s)

    def attend(block: Int, flat: list[Any], slot: Pointer, _: Any) -> list[Any]:
        found = _attend((slot, block * s.block), at, query, here, products, s)
        if s.is_split:
            _leave(a, at, block, found, here, channel, s)
            return flat
        return State.of(flat, s.tiles).joined(found).flat()

    def refill(_: Int, slot: Pointer, barrier: Pointer, read: tuple[Int, Int]) -> None:
        start_copies(a, at, here, *read, (slot, barrier), s)

    flat = [] if s.is_split else State.empty(s.tiles, a.head_dim // 8).flat()
    flat = warp.over_blocks(first, at.stop, s.warps, slots, flat, ahead, attend, refill)
    return None if s.is_split else State.of(flat, s.tiles)


def _load_query(
    a: Arrays, at: Program, here: Place, pages: Any, area: Pointer, s: Settings
) -> Query:
    """Loads the program's queries, row ``head * T + token`` of their KV head.

    `pages` gives the operands for a query's numbers; in `area`, shared memory of all warps, each
    warp rotates a query.
    """
    operands, starts, offsets, factors, positions = [], [], [], [], []
    unit = s.scale * (LOG2_E if s.soft_cap is None else 1.0)
    for tile in range(s.tiles):
        base = at.tile * s.rows + TILE * tile
        row, run = base + (here.g >> 1), a.head_dim // s.key_runs
        count = run // 4
        if s.is_plain:
            given: Any = _query_row(a, at, row)
        elif a.pages.signs is None or not s.rotates_queries:
            firsts = [here.t * count + i * run for i in range(s.key_runs)]
            given = [x for first in firsts for x in _numbers(a, at, row, first, count)]
        else:
            given = _rotated(a, at, base, here, area, s)
        words, start, offset, scale = pages.query_operands(given, here)
        operands.append(words)
        starts.append(start)
        offsets.append(offset)
        # What lane 8 t holds is of query t.
        factor = lane.from_lane(scale, here.t << 3) * unit
        if a.pages.key_scale is not None:
            factor = factor * a.pages.key_scale.float()
        factors.append(factor)
        positions.append(warp.position(base, here, a, at))
    return Query(operands, starts, offsets, factors, positions)


def _query_row(a: Arrays, at: Program, row: Int) -> Pointer:
    """A pointer to a query; to any place if there is no such query."""
    row = row.minimum(a.rows - 1)
    token, head = row % a.tokens, at.head * a.group + row // a.tokens
    index = (at.batch * a.tokens + token) * a.heads + head
    return a.query.times(index, a.head_dim * (4 if a.dtype == "float32" else 2))


def _numbers(a: Arrays, at: Program, row: Int, first: Int, count: int) -> list[lane.Float]:
    """`count` channels of a query, from the `first` on."""
    width = 4 if a.dtype == "float32" else 2
    words = _query_row(a, at, row).at(first * width).words(count * width // 4)
    return [number for word in words for number in warp.numbers(word, a.dtype)]


def _rotated(
    a: Arrays, at: Program, base: Int, here: Place, area: Pointer, s: Settings
) -> list[lane.Float]:
    """This lane's part of the four queries from row `base` on; each warp rotates one of them."""
    count, own = a.head_dim // 32, lane.uniform(lane.thread() >> 5)
    each, offset = s.warp_bytes(a.head_dim), s.query_offset(a.head_dim)
    first = here.number * count
    x = _numbers(a, at, base + own, first, count)
    x = rotated(x, a.pages.signs.at(first << 2), here.number)
    place = area.at(own * each + offset, first << 2)
    for i, v in enumerate(x):
        place.at(4 * i).store(v)
    lane.block_barrier()
    kept = area.at((here.g >> 1) * each + offset, here.t * a.head_dim)
    x = [word.as_float() for word in kept.words(a.head_dim // 4)]
    lane.block_barrier()  # before the next four are written there
    return x


def _attend(
    place: tuple[Pointer, Int],
    at: Program,
    query: Query,
    here: Place,
    products: Products,
    s: Settings,
) -> State:
    """The state of one block: `place` is its place in shared memory, and its first token."""
    slot, begin = place
    lost = products.unseen(slot, begin, at, here)
    weights, masks, maxima, totals = [], [], [], []
    first = begin + here.g * s.held
    for tile, x in enumerate(products.scores(slot, query, here)):
        if s.soft_cap is not None:
            one = lane.number(1.0)
            x = [warp.soft_cap(v, factor=one, cap=s.soft_cap) * LOG2_E for v in x]
        seen = _visible(query.position[tile] - first, here, s)
        x = [mask.where(v, float("-inf")) for mask, v in zip(seen, x, strict=True)]
        # Of NaN and a number the number; the sum of weights is NaN then.
        top = lane.reduce_lanes(lane.tree(x, lane.maximum), lane.maximum, (4, 8, 16))
        shift = (top > float("-inf")).where(top, 0.0)
        p = [lane.exp2(v - shift) for v in x]
        weights.append(p)
        masks.append(seen)
        maxima.append(top)
        totals.append(lane.reduce_lanes(lane.tree(p, operator.add), operator.add, (4, 8, 16)))
    outputs = products.weighted(slot, weights, masks, lost, here)
    return State(outputs, maxima, totals)


def _visible(distance: Int, here: Place, s: Settings) -> list[lane.Bool]:
    """Which of the lane's tokens a query sees that is `distance` tokens after the first of them."""
    out = []
    for i in range(s.held):
        token = here.odd ^ i
        mask = token <= distance
        if s.window is not None:
            mask = mask & (token >= distance - s.window[0]) & (token <= distance + s.window[1])
        out.append(mask)
    return out


def _keep(
    state: State, area: Pointer, here: Place, head_dim: int, channel: Any, s: Settings
) -> None:
    """Writes a warp's result to shared memory: outputs, maxima in powers of two, sums."""
    lane.warp_barrier()
    size = s.rows * head_dim * 4
    for tile in range(s.tiles):
        row = here.t + 4 * tile
        for i, x in enumerate(state.outputs[tile]):
            area.at((row * head_dim + channel(i, here, head_dim)) << 2).store(x)
        with lane.when(here.g.equals(0)):
            at = area.at(row << 2, size)
            at.store(state.maxima[tile])
            at.at(4 * s.rows).store(state.totals[tile])


def _leave(
    a: Arrays, at: Program, block: Int, found: State, here: Place, channel: Any, s: Settings
) -> None:
    place = at.pair * a.count(s.run) * (s.run // s.block) + block
    o, maxima, sums = a.outputs
    for tile in range(s.tiles):
        row = at.tile * s.rows + here.t + 4 * tile
        index = place * a.rows + row
        with lane.when(row < a.rows):
            out = o.times(index, 4 * a.head_dim)
            for i, x in enumerate(found.outputs[tile]):
                out.at(channel(i, here, a.head_dim) << 2).store(x)
            with lane.when(here.g.equals(0)):
                maxima.times(index, 4).store(found.maxima[tile])
                sums.times(index, 4).store(found.totals[tile])


def _combine(a: Arrays, at: Program, area: Pointer, s: Settings) -> None:
    lane.block_barrier()
    threads, size = 32 * s.warps, s.rows * a.head_dim
    for start in range(0, size, threads):
        element = lane.thread() + start
        q, channel = element // a.head_dim, element % a.head_dim
        row = at.tile * s.rows + q
        inside = row < a.rows
        if size % threads:
            inside = inside & (element < size)
        with lane.when(inside):
            result = warp.nothing(1)
            for i in range(s.warps):
                kept = area.at(i * s.warp_bytes(a.head_dim))
                m, l = (kept.at(q << 2, 4 * (size + k * s.rows)).float() for k in (0, 1))
                result = warp.joined(result, ([kept.at(element << 2).float()], m, l))
            index = (at.pair * a.count(s.part) + at.run) * a.rows + row
            warp.write_partial(a, index, channel, (result[0][0], *result[1:]))


def attend(
    query: jax.Array,
    pages: Pages,
    tables: jax.Array | None,
    lengths: jax.Array,
    query_lengths: jax.Array | None,
    settings: Settings,
) -> tuple[jax.Array, jax.Array]:
    """Attends the last `T` tokens' queries of each sequence to its pages.

    `query` is ``[B, T, N, H]``, `H` 64, 128 or 256. int32: `tables` ``[B, max_pages]``, where
    entries past the length or wholly before the windows of the queries may be anything; `lengths`
    ``[B]``, tokens held; `query_lengths` ``[B]``, how many of the `T` queries are real, None if all
    are. Without `tables` caches are contiguous, ``[B, n, K, H]``: each token is a page,
    ``[B * n, K, 1, H]``; see `Settings.limit`.

    Returns ``[B, T, N, H]`` in the query's dtype, or the settings', and the float32 log-sum-exp
    ``[B, T, N]``; NaN for a sequence whose length, or a page that it needs, is out of range.
    """
    s = settings
    if s.part % s.step:
        raise ValueError(f"{s.part=} must be a multiple of {s.step=}")
    batch, tokens, heads, head_dim = query.shape
    kv_heads, page_size = pages.key.shape[1:3]
    rows, pairs = heads // kv_heads * tokens, batch * kv_heads
    runs = pl.cdiv(table_width(tables, s) * page_size, s.run)
    programs = runs if s.window is None else min(runs, pl.cdiv(s.window[0] + tokens, s.run) + 1)
    shape = (pairs, runs * (s.run // s.block if s.is_split else 1), rows)
    run = warp.launch(
        functools.partial(_kernel, s=s),
        "turbojax_paged_hopper",
        [jax.ShapeDtypeStruct(x, jnp.float32) for x in ((*shape, head_dim), shape, shape)],
        dict(zip(_GRID, (pl.cdiv(rows, s.rows), programs, pairs), strict=True)),
        s,
        head_dim,
    )
    partials = run(query, pages, tables, lengths, query_lengths)
    return merge.merge(query, pages, tables, lengths, query_lengths, partials, settings)
