"""Kernels of `pallas_kernels.mosaic.lanes` in numpy: each warp of each program.

Stands in for that frame. Where warps share memory, they take turns, and meet at barriers.
"""

import functools
import itertools

import jax
import numpy as np

from tests.oracles import warp
from tests.oracles.programs import RoundRobin

WARPS = 4


def patch(monkeypatch, *modules):
    """Lets kernels of these modules run emulated, on any device."""
    for module in modules:
        monkeypatch.setattr(module, "lane", warp)
        if hasattr(module, "lanes"):
            monkeypatch.setattr(module.lanes, "launch", launch)
            monkeypatch.setattr(module.lanes, "update", update)


def update(body, name, inputs, arrays, *, grid, warpgroups, shared=0, out=(), backwards=False):
    """As `lanes.update`; the last warp of a program first, if asked."""
    count, shapes = len(inputs), [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    shapes += out

    def run(*given):
        written = [*given[count:], *_nothing(out)]
        return _run(body, given[:count], written, grid, warpgroups, shared, backwards)

    return jax.pure_callback(run, shapes, *inputs, *arrays)


def launch(body, name, inputs, out, *, grid, warpgroups, shared=0):
    """As `lanes.launch`; what is not written is all ones in bits, NaN where there is one."""

    def run(*given):
        return _run(body, given, _nothing(out), grid, warpgroups, shared)

    return jax.pure_callback(run, list(out), *inputs)


def _nothing(out):
    empty = [np.full(x.size * x.dtype.itemsize, 255, np.uint8) for x in out]
    return [x.view(to.dtype).reshape(to.shape) for x, to in zip(empty, out, strict=True)]


def _run(body, inputs, written, grid, warpgroups, shared, backwards=False):
    arrays = [np.array(x) for x in (*inputs, *written)]
    pointers = [warp.Pointer(x.reshape(-1).view(np.uint8)) for x in arrays]
    warps = range(WARPS * warpgroups)[:: -1 if backwards else 1]
    for ids in itertools.product(*map(range, grid.values())):
        if not shared:
            for number in warps:
                _warp(body, pointers, ids, number, None)
            continue
        memory = warp.Pointer(np.full(shared, 255, np.uint8))
        _together(body, [*pointers, memory], ids, warps)
    return arrays[len(inputs) :]


def _together(body, pointers, ids, warps):
    def barrier():
        scheduler.barrier("all", len(warps))

    given = body, pointers, ids
    scheduler = RoundRobin([functools.partial(_warp, *given, number, barrier) for number in warps])
    scheduler.run()


def _warp(body, pointers, ids, number, barrier):
    warp.STATE.number, warp.STATE.barrier = number, barrier
    try:
        body(pointers, [warp.integer(i) for i in ids])
    finally:
        warp.STATE.number, warp.STATE.barrier = 0, None
