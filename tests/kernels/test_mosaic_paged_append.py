"""The kernel that writes pages on Hopper, emulated on a CPU: the bits of plain JAX; lowering."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mosaic import eight_bits
from pallas_kernels.mosaic.hopper.paged import append as kernel
from pallas_kernels.mosaic.hopper.paged import int8, rotation
from tests.caches.paged_append_helpers import (
    MIXES,
    TABLES,
    assert_stores_the_same,
    check_dropped,
    check_ragged,
    integers,
    new,
    strange,
    tokens,
)
from tests.grids import pairwise
from tests.kernels.kernel_helpers import lower_for_cuda
from tests.oracles import lanes
from turbojax import _device
from turbojax.caches.paged import append_mosaic
from turbojax.caches.paged import pool as paged

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
FORMATS = ("turbo4", "auto", "fp8_e4m3", "fp8_e5m2", *MIXES)


@pytest.fixture
def same(monkeypatch):
    """Runs both; the kernel traced anew, so that no trace is kept for others."""
    lanes.patch(monkeypatch, kernel, rotation, int8, eight_bits)

    @jax.jit
    def append(cache, key, value, tables, lengths, new_lengths):
        run = append_mosaic.append.__wrapped__
        return run(cache, key, value, jnp.asarray(tables), lengths, new_lengths)[0]

    def run(cache, key, value, tables, lengths, new_lengths=None):
        if new_lengths is None:
            new_lengths = jnp.full(len(key), key.shape[1], jnp.int32)
        return append(cache, key, value, tables, lengths, new_lengths)

    return functools.partial(assert_stores_the_same, run=run)


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize(
    ("kv_dtype", "head_dim", "dtype"),
    [
        ("turbo_k3v4", 128, jnp.bfloat16),
        ("fp8_e5m2", 64, jnp.float16),
        ("k8v4", 32, jnp.float32),
        ("auto", 256, jnp.bfloat16),
        *pairwise(kv_dtype=FORMATS, head_dim=(128, 64, 16, 32, 256), dtype=DTYPES),
    ],
)
def test_ragged_tokens(same, kv_dtype, head_dim, dtype):
    check_ragged(same, head_dim, dtype, kv_dtype=kv_dtype)


@pytest.mark.quick(first=1, slow=1)
@pytest.mark.parametrize(
    ("kv_dtype", "head_dim", "dtype"),
    [("turbo_k3v2", 128, jnp.bfloat16), *pairwise(
        kv_dtype=("turbo4", "fp8_e4m3", "k8v4", "int8"), head_dim=(16, 64, 256), dtype=DTYPES
    )],
)  # fmt: skip
def test_strange_vectors(same, kv_dtype, head_dim, dtype):
    """What is no number, too large or too small, zeros, and what lies next to a threshold."""
    cache = new(head_dim, dtype, kv_dtype=kv_dtype)
    same(cache, *strange(head_dim, dtype), TABLES, integers(0, 0, 0))


@pytest.mark.quick(1)
@pytest.mark.parametrize("kv_dtype", ["turbo4", "auto"])
def test_what_has_no_place_is_lost(same, kv_dtype):
    check_dropped(same, kv_dtype)


def test_several_rounds_of_a_warp(same, monkeypatch):
    monkeypatch.setattr(append_mosaic, "_MANY", 100)
    cache = new(64, jnp.bfloat16, kv_dtype="turbo_k4v2")
    x = tokens(21, 64, jnp.bfloat16, seed=3)
    assert append_mosaic.settings(cache, x[0], 4).rounds > 1
    same(cache, *x, TABLES, integers(14, 0, 3), new_lengths=integers(21, 5, 0))


# The choice, and that it lowers -------------------------------------------------------------------


def specification(kv_dtype, head_dim=128, dtype=jnp.bfloat16, tokens=1, heads=8, page_size=64):
    """Arguments of `append` that are shapes alone."""
    cache = jax.eval_shape(
        lambda: paged.init_paged_cache(
            640, page_size, heads, head_dim, kv_dtype=kv_dtype, dtype=dtype
        )
    )
    x = jax.ShapeDtypeStruct((4, tokens, heads, head_dim), dtype)
    tables = jax.ShapeDtypeStruct((4, 40), jnp.int32)
    return cache, x, x, tables, jax.ShapeDtypeStruct((4,), jnp.int32)


@pytest.mark.quick(first=2, slow=0)
@pytest.mark.parametrize(
    ("kv_dtype", "head_dim", "dtype", "tokens", "page_size"),
    [
        ("turbo_k3v4", 128, jnp.bfloat16, 1, 64),
        ("k8v4", 64, jnp.bfloat16, 2048, 16),
        *pairwise(
            kv_dtype=FORMATS,
            head_dim=(128, 16, 256),
            dtype=DTYPES,
            tokens=(1, 2048),
            page_size=(64, 16),
        ),
    ],
)
def test_it_lowers_in_place(hopper, kv_dtype, head_dim, dtype, tokens, page_size):
    """One kernel, whose every array of pages is its own result; nothing else touches them."""
    arguments = specification(kv_dtype, head_dim, dtype, tokens, page_size=page_size)
    assert kernel.NAME in str(jax.make_jaxpr(paged.append)(*arguments))
    text = lower_for_cuda(jax.jit(paged.append, donate_argnums=0), *arguments)
    assert text.count("custom_call @mosaic_gpu") == 1
    assert "stablehlo.scatter" not in text
    arrays = len(paged.page_arrays(arguments[0])) + 1
    assert text.count("#stablehlo.output_operand_alias") == arrays


def test_it_lowers_in_loops_and_under_vmap(hopper):
    cache, key, _, tables, lengths = specification("turbo4")
    steps = jax.ShapeDtypeStruct((3, *key.shape), key.dtype)

    def run(cache, key, value, tables, lengths):
        def step(cache, x):
            return paged.append(cache, *x, tables, lengths), None

        return jax.lax.scan(step, cache, (key, value))[0]

    over = jax.vmap(paged.append, (None, 0, 0, None, None))
    for f in (run, over):
        assert "@mosaic_gpu" in lower_for_cuda(f, cache, steps, steps, tables, lengths)


@pytest.mark.parametrize(
    ("kv_dtype", "shape", "reason"),
    [
        ("turbo4", {"head_dim": 80}, "head_dim=80 must be a power of two"),
        ("auto", {"head_dim": 512}, "head_dim=512 must be a power of two from 16 to 256"),
        ("fp8_e4m3", {"tokens": 0}, r"key.shape=\(4, 0, 8, 128\) is empty"),
    ],
)
def test_what_is_refused(hopper, kv_dtype, shape, reason):
    cache, key, _, tables, _ = specification(kv_dtype, **shape)
    with pytest.raises(NotImplementedError, match=reason):
        paged.APPEND.select("mosaic_gpu", cache=cache, key=key, block_tables=tables)


def test_elsewhere_it_is_chosen_after_others(monkeypatch):
    cache, key, _, tables, _ = specification("turbo4")
    monkeypatch.setattr(_device, "gpu_compute_capability", lambda: 8.0)
    chosen = paged.APPEND.select(None, cache=cache, key=key, block_tables=tables)
    assert chosen.name == "triton"


def test_settings_divide_the_work():
    cache, key, _, _, _ = specification("turbo4", head_dim=64, tokens=5)
    s = append_mosaic.settings(cache, key, 40)
    assert (s.lanes, s.together, s.rounds) == (8, 4, 1)
    assert s.programs == 4 * 5 * 8 // 16
    assert np.prod(key.shape[:3]) == s.vectors
