"""Decode over latents on Hopper, on a CPU: lowering, expansion into slots, settings.

Code for single lanes runs on arrays of 32 lanes (`oracles.warp`); the attention itself runs in
Pallas' interpreter where that is (`test_mosaic_interpreted.py`), and on a GPU
(`test_gpu_latent.py`).
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mosaic.hopper.latent import kernel, tiles
from tests.kernels.kernel_helpers import lower_for_cuda
from tests.kernels.test_mosaic_prompt import Half, Memory, swizzle
from tests.models import latent_helpers as helpers
from tests.oracles import warp


def specification(name, batch=2, heads=16, tokens=1, page_size=64, pages=64):
    """Shapes of a call."""
    of = jax.ShapeDtypeStruct
    dtype = jnp.float16 if name == "float16" else jnp.bfloat16
    data = {"turbo4": (256, jnp.uint8), "fp8_e4m3": (512, jnp.float8_e4m3fn)}
    width, kind = data.get(name, (512, dtype))
    pool = (batch * pages, page_size)
    return (
        *(of((batch, tokens, heads, size), dtype) for size in (512, 64)),
        of((*pool, width), kind),
        of(pool, jnp.float32) if name in data else None,
        of((*pool, 64), dtype),
        of((batch, pages), jnp.int32),
        of((batch,), jnp.int32),
        of((batch,), jnp.int32),
    )


def lower(name, *, window=None, **shape):
    arrays = specification(name, **shape)
    heads = arrays[0].shape[2]
    s = kernel.settings(helpers.SCALE, heads, window=window, codec=helpers.codec_of(name))
    return lower_for_cuda(functools.partial(kernel.attend, settings=s), *arrays)


@pytest.mark.fuzz
@pytest.mark.parametrize(
    ("name", "shape", "is_joined"),
    [
        ("bfloat16", {}, True),
        ("turbo4", {"pages": 16}, False),
        ("float16", {"heads": 20, "tokens": 3, "page_size": 16, "window": 300}, False),
        ("fp8_e4m3", {"heads": 128, "page_size": 128}, True),
    ],
)
def test_it_lowers(name, shape, is_joined):
    text = lower(name, **shape)
    assert "turbojax_latent_hopper" in text
    assert ("turbojax_paged_join_hopper" in text) == is_joined


def test_parts_grow_with_the_heads_and_registers_suffice():
    few, many = (kernel.settings(0.1, heads) for heads in (64, 65))
    assert (few.part, many.part) == (1024, 2048)
    assert few.part % tiles.TILE == 0
    for codec in (None, helpers.codec_of("turbo4")):
        attends, copies = kernel.settings(0.1, 16, codec=codec).registers
        # What three warpgroups have when they start.
        assert 2 * attends + copies <= 3 * 168


@pytest.fixture
def lanes(monkeypatch):
    """Runs code for lanes as one of a warpgroup's warps."""
    prefetched = []
    monkeypatch.setattr(warp, "special", lambda name: warp.thread(), raising=False)
    monkeypatch.setattr(warp, "prefetch", prefetched.append, raising=False)
    monkeypatch.setattr(warp, "half", Half)
    for module in (kernel, tiles):
        monkeypatch.setattr(module, "lane", warp)
    monkeypatch.setattr("pallas_kernels.mosaic.hopper.paged_prompt.expand.lane", warp)

    def run(number, f):
        warp.STATE.number = number
        return f()

    run.prefetched = prefetched
    return run


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("name", ["fp8_e4m3", "turbo4"])
@pytest.mark.parametrize("page_size", [16, 128])
def test_tiles_are_expanded_where_the_matrix_unit_finds_them(lanes, name, page_size):
    length = 230
    case = helpers.make(name, (3, length), page_size=page_size)
    given = [np.asarray(case.arrays[i]) for i in (2, 3, 5, 4)]
    arrays = [Memory(np.ascontiguousarray(x).reshape(-1).view(np.uint8)) for x in given]
    tables, rope = given[2:]
    x = types.SimpleNamespace(rope=rope, tables=tables)
    codes = kernel.Codes(x, helpers.codec_of(name), "bfloat16")
    for tile in range(-(-length // tiles.TILE)):
        slot = np.zeros(2 * 64 * 256 * 2, np.uint8)
        numbers = [warp.integer(n) for n in (1, tile, length)]
        for share in range(kernel.SHARES):
            for number in range(4):

                def f(share=share, numbers=numbers, slot=slot):
                    words, factor = codes.loaded(arrays[:3], numbers, share)
                    codes.stored(words, factor, Memory(slot), share)

                lanes(number, f)
        found = slot.view(np.uint16).reshape(2, 8, 4, 8, 8, 8)
        found = np.take_along_axis(found, swizzle()[None, None, None, :, :, None], 4)
        found = found.transpose(1, 3, 0, 2, 4, 5).reshape(64, 512).view(jnp.bfloat16)
        want = case.latent[1][tile * 64 : (tile + 1) * 64]
        got = found[: len(want)].astype(np.float64)
        assert (np.abs(got - want) <= 2.0**-8 * np.abs(want) + 1e-6).all()


@pytest.mark.parametrize("name", helpers.FORMATS)
def test_all_of_a_tile_is_asked_for_once(lanes, name):
    case = helpers.make(name, (3, 230), page_size=16)
    latent, _, rope, tables = (np.asarray(x) for x in case.arrays[2:6])
    arrays = [Memory(np.zeros(0 if x is None else x.nbytes, np.uint8)) for x in (latent, rope)]
    arrays.append(Memory(np.ascontiguousarray(tables).reshape(-1).view(np.uint8)))
    x = types.SimpleNamespace(latent=latent, rope=rope, tables=tables)
    numbers = [warp.integer(n) for n in (1, 2, 230)]
    for number in range(4):
        lanes(number, lambda: tiles.asked_for(arrays, numbers, x))
    pages = tables[1, 8:12]
    for memory, array in zip(arrays, (latent, rope), strict=False):
        size = array[0].nbytes
        lines = [at.offset // 128 for at in lanes.prefetched if at.memory is memory.memory]
        want = {page * size // 128 + i for page in pages for i in range(size // 128)}
        assert set(np.concatenate(lines).tolist()) == want
