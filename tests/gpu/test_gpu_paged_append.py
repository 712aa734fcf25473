"""`paged.append` of codes compiled on a GPU: the kernel's bits are those of plain JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mosaic.hopper.paged import append as hopper
from pallas_kernels.triton import paged_append as kernel
from tests.caches.cache_helpers import assert_same_bits
from tests.caches.paged_append_helpers import (
    MIXES,
    TABLES,
    as_bits,
    assert_stores_the_same,
    compiled,
    integers,
    new,
    strange,
    tokens,
)
from turbojax import polar
from turbojax._device import needs_hopper
from turbojax.caches.paged import formats
from turbojax.caches.paged import pool as paged

pytestmark = pytest.mark.gpu

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
FORMATS = ("auto", "fp8_e4m3", "fp8_e5m2")


@pytest.fixture(params=["triton", "mosaic_gpu"])
def implementation(request):
    if request.param == "mosaic_gpu" and (refusal := needs_hopper()):
        pytest.skip(f"mosaic_gpu: {refusal}")
    return request.param


@pytest.fixture
def same(implementation):
    return functools.partial(assert_stores_the_same, run=compiled(implementation))


@pytest.mark.quick(7)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("page_size", [16, 64])
def test_ragged_tokens(same, page_size, head_dim, dtype):
    cache = new(head_dim, dtype, page_size)
    before, count = integers(page_size - 2, 0, 3), integers(21, 5, 0)
    cache = same(cache, *tokens(21, head_dim, dtype), TABLES, before, new_lengths=count)
    given = {"new_lengths": integers(1, 0, 1)}
    same(cache, *tokens(1, head_dim, dtype, seed=1), TABLES, before + count, **given)


@pytest.mark.quick(7)
@pytest.mark.parametrize("kv_dtype", MIXES)
@pytest.mark.parametrize(("head_dim", "dtype"), [(16, jnp.float32), (128, jnp.bfloat16)])
def test_every_number_of_bits(same, head_dim, dtype, kv_dtype):
    cache = new(head_dim, dtype, kv_dtype=kv_dtype)
    x = tokens(21, head_dim, dtype, seed=2)
    cache = same(cache, *x, TABLES, integers(14, 0, 3), new_lengths=integers(21, 5, 0))
    same(cache, *strange(head_dim, dtype), TABLES, integers(1, 0, 0))


@pytest.mark.parametrize("kv_dtype", FORMATS)
@pytest.mark.parametrize(("head_dim", "dtype"), list(zip((16, 128, 256), DTYPES, strict=True)))
def test_formats_without_codes(head_dim, dtype, kv_dtype):
    """On Hopper alone they have a kernel."""
    if refusal := needs_hopper():
        pytest.skip(refusal)
    same = functools.partial(assert_stores_the_same, run=compiled("mosaic_gpu"))
    cache = new(head_dim, dtype, kv_dtype=kv_dtype)
    x = tokens(21, head_dim, dtype, seed=2)
    cache = same(cache, *x, TABLES, integers(14, 0, 3), new_lengths=integers(21, 5, 0))
    same(cache, *strange(head_dim, dtype), TABLES, integers(1, 0, 0))


@pytest.mark.quick(5)
@pytest.mark.parametrize("count", [1, 300, 3000])
@pytest.mark.parametrize("kv_dtype", MIXES)
def test_every_launch_of_every_number_of_bits(same, kv_dtype, count):
    tables = jnp.arange(64 * 50, dtype=jnp.int32).reshape(64, 50)[: 64 if count == 1 else 4]
    batch = len(tables)
    cache = paged.init_paged_cache(64 * 50, 64, 8, 128, kv_dtype=kv_dtype, dtype=jnp.bfloat16)
    before = jnp.arange(batch, dtype=jnp.int32)
    cache = same(cache, *tokens(count, 128, jnp.bfloat16, 8, batch=batch), tables, before)
    assert np.asarray(cache.value_norm).any()


@pytest.mark.quick(5)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
def test_strange_vectors(same, head_dim, dtype):
    same(new(head_dim, dtype), *strange(head_dim, dtype), TABLES, integers(0, 0, 0))


@pytest.mark.quick(7)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "count", "heads", "head_dim"),
    [
        (64, 1, 8, 128),
        (64, 5, 8, 128),
        (4, 1000, 8, 128),
        (2, 4096, 8, 128),
        (2, 3000, 8, 64),
        (2, 1500, 8, 256),
        (3, 6001, 3, 32),
        (3, 6001, 3, 16),
    ],
)
def test_full_sizes(same, batch, count, heads, head_dim, dtype):
    """Every launch; places at random, each vector of another length."""
    width = -(-(count + 70) // 64)
    cache = paged.init_paged_cache(batch * width + 3, 64, heads, head_dim, dtype=dtype, seed=2)
    rng = np.random.default_rng(3)
    tables = jnp.asarray(rng.permutation(batch * width).reshape(batch, width), jnp.int32)
    before = jnp.asarray(rng.integers(0, 70, batch), jnp.int32)
    x = tokens(count, head_dim, dtype, heads, batch=batch)
    cache = same(cache, *x, tables, before)
    assert int(cache.lost) == 0
    assert np.asarray(cache.key_norm).any()


def test_what_has_no_place_is_lost(same):
    cache = new(128, jnp.bfloat16)
    tables = jnp.asarray(TABLES).at[0, 1].set(-1).at[1, 0].set(99)
    x = tokens(30, 128, jnp.bfloat16, seed=5)
    for lengths in ((10, 0, 40), (60, -5, 2**31 - 9)):
        assert int(same(cache, *x, tables, integers(*lengths)).lost) > 0


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_codec_gives_a_cpus_bits(head_dim, dtype):
    """Roots and quotients are approximate on a GPU, what is stored is not."""
    try:
        [cpu, *_] = jax.local_devices(backend="cpu")
    except RuntimeError as error:
        pytest.skip(str(error))
    rotation = polar.rotation(head_dim, 1)
    x = tokens(500, head_dim, dtype)[0]
    got = jax.jit(polar.encode)(x, rotation)
    with jax.default_device(cpu):
        want = jax.jit(polar.encode)(*jax.device_get((x, rotation)))
    bits = functools.partial(jax.tree.map, as_bits)
    assert_same_bits(bits(got), bits(jax.device_put(want, jax.devices()[0])))


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_has_a_cpus_bits(dtype):
    """Though a GPU's quotients are approximate."""
    try:
        [cpu, *_] = jax.local_devices(backend="cpu")
    except RuntimeError as error:
        pytest.skip(str(error))
    x = jnp.concatenate(
        [tokens(500, 80, dtype)[0].reshape(-1, 80), strange(80, dtype)[0].reshape(-1, 80)]
    )
    got = jax.jit(formats.to_int8)(x)
    with jax.default_device(cpu):
        want = jax.jit(formats.to_int8)(jax.device_get(x))
    bits = functools.partial(jax.tree.map, as_bits)
    assert_same_bits(bits(got), bits(jax.device_put(want, jax.devices()[0])))


def test_donated_memory_is_reused(implementation):
    """Token by token in one program each."""
    key, value = tokens(6, 128, jnp.bfloat16, seed=6)

    @functools.partial(jax.jit, donate_argnums=0, static_argnames="implementation")
    def step(cache, key, value, lengths, implementation):
        return paged.append(cache, key, value, TABLES, lengths, implementation=implementation)

    got, want = new(128, jnp.bfloat16), new(128, jnp.bfloat16)
    for t in range(6):
        x = key[:, t : t + 1], value[:, t : t + 1], integers(13 + t, t, 30 + t)
        want = step(want, *x, implementation="xla")
        memory = got.key.unsafe_buffer_pointer()
        got = step(got, *x, implementation=implementation)
        assert got.key.unsafe_buffer_pointer() == memory
    assert_same_bits(got, want)


@pytest.mark.parametrize("kv_dtype", ["turbo4", *MIXES])
def test_the_gpu_chooses_the_kernel(kv_dtype):
    cache = new(128, jnp.bfloat16, kv_dtype=kv_dtype)
    arguments = cache, *tokens(1, 128, jnp.bfloat16), TABLES, integers(0, 0, 0)
    chosen = kernel.NAME if needs_hopper() else hopper.NAME
    assert chosen in str(jax.make_jaxpr(paged.append)(*arguments))
