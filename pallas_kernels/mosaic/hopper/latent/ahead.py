"""Tiles that are asked for in the L2 cache before there is room for them in shared memory.

There is room for two tiles alone, so while they are attended to nothing would be on its way from
memory.
"""

from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import lane, ring
from pallas_kernels.mosaic.hopper.latent.tiles import TILE, Inputs, Work
from pallas_kernels.mosaic.lane import Int, Pointer
from pallas_kernels.mosaic.ring import SCALAR

TOKENS = 16
"""Tokens of a tile for each of a warpgroup's warps: all are in one page."""
_LANES, _LINE = 32, 128


def place() -> tuple[Int, Int]:
    thread = lane.special("tid.x")
    return (thread >> 5) & 3, thread & (_LANES - 1)


def first_row(tables: Pointer, numbers: list[Int], x: Inputs) -> Int:
    """The pool's number of this warp's first token in a tile; any number past the sequence's end.

    `numbers` are the sequence, the tile, and the sequence's length; only sizes of `x` are read.
    """
    b, tile, length = numbers
    page_size, max_pages = x.rope.shape[1], x.tables.shape[1]
    warp, _ = place()
    token = (tile * TILE + warp * TOKENS).minimum((length - 1).maximum(0))
    entry = (token // page_size).minimum(max_pages - 1)
    page = tables.at((b * max_pages + entry) * 4).word()
    return page * page_size + token % page_size // TOKENS * TOKENS


def ask_for(work: Work, j: jax.Array, x: Inputs) -> None:
    """Prefetches tile `j`; past a sequence's end, some other tile."""

    def f(refs: Any, *numbers: Any) -> None:
        asked_for([Pointer.to(ref) for ref in refs], [lane.scalar(n) for n in numbers], x)

    refs = (x.latent, x.rope, x.tables)
    types = ((plgpu.RefType(),) * len(refs), SCALAR, SCALAR, SCALAR)
    ring.inline(f, types)(refs, work.b, j, work.length)


def asked_for(arrays: list[Pointer], numbers: list[Int], x: Inputs) -> None:
    """A lane's part of `ask_for`; `arrays` are latents, rotary parts and tables."""
    *sources, tables = arrays
    row, (_, own) = first_row(tables, numbers, x), place()
    for source, ref in zip(sources, (x.latent, x.rope), strict=True):
        size = ref.shape[-1] * ref.dtype.itemsize
        lines = TOKENS * size // _LINE
        for i in range(0, lines, _LANES):
            line = own + i if lines >= _LANES else own & (lines - 1)
            lane.prefetch(source.times(row, size).at(line * _LINE))
