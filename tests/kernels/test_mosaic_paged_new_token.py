"""A new token that attention to pages stores on Hopper: its bits, emulated on a CPU; lowering."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mosaic import eight_bits
from pallas_kernels.mosaic.hopper.paged import append, inputs, int8, new_token, rotation
from tests.caches.paged_append_helpers import PAGES, TABLES, compiled, integers, new, tokens
from tests.grids import pairwise
from tests.kernels.kernel_helpers import lower_for_cuda
from tests.oracles import warp
from turbojax.attention.options import Options
from turbojax.caches.paged import append_mosaic, mosaic_gpu, pool, store_and_attend

ALIKE = ("turbo4", "fp8_e4m3", "fp8_e5m2", "auto", "int8")
PAGE, HEADS = 16, 3


@pytest.fixture
def here(monkeypatch):
    """The kernel's modules on arrays of lanes; gives the lane."""
    for module in (append, inputs, int8, eight_bits, new_token, rotation):
        monkeypatch.setattr(module, "lane", warp)
    monkeypatch.setattr(new_token, "Pointer", warp.Pointer)
    number = warp.Int(warp.LANES)
    return inputs.Place(number >> 2, number & 3, number, inputs.parity(number >> 2))


def memory(x):
    """An array's bytes, to be written to."""
    return np.array(x).reshape(-1).view(np.uint8)


def copied_block(arrays, page, head):
    """A block of a head as the copy engine leaves it in shared memory, from the pool's bytes."""
    names = [n for n in ("key", "value", "key_norm", "value_norm") if n in arrays]
    rows = (arrays[n].reshape(PAGES * HEADS, -1) for n in names)
    return np.concatenate([x[page * HEADS + head] for x in rows])


@pytest.mark.quick(3, slow=0)
@pytest.mark.parametrize(
    ("kv_dtype", "head_dim", "dtype"),
    [
        ("turbo4", 128, jnp.bfloat16),
        *pairwise(kv_dtype=ALIKE, head_dim=(64, 128), dtype=(jnp.float16, jnp.bfloat16)),
    ],
)
def test_pages_and_the_copy_of_its_block_hold_it(here, kv_dtype, head_dim, dtype):
    """Also where it begins a page; one sequence has none, one no page, of another head nothing."""
    cache = new(head_dim, dtype, PAGE, HEADS, kv_dtype=kv_dtype)
    scaled = {n: x * (1 + i) for i, n in enumerate(("key_scale", "value_scale"))
              if (x := getattr(cache, n)) is not None}  # fmt: skip
    cache = dataclasses.replace(cache, **scaled)
    tables = np.concatenate([TABLES, [[0, -1, 0, 0]]])
    key, value = tokens(1, head_dim, dtype, batch=4)
    before, counts = integers(21, 32, 7, 16), integers(1, 1, 0, 1)
    want = compiled("xla")(cache, key, value, tables, before, new_lengths=counts)
    s = append_mosaic.settings(cache, key, tables.shape[1])
    settings = types.SimpleNamespace(block=PAGE, warps=4)
    arrays = {n: memory(x) for n, x in pool.page_arrays(cache).items()}
    clean = {n: memory(x) for n, x in pool.page_arrays(want).items()}
    dropped, pointers = (
        memory(cache.dropped_tokens),
        {n: warp.Pointer(x) for n, x in arrays.items()},
    )
    scales = [None if (x := getattr(cache, n)) is None else warp.Pointer(memory(x))
              for n in ("key_scale", "value_scale")]  # fmt: skip
    sides = tuple(
        append.Side(warp.Pointer(memory(x)), pointers[n], pointers.get(f"{n}_norm"), scale)
        for n, x, scale in (("key", key, scales[0]), ("value", value, scales[1]))
    )
    signs = warp.Pointer(memory(cache.rotation.signs)) if cache.formats.is_rotated else None
    where = (warp.Pointer(memory(x)) for x in (tables.astype(np.int32), before, counts))
    a = append.Arrays(*where, signs, sides, warp.Pointer(dropped))
    for pair in range(4 * HEADS):
        sequence, head = divmod(pair, HEADS)
        page = max(int(tables[sequence, int(before[sequence]) // PAGE]), 0)
        at = types.SimpleNamespace(
            **{"pair": warp.integer(pair), "batch": warp.integer(sequence), "tile": warp.integer(0)}
        )
        token = new_token.NewToken.of(a, at, here, s)
        token.count_dropped(here, warp.integer(0))
        token.count_dropped(here, warp.integer(1))
        if sequence >= 2:  # nothing is stored
            assert np.all(token.block(settings).value == np.uint32(2**32 - 1))
            continue
        block = int(before[sequence]) // PAGE
        assert np.all(token.block(settings).value == block)
        for slot in (0, 1, 2):  # whose copy its block is, of two
            copies = [np.full(PAGE * s.vector_bytes(0) * 2 + PAGE * 4, 255, np.uint8)] * 2
            if slot < 2:
                copies[slot] = copied_block(arrays, page, head)
            slots = types.SimpleNamespace(
                count=2, slot=lambda i, x=copies: warp.Pointer(x[i]), barrier=lambda _: None
            )
            token.store(warp.integer(block - 4 * slot), slots, here, settings)
            if slot < 2:
                np.testing.assert_array_equal(copies[slot], copied_block(clean, page, head))
            assert all((x == 255).all() for i, x in enumerate(copies) if i != slot)
    for name, x in clean.items():
        np.testing.assert_array_equal(arrays[name], x, err_msg=name)
    assert int(dropped.view(np.int32)[0]) == int(want.dropped_tokens) == 1


# That it lowers, and when it is chosen ------------------------------------------------------------


def specification(kv_dtype, *, head_dim=128, heads=32, page_size=64, tokens=1, batch=4):
    dtype = jnp.bfloat16
    cache = jax.eval_shape(
        lambda: pool.init_paged_cache(64, page_size, 8, head_dim, kv_dtype=kv_dtype, dtype=dtype)
    )
    vectors = [jax.ShapeDtypeStruct((batch, tokens, n, head_dim), dtype) for n in (heads, 8, 8)]
    lengths = jax.ShapeDtypeStruct((batch,), jnp.int32)
    return *vectors, cache, jax.ShapeDtypeStruct((batch, 40), jnp.int32), lengths, lengths


def run(window=None, implementation=None):
    options = Options(True, window, scale=0.1, implementation=implementation)
    return functools.partial(store_and_attend, options=options)


@pytest.mark.quick(first=2, slow=0)
@pytest.mark.parametrize(
    ("kv_dtype", "head_dim", "heads", "page_size", "window"),
    [
        ("turbo4", 128, 32, 64, None),
        *pairwise(
            kv_dtype=ALIKE,
            head_dim=(64, 128),
            heads=(8, 32, 512),
            page_size=(64, 16, 128),
            window=(None, (300, 0)),
        ),
    ],
)
def test_it_lowers_in_place(hopper, monkeypatch, kv_dtype, head_dim, heads, page_size, window):
    """One kernel, and one that joins parts if there are any; pages are results in their place.

    With what is not chosen by itself, too.
    """
    monkeypatch.setattr(mosaic_gpu, "stores", lambda *_: True)
    shape = {"head_dim": head_dim, "heads": heads, "page_size": page_size}
    arguments = specification(kv_dtype, **shape)
    text = lower_for_cuda(jax.jit(run(window), donate_argnums=3), *arguments)
    query, _, _, cache, tables, *_ = arguments
    call = mosaic_gpu.call_of(query, cache, tables, Options(True, window, scale=0.1))
    launch = mosaic_gpu.default_launch(call)
    is_one = not launch.is_split and call.tokens <= launch.part
    assert text.count("custom_call @mosaic_gpu") == (1 if is_one else 2)
    assert append.NAME not in text
    arrays = len(pool.page_arrays(arguments[3])) + 1
    assert text.count("#stablehlo.output_operand_alias") == arrays


def test_it_lowers_in_loops_and_under_vmap(hopper):
    query, key, value, cache, *where = specification("turbo4")
    steps = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), (query, key, value)
    )

    def loop(cache, steps, *where):
        def step(cache, x):
            (out, _), cache = run()(*x, cache, *where)
            return cache, out

        return jax.lax.scan(step, cache, steps)

    over = jax.vmap(run(), (0, 0, 0, None, None, None, None))
    assert "@mosaic_gpu" in lower_for_cuda(loop, cache, steps, *where)
    assert "@mosaic_gpu" in lower_for_cuda(over, *steps, cache, *where)


@pytest.mark.parametrize(
    ("kv_dtype", "shape"),
    [
        ("k8v4", {}),
        ("int8_v4", {}),
        ("turbo_k3v3", {}),
        ("turbo4", {"head_dim": 64}),
        ("turbo4", {"tokens": 2}),
        ("turbo4", {"heads": 128}),
        ("turbo4", {"batch": 17}),
    ],
)
def test_otherwise_there_are_two_calls(hopper, kv_dtype, shape):
    assert append.NAME in str(jax.make_jaxpr(run())(*specification(kv_dtype, **shape)))


@pytest.mark.parametrize("kv_dtype", ALIKE)
def test_one_call_is_chosen_for_few_sequences(hopper, kv_dtype):
    assert append.NAME not in str(jax.make_jaxpr(run())(*specification(kv_dtype)))
