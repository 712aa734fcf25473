"""Attention of new queries to pages of integers of 2 to 8 bits or floats of 8 or 16, for Hopper.

Roofline, for 16 sequences of 32,768 tokens, 8 KV heads of 4 queries each, head dim 128: 554 MB for
turbo4, 1,074 for 8-bit floats, 2,147 for 16 bits, at the 3.0 TB/s of a copy on an H100 185, 358 and
716 us; some 1,000 instructions for a block and warp, of 2,600, 5,000 and 10,000 that its time
holds. Memory is the floor. Target: 80 % of it for 4 and 8 bits, 97 % of cuDNN's speed for 16. Seen
on an H100: 209 and 373 us, 88 and 96 %; on an H200 143, 257 and 477 (cuDNN on bfloat16 463 to 473).
What bounds turbo4: look-ups and the transposition of values.

As in `decode`, every warp takes its own blocks of tokens, brings them to shared memory by itself
with the copy engine, a page or a part of one with each copy, and works without a barrier that other
warps share. Contiguous caches ``[B, n, K, H]`` are pages of one token, whose rows lanes copy. Rows
of the products are tokens and channels, columns queries; each query has two, a high and a low part,
which makes eight of four queries, the fewest that a product takes.

Every block has a softmax of its own, and is then joined with those before it: of a part of the
sequence, `Settings.part` tokens at a fixed place, each warp takes every fourth block in order, then
the four warps' results are joined, then the parts' (`merge`). A program takes a part, or, where
those would be few, a few blocks (`Settings.is_split`), whose results the merge joins in that order.
A call of a single part ends here. A new token that comes with it is stored, see `new_token`.
So what is added up, and how, depends on a token's position alone: not on the length of its
sequence, on how a prompt is cut into chunks, on the rest of the batch, or on the programs.

Roofline in full and versions: `docs/kernels/paged.md`.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import varying
from pallas_kernels.layouts import LOG2_E
from pallas_kernels.mosaic import lane, lanes, warp
from pallas_kernels.mosaic.hopper.paged import (
    append,
    codes,
    floats,
    merge,
    scaled,
    turbo4,
    turbo4_rows,
)
from pallas_kernels.mosaic.hopper.paged.copies import page_of, start_copies
from pallas_kernels.mosaic.hopper.paged.floats import Fp8, Plain
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
from pallas_kernels.mosaic.hopper.paged.new_token import NewToken
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
    if s.has_rows:
        return turbo4_rows.channel
    return turbo4.channel if s.has_norms else floats.channel


_GRID, _NAME = ("tile", "run", "pair"), "turbojax_paged_hopper"
# Arrays of pages, which a new token is written to.
_WRITTEN = ("key", "value", "key_norm", "value_norm")


def _kernel(*refs: Any, s: Settings) -> None:
    def body(refs: Any, inputs: Any, ids: list[Int], memory: tuple[Any, Any]) -> None:
        _program(Arrays.of(refs, inputs, s), None, ids, memory, s)

    warp.inline(_GRID, refs, body)


def _storing_kernel(*refs: Any, s: Settings, new: append.Settings) -> None:
    """`_kernel` with a `New` after its inputs."""

    def body(refs: Any, inputs: Any, ids: list[Int], memory: tuple[Any, Any]) -> None:
        a = Arrays.of((*refs[:6], *refs[7:]), inputs, s)
        given, pages = New(*map(Pointer.to, refs[6])), a.pages
        sides = (
            append.Side(given.key, pages.key, pages.key_norm, pages.key_scale),
            append.Side(given.value, pages.value, pages.value_norm, pages.value_scale),
        )
        assert a.tables is not None
        where = a.tables, a.lengths, a.new_lengths, pages.signs
        arrays = append.Arrays(*where, sides, given.dropped_tokens)
        _program(a, (arrays, new), ids, memory, s)

    warp.inline(_GRID, refs, body)


def _program(
    a: Arrays,
    new: tuple[append.Arrays, append.Settings] | None,
    ids: list[Int],
    memory: tuple[Any, Any],
    s: Settings,
) -> None:
    at, here = Program.of(a, ids, s), Place.here()
    # Read before it is known whether there is anything to do, which takes a load too.
    own = at.start + lane.uniform(lane.thread() >> 5)
    pages = [page_of(a, at, here, own + i * s.warps, s) for i in range(s.stages)]
    new_token = None if new is None else NewToken.of(new[0], at, here, new[1])
    smem = Pointer.to(memory[0]), Pointer.to(memory[1])
    if a.is_final:
        _run(a, at, here, pages, new_token, smem, s)
    else:
        with lane.when(at.start < at.stop):
            _run(a, at, here, pages, new_token, smem, s)
    if new_token is not None:
        new_token.count_dropped(here, ids[1])


def _run(
    a: Arrays,
    at: Program,
    here: Place,
    pages: list[Int],
    new_token: NewToken | None,
    smem: tuple[Pointer, Pointer],
    s: Settings,
) -> None:
    products, number = products_of(a.head_dim, s), lane.uniform(lane.thread() >> 5)
    size = s.block * s.token_bytes(a.head_dim)
    arrivals = 32 if s.is_contiguous or s.copies_words else 1
    slots = warp.Slots.of(smem, number, s.warp_bytes(a.head_dim), size, s.stages, arrivals)
    state = _walk(a, at, here, pages, new_token, products, slots, smem[0], s)
    if state is None:
        return
    _keep(state, slots.area, here, a.head_dim, channel_of(s), s)
    lane.block_barrier()
    if a.is_final:
        _finish(a, at, here, smem[0], s)
    else:
        _combine(a, at, smem[0], s)


def _walk(
    a: Arrays,
    at: Program,
    here: Place,
    pages: list[Int],
    new_token: NewToken | None,
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
    if new_token is not None:
        block = new_token.block(s)
        is_own = (block >= first) & (block < at.stop) & ((block - first) & (s.warps - 1)).equals(0)
        with lane.when(is_own):
            new_token.store(first, slots, here, s)

    channel = channel_of(s)

    def prefetch(block: Int) -> tuple[Int, Int]:
        later = block + s.warps * s.stages
        return later, page_of(a, at, here, later, s)

    def attend(is_masked: bool, block: Int, flat: list[Any], slot: Pointer, _: Any) -> list[Any]:
        found = _attend((slot, block * s.block), at, query, here, products, is_masked, s)
        if s.is_split:
            _leave(a, at, block, found, here, channel, s)
            return flat
        return State.of(flat, s.entries).joined(found).flat()

    def refill(_: Int, slot: Pointer, barrier: Pointer, read: tuple[Int, Int]) -> None:
        start_copies(a, at, here, *read, (slot, barrier), s)

    flat = [] if s.is_split else State.empty(s.entries, s.outputs(a.head_dim)).flat()
    place = lane.integer(0), lane.integer(0)
    for begin, stop, is_masked in _runs(at, first, s):
        masked = functools.partial(attend, is_masked)
        flat, place = warp.run_of_blocks(
            begin, stop, s.warps, slots, flat, place, prefetch, masked, refill
        )
    if s.is_split:
        return None
    state = State.of(flat, s.entries)
    return turbo4_rows.existing(state, query) if isinstance(query, turbo4_rows.Rows) else state


def _runs(at: Program, first: Int, s: Settings) -> list[tuple[Int, Int, bool]]:
    """A warp's runs of blocks from `first` on, and whether some query may not see all of them."""
    if not s.has_rows or s.window is not None:
        return [(first, at.stop, True)]
    whole = ((at.begin + 1).maximum(0) // s.block).maximum(first).minimum(at.stop)
    rest = first + ((whole - first).maximum(0) + (s.warps - 1)) // s.warps * s.warps
    return [(first, whole, False), (rest, at.stop, True)]


def _load_query(
    a: Arrays, at: Program, here: Place, pages: Any, area: Pointer, s: Settings
) -> Query | turbo4_rows.Rows:
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
    query = Query(operands, starts, offsets, factors, positions)
    return turbo4_rows.of_tiles(query, here) if s.has_rows else query


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
    query: Query | turbo4_rows.Rows,
    here: Place,
    products: Products,
    is_masked: bool,
    s: Settings,
) -> State:
    """The state of one block: `place` is its place in shared memory, and its first token."""
    slot, begin = place
    if isinstance(query, turbo4_rows.Rows):
        assert isinstance(products, turbo4.Turbo4)
        return turbo4_rows.attend(slot, begin, query, here, products, is_masked, s)
    nonfinite = products.unseen(slot, begin, at, here)
    weights, masks, maxima, totals = [], [], [], []
    first = begin + here.g * s.held
    for tile, x in enumerate(products.scores(slot, query, here)):
        if s.soft_cap is not None:
            one = lane.number(1.0)
            x = [warp.soft_cap(v, factor=one, cap=s.soft_cap) * LOG2_E for v in x]
        seen = turbo4_rows.visible(query.position[tile] - first, here.odd, s)
        x = [mask.where(v, float("-inf")) for mask, v in zip(seen, x, strict=True)]
        # Of NaN and a number the number; the sum of weights is NaN then.
        top = lane.reduce_lanes(lane.tree(x, lane.maximum), lane.maximum, (4, 8, 16))
        shift = (top > float("-inf")).where(top, 0.0)
        p = [lane.exp2(v - shift) for v in x]
        weights.append(p)
        masks.append(seen)
        maxima.append(top)
        totals.append(lane.reduce_lanes(lane.tree(p, operator.add), operator.add, (4, 8, 16)))
    outputs = products.weighted(slot, weights, masks, nonfinite, here)
    return State(outputs, maxima, totals)


def _keep(
    state: State, area: Pointer, here: Place, head_dim: int, channel: Any, s: Settings
) -> None:
    """Writes a warp's result to shared memory: outputs, maxima in powers of two, sums."""
    lane.warp_barrier()
    size = s.rows * head_dim * 4
    for entry in range(s.entries):
        row = s.row(entry, here)
        for i, x in enumerate(state.outputs[entry]):
            area.at((row * head_dim + channel(i, here, head_dim)) << 2).store(x)
        with lane.when(s.writes(here)):
            at = area.at(row << 2, size)
            at.store(state.maxima[entry])
            at.at(4 * s.rows).store(state.totals[entry])


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


def _finish(a: Arrays, at: Program, here: Place, area: Pointer, s: Settings) -> None:
    """Writes the call's results: each warp joins what all found for some queries, as `merge`."""
    zero, size = lane.integer(0), s.rows * a.head_dim
    for start in range(0, s.rows, s.warps):
        q = lane.uniform(lane.thread() >> 5) + start
        number, layout = at.tile * s.rows + q, merge.Layout(1, s.rows)
        numbers = number, at.pair, at.batch, at.length, zero, here.number, zero, zero
        row = merge.Row(a, [], s, layout, *numbers)
        with lane.when((q < s.rows) & (number < a.rows)):
            found = warp.nothing(row.channels)
            for i in range(s.warps):
                kept = area.at(i * s.warp_bytes(a.head_dim))
                own = kept.times(q, 4 * a.head_dim).at(row.first << 2).words(row.channels)
                m, l = (kept.at(q << 2, 4 * (size + k * s.rows)).float() for k in (0, 1))
                found = warp.joined(found, ([x.as_float() for x in own], m, l))
            part = warp.joined(warp.nothing(row.channels), found)
            merge.finish(row, [part], row.has_bad_page(row.pages(row.first_needed)))


def _combine(a: Arrays, at: Program, area: Pointer, s: Settings) -> None:
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


class New(NamedTuple):
    """A new token of each sequence; some may have none."""

    key: Any  # ``[B * K, H]``, in the query's dtype
    value: Any  # the same
    dropped_tokens: Any  # int32 ``[1]``, to which those without a page are added


def append_and_attend(
    query: jax.Array,
    pages: Pages,
    tables: jax.Array,
    lengths: jax.Array,
    query_lengths: jax.Array | None,
    new_lengths: jax.Array | None,
    new: New,
    settings: Settings,
    new_settings: append.Settings,
) -> tuple[tuple[jax.Array, jax.Array], Pages, jax.Array]:
    """Stores a new token of each sequence and attends to it and all others, in one launch.

    Arguments and the first result are those of `attend`, but `lengths` are those before;
    `new_lengths` int32 ``[B]`` are 1 where there is a new token, see also `Settings.max_length`.
    Returned are also the pages and `New.dropped_tokens`, in their own memory if they were donated.
    All bits are those of `append.append`, then `attend`. Under `vmap` calls follow one another.
    """
    names = [n for n in _WRITTEN if getattr(pages, n) is not None]
    grid, shapes = _launch(query, pages, tables, settings)
    kernel = functools.partial(_storing_kernel, s=settings, new=new_settings)

    @jax.custom_batching.sequential_vmap
    def run(
        operands: tuple[Any, ...], written: list[jax.Array]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        (query, pages, *where, new), written = lanes.unfused((operands, written))
        call = warp.update(kernel, _NAME, shapes, grid, settings, query.shape[3])

        def write(state: tuple[list[Any], list[Any]]) -> None:
            partials, refs = state
            here = pages._replace(**dict(zip(names, refs, strict=False)))
            token = new._replace(dropped_tokens=refs[-1])
            found = call(query, here, *where, token)
            for ref, x in zip(partials, found, strict=True):
                ref[...] = x

        # What is there first is never used, so no kernel makes it.
        nothing = [jnp.zeros(x.shape, x.dtype) for x in shapes]
        found: tuple[list[jax.Array], list[jax.Array]]
        found = lanes.unfused(pl.run_state(write)((nothing, written)))
        return found

    written = [*(getattr(pages, n) for n in names), new.dropped_tokens]
    read = pages._replace(**dict.fromkeys(names)), new._replace(dropped_tokens=None)
    where = (tables, lengths, query_lengths, new_lengths)
    operands = (query, read[0], *where, read[1])
    axes = varying.axes_of((operands, written))
    found, written = varying.cast(run(*varying.cast((operands, written), axes)), axes)
    pages = pages._replace(**dict(zip(names, written, strict=False)))
    return _joined(query, pages, where, found, settings), pages, written[-1]


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
    grid, shapes = _launch(query, pages, tables, settings)
    kernel = functools.partial(_kernel, s=settings)
    run = warp.launch(kernel, _NAME, shapes, grid, settings, query.shape[3])
    where = (tables, lengths, query_lengths, None)
    return _joined(query, pages, where, run(query, pages, *where), settings)


def _is_final(runs: int, s: Settings) -> bool:
    """Whether programs find results, and not parts of them."""
    return runs == 1 and not s.is_split


def _joined(
    query: jax.Array, pages: Pages, where: tuple[Any, Any, Any, Any], found: Any, s: Settings
) -> tuple[jax.Array, jax.Array]:
    """The results of a call, from those of its programs."""
    if len(found) == 2:
        return found[0], found[1]
    return merge.merge(query, pages, *where, tuple(found), s)


def _launch(
    query: jax.Array, pages: Pages, tables: jax.Array | None, s: Settings
) -> tuple[dict[str, int], list[jax.ShapeDtypeStruct]]:
    """The grid, and what programs write: parts, which `merge` joins, or if there is one results."""
    if s.part % s.step:
        raise ValueError(f"{s.part=} must be a multiple of {s.step=}")
    batch, tokens, heads, head_dim = query.shape
    kv_heads, page_size = pages.key.shape[1:3]
    rows, pairs = heads // kv_heads * tokens, batch * kv_heads
    runs = pl.cdiv(table_width(tables, s) * page_size, s.run)
    programs = runs if s.window is None else min(runs, pl.cdiv(s.window[0] + tokens, s.run) + 1)
    grid = dict(zip(_GRID, (pl.cdiv(rows, s.rows), programs, pairs), strict=True))
    if _is_final(runs, s):
        return grid, merge.results(query, s)
    shape = (pairs, runs * (s.run // s.block if s.is_split else 1), rows)
    return grid, [jax.ShapeDtypeStruct(x, jnp.float32) for x in ((*shape, head_dim), shape, shape)]
