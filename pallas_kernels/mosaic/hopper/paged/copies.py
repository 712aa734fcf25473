"""Copies of pages to shared memory: in bulk, or by lanes on GPUs that have no bulk copies."""

from pallas_kernels.mosaic import lane
from pallas_kernels.mosaic.hopper.paged.inputs import Arrays, Place, Program, Settings
from pallas_kernels.mosaic.lane import Int, Pointer

# Tokens that always follow each other in a contiguous cache, even in a rolling buffer.
_RUN_OF_ROWS = 16
# Bytes that a warp's lanes copy at once without bulk copies.
_BYTES_OF_WARP = 32 * 16


def _pages_per_block(a: Arrays, s: Settings) -> int:
    return max(1, s.block // a.page_size)


def page_of(a: Arrays, at: Program, here: Place, block: Int, s: Settings) -> Int:
    """The number of the page from which this lane copies; any number if it copies nothing."""
    if a.tables is None:
        return block  # a page's place follows from its number
    number = block * s.block // a.page_size
    if _pages_per_block(a, s) > 1:
        number = number + here.number
    # The merge discards the results of a page that does not exist.
    return a.page(at.batch, number).maximum(0).minimum(a.num_pages - 1)


def start_copies(
    a: Arrays,
    at: Program,
    here: Place,
    block: Int,
    page: Int,
    target: tuple[Pointer, Pointer],
    s: Settings,
) -> None:
    """Starts to copy a block of the program: only the pages that hold tokens."""
    if s.is_contiguous:
        _copy_rows(a, at, here, block, target, s)
        return
    if s.copies_words:
        _copy_pages(a, at, here, block, page, target, s)
        return
    slot, barrier = target
    count, size = _pages_per_block(a, s), min(a.page_size, s.block)
    begin = block * s.block

    def copy(number: Int | int) -> None:
        """Starts the copies of a page, number `number` of the block."""
        first = (page * a.kv_heads + at.head) * a.page_size
        if a.page_size > s.block:
            first = first + begin % a.page_size
        offset = 0
        for source, width in _sources(a, s):
            to = slot.at(number * (size * width), offset)
            lane.copy(source.times(first, width), to, size * width, barrier)
            offset += s.block * width

    with lane.when(block < at.stop):
        if count == 1:
            with lane.when(lane.elected()):
                lane.expect_bytes(barrier, size * s.token_bytes(a.head_dim))
                copy(0)
            return
        held = (at.length - begin + (size - 1)) // size
        with lane.when(here.is_first):
            lane.expect_bytes(barrier, held.minimum(count) * (size * s.token_bytes(a.head_dim)))
        lane.warp_barrier()
        with lane.when(here.number < held.minimum(count)):
            copy(here.number)


def _sources(a: Arrays, s: Settings) -> list[tuple[Pointer, int]]:
    """A block's arrays in memory, and the bytes a token has in each."""
    rows = s.key_bytes(a.head_dim), s.row_bytes(a.head_dim)
    sources = list(zip((a.pages.key, a.pages.value), rows, strict=True))
    return sources + [(x, 2) for x in (a.pages.key_norm, a.pages.value_norm) if x is not None]


def _copy_pages(
    a: Arrays,
    at: Program,
    here: Place,
    block: Int,
    page: Int,
    target: tuple[Pointer, Pointer],
    s: Settings,
) -> None:
    """`start_copies` for GPUs without bulk copies: each lane copies 16 bytes at a time."""
    slot, barrier = target
    count, size = _pages_per_block(a, s), min(a.page_size, s.block)
    begin = block * s.block
    with lane.when(block < at.stop):
        held = (at.length - begin + (size - 1)) // size
        for number in range(count):
            own = lane.from_lane(page, lane.integer(number))
            first = (own * a.kv_heads + at.head) * a.page_size
            if a.page_size > s.block:
                first = first + begin % a.page_size
            offset = 0
            for source, width in _sources(a, s):
                start, bytes_of_page = source.times(first, width), size * width
                to = slot.at(number * bytes_of_page + offset)
                for done in range(0, bytes_of_page, _BYTES_OF_WARP):
                    place = (here.number << 4) + done
                    with lane.when(place < bytes_of_page):
                        lane.copy_words(start.at(place), to.at(place), held > number)
                offset += s.block * width
        lane.arrive_after_copies(barrier)


def _copy_rows(
    a: Arrays, at: Program, here: Place, block: Int, target: tuple[Pointer, Pointer], s: Settings
) -> None:
    """`start_copies` of a contiguous cache, where the heads lie between tokens; lanes copy."""
    slot, barrier = target
    row, begin = s.row_bytes(a.head_dim), block * s.block
    lanes = row // 16
    own, part = here.number // lanes, (here.number % lanes) << 4
    each, stride = 32 // lanes, row * a.kv_heads
    with lane.when(block < at.stop):
        for first in range(0, s.block, _RUN_OF_ROWS):
            place = a.page(at.batch, begin + first) * a.kv_heads + at.head
            for side, source in enumerate((a.pages.key, a.pages.value)):
                from_here = source.times(place, row).at(own * stride, part)
                to_here = slot.at(own * row, part, (side * s.block + first) * row)
                for i in range(0, _RUN_OF_ROWS, each):
                    is_held = begin + (first + i) + own < at.length
                    lane.copy_words(from_here.at(i * stride), to_here.at(i * row), is_held)
        lane.arrive_after_copies(barrier)
