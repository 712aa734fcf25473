"""Kernels of `pallas_kernels.mosaic.lanes` in numpy: each warp of each program, one after another.

Stands in for that frame in kernels whose warps neither wait for each other nor share memory.
"""

import itertools

import jax
import numpy as np
from oracles import warp

WARPS = 4


def patch(monkeypatch, *modules):
    """Lets kernels of these modules run emulated, on any device."""
    for module in modules:
        monkeypatch.setattr(module, "lane", warp)
        if hasattr(module, "lanes"):
            monkeypatch.setattr(module.lanes, "launch", launch)
            monkeypatch.setattr(module.lanes, "update", update)


def update(body, name, inputs, arrays, *, grid, warpgroups):
    """As `lanes.update`."""
    count, shapes = len(inputs), [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]

    def run(*given):
        return _run(body, given[:count], given[count:], grid, warpgroups)

    return jax.pure_callback(run, shapes, *inputs, *arrays)


def launch(body, name, inputs, out, *, grid, warpgroups):
    """As `lanes.launch`; what is not written is all ones in bits, NaN where there is one."""

    def run(*given):
        empty = [np.full(x.size * x.dtype.itemsize, 255, np.uint8) for x in out]
        empty = [x.view(to.dtype).reshape(to.shape) for x, to in zip(empty, out, strict=True)]
        return _run(body, given, empty, grid, warpgroups)

    return jax.pure_callback(run, list(out), *inputs)


def _run(body, inputs, written, grid, warpgroups):
    arrays = [np.array(x) for x in (*inputs, *written)]
    pointers = [warp.Pointer(x.reshape(-1).view(np.uint8)) for x in arrays]
    for ids in itertools.product(*map(range, grid.values())):
        for number in range(WARPS * warpgroups):
            warp._WARP.append(number)
            body(pointers, [warp.integer(i) for i in ids])
            warp._WARP.pop()
    return arrays[len(inputs) :]
